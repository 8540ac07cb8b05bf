"""A tagged request of the step chain, from its arrival to its first token: compiled.

All of it in transforms, E[e^(−s·…)] at N values of s. States and shapes are those of
:mod:`testbed.theory.delay.step_chain_forward`; a position j ≥ 1 counts the tagged request itself
and those before it that are not yet whole.
"""

from __future__ import annotations

import math

import numba
import numpy as np

MOST_CHUNKS = 12
"""Turns in which a cut prompt is followed through a class that leads to itself."""


@numba.njit(cache=True)
def own_step(
    s: np.ndarray,
    present: np.ndarray,
    fits: np.ndarray,
    cut: np.ndarray,
    own_whole: np.ndarray,
    own_share: np.ndarray,
    z: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """E[e^(−sT) | the j-th prompt is completed], the step of the first token, by who waits behind
    it: u + v·z^B of B behind; u and v are (c + 1, F, c + 1, N), z (N,).

    ``present`` (c + 1, F, L) is the stationary law when steps start: it tells how many wait behind
    the j-th and join the same step. ``z`` is about the transform of what one more of them adds.
    u and v are those that meet E[e^(−sT)] and its covariance with B.
    """
    slots = fits.shape[0] - 1
    kinds = fits.shape[1]
    levels = present.shape[2]
    shape = (slots + 1, kinds, slots + 1, s.size)
    fixed = np.zeros(shape, dtype=np.complex128)
    slope = np.zeros(shape, dtype=np.complex128)
    size = levels + slots + 2
    tail = np.zeros(size)
    first = np.zeros(size)
    term = np.zeros(s.size, dtype=np.complex128)
    power = np.zeros(s.size, dtype=np.complex128)
    value = np.zeros(s.size, dtype=np.complex128)
    mean = np.zeros(s.size, dtype=np.complex128)
    product = np.zeros(s.size, dtype=np.complex128)
    for n in range(slots + 1):
        free = slots - n
        for f in range(kinds):
            # Sums over queues of q and more: of their mass and of q.
            tail[:] = 0.0
            first[:] = 0.0
            for q in range(levels - 1, -1, -1):
                p = max(present[n, f, q], 0.0)
                tail[q] = tail[q + 1] + p
                first[q] = first[q + 1] + p * q
            for j in range(1, free + 1):
                if fits[n, f, j] * tail[j] <= 1e-14:
                    _add_steps(fixed[n, f, j], s, own_whole[n, f, j], own_share[n, f, j], 1.0)
                    continue
                # Given that the j-th fits, over queues q: what is completed in its step.
                mean[:] = 0.0
                product[:] = 0.0
                total = 0.0
                behind = 0.0
                for i in range(j, free + 1):
                    here = tail[i] if i == free else tail[i] - tail[i + 1]
                    more = first[i] - i * tail[i] if i == free else 0.0
                    for part in range(2):
                        if part == 0:
                            p = here * fits[n, f, i]
                            count = ((i - j) * here + more) * fits[n, f, i]
                        elif i < free:
                            chance = fits[n, f, i] - fits[n, f, i + 1]
                            p = tail[i + 1] * chance
                            count = (first[i + 1] - j * tail[i + 1]) * chance
                        else:
                            continue
                        if p <= 0.0:
                            continue
                        value[:] = 0.0
                        if part == 0:
                            _add_steps(value, s, own_whole[n, f, i], own_share[n, f, i], 1.0)
                        else:
                            for a in range(s.size):
                                value[a] = np.exp(-s[a] * cut[n, f, i])
                        total += p
                        behind += count
                        for a in range(s.size):
                            mean[a] += p * value[a]
                            product[a] += count * value[a]
                # z^B and its covariance with B, over the same queues.
                around = behind / total
                along = first[j] / tail[j] - j
                power[:] = 0.0
                value[:] = 0.0
                term[:] = 1.0
                for q in range(j, levels):
                    p = max(present[n, f, q], 0.0) / tail[j]
                    for a in range(s.size):
                        power[a] += p * term[a]
                        value[a] += p * (q - j - along) * term[a]
                        term[a] *= z[a]
                    if tail[q] < 1e-9 * tail[j]:
                        break
                for a in range(s.size):
                    mean[a] /= total
                    if abs(value[a]) > 1e-14:
                        slope[n, f, j, a] = (product[a] / total - around * mean[a]) / value[a]
                    fixed[n, f, j, a] = mean[a] - slope[n, f, j, a] * power[a]
    return fixed, slope


@numba.njit(cache=True)
def _add_steps(
    row: np.ndarray, s: np.ndarray, seconds: np.ndarray, share: float, weight: float
) -> None:
    for a in range(s.size):
        value = share * np.exp(-s[a] * seconds[0])
        if share < 1.0:
            value += (1.0 - share) * np.exp(-s[a] * seconds[1])
        row[a] += weight * value


@numba.njit(cache=True)
def step_transforms(
    s: np.ndarray, whole: np.ndarray, share: np.ndarray, cut: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """E[e^(−sT)] of each batch, (c + 1, F, c + 1, N), whole and cut."""
    slots = whole.shape[0] - 1
    kinds = whole.shape[1]
    shape = (slots + 1, kinds, slots + 1, s.size)
    for_whole = np.zeros(shape, dtype=np.complex128)
    for_cut = np.zeros(shape, dtype=np.complex128)
    for n in range(slots + 1):
        for f in range(kinds):
            for j in range(slots - n + 1):
                _add_steps(for_whole[n, f, j], s, whole[n, f, j], share[n, f, j], 1.0)
                if kinds > 1:
                    for a in range(s.size):
                        for_cut[n, f, j, a] = np.exp(-s[a] * cut[n, f, j])
    return for_whole, for_cut


@numba.njit(cache=True)
def formed_step(
    present: np.ndarray, fits: np.ndarray, whole: np.ndarray, cut: np.ndarray
) -> np.ndarray:
    """E[e^(−sT)] of the step that an arrival finds formed and empty of those before it,
    (c + 1, N), by the sequences n that decode in it.

    It holds who came in the step before the one that runs: as many as come before any step that
    starts with n sequences and has a slot for everybody (``present`` (c + 1, F, L)). ``whole`` and
    ``cut`` are transforms.
    """
    slots = whole.shape[0] - 1
    result = np.ones((slots + 1, whole.shape[3]), dtype=np.complex128)
    for n in range(1, slots + 1):
        most = min(slots - n, present.shape[2] - 1)
        total = 0.0
        for q in range(most + 1):
            total += max(present[n, 0, q], 0.0)
        if total <= 0.0:
            result[n] = whole[n, 0, 0]
            continue
        result[n] = 0.0
        for q in range(most + 1):
            p = max(present[n, 0, q], 0.0) / total
            result[n] += p * fits[n, 0, q] * whole[n, 0, q]
            for i in range(q):
                result[n] += p * (fits[n, 0, i] - fits[n, 0, i + 1]) * cut[n, 0, i]
    return result


@numba.njit(cache=True)
def remaining(
    start: np.ndarray,
    target: np.ndarray,
    probability: np.ndarray,
    occupied: np.ndarray,
    joined: np.ndarray,
    fits: np.ndarray,
    own_fits: np.ndarray,
    own: np.ndarray,
    whole: np.ndarray,
    cut: np.ndarray,
    left: np.ndarray,
    own_left: np.ndarray,
    levels: int,
    formed: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """E[e^(−s·time to the first token)] at a step's end, (L + 1, V, F, N), by position j ≥ 1; and
    the same at the end of the step in which it arrived.

    ``own``, ``whole`` and ``cut`` are transforms; ``own_fits`` is P(the j-th fits) for its type.
    ``formed`` (c + 1, F, N) is the transform of the step that was formed before the request
    arrived and runs before the first one that can take it in; empty where steps are formed when
    they start.
    Positions are solved upwards and, within one, occupations in their order: a step leads to lower
    ones, or to the same state.
    """
    states = occupied.size
    slots = fits.shape[0] - 1
    kinds = fits.shape[1]
    size = own.shape[3]
    before = np.zeros((levels + 1, states, kinds, size), dtype=np.complex128)
    ahead = formed.size > 0
    first = before
    if ahead:
        first = np.zeros((levels + 1, states, kinds, size), dtype=np.complex128)
    after = np.zeros((states, kinds, size), dtype=np.complex128)
    at_once = np.zeros((states, kinds, size), dtype=np.complex128)
    value = np.zeros(size, dtype=np.complex128)
    again = np.zeros(size, dtype=np.complex128)
    for j in range(1, levels + 1):
        for v in range(states):
            n = occupied[v]
            free = slots - n
            same = 0.0
            for e in range(start[v], start[v + 1]):
                if target[e] == v:
                    same = probability[e]
            # A prompt longer than a step stays at its position, from class to class, slots alone
            # moving on. What is left gets less, so that classes are taken from the first; one that
            # leads to itself is taken in turns.
            turns = 1
            for f in range(1, kinds):
                if free > 0 and fits[n, f, 1] < 1.0 - 1e-9 and left[n, f, 0, f:].sum() > 1e-9:
                    turns = MOST_CHUNKS
            for _turn in range(turns):
                for turn in range(1, kinds + 1):
                    f = turn % kinds
                    if f > 0 and free == 0:
                        continue
                    value[:] = 0.0
                    again[:] = 0.0
                    at_once[v, f] = 0.0
                    if j <= free:
                        p = own_fits[n, f, j]
                        for a in range(size):
                            value[a] += p * own[n, f, j, a]
                        if ahead:
                            for a in range(size):
                                at_once[v, f, a] = p * own[n, f, j, a] * (formed[n, f, a] - 1.0)
                    else:
                        p = fits[n, f, free]
                        if free > 0:
                            u = joined[v, free]
                            for a in range(size):
                                value[a] += p * whole[n, f, free, a] * before[j - free, u, 0, a]
                        else:
                            for a in range(size):
                                again[a] += p * whole[n, f, 0, a]
                            for e in range(start[v], start[v + 1]):
                                if target[e] != v:
                                    p_move = probability[e]
                                    for a in range(size):
                                        value[a] += p_move * again[a] * after[target[e], 0, a]
                    if kinds > 1:
                        for i in range(min(j, free)):
                            reach = own_fits[n, f, j] if i == j - 1 else fits[n, f, i + 1]
                            p = fits[n, f, i] - reach
                            if p <= 1e-9:
                                continue
                            for g in range(1, kinds):
                                weight = p * (
                                    own_left[n, f, i, g] if i == j - 1 else left[n, f, i, g]
                                )
                                if weight <= 0.0:
                                    continue
                                if i > 0:
                                    u = joined[v, i]
                                    for a in range(size):
                                        value[a] += (
                                            weight * cut[n, f, i, a] * before[j - i, u, g, a]
                                        )
                                    continue
                                for e in range(start[v], start[v + 1]):
                                    w = target[e]
                                    p_move = weight * probability[e]
                                    for a in range(size):
                                        value[a] += p_move * cut[n, f, 0, a] * after[w, g, a]
                    for a in range(size):
                        after[v, f, a] = value[a] / (1.0 - same * again[a])
        for u in range(states):
            for e in range(start[u], start[u + 1]):
                v = target[e]
                p = probability[e]
                for f in range(kinds):
                    for a in range(size):
                        before[j, u, f, a] += p * after[v, f, a]
                    if ahead:
                        for a in range(size):
                            first[j, u, f, a] += p * (after[v, f, a] + at_once[v, f, a])
    return before, first


@numba.njit(cache=True)
def arrival_kernel(s: np.ndarray, rate: float, seconds: float, row: np.ndarray) -> None:
    """∫₀^T e^(−s(T − x)) P(k arrivals in x) dx for k along the first axis of ``row`` (size, N).

    What an arrival in a step of T finds: k that came earlier in it, and the rest of the step.
    Where λ and s are near, the recursion would cancel; s are imaginary or small beside λ or, at
    the reals used for moments, 0 < |s| ≪ λ.
    """
    size = row.shape[0]
    poisson = math.exp(-rate * seconds)
    for a in range(s.size):
        row[0, a] = (np.exp(-s[a] * seconds) - poisson) / (rate - s[a])
    for k in range(1, size):
        poisson *= rate * seconds / k
        for a in range(s.size):
            row[k, a] = (rate * row[k - 1, a] - poisson) / (rate - s[a])


@numba.njit(cache=True)
def arriving(
    s: np.ndarray,
    rate: float,
    x: np.ndarray,
    occupied: np.ndarray,
    joined: np.ndarray,
    fits: np.ndarray,
    whole: np.ndarray,
    share: np.ndarray,
    cut: np.ndarray,
    length_whole: np.ndarray,
    length_cut: np.ndarray,
    left: np.ndarray,
    before: np.ndarray,
    least: float,
) -> np.ndarray:
    """Σ over steps of ∫ over their time of E[e^(−s·TTFT)], (N,), s: arrivals within a step.

    ``x`` (V, F, L) is the law when steps start, after the slots moved. Parts below ``least`` are
    left out.
    """
    states, kinds, levels = x.shape
    slots = fits.shape[0] - 1
    size = s.size
    result = np.zeros(size, dtype=np.complex128)
    row = np.zeros((max(length_whole.max(), length_cut.max()), size), dtype=np.complex128)
    mass = np.zeros(levels)
    for n in range(slots + 1):
        free = slots - n
        for f in range(kinds):
            for j in range(free + 1):
                for part in range(3):
                    if part == 2 and kinds == 1:
                        continue
                    if part == 2:
                        seconds, weight = cut[n, f, j], 1.0
                        count = length_cut[n, f, j]
                    else:
                        seconds = whole[n, f, j, part]
                        weight = share[n, f, j] if part == 0 else 1.0 - share[n, f, j]
                        count = length_whole[n, f, j]
                    if weight <= 0.0 or seconds <= 0.0:
                        continue
                    ready = False
                    for v in range(states):
                        if occupied[v] != n:
                            continue
                        # Mass by what is left of the queue after this batch.
                        low = levels
                        high = -1
                        if part == 2:
                            p = weight * (fits[n, f, j] - fits[n, f, j + 1]) if j < free else 0.0
                            if p <= 0.0:
                                continue
                            for q in range(j + 1, levels):
                                mass[q - j] = p * x[v, f, q]
                            if n == 0 and f == 0 and j == 0:
                                mass[1] += p * x[v, f, 0]
                            first, last = 1, levels - j
                        elif j < free:
                            p = weight * fits[n, f, j]
                            mass[0] = p * x[v, f, j] if j < levels else 0.0
                            if n == 0 and f == 0:
                                if j == 0:
                                    mass[0] = 0.0
                                if j == 1:
                                    mass[0] += p * x[v, f, 0]
                            first, last = 0, 1
                        else:
                            p = weight * fits[n, f, j]
                            for q in range(j, levels):
                                mass[q - j] = p * x[v, f, q]
                            if n == 0 and f == 0 and j == 0:
                                mass[0] = 0.0
                            if n == 0 and f == 0 and j == 1:
                                mass[0] += p * x[v, f, 0]
                            first, last = 0, levels - j
                        for r in range(first, last):
                            if mass[r] > least:
                                low = min(low, r)
                                high = r
                        if high < 0:
                            continue
                        if not ready:
                            arrival_kernel(s, rate, seconds, row[:count])
                            ready = True
                        u = joined[v, j]
                        for g in range(kinds):
                            share_of = left[n, f, j, g] if part == 2 else (1.0 if g == 0 else 0.0)
                            if share_of <= 0.0:
                                continue
                            for r in range(low, high + 1):
                                m = mass[r] * share_of
                                if m <= least:
                                    continue
                                for k in range(count):
                                    at = min(r + k + 1, levels)
                                    for a in range(size):
                                        result[a] += m * row[k, a] * before[at, u, g, a]
    return result
