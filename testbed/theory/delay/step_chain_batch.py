"""PrefillBatch: which prompts a step completes, and how long it takes.

Waiting prompts are served first come, first served within the step's token budget; the last one
is cut where the budget ends and goes on in the next step. Prompt lengths are those of the mixture,
independent of each other. What is left of a cut prompt is known by class; within a class it has
the law that full steps reproduce.

All of it is tabulated over n, the sequences that decode beside it (each takes one token of the
budget and its own time), and over f, the class of a prompt cut before, 0 without one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from testbed.step_time import step_seconds

CELLS = 512
"""Cells of the token budget on which sums of prompt lengths are counted."""

CLASSES = 4
"""Classes of what is left of a cut prompt, about equally likely."""

RARE = 1e-5
"""Probability below which a number of prompts in a step is not told apart."""

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
    """Tables over (n, f, j): n sequences decode, f the class of a cut prompt, j prompts.

    Attributes
    ----------
    fits : (c + 1, F, c + 2) P(the first j fit within the budget); 0 beyond the free slots
    whole : (c + 1, F, c + 1, 2) seconds of a step of j whole prompts, two equally weighted-by
        ``share`` values that meet the law's mean, variance and skewness
    share : (c + 1, F, c + 1) probability of the first of the two
    cut : (c + 1, F, c + 1) seconds of a step of j prompts and a part of the next
    left : (c + 1, F, c + 1, F) class of what is then left, sum 1; 0 in the first
    own_fits, own_whole : (Q, c + 1, F, c + 1), and with two values: the same when the last of the
        j is of type q
    """

    fits: np.ndarray
    whole: np.ndarray
    share: np.ndarray
    cut: np.ndarray
    left: np.ndarray
    own_fits: np.ndarray
    own_whole: np.ndarray
    own_share: np.ndarray


def prefill_batch(
    step_time: np.ndarray, mix: PromptMix, slots: int, budget: int, decode_context: float
) -> PrefillBatch:
    """``step_time`` packed; ``decode_context`` mean tokens that a decode attends to."""
    cell = budget / CELLS
    n = np.arange(slots + 1)
    binds = bool(((slots - n) * mix.new[mix.weights > 0].max() > budget - n).any())
    tables = [_sums(mix, slots, cell, None)]
    bounds = np.zeros(0)
    usual = np.ones(1)
    if binds:
        rest = _rest(mix, tables[0], slots, cell, budget - slots // 2)
        bounds, usual, firsts = _classes(rest, cell)
        tables += [_sums(mix, slots, cell, first) for first in firsts]
    cumulative = np.cumsum(np.array(tables), axis=2)
    context = float(mix.weights @ (mix.new * mix.cached)) / mix.mean_new
    return PrefillBatch(
        *_tabulate(
            step_time, cumulative, bounds, usual, context, mix.weights, mix.new, mix.cached,
            mix.work, slots, float(budget), cell, decode_context,
        )
    )  # fmt: skip


def _rest(mix: PromptMix, fresh: np.ndarray, slots: int, cell: float, window: float) -> np.ndarray:
    """(_SUMS, CELLS + 1) of what is left of a cut prompt, by tokens; the last cell and beyond.

    The law that reproduces itself from one full step to the next, found by iteration from a step
    without a cut prompt before it.
    """
    law = np.zeros((_SUMS, CELLS + 1))
    _leave(fresh, mix.weights, mix.new, mix.cached, mix.work, window, cell, law)
    law /= law[0].sum()
    for _ in range(8):
        after = np.zeros_like(law)
        table = _sums(mix, slots, cell, law)
        _leave(table[1:], mix.weights, mix.new, mix.cached, mix.work, window, cell, after)
        if after[0].sum() > 0:
            law = 0.5 * (law + after / after[0].sum())
    return law


def _classes(rest: np.ndarray, cell: float) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Upper bounds of the classes, tokens, their shares, and the law within each."""
    mass = np.cumsum(rest[0])
    wanted = np.arange(1, CLASSES) / CLASSES
    edges = np.unique(np.concatenate([np.searchsorted(mass, wanted) + 1, [CELLS + 1]]))
    bounds, shares, laws = [], [], []
    low = 0
    for high in edges:
        inside = np.zeros_like(rest)
        inside[:, low:high] = rest[:, low:high]
        share = float(inside[0].sum())
        low = high
        if share <= 0:
            continue
        bounds.append((high - 0.5) * cell)
        shares.append(share)
        laws.append(inside / share)
    bounds[-1] = np.inf
    return np.array(bounds), np.array(shares), laws


