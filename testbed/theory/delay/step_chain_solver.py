"""The stationary law of the step chain: GMRES, with a coarse chain that carries what is slow.

Slow modes of the chain are a queue that grows or drains and slots that fill or empty. States are
taken together by occupied slots and by ranges of the queue; the chain between these groups, at the
weights that states have within them in the present estimate, is solved directly (aggregation and
disaggregation, Takahashi 1975), and its solution corrects each step of GMRES.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
from scipy.linalg import lu_factor, lu_solve

INNER = 6
"""Steps of GMRES between two estimates of the weights within groups."""

MOST_OUTER = 60

LEAST_LEFT = 0.1
"""Share of a state's estimate that one turn keeps at least."""


def queue_ranges(levels: int) -> np.ndarray:
    """(L,) group of each queue length: single up to 4, then wider by a fifth each."""
    group = np.zeros(levels, dtype=np.int64)
    start, width, index = 0, 1.0, 0
    while start < levels:
        stop = min(start + int(width), levels)
        group[start:stop] = index
        index += 1
        start = stop
        if start >= 4:
            width = max(width, 1.0) * 1.2
    return group


def slot_ranges(slots: int) -> np.ndarray:
    """(c + 1,) group of each number of occupied slots; at most 12."""
    return np.arange(slots + 1) * min(slots + 1, 12) // (slots + 1)


@numba.njit(cache=True)
def coarse_chain(
    x: np.ndarray,
    start: np.ndarray,
    target: np.ndarray,
    probability: np.ndarray,
    occupied: np.ndarray,
    fits: np.ndarray,
    for_whole: np.ndarray,
    for_cut: np.ndarray,
    length_whole: np.ndarray,
    length_cut: np.ndarray,
    by_slots: np.ndarray,
    by_queue: np.ndarray,
    negligible: float,
) -> np.ndarray:
    """Flows (G, G) from group to group in a step, for the mass ``x`` (V, F, L) at a step's end."""
    states, kinds, levels = x.shape
    slots = fits.shape[0] - 1
    rows = by_slots[-1] + 1
    columns = by_queue[-1] + 1
    moved = np.zeros((rows, slots + 1, kinds, levels))
    for u in range(states):
        a = by_slots[occupied[u]]
        for e in range(start[u], start[u + 1]):
            n = occupied[target[e]]
            p = probability[e]
            for f in range(kinds):
                for q in range(levels):
                    moved[a, n, f, q] += p * x[u, f, q]
    flow = np.zeros((rows, columns, rows, columns))
    for a in range(rows):
        for n in range(slots + 1):
            free = slots - n
            for f in range(kinds):
                for q in range(levels):
                    mass = moved[a, n, f, q]
                    if mass <= negligible:
                        continue
                    b = by_queue[q]
                    waiting = q
                    if n == 0 and f == 0 and q == 0:
                        waiting = 1
                    j = min(waiting, free)
                    p = mass * fits[n, f, j]
                    to = by_slots[n + j]
                    for k in range(length_whole[n, f, j]):
                        at = by_queue[min(waiting - j + k, levels - 1)]
                        flow[a, b, to, at] += p * for_whole[n, f, j, k]
                    if kinds == 1:
                        continue
                    for i in range(j):
                        p = mass * (fits[n, f, i] - fits[n, f, i + 1])
                        if p <= negligible:
                            continue
                        to = by_slots[n + i]
                        for k in range(length_cut[n, f, i]):
                            at = by_queue[min(waiting - i + k, levels - 1)]
                            flow[a, b, to, at] += p * for_cut[n, f, i, k]
    return flow.reshape(rows * columns, rows * columns)


