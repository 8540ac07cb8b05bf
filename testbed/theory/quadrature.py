"""Quadrature: nodes of the least cost of one request type (Theory C3 in the cost y).

The integrands have their only kinks where a tier opens, at y = K_t; between them they are smooth
after the substitution y = K + h·t^p, p = k·α/2, under which a tier that opens at K has v_t ∝ t^k,
a polynomial. Each panel is checked against the one integral that is known exactly,
Σ_s ∫ v_s' e^−v dy = e^−v(a) − e^−v(b), and halved until it agrees to :data:`PANEL_TOLERANCE`.
"""

from __future__ import annotations

import math

import numba
import numpy as np

PANEL_TOLERANCE = 1e-13
"""Largest probability by which a quadrature panel may miss its exact total."""

VOID = 37.0
"""Mean number of cheaper nodes at which the integrals stop: e^−37 = 9·10⁻¹⁷."""

_ORDER = 16
_x, _w = np.polynomial.legendre.leggauss(_ORDER)
_NODES = 0.5 * (_x + 1.0)
_WEIGHTS = 0.5 * _w
_DEEPEST = 50
_STEEPEST = 16.0
"""Exposure that one panel spans at most: more is not worth trying at this order."""


@numba.njit(cache=True)
def _sort(values: np.ndarray, count: int) -> None:
    """Sort the first few values in place (a library sort takes seconds to compile)."""
    for i in range(1, count):
        value = values[i]
        j = i - 1
        while j >= 0 and values[j] > value:
            values[j + 1] = values[j]
            j -= 1
        values[j + 1] = value


@numba.njit(cache=True)
def _grading(power: float) -> float:
    """p of y = K + h·t^p: v ∝ t^k for a tier that opens at K, and the rest analytic in t^p.

    An even k makes the distance, r ∝ t^(k/2), a polynomial too. An integer p leaves no fractional
    power at t = 0; a p of 5 or more leaves a harmless one. The smallest such p spreads the nodes
    best.
    """
    best = np.inf
    for half in range(1, 13):
        p = 2.0 * half / power
        if p < 1.0:
            continue
        if abs(p - round(p)) < 1e-9:
            best = min(best, p)
        elif p >= 5.0 and best > p + 3.0:
            best = p
    return best if best < np.inf else 26.0 / power


@numba.njit(cache=True)
def _span(
    offset: np.ndarray, z: float, opened: np.ndarray, count: int, area: np.ndarray, power: float
) -> float:
    """v at the cost z beyond a segment's start, over the tiers open there."""
    total = 0.0
    for j in range(count):
        total += area[opened[j]] * (offset[j] + z) ** power
    return total


@numba.njit(cache=True)
def _reach(
    offset: np.ndarray, opened: np.ndarray, count: int, area: np.ndarray, power: float
) -> float:
    """How far beyond a segment's start v certainly exceeds VOID: some tier alone gets there."""
    reach = np.inf
    for j in range(count):
        reach = min(reach, (VOID / area[opened[j]]) ** (1.0 / power) - offset[j])
    low = 0.0
    high = max(reach, 0.0)
    # The bound is loose where many tiers share the area: a few halvings tighten it.
    for _ in range(6):
        middle = 0.5 * (low + high)
        if _span(offset, middle, opened, count, area, power) >= VOID:
            high = middle
        else:
            low = middle
    return high


