"""Relaxation: one tier's wait after another, where Newton's method does not settle (Theory D1).

With all other waits fixed the requests that a tier gets fall as its own wait grows, and the wait
that they cause falls with them: there is one wait at which both agree, and bisection cannot miss
it. Where all types are served alike these steps descend a convex function (the equilibrium is that
of Beckmann's transportation problem), so that going round the tiers ends at the operating point.
It is slow, and only brings a level near enough for Newton's method.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import brentq

from testbed.theory.geometry import association_kernel
from testbed.theory.wait_curve import penalised_level

ROUNDS = 40
_NEAR = 1e-6


def tier_work(
    gained: np.ndarray,
    flow: np.ndarray,
    burden: np.ndarray,
    servers: int,
    exponent: float,
    unit: float,
) -> tuple[float, float]:
    """Utilisation and mean service, s, of a tier's node that gets ``gained`` requests/s, (Q,).

    A curve that is not Erlang-C's has its own unit; a tier that gets nothing keeps the mean of all
    requests, ``flow`` (Q,).
    """
    rho = float(gained @ burden)
    if exponent >= 0:
        return rho, float(unit)
    weight = gained if rho > 0 else flow
    return rho, float(servers * (weight @ burden) / weight.sum())


def relax(
    flow: np.ndarray,
    fixed: np.ndarray,
    share: np.ndarray,
    burden: np.ndarray,
    servers: np.ndarray,
    exponent: np.ndarray,
    unit: np.ndarray,
    growth: np.ndarray,
    area: np.ndarray,
    power: float,
    spare: float,
    level: np.ndarray,
    floor: float,
    budget: int,
) -> int:
    """Bring the levels ω (S,), seconds, near the operating point, in place.

    The arguments are those of :func:`~testbed.theory.newton.newton`; no round begins after
    ``budget`` evaluations.

    Returns
    -------
    Evaluations of the association.
    """
    used = np.flatnonzero((flow * burden).sum(axis=0) > 0)
    evaluations = 0

    def surplus(value: float, s: int) -> float:
        nonlocal evaluations
        evaluations += 1
        level[s] = value
        gained = flow[:, s] * association_kernel(fixed + share * level, area, power)[:, s]
        rho, mean = tier_work(
            gained, flow[:, s], burden[:, s], int(servers[s]), exponent[s], unit[s]
        )
        ceiling = 1.0 - spare / float(servers[s])
        wait, _ = penalised_level(
            int(servers[s]), float(exponent[s]), mean, float(growth[s]), rho, ceiling
        )
        return float(wait) - value

    for _ in range(ROUNDS):
        if evaluations >= budget:
            break
        before = level.copy()
        for s in used:
            low, high = 0.0, max(float(level[s]), floor)
            if surplus(low, s) <= 0:
                level[s] = 0.0
                continue
            while surplus(high, s) > 0:
                low, high = high, 4.0 * high
            level[s] = brentq(surplus, low, high, args=(s,), xtol=1e-3 * floor, rtol=1e-9)
        if np.abs(level - before).max() <= _NEAR * max(float(level.max()), floor):
            break
    return evaluations