@numba.njit(cache=True)
def _leave(
    table: np.ndarray,
    weights: np.ndarray,
    new: np.ndarray,
    cached: np.ndarray,
    work: np.ndarray,
    window: float,
    cell: float,
    law: np.ndarray,
) -> None:
    """Add what is left of the prompt that a full window cuts after any number of whole ones."""
    last = law.shape[1] - 1
    for j in range(table.shape[0]):
        for x in range(table.shape[1]):
            p = table[j, x, 0]
            left = window - x * cell
            if p <= 0.0 or left < 0.0:
                continue
            for q in range(new.size):
                n = new[q] - left
                if n <= 0.0:
                    continue
                # Attention of the rest to what is computed: both quadratic terms of equal worth.
                values = (
                    1.0, n * n, n * (cached[q] + left), work[q] * n / new[q],
                    (work[q] * n / new[q]) ** 2, (work[q] * n / new[q]) ** 3, n,
                )  # fmt: skip
                low = min(int(n / cell), last)
                part = n / cell - low
                if low == last:
                    part = 0.0
                for i in range(7):
                    law[i, low] += p * weights[q] * (1.0 - part) * values[i]
                    if part > 0.0:
                        law[i, low + 1] += p * weights[q] * part * values[i]


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
    bounds: np.ndarray,
    usual: np.ndarray,
    context_rate: float,
    weights: np.ndarray,
    new: np.ndarray,
    cached: np.ndarray,
    work: np.ndarray,
    slots: int,
    budget: float,
    cell: float,
    decode_context: float,
) -> tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray
]:  # fmt: skip
    kinds = cumulative.shape[0]
    types = new.size
    fits = np.zeros((slots + 1, kinds, slots + 2))
    whole = np.zeros((slots + 1, kinds, slots + 1, 2))
    share = np.ones((slots + 1, kinds, slots + 1))
    cut = np.zeros((slots + 1, kinds, slots + 1))
    leaves = np.zeros((slots + 1, kinds, slots + 1, kinds))
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
                fits[n, f, j] = min(sums[0], 1.0) if j > 0 and kinds > 1 else 1.0
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
                if kinds > 1 and not (j == 0 and f > 0):
                    for x in range(min(last, table.shape[0] - 1) + 1):
                        p = table[x, 0] - (table[x - 1, 0] if x > 0 else 0.0)
                        if p <= 1e-15:
                            continue
                        left = window - x * cell
                        chance = 0.0
                        for q in range(types):
                            if new[q] > left + 1e-9:
                                chance += weights[q]
                                r = np.searchsorted(bounds, new[q] - left)
                                leaves[n, f, j, 1 + r] += p * weights[q]
                        if chance <= 0.0:
                            continue
                        weight += p * chance
                        squared += chance * (table[x, 1] + p * left * left)
                        context += chance * (table[x, 2] + p * left * context_rate)
                        if x > 0:
                            squared -= chance * table[x - 1, 1]
                            context -= chance * table[x - 1, 2]
                if weight > 0.0:
                    leaves[n, f, j] /= weight
                elif kinds > 1:
                    leaves[n, f, j, 1:] = usual
                if weight > 0.0:
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
                    if f > 0 and j == 1:
                        own_fits[q, n, f, j] = fits[n, f, j]
                        own_whole[q, n, f, j] = whole[n, f, j]
                        own_share[q, n, f, j] = share[n, f, j]
                        continue
                    _threshold(cumulative[f, j - 1], cell, window - new[q], sums)
                    own_fits[q, n, f, j] = min(sums[0], 1.0) if kinds > 1 else 1.0
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
            # Numbers that hardly ever fit last are taken together with the next.
            before = 1.0
            for j in range(1, slots - n + 1):
                here = min(fits[n, f, j], before)
                if here < RARE:
                    here = 0.0
                elif before - here < RARE:
                    here = before
                fits[n, f, j] = here
                before = here
    return fits, whole, share, cut, leaves, own_fits, own_whole, own_share
