"""Distance: how far the serving node is, and who beats whom at which distances (Theory C2-C6)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from testbed.radio import RadioModel
from testbed.theory.geometry import cost_nodes, moments_kernel, radio_area
from testbed.theory.system import System


def equal_cost_radius(
    radio: RadioModel, distance: ArrayLike, cost: ArrayLike, other: ArrayLike
) -> np.ndarray:
    """ϱ_st(r), km: within it a node of cost K_t undercuts one of cost K_s at r (Theory C2).

    ``distance`` r km, ``cost`` K_s and ``other`` K_t seconds; shapes broadcast. It is 0 where no
    node of the other tier can win.
    """
    r = np.asarray(distance, dtype=float)
    return radio.distance(radio.delay(r) + np.asarray(cost) - np.asarray(other))


def prefers(
    radio: RadioModel, r_s: ArrayLike, r_t: ArrayLike, cost: ArrayLike, other: ArrayLike
) -> np.ndarray:
    """Whether t at ``r_t`` beats s at ``r_s`` (Theory C6, [46]); the boundary counts for t.

    ξ(r_t^α − r_s^α) ≤ [g(L − h_s) − g(L − h_t)] + W̄_s − W̄_t, with both sides' costs K joined in
    ``cost`` (s) and ``other`` (t), seconds. Its boundary r_t = ϱ_st(r_s) is that of Fig. 3.
    """
    extra = radio.delay(np.asarray(r_t, dtype=float)) - radio.delay(np.asarray(r_s, dtype=float))
    return np.asarray(extra <= np.asarray(cost) - np.asarray(other))


def joint_density(system: System, costs: np.ndarray, q: int, s: int, r: ArrayLike) -> np.ndarray:
    """Density of (served by s, at distance r) for type q, 1/km (Theory C3's integrand, C4).

    2π λ_s r·exp(−π Σ_t λ_t ϱ_st(r)²); ``costs`` (Q, S) seconds, ``r`` km, any shape. Its integral
    over r is A_sq.
    """
    r = np.asarray(r, dtype=float)
    exposure = np.zeros_like(r)
    for t, density in enumerate(system.density):
        if density > 0:
            own = r if t == s else equal_cost_radius(system.radio, r, costs[q, s], costs[q, t])
            exposure = exposure + np.pi * density * own**2
    return 2.0 * np.pi * system.density[s] * r * np.exp(-exposure)


def distance_cdf(system: System, costs: np.ndarray, q: int, s: int, r: ArrayLike) -> np.ndarray:
    """P(R ≤ r | type q, served by s) (Theory C4); 0 everywhere for a tier that serves nobody.

    ``costs`` (Q, S) seconds, ``r`` km, any shape.
    """
    r = np.asarray(r, dtype=float)
    area, power, _ = radio_area(system)
    reach = system.radio.delay(r.ravel())
    cuts = np.unique(costs[q, s] + reach[np.isfinite(reach)])
    start, beyond, slope, weight = cost_nodes(costs[q], area, power, cuts, np.zeros_like(cuts))
    radio = (start - costs[q, s]) + beyond
    order = np.argsort(radio)
    mass = np.concatenate([[0.0], np.cumsum(slope[order, s] * weight[order])])
    total = mass[-1]
    if total <= 0:
        return np.zeros_like(r)
    below = np.searchsorted(radio[order], reach, side="right")
    return (mass[below] / total).reshape(r.shape)


def mean_distances(system: System, costs: np.ndarray) -> np.ndarray:
    """R̄_sq, (Q, S), km; 0 for a tier that serves nobody (Theory C4)."""
    area, power, xi = radio_area(system)
    association, _, distance = moments_kernel(np.ascontiguousarray(costs), area, power, xi)
    return np.divide(distance, association, out=np.zeros_like(distance), where=association > 0)