def stationary(
    step: Callable[[np.ndarray], np.ndarray],
    coarse: Callable[[np.ndarray], np.ndarray],
    group: np.ndarray,
    leave: np.ndarray,
    guess: np.ndarray,
    tolerance: float,
) -> tuple[np.ndarray, int, float]:
    """π = step(π) with sum 1, the number of steps taken, and Σ|π − step(π)|.

    Parameters
    ----------
    step : one step of the chain, (N,) -> (N,); the result may be overwritten by the next call
    coarse : flows between groups (G, G) for a law (N,)
    group : (N,) group of each state
    leave : (N,) probability that a step changes the state
    guess : (N,) a law to start from
    tolerance : Σ|π − step(π)| at the stop
    """
    x = guess / guess.sum()
    used, error = 0, np.inf
    for _ in range(MOST_OUTER):
        # (I − Pᵀ + x1ᵀ)π = x has the stationary law as its solution; x itself is the start.
        residual = step(x) - x
        used += 1
        error = float(np.abs(residual).sum())
        if error < tolerance:
            break
        correct = Coarse.of(x, coarse(x), group)
        change, count = _krylov(step, correct, x, 1.0 / leave, residual, 0.3 * tolerance / error)
        used += 2 * count + 1
        # A law stays positive; what falls to nothing does so over several turns.
        x = np.maximum(x + change, LEAST_LEFT * x)
        x = step(x / x.sum()).copy()
    return x, used, error


@dataclass(frozen=True)
class Coarse:
    """Solves for the sums over groups and spreads them as an estimate ``share`` does."""

    group: np.ndarray
    live: np.ndarray
    share: np.ndarray
    factor: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, x: np.ndarray, flow: np.ndarray, group: np.ndarray) -> Coarse:
        """``x`` (N,) the estimate, ``flow`` (G, G) between groups."""
        mass = np.bincount(group, weights=x, minlength=len(flow))
        live = np.flatnonzero(mass > 1e-13)
        inside = flow[np.ix_(live, live)] / mass[live][:, None]
        anchor = mass[live] / mass[live].sum()
        factor = lu_factor(np.eye(len(live)) - inside.T + anchor[:, None])
        return cls(group, live, x / np.where(mass > 0, mass, 1.0)[group], factor)

    def __call__(self, r: np.ndarray) -> np.ndarray:
        size = int(self.group.max()) + 1
        sums = np.bincount(self.group, weights=r, minlength=size)
        level = np.zeros(size)
        level[self.live] = lu_solve(self.factor, sums[self.live])
        return self.share * level[self.group]


def _krylov(
    step: Callable[[np.ndarray], np.ndarray],
    correct: Coarse,
    x: np.ndarray,
    smooth: np.ndarray,
    residual: np.ndarray,
    wanted: float,
) -> tuple[np.ndarray, int]:
    """Flexible GMRES: the change of x that lowers the residual, and how many directions it took.

    It ends early where the residual is expected to be below ``wanted`` of what it was.
    """
    basis = np.empty((INNER + 1, x.size))
    tries = np.empty((INNER, x.size))
    size = float(np.linalg.norm(residual))
    np.divide(residual, size, out=basis[0])
    hessenberg = np.zeros((INNER + 1, INNER))
    right = np.zeros(INNER + 1)
    right[0] = size
    weights: np.ndarray = np.zeros(0)
    for k in range(INNER):
        z, w = tries[k], basis[k + 1]
        z[:] = correct(basis[k])
        _apply(step(z), z, x, w)
        # One step of Jacobi's on what the coarse chain leaves.
        np.subtract(basis[k], w, out=w)
        w *= smooth
        z += w
        _apply(step(z), z, x, w)
        for _ in range(2):
            along = basis[: k + 1] @ w
            w -= along @ basis[: k + 1]
            hessenberg[: k + 1, k] += along
        length = float(np.linalg.norm(w))
        hessenberg[k + 1, k] = length
        part = hessenberg[: k + 2, : k + 1]
        weights = np.linalg.lstsq(part, right[: k + 2], rcond=None)[0]
        left = float(np.linalg.norm(right[: k + 2] - part @ weights))
        if left < wanted * size or length < 1e-14 * size:
            break
        w /= length
    return weights @ tries[: weights.size], weights.size


def _apply(after: np.ndarray, z: np.ndarray, x: np.ndarray, result: np.ndarray) -> None:
    """result = z − step(z) + x·Σz, with ``after`` = step(z)."""
    np.multiply(x, z.sum(), out=result)
    result += z
    result -= after
