"""Geometry: who serves the typical request, and from how far (Theory A6-A7, C).

Axes: request type Q, profile S. Costs are seconds, densities nodes per km², distances km.

The request takes the least of the costs ``K_t + ξ·R_t^α`` over the nearest node of every tier
(Theory C1). Written in the *cost* y instead of the distance r, every tier's exclusion disc
enters through one function of its own,

    v_t(y) = π λ_t ϱ_t(y)²,   ϱ_t(y) = (max(y − K_t, 0)/ξ)^(1/α),

because the equal-cost radius ϱ_st(r) of Theory C2 is ϱ_t(y) at y = K_s + ξ r^α. The probability
that the least cost exceeds y is exp(−v(y)), v = Σ_t v_t, and Theory C3 becomes

    A_s = ∫ v_s'(y) exp(−v(y)) dy:

one set of nodes per request type (`quadrature`) serves all its profiles, S power functions a node
instead of S² per radius.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from testbed.errors import ScenarioError
from testbed.radio import PowerLaw
from testbed.theory.quadrature import cost_nodes
from testbed.theory.system import System


@numba.njit(cache=True)
def association_kernel(costs: np.ndarray, area: np.ndarray, power: float) -> np.ndarray:
    """A_sq for every type, shape (Q, S) (Theory C3)."""
    types, tiers = costs.shape
    none = np.empty(0)
    result = np.zeros((types, tiers))
    for q in range(types):
        _, _, slope, weight = cost_nodes(costs[q], area, power, none, none)
        for n in range(weight.size):
            for s in range(tiers):
                result[q, s] += slope[n, s] * weight[n]
    return result


@numba.njit(cache=True)
def association_response(
    costs: np.ndarray, area: np.ndarray, power: float, association: np.ndarray, response: np.ndarray
) -> None:
    """Fill A_s (S,) and ∂A_s/∂K_t (S, S) of one request type (Theory C3)."""
    tiers = costs.size
    none = np.empty(0)
    _, _, slope, weight = cost_nodes(costs, area, power, none, none)
    for s in range(tiers):
        association[s] = 0.0
        for t in range(tiers):
            response[s, t] = 0.0
    for n in range(weight.size):
        for s in range(tiers):
            mass = slope[n, s] * weight[n]
            if mass > 0.0:
                association[s] += mass
                for t in range(s):
                    response[s, t] += mass * slope[n, t]
    for s in range(tiers):
        for t in range(s):
            response[t, s] = response[s, t]
            response[s, s] -= response[s, t]
            response[t, t] -= response[s, t]


@numba.njit(cache=True)
def response_kernel(
    costs: np.ndarray,
    area: np.ndarray,
    power: float,
    association: np.ndarray,
    response: np.ndarray,
) -> None:
    """Fill A_sq (Q, S) and ∂A_sq/∂K_tq (Q, S, S)."""
    for q in range(costs.shape[0]):
        association_response(costs[q], area, power, association[q], response[q])


@numba.njit(cache=True)
def moments_kernel(
    costs: np.ndarray, area: np.ndarray, power: float, xi: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A_sq, A_sq·E[ξ r^α] and A_sq·E[r], each (Q, S) (Theory C4, E3)."""
    types, tiers = costs.shape
    none = np.empty(0)
    result = np.zeros((3, types, tiers))
    for q in range(types):
        start, beyond, slope, weight = cost_nodes(costs[q], area, power, none, none)
        for n in range(weight.size):
            for s in range(tiers):
                mass = slope[n, s] * weight[n]
                if mass > 0.0:
                    radio = (start[n] - costs[q, s]) + beyond[n]
                    result[0, q, s] += mass
                    result[1, q, s] += mass * radio
                    result[2, q, s] += mass * (radio / xi) ** (0.5 * power)
    return result[0], result[1], result[2]


@numba.njit(cache=True)
def coverage_kernel(
    costs: np.ndarray,
    area: np.ndarray,
    power: float,
    deadline: np.ndarray,
    waiting: np.ndarray,
    rate: np.ndarray,
) -> np.ndarray:
    """∫ joint · F_W for waits that are 0 or exponential, shape (Q, S) (Theory E2).

    ``deadline`` (Q, S) is the cost y at which a request of type q at tier s has no time left to
    wait, ``waiting`` (Q, S) the probability of a wait, ``rate`` (Q, S) its decay, 1/s. A rate of 0
    with a waiting probability of 1 is a wait that never ends.
    """
    types, tiers = costs.shape
    result = np.zeros((types, tiers))
    for q in range(types):
        start, beyond, slope, weight = cost_nodes(costs[q], area, power, deadline[q], rate[q])
        for n in range(weight.size):
            for s in range(tiers):
                left = (deadline[q, s] - start[n]) - beyond[n]
                if left >= 0.0 and slope[n, s] > 0.0:
                    covered = 1.0 - waiting[q, s] * math.exp(-rate[q, s] * left)
                    result[q, s] += slope[n, s] * weight[n] * covered
    return result


def radio_area(system: System) -> tuple[np.ndarray, float, float]:
    """(π λ_s ξ^(−2/α), 2/α, ξ): what the kernels need of density and radio (Theory A6, A7)."""
    radio = system.radio
    if not isinstance(radio, PowerLaw):
        raise ScenarioError("radio.model: the analytical geometry needs power_law")
    power = 2.0 / radio.alpha
    return np.pi * system.density * radio.xi**-power, power, radio.xi


def associate(system: System, costs: np.ndarray) -> np.ndarray:
    """A_sq under costs K (Q, S), seconds: the least K_sq + radio delay serves (Theory C1, C3)."""
    area, power, _ = radio_area(system)
    return association_kernel(np.ascontiguousarray(costs, dtype=float), area, power)


def respond(system: System, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A_sq (Q, S) and its derivative ∂A_sq/∂K_tq (Q, S, S), 1/s (Theory C3 differentiated)."""
    area, power, _ = radio_area(system)
    types, tiers = system.shape
    association, response = np.empty((types, tiers)), np.empty((types, tiers, tiers))
    response_kernel(np.ascontiguousarray(costs, dtype=float), area, power, association, response)
    return association, response
