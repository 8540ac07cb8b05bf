"""The step chain, one step forward: compiled.

The state at a step's end, before the slots move on, is (u, f, q): u the occupation of the slots, f
the class of what is left of a cut prompt (0 without one), q the prompts not yet whole, that one
included. Then the slots move to v; min(q, free slots) prompts at most enter the batch; the step
takes its time, in which Poisson arrivals join the queue. In an empty engine nothing happens until
the next arrival, which starts alone at q = 1.

Arrays over states have the shape (V, F, L), L the levels of q. Batch tables are those of
:class:`~testbed.theory.delay.step_chain_batch.PrefillBatch`.
"""

from __future__ import annotations

import math

import numba
import numpy as np


@numba.njit(cache=True)
def poisson_laws(
    rate: float, whole: np.ndarray, share: np.ndarray, cut: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals during a step of each batch: (c + 1, F, c + 1, size), whole and cut.

    The last entry holds all that is beyond it.
    """
    slots = whole.shape[0] - 1
    kinds = whole.shape[1]
    for_whole = np.zeros((slots + 1, kinds, slots + 1, size))
    for_cut = np.zeros((slots + 1, kinds, slots + 1, size))
    for n in range(slots + 1):
        for f in range(kinds):
            for j in range(slots - n + 1):
                first = share[n, f, j]
                _add_poisson(for_whole[n, f, j], rate * whole[n, f, j, 0], first)
                if first < 1.0:
                    _add_poisson(for_whole[n, f, j], rate * whole[n, f, j, 1], 1.0 - first)
                if kinds > 1:
                    _add_poisson(for_cut[n, f, j], rate * cut[n, f, j], 1.0)
    return for_whole, for_cut


@numba.njit(cache=True)
def _add_poisson(row: np.ndarray, mean: float, weight: float) -> None:
    term = math.exp(-mean) * weight
    left = weight
    last = row.size - 1
    for i in range(last):
        row[i] += term
        left -= term
        term *= mean / (i + 1)
    row[last] += max(left, 0.0)


@numba.njit(cache=True)
def trim(laws: np.ndarray, negligible: float) -> np.ndarray:
    """Entries of each law that count, (c + 1, F, c + 1); what is beyond joins the last of them."""
    shape = laws.shape
    lengths = np.zeros(shape[:3], dtype=np.int64)
    for n in range(shape[0]):
        for f in range(shape[1]):
            for j in range(shape[2]):
                row = laws[n, f, j]
                beyond = 0.0
                size = row.size
                while size > 1 and beyond + row[size - 1] < negligible:
                    beyond += row[size - 1]
                    size -= 1
                row[size - 1] += beyond
                lengths[n, f, j] = size
    return lengths


@numba.njit(cache=True)
def move(
    x: np.ndarray, start: np.ndarray, target: np.ndarray, probability: np.ndarray, y: np.ndarray
) -> None:
    """y = x after the slots moved on; (V, F, L) both."""
    y[:] = 0.0
    states = x.shape[0]
    width = x.shape[1] * x.shape[2]
    flat_x = x.reshape(states, width)
    flat_y = y.reshape(states, width)
    for u in range(states):
        for e in range(start[u], start[u + 1]):
            v = target[e]
            p = probability[e]
            for i in range(width):
                flat_y[v, i] += p * flat_x[u, i]


@numba.njit(cache=True)
def serve(
    x: np.ndarray,
    occupied: np.ndarray,
    joined: np.ndarray,
    fits: np.ndarray,
    for_whole: np.ndarray,
    for_cut: np.ndarray,
    length_whole: np.ndarray,
    length_cut: np.ndarray,
    left: np.ndarray,
    y: np.ndarray,
) -> None:
    """y = x after a step: prompts enter, and arrivals join.

    ``length_whole`` and ``length_cut`` (c + 1, F, c + 1) say how much of an arrival law counts.
    """
    y[:] = 0.0
    states, kinds, levels = x.shape
    slots = fits.shape[0] - 1
    joint = np.zeros(levels)
    for v in range(states):
        n = occupied[v]
        free = slots - n
        for f in range(kinds):
            total = 0.0
            for q in range(levels):
                total += abs(x[v, f, q])
            if total < 1e-16:
                continue
            # All who wait are completed, fewer than the free slots.
            for q in range(min(free, levels)):
                mass = x[v, f, q]
                j = q
                if n == 0 and q == 0 and f == 0:
                    j = 1
                mass *= fits[n, f, j]
                if mass == 0.0:
                    continue
                u = joined[v, j]
                law = for_whole[n, f, j]
                for k in range(length_whole[n, f, j]):
                    y[u, 0, min(k, levels - 1)] += mass * law[k]
            # As many as there are free slots.
            p = fits[n, f, free]
            if p > 0.0:
                _pour(
                    x[v, f], free, p, for_whole[n, f, free], length_whole[n, f, free],
                    y[joined[v, free], 0],
                )  # fmt: skip
            if kinds == 1:
                continue
            for j in range(free):
                p = fits[n, f, j] - fits[n, f, j + 1]
                if p <= 1e-9:
                    continue
                joint[:] = 0.0
                law = for_cut[n, f, j]
                for k in range(length_cut[n, f, j]):
                    a = p * law[k]
                    if n == 0 and f == 0 and j == 0:
                        # The arrival that ends an idle time does not fit in one step.
                        joint[min(1 + k, levels - 1)] += a * x[v, f, 0]
                    # Somebody beyond the j is cut.
                    inside = max(min(levels, levels - 1 + j - k), j + 1)
                    _add(a, x[v, f, j + 1 : inside], joint[k + 1 :])
                    for q in range(inside, levels):
                        joint[levels - 1] += a * x[v, f, q]
                u = joined[v, j]
                for g in range(1, kinds):
                    a = left[n, f, j, g]
                    if a > 0.0:
                        _add(a, joint, y[u, g])


@numba.njit(cache=True)
def _add(a: float, source: np.ndarray, result: np.ndarray) -> None:
    """result += a·source, where source lies; on its own, so that it runs on vector units."""
    for i in range(source.size):
        result[i] += a * source[i]


@numba.njit(cache=True)
def _pour(
    source: np.ndarray, served: int, p: float, law: np.ndarray, length: int, result: np.ndarray
) -> None:
    """Levels from ``served`` on, lowered by that, with arrivals; the top level keeps what is
    above."""
    levels = source.size
    for k in range(length):
        a = p * law[k]
        inside = max(min(levels, levels - 1 + served - k), served)
        _add(a, source[served:inside], result[k:])
        for q in range(inside, levels):
            result[levels - 1] += a * source[q]


@numba.njit(cache=True)
def stay_probability(
    start: np.ndarray,
    target: np.ndarray,
    probability: np.ndarray,
    occupied: np.ndarray,
    fits: np.ndarray,
    for_whole: np.ndarray,
    kinds: int,
    levels: int,
) -> np.ndarray:
    """(V, F, L) probability that a step changes nothing."""
    states = occupied.size
    slots = fits.shape[0] - 1
    result = np.zeros((states, kinds, levels))
    for u in range(states):
        same = 0.0
        for e in range(start[u], start[u + 1]):
            if target[e] == u:
                same = probability[e]
        n = occupied[u]
        if n == 0:
            continue
        if n == slots:
            result[u, 0, :] = same * for_whole[n, 0, 0, 0]
        else:
            result[u, 0, 0] = same * for_whole[n, 0, 0, 0]
    return result


@numba.njit(cache=True)
def by_occupied(x: np.ndarray, occupied: np.ndarray, slots: int) -> np.ndarray:
    """(c + 1, F, L): states with equally many slots taken together."""
    result = np.zeros((slots + 1, x.shape[1], x.shape[2]))
    for v in range(x.shape[0]):
        result[occupied[v]] += x[v]
    return result
