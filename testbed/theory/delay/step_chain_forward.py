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
    What would come to stand above the top level stays there.
    """
    y[:] = 0.0
    states, kinds, levels = x.shape
    slots = fits.shape[0] - 1
    # Queues after arrivals, with room above the top level.
    queue = np.zeros(levels + for_whole.shape[3] + 1)
    for v in range(states):
        n = occupied[v]
        free = slots - n
        for f in range(kinds):
            row = x[v, f]
            total = 0.0
            for q in range(levels):
                total += abs(row[q])
            if total < 1e-16:
                continue
            # All who wait are completed, fewer than the free slots.
            for q in range(min(free, levels)):
                j = q
                if n == 0 and q == 0 and f == 0:
                    j = 1
                mass = row[q] * fits[n, f, j]
                if mass == 0.0:
                    continue
                _arrive(mass, for_whole[n, f, j], length_whole[n, f, j], y[joined[v, j], 0])
            # As many as there are free slots.
            p = fits[n, f, free]
            if p > 0.0 and free < levels:
                _pour(row, free, free, p, for_whole[n, f, free], length_whole[n, f, free], queue)
                _add(1.0, queue, y[joined[v, free], 0])
            if kinds == 1:
                continue
            for j in range(free):
                p = fits[n, f, j] - fits[n, f, j + 1]
                if p <= 1e-9:
                    continue
                # Somebody beyond the j is cut.
                _pour(row, j + 1, j, p, for_cut[n, f, j], length_cut[n, f, j], queue)
                if n == 0 and f == 0 and j == 0:
                    # The arrival that ends an idle time does not fit in one step.
                    _arrive(p * row[0], for_cut[n, f, 0], length_cut[n, f, 0], queue[1:levels])
                u = joined[v, j]
                for g in range(1, kinds):
                    a = left[n, f, j, g]
                    if a > 0.0:
                        _add(a, queue, y[u, g])


@numba.njit(cache=True)
def _add(a: float, source: np.ndarray, result: np.ndarray) -> None:
    """result += a·source, as far as result goes."""
    for i in range(result.size):
        result[i] += a * source[i]


@numba.njit(cache=True)
def _arrive(a: float, law: np.ndarray, length: int, result: np.ndarray) -> None:
    """result += a·law; what is beyond it at its last place."""
    last = result.size - 1
    for k in range(length):
        result[min(k, last)] += a * law[k]


@numba.njit(cache=True)
def _pour(
    source: np.ndarray,
    lowest: int,
    served: int,
    p: float,
    law: np.ndarray,
    length: int,
    result: np.ndarray,
) -> None:
    """result[q − served + k] = Σ p·source[q]·law[k] over q from ``lowest`` on, the top level
    with all that is above; ``result`` has room for it."""
    levels = source.size
    count = levels - lowest
    result[: levels + length] = 0.0
    above = source[lowest:]
    for k in range(length):
        a = p * law[k]
        # A slice starts at 0, which lets the loop run on vector units.
        shifted = result[lowest - served + k :]
        for i in range(count):
            shifted[i] += a * above[i]
    for i in range(levels, levels + length):
        result[levels - 1] += result[i]


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