@numba.njit(cache=True)
def cost_nodes(
    costs: np.ndarray,
    area: np.ndarray,
    power: float,
    cuts: np.ndarray,
    rates: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Quadrature nodes of the least cost of one request type (Theory C3, C4).

    Parameters
    ----------
    costs : (S,) K_s, seconds; an infinite cost closes the tier
    area : (S,) π λ_s ξ^(−2/α); 0 closes the tier
    power : 2/α
    cuts : (C,) costs at which the caller's integrand jumps or bends; panels end there
    rates : (C,) 1/s, how fast the caller's integrand decays below each cut; 0 for a bare jump

    Returns
    -------
    start, beyond : (N,) the cost y = start + beyond, seconds, in two parts: the radio delay at
        tier s, (start − K_s) + beyond, keeps its digits where it is tiny beside the costs
    slope : (N, S) v_s'(y), 1/s
    weight : (N,) e^−v(y) times the quadrature weight, so that for any smooth f
        ∫ f(y) v_s'(y) e^−v(y) dy ≈ Σ_n f(y_n)·slope[n, s]·weight[n]
    """
    tiers = costs.size
    ends = np.empty(tiers + cuts.size + 1)
    count = 0
    first = np.inf
    for t in range(tiers):
        if area[t] > 0.0 and costs[t] < np.inf:
            ends[count] = costs[t]
            count += 1
            first = min(first, costs[t])
    for c in range(cuts.size):
        if first < cuts[c] < np.inf:
            ends[count] = cuts[c]
            count += 1
    ends[count] = np.inf
    count += 1
    _sort(ends, count)

    capacity = 8 * _ORDER * count
    begin = np.empty(capacity)
    beyond = np.empty(capacity)
    slope = np.empty((capacity, tiers))
    weight = np.empty(capacity)
    used = 0
    p = _grading(power)
    stack = np.empty((_DEEPEST + 2, 4))
    opened = np.empty(tiers, np.int64)
    offset = np.empty(tiers)
    steepness = np.empty(tiers)

    for i in range(count - 1):
        start = ends[i]
        if ends[i + 1] <= start:
            continue
        n_open = 0
        kink = False
        for t in range(tiers):
            if area[t] > 0.0 and costs[t] <= start:
                opened[n_open] = t
                offset[n_open] = start - costs[t]
                steepness[n_open] = power * area[t]
                kink = kink or costs[t] == start
                n_open += 1
        length = min(ends[i + 1] - start, _reach(offset, opened, n_open, area, power))
        if length <= 0.0:
            break
        q = p if kink else 1.0
        depth = 0
        stack[0, 0] = 0.0
        stack[0, 1] = 1.0
        stack[0, 2] = _span(offset, 0.0, opened, n_open, area, power)
        stack[0, 3] = _span(offset, length, opened, n_open, area, power)
        while depth >= 0:
            a = stack[depth, 0]
            b = stack[depth, 1]
            va = stack[depth, 2]
            vb = stack[depth, 3]
            depth -= 1
            width = b - a
            last_resort = depth + 3 > _DEEPEST or width < 1e-13
            exact = math.exp(-va) * -math.expm1(va - vb)
            if exact < 1e-18:
                continue
            fine = last_resort or exact < PANEL_TOLERANCE or vb - va < _STEEPEST
            if fine and exact > PANEL_TOLERANCE and not last_resort:
                za = length * a**q
                zb = length * b**q
                for c in range(cuts.size):
                    # A cut ends a segment, so it lies above this panel or below its segment.
                    if cuts[c] >= start + length:
                        gap = (cuts[c] - start) - zb
                        if rates[c] * gap < 32.0 and rates[c] * (zb - za) > 6.0:
                            fine = False
            if fine:
                if used + _ORDER > capacity:
                    capacity *= 2
                    old_begin, old_beyond, old_slope, old_weight = begin, beyond, slope, weight
                    begin = np.empty(capacity)
                    beyond = np.empty(capacity)
                    slope = np.empty((capacity, tiers))
                    weight = np.empty(capacity)
                    for n in range(used):
                        begin[n] = old_begin[n]
                        beyond[n] = old_beyond[n]
                        weight[n] = old_weight[n]
                        for t in range(tiers):
                            slope[n, t] = old_slope[n, t]
                total = 0.0
                for n in range(_ORDER):
                    t_n = a + width * _NODES[n]
                    z = length * t_n**q
                    v = 0.0
                    slopes = 0.0
                    for t in range(tiers):
                        slope[used + n, t] = 0.0
                    for j in range(n_open):
                        radio = offset[j] + z
                        d = steepness[j] * radio ** (power - 1.0)
                        v += d * radio
                        slope[used + n, opened[j]] = d
                        slopes += d
                    begin[used + n] = start
                    beyond[used + n] = z
                    weight[used + n] = math.exp(-v / power) * width * _WEIGHTS[n] * q * z / t_n
                    total += slopes * weight[used + n]
                fine = last_resort or abs(total - exact) <= PANEL_TOLERANCE
            if fine:
                used += _ORDER
            else:
                middle = 0.5 * (a + b)
                vm = _span(offset, length * middle**q, opened, n_open, area, power)
                depth += 1
                stack[depth, 0] = middle
                stack[depth, 1] = b
                stack[depth, 2] = vm
                stack[depth, 3] = vb
                depth += 1
                stack[depth, 0] = a
                stack[depth, 1] = middle
                stack[depth, 2] = va
                stack[depth, 3] = vm
    return begin[:used], beyond[:used], slope[:used], weight[:used]
