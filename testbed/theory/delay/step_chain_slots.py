"""SequenceSlots: who holds the slots of an engine, and how they move on by one step.

A request holds its slot for as many steps as it generates tokens: the step that ends its prefill
and one decode step for each further token. That number is Erlang-like: K stages, each left with
probability p at a step's end, so the mean is K/p and the SCV (1 − p)/K. All requests move at
once, each by one stage at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numba
import numpy as np

LEAST_PROBABILITY = 1e-6
"""Joint moves less likely than this are left out; what is left is scaled to sum to 1."""


MOST_ADVANCE = 0.7
"""Most chance to leave a stage in a step, where a request has more than one."""


def stage_count(mean: float, scv: float, slots: int, most_states: int) -> int:
    """K, the stages whose SCV comes nearest, with at most ``most_states`` occupations.

    With p = K/mean the SCV is 1/K − 1/mean. A fixed number of tokens would be K = mean, p = 1; but
    then who was admitted together stays together as long as slots are full, throughput depends on
    how that began, and there is no one capacity. p stays at ``MOST_ADVANCE`` or below.
    """
    wanted = max(1, min(round(1.0 / (max(scv, 0.0) + 1.0 / mean)), int(MOST_ADVANCE * mean)))
    while wanted > 1 and comb(slots + wanted, wanted) > most_states:
        wanted -= 1
    return wanted


@dataclass(frozen=True)
class SequenceSlots:
    """Occupations v of K stages with Σ v ≤ c, V of them, and their moves in one step.

    Ordered so that a move leads to an earlier occupation or to the same.

    Attributes
    ----------
    occupied : (V,) requests that hold a slot
    joined : (V, c + 1) occupation after m more in the first stage, −1 beyond c
    start, target, probability : rows of the move's matrix, CSR: (V + 1,), (nnz,), (nnz,)
    """

    occupied: np.ndarray
    joined: np.ndarray
    start: np.ndarray
    target: np.ndarray
    probability: np.ndarray

    @classmethod
    def of(cls, slots: int, stages: int, advance: float) -> SequenceSlots:
        """``slots`` c, ``stages`` K, ``advance`` p."""
        states, codes, joined = _occupations(slots, stages)
        start, target, probability = _moves(states, codes, _binomials(slots, advance))
        return cls(states.sum(axis=1), joined, start, target, probability)


@lru_cache(maxsize=16)
def _occupations(slots: int, stages: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """States (V, K), their numbers in base c + 1 (V,), and ``joined``."""
    states = np.zeros((1, 0), dtype=np.int64)
    for _ in range(stages):
        room = slots - states.sum(axis=1)
        grown = np.repeat(states, room + 1, axis=0)
        more = np.concatenate([np.arange(r + 1) for r in room])
        states = np.column_stack([grown, more])
    # A move lowers the occupied slots, or keeps them and carries somebody to a later stage.
    progress = states @ np.arange(stages)
    states = states[np.lexsort((-progress, states.sum(axis=1)))]
    base = (slots + 1) ** np.arange(stages, dtype=np.int64)
    codes = states @ base
    rank = {int(code): i for i, code in enumerate(codes)}
    occupied = states.sum(axis=1)
    joined = np.full((len(states), slots + 1), -1, dtype=np.int64)
    for m in range(slots + 1):
        for i in np.flatnonzero(occupied + m <= slots):
            joined[i, m] = rank[int(codes[i]) + m]
    return states, codes, joined


def _binomials(count: int, p: float) -> np.ndarray:
    """P(b of n move), (n, b), both to ``count``."""
    table = np.zeros((count + 1, count + 1))
    table[0, 0] = 1.0
    for n in range(count):
        table[n + 1] = (1.0 - p) * table[n]
        table[n + 1, 1:] += p * table[n, :-1]
    return table


def _moves(
    states: np.ndarray, codes: np.ndarray, binomial: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    order = np.argsort(codes)
    sizes = _row_sizes(states, binomial)
    start = np.concatenate([[0], np.cumsum(sizes)])
    target = np.empty(start[-1], dtype=np.int64)
    probability = np.empty(start[-1])
    _fill_rows(states, codes[order], order, binomial, start, target, probability)
    return start, target, probability


@numba.njit(cache=True)
def _row_sizes(states: np.ndarray, binomial: np.ndarray) -> np.ndarray:
    count = np.zeros(states.shape[0], dtype=np.int64)
    stages = states.shape[1]
    moved = np.zeros(stages, dtype=np.int64)
    for i in range(states.shape[0]):
        moved[:] = 0
        while True:
            p = 1.0
            for k in range(stages):
                p *= binomial[states[i, k], moved[k]]
            if p >= LEAST_PROBABILITY:
                count[i] += 1
            k = 0
            while k < stages and moved[k] == states[i, k]:
                moved[k] = 0
                k += 1
            if k == stages:
                break
            moved[k] += 1
    return count


@numba.njit(cache=True)
def _fill_rows(
    states: np.ndarray,
    codes: np.ndarray,
    order: np.ndarray,
    binomial: np.ndarray,
    start: np.ndarray,
    target: np.ndarray,
    probability: np.ndarray,
) -> None:
    """``codes`` sorted, ``order`` the state of each."""
    stages = states.shape[1]
    base = 1
    top = 0
    for i in range(states.shape[0]):
        for k in range(stages):
            top = max(top, states[i, k])
    moved = np.zeros(stages, dtype=np.int64)
    for i in range(states.shape[0]):
        moved[:] = 0
        at = start[i]
        total = 0.0
        while True:
            p = 1.0
            for k in range(stages):
                p *= binomial[states[i, k], moved[k]]
            if p >= LEAST_PROBABILITY:
                code = 0
                base = 1
                for k in range(stages):
                    here = states[i, k] - moved[k]
                    if k > 0:
                        here += moved[k - 1]
                    code += here * base
                    base *= top + 1
                target[at] = order[np.searchsorted(codes, code)]
                probability[at] = p
                total += p
                at += 1
            k = 0
            while k < stages and moved[k] == states[i, k]:
                moved[k] = 0
                k += 1
            if k == stages:
                break
            moved[k] += 1
        for e in range(start[i], at):
            probability[e] /= total
