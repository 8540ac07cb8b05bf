"""PrefillBatch: which prompts a step completes, and how long it takes.

Waiting prompts are served first come, first served within the step's token budget; the last one
is cut where the budget ends and goes on in the next step. Prompt lengths are those of the mixture,
independent of each other. What is left of a cut prompt is known by class.

All of it is tabulated over n, the sequences that decode beside it (each takes one token of the
budget and its own time), and over f, the class of a prompt cut before, 0 without one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from testbed.step_time import LINEAR_SIZE, step_seconds, token_seconds
from testbed.theory.delay.step_chain_prompts import CELLS, PromptMix, prompt_sums
from testbed.theory.delay.step_chain_rests import Rests

RARE = 1e-5
"""Probability below which a number of prompts in a step is not told apart."""


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
    own_left : (Q, c + 1, F, c + 1, F) ``left`` when the prompt that is cut is of type q
    """

    fits: np.ndarray
    whole: np.ndarray
    share: np.ndarray
    cut: np.ndarray
    left: np.ndarray
    own_fits: np.ndarray
    own_whole: np.ndarray
    own_share: np.ndarray
    own_left: np.ndarray


def prefill_batch(
    step_time: np.ndarray,
    mix: PromptMix,
    slots: int,
    budget: int,
    decode_context: float,
    decoding: float = 1.0,
) -> PrefillBatch:
    """``step_time`` packed; ``decode_context`` mean tokens that a decode attends to;
    ``decoding`` share of the sequences beside the prompts that do decode."""
    cell = budget / CELLS
    n = np.arange(slots + 1)
    binds = bool(((slots - n) * mix.new[mix.weights > 0].max() > budget - n).any())
    tables = [prompt_sums(mix, slots, cell, None)]
    rests = Rests.none(mix)
    if binds:
        rests = Rests.of(mix, tables[0], slots, cell, float(budget - slots // 2))
        tables += [prompt_sums(mix, slots, cell, law[:, : CELLS + 1]) for law in rests.laws]
    cumulative = np.cumsum(np.array(tables), axis=2)
    context = float(mix.weights @ (mix.new * mix.cached)) / mix.mean_new
    return PrefillBatch(
        *_tabulate(
            step_time, cumulative, rests.group, rests.table, rests.owner, rests.share, rests.laws,
            context, mix.weights, mix.new, mix.cached, slots, float(budget), cell, decode_context,
            decoding,
        )
    )  # fmt: skip


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
def _bend(
    dense: np.ndarray, masses: np.ndarray, cell: float, limit: float, more: float, mean: float
) -> float:
    """Mean of ``dense`` over totals of tokens up to ``limit``, beyond its value at their mean.

    ``masses`` (cells,) of totals, to which ``more`` tokens come that are certain; 0 where a step
    takes time in proportion to its tokens, as no ``dense`` says.
    """
    if dense.size == 0:
        return 0.0
    last = min(int(np.floor(limit / cell + 1e-9)), masses.size - 1)
    top = dense.size - 1
    total = 0.0
    weight = 0.0
    for x in range(last + 1):
        p = masses[x]
        if p > 0.0:
            total += p * dense[min(int(x * cell + more + 0.5), top)]
            weight += p
    return total / weight - dense[min(int(mean + more + 0.5), top)] if weight > 0.0 else 0.0


@numba.njit(cache=True)
def _law(
    k: np.ndarray,
    sums: np.ndarray,
    prefills: int,
    decodes: float,
    context: float,
    more: np.ndarray,
    bend: float,
) -> tuple[float, float, float]:
    """Two seconds and the share of the first; ``more`` adds (n, n², nh) that are certain, ``bend``
    seconds to the mean."""
    p = sums[0]
    mean = sums[3] / p
    second = sums[4] / p
    variance = max(second - mean * mean, 0.0)
    third = sums[5] / p - 3.0 * mean * second + 2.0 * mean**3
    seconds = step_seconds(
        k, prefills, sums[6] / p + more[0], sums[1] / p + more[1], sums[2] / p + more[2],
        decodes, decodes * context,
    ) + bend  # fmt: skip
    low, high, share = two_points(0.0, variance, third)
    # No step is shorter than one of its decodes and a single token.
    return max(seconds + low, 0.0), seconds + high, share


@numba.njit(cache=True)
def _tabulate(
    k: np.ndarray,
    cumulative: np.ndarray,
    group: np.ndarray,
    class_of: np.ndarray,
    owner: np.ndarray,
    usual: np.ndarray,
    laws: np.ndarray,
    context_rate: float,
    weights: np.ndarray,
    new: np.ndarray,
    cached: np.ndarray,
    slots: int,
    budget: float,
    cell: float,
    decode_context: float,
    decoding: float,
) -> tuple[
    np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray,
    np.ndarray,
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
    own_leaves = np.zeros((types, slots + 1, kinds, slots + 1, kinds))
    # What a step of so many tokens takes but for its attention, where tokens do not all cost alike.
    dense = np.zeros(int(budget) + 1 if k.size > LINEAR_SIZE else 0)
    for t in range(1, dense.size):
        dense[t] = token_seconds(k, float(t), 1.0)
    masses = np.zeros(cumulative.shape[:3])
    masses[:, :, 0] = cumulative[:, :, 0, 0]
    masses[:, :, 1:] = cumulative[:, :, 1:, 0] - cumulative[:, :, :-1, 0]
    sums = np.zeros(7)
    nothing = np.zeros(3)
    own = np.zeros(3)
    for n in range(slots + 1):
        window = budget - n
        last = int(window / cell)
        decodes = n * decoding
        for f in range(kinds):
            for j in range(slots - n + 1):
                table = cumulative[f, j]
                _threshold(table, cell, window, sums)
                fits[n, f, j] = min(sums[0], 1.0) if j > 0 and kinds > 1 else 1.0
                if j == 0:
                    seconds = step_seconds(k, 0, 0.0, 0.0, 0.0, decodes, decodes * decode_context)
                    whole[n, f, 0, :] = seconds
                elif sums[0] > 1e-13:
                    mean = sums[6] / sums[0]
                    bend = _bend(dense, masses[f, j], cell, window, float(n), mean)
                    low, high, s = _law(k, sums, j, decodes, decode_context, nothing, bend)
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
                        attended = 0.0
                        for q in range(types):
                            if new[q] > left + 1e-9:
                                chance += weights[q]
                                attended += weights[q] * cached[q]
                                r = 1 + class_of[group[q], int((new[q] - left) / cell + 0.5)]
                                leaves[n, f, j, r] += p * weights[q]
                                own_leaves[q, n, f, j, r] += p
                        if chance <= 0.0:
                            continue
                        weight += p * chance
                        squared += chance * (table[x, 1] + p * left * left)
                        context += chance * table[x, 2] + p * left * attended
                        if x > 0:
                            squared -= chance * table[x - 1, 1]
                            context -= chance * table[x - 1, 2]
                if kinds > 1 and j == 0 and f > 0:
                    # The cut prompt fills the step alone and goes on.
                    law = laws[f - 1]
                    for x in range(law.shape[1]):
                        p = law[0, x]
                        rest = x * cell - window
                        if p <= 0.0 or rest <= 1e-9:
                            continue
                        leaves[n, f, 0, 1 + class_of[owner[f - 1], int(rest / cell + 0.5)]] += p
                        weight += p
                        squared += p * window * window
                        context += p * window * law[2, x] / law[6, x]
                if weight > 0.0:
                    leaves[n, f, j] /= weight
                elif kinds > 1:
                    leaves[n, f, j, 1:] = usual
                for q in range(types):
                    total = own_leaves[q, n, f, j].sum()
                    own_leaves[q, n, f, j] = (
                        own_leaves[q, n, f, j] / total if total > 0.0 else leaves[n, f, j]
                    )
                if weight > 0.0:
                    cut[n, f, j] = step_seconds(
                        k, j + 1, window, squared / weight, context / weight,
                        decodes, decodes * decode_context,
                    )  # fmt: skip
                elif j > 0:
                    cut[n, f, j] = whole[n, f, j, 1]
                else:
                    cut[n, f, j] = step_seconds(
                        k, 1, window, window * window, window * context_rate,
                        decodes, decodes * decode_context,
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
                        mean = sums[6] / sums[0]
                        rest = window - new[q]
                        bend = _bend(dense, masses[f, j - 1], cell, rest, n + new[q], mean)
                        low, high, s = _law(k, sums, j, decodes, decode_context, own, bend)
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
    return fits, whole, share, cut, leaves, own_fits, own_whole, own_share, own_leaves
