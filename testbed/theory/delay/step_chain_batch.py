"""PrefillBatch: which prompts a step completes, and how long it takes.

Waiting prompts are served first come, first served within the step's token budget; the last one
is cut where the budget ends and goes on in the next step. Prompt lengths are those of the mixture,
independent of each other. A prompt that was cut has left what renewal theory says of one that a
window's end cuts: type q with a chance in proportion to its new tokens, at a uniform place.

All of it is tabulated over n, the sequences that decode beside it (each takes one token of the
budget and its own time), and over whether the first prompt was cut before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from testbed.step_time import step_seconds

CELLS = 512
"""Cells of the token budget on which sums of prompt lengths are counted."""

_SUMS = 7
"""Tabulated with the number of tokens: probability, Σn², Σnh, work, work², work³, Σn."""


@dataclass(frozen=True)
class PromptMix:
    """New prompts of a node. Arrays are (Q,); work is what a prompt adds to a step, s."""

    weights: np.ndarray
    new: np.ndarray
    cached: np.ndarray
    work: np.ndarray

    @property
    def mean_new(self) -> float:
        return float(self.weights @ self.new)


@dataclass(frozen=True)
class PrefillBatch:
    """Tables over (n, f, j): n sequences decode, f the first prompt was cut before, j prompts.

    Attributes
    ----------
    fits : (c + 1, F, c + 2) P(the first j fit within the budget); 0 beyond the free slots
    whole : (c + 1, F, c + 1, 2) seconds of a step of j whole prompts, two equally weighted-by
        ``share`` values that meet the law's mean, variance and skewness
    share : (c + 1, F, c + 1) probability of the first of the two
    cut : (c + 1, F, c + 1) seconds of a step of j prompts and a part of the next
    own_fits, own_whole : (Q, c + 1, F, c + 1), and with two values: the same when the last of the
        j is of type q
    """

    fits: np.ndarray
    whole: np.ndarray
    share: np.ndarray
    cut: np.ndarray
    own_fits: np.ndarray
    own_whole: np.ndarray
    own_share: np.ndarray


def prefill_batch(
    step_time: np.ndarray, mix: PromptMix, slots: int, budget: int, decode_context: float
) -> PrefillBatch:
    """``step_time`` packed; ``decode_context`` mean tokens that a decode attends to."""
    cell = budget / CELLS
    fresh = _sums(mix, slots, cell, None)
    binds = float(mix.new[mix.weights > 0].max()) * slots > budget - slots
    tables = [fresh]
    if binds:
        tables.append(_sums(mix, slots, cell, _remainder(mix, cell)))
    cumulative = np.cumsum(np.array(tables), axis=2)
    beyond = np.array([mix.weights @ (mix.new > (k * cell)[:, None]).T
                       for k in [np.arange(CELLS + 1)]][0])  # fmt: skip
    context = float(mix.weights @ (mix.new * mix.cached)) / mix.mean_new
    return PrefillBatch(
        *_tabulate(
            step_time, cumulative, beyond, context, mix.new, mix.cached, mix.work, slots,
            float(budget), cell, decode_context,
        )
    )  # fmt: skip


def _remainder(mix: PromptMix, cell: float) -> np.ndarray:
    """(_SUMS, CELLS + 1) of what is left of a prompt that was cut, by tokens left."""
    result = np.zeros((_SUMS, CELLS + 1))
    share = mix.weights * mix.new / mix.mean_new
    for p, new, cached, work in zip(share, mix.new, mix.cached, mix.work, strict=True):
        if p <= 0:
            continue
        left = (np.arange(64) + 0.5) / 64 * new
        # Attention of the rest to what is computed: quadratic and context terms of equal worth.
        for n in left:
            part = work * n / new
            _drop(result, p / 64, n, n * n, n * (cached + new - n), part, cell)
    return result


def _drop(
    result: np.ndarray, p: float, n: float, squared: float, context: float, work: float, cell: float
) -> None:
    """Add one prompt at its number of tokens, shared between the cells on either side."""
    at = n / cell
    low = int(at)
    values = p * np.array([1.0, squared, context, work, work**2, work**3, n])
    for index, part in ((low, 1.0 - (at - low)), (low + 1, at - low)):
        if part > 0 and index <= CELLS:
            result[:, index] += part * values


def _sums(mix: PromptMix, most: int, cell: float, first: np.ndarray | None) -> np.ndarray:
    """(most + 1, CELLS + 1, _SUMS): sums of j prompts, by their tokens, ``first`` one apart."""
    result = np.zeros((most + 1, CELLS + 1, _SUMS))
    result[0, 0, 0] = 1.0
    if first is not None and most > 0:
        result[1] = first.T
    for j in range(1 if first is None else 2, most + 1):
        _convolve(result[j - 1], result[j], mix.weights, mix.new, mix.cached, mix.work, cell)
        if result[j, :, 0].sum() < 1e-12:
            break
    return result


@numba.njit(cache=True)
def _convolve(
    before: np.ndarray,
    after: np.ndarray,
    weights: np.ndarray,
    new: np.ndarray,
    cached: np.ndarray,
    work: np.ndarray,
    cell: float,
) -> None:
    cells = before.shape[0]
    for q in range(weights.size):
        if weights[q] <= 0.0:
            continue
        low = int(new[q] / cell)
        split = new[q] / cell - low
        w = work[q]
        for side in range(2):
            part = weights[q] * (1.0 - split if side == 0 else split)
            if part <= 0.0:
                continue
            for x in range(cells - low - side):
                p = before[x, 0]
                if p <= 0.0:
                    continue
                y = x + low + side
                after[y, 0] += part * p
                after[y, 1] += part * (before[x, 1] + p * new[q] * new[q])
                after[y, 2] += part * (before[x, 2] + p * new[q] * cached[q])
                after[y, 3] += part * (before[x, 3] + p * w)
                after[y, 4] += part * (before[x, 4] + 2 * w * before[x, 3] + p * w * w)
                after[y, 5] += part * (
                    before[x, 5] + 3 * w * before[x, 4] + 3 * w * w * before[x, 3] + p * w**3
                )
                after[y, 6] += part * (before[x, 6] + p * new[q])


@numba.njit(cache=True)
def two_points(mean: float, variance: float, third: float) -> tuple[float, float, float]:
    """Values a, b and P(a) with a given mean, variance and third central moment."""
    if variance <= 1e-18 + 1e-12 * mean * mean:
        return mean, mean, 1.0
    spread = np.sqrt(variance)
    skew = third / (variance * spread)
    half = 0.5 * skew
    root = np.sqrt(1.0 + half * half)
    low = half - root
    high = half + root
    return mean + spread * low, mean + spread * high, high / (high - low)


@numba.njit(cache=True)
def _threshold(cumulative: np.ndarray, cell: float, limit: float, sums: np.ndarray) -> None:
    """Sums (_SUMS,) over totals up to ``limit`` tokens; a cell counts to half beyond its middle."""
    at = int(np.floor(limit / cell + 1e-9))
    if at < 0:
        sums[:] = 0.0
        return
    at = min(at, cumulative.shape[0] - 1)
    for i in range(sums.size):
        sums[i] = cumulative[at, i]


@numba.njit(cache=True)
def _law(
    k: np.ndarray, sums: np.ndarray, prefills: int, decodes: int, context: float, more: np.ndarray
) -> tuple[float, float, float]:
    """Two seconds and the share of the first; ``more`` adds (n, n², nh) that are certain."""
    p = sums[0]
    mean = sums[3] / p
    second = sums[4] / p
    variance = max(second - mean * mean, 0.0)
    third = sums[5] / p - 3.0 * mean * second + 2.0 * mean**3
    seconds = step_seconds(
        k, prefills, sums[6] / p + more[0], sums[1] / p + more[1], sums[2] / p + more[2],
        decodes, decodes * context,
    )  # fmt: skip
    low, high, share = two_points(0.0, variance, third)
    # No step is shorter than one of its decodes and a single token.
    return max(seconds + low, 0.0), seconds + high, share


@numba.njit(cache=True)
def _tabulate(
    k: np.ndarray,
    cumulative: np.ndarray,
    beyond: np.ndarray,
    context_rate: float,
    new: np.ndarray,
    cached: np.ndarray,
    work: np.ndarray,
    slots: int,
    budget: float,
    cell: float,
    decode_context: float,
) -> tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray
]:  # fmt: skip
    kinds = cumulative.shape[0]
    types = new.size
    fits = np.zeros((slots + 1, kinds, slots + 2))
    whole = np.zeros((slots + 1, kinds, slots + 1, 2))
    share = np.ones((slots + 1, kinds, slots + 1))
    cut = np.zeros((slots + 1, kinds, slots + 1))
    own_fits = np.zeros((types, slots + 1, kinds, slots + 1))
    own_whole = np.zeros((types, slots + 1, kinds, slots + 1, 2))
    own_share = np.ones((types, slots + 1, kinds, slots + 1))
    sums = np.zeros(7)
    nothing = np.zeros(3)
    own = np.zeros(3)
    for n in range(slots + 1):
        window = budget - n
        last = int(window / cell)
        for f in range(kinds):
            for j in range(slots - n + 1):
                table = cumulative[f, j]
                _threshold(table, cell, window, sums)
                fits[n, f, j] = sums[0] if j > 0 else 1.0
                if j == 0:
                    seconds = step_seconds(k, 0, 0.0, 0.0, 0.0, n, n * decode_context)
                    whole[n, f, 0, :] = seconds
                elif sums[0] > 1e-13:
                    low, high, s = _law(k, sums, j, n, decode_context, nothing)
                    whole[n, f, j, 0] = low
                    whole[n, f, j, 1] = high
                    share[n, f, j] = s
                # j whole prompts and a part of the next, which is longer than what is left.
                weight = 0.0
                squared = 0.0
                context = 0.0
                for x in range(min(last, table.shape[0] - 1) + 1):
                    p = table[x, 0] - (table[x - 1, 0] if x > 0 else 0.0)
                    if p <= 0.0:
                        continue
                    left = window - x * cell
                    chance = beyond[min(int(left / cell), beyond.size - 1)]
                    if j == 0 and f == 1:
                        chance = 1.0
                    if chance <= 0.0:
                        continue
                    weight += p * chance
                    before = table[x - 1] if x > 0 else np.zeros(7)
                    squared += chance * (table[x, 1] - before[1] + p * left * left)
                    context += chance * (table[x, 2] - before[2] + p * left * context_rate)
                if weight > 1e-13:
                    cut[n, f, j] = step_seconds(
                        k, j + 1, window, squared / weight, context / weight,
                        n, n * decode_context,
                    )  # fmt: skip
                elif j > 0:
                    cut[n, f, j] = whole[n, f, j, 1]
                else:
                    cut[n, f, j] = step_seconds(
                        k, 1, window, window * window, window * context_rate,
                        n, n * decode_context,
                    )  # fmt: skip
                if j == 0:
                    continue
                for q in range(types):
                    if f == 1 and j == 1:
                        own_fits[q, n, f, j] = min(window / new[q], 1.0)
                        own_whole[q, n, f, j] = whole[n, f, j]
                        own_share[q, n, f, j] = share[n, f, j]
                        continue
                    _threshold(cumulative[f, j - 1], cell, window - new[q], sums)
                    own_fits[q, n, f, j] = min(sums[0], 1.0)
                    if sums[0] > 1e-13:
                        own[0] = new[q]
                        own[1] = new[q] * new[q]
                        own[2] = new[q] * cached[q]
                        low, high, s = _law(k, sums, j, n, decode_context, own)
                        own_whole[q, n, f, j, 0] = low
                        own_whole[q, n, f, j, 1] = high
                        own_share[q, n, f, j] = s
                    else:
                        own_whole[q, n, f, j] = whole[n, f, j]
                        own_share[q, n, f, j] = share[n, f, j]
    for n in range(slots + 1):
        for f in range(kinds):
            for j in range(1, slots - n + 1):
                fits[n, f, j] = min(fits[n, f, j], fits[n, f, j - 1])
    return fits, whole, share, cut, own_fits, own_whole, own_share
