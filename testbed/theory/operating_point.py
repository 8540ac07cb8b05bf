"""OperatingPoint: the waits and the association that cause each other (Theory D)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.radio import PowerLaw
from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel, TierLoad
from testbed.theory.delay.erlang_c import ErlangC
from testbed.theory.fitted import fitted_waits
from testbed.theory.geometry import associate
from testbed.theory.overload import (
    overload_growth,
    overload_reason,
    penalised_means,
    unsettled_reason,
)
from testbed.theory.search import SPARE_SERVERS, Search, erlang_waits, relative_change
from testbed.theory.system import System

__all__ = [
    "SPARE_SERVERS",
    "OperatingPoint",
    "assemble",
    "damped",
    "overload_growth",
    "overload_reason",
    "penalised_means",
    "solve",
]


@dataclass(frozen=True)
class OperatingPoint:
    """A consistent (W̄, A), or the nearest that was found.

    Attributes
    ----------
    wait : (Q, S) W̄, s; infinite at a tier with ρ ≥ 1
    association : (Q, S) A_sq
    costs : (Q, S) K_sq that the association minimised together with the radio delay, s
    loads : one :class:`TierLoad` per profile
    utilisation : (S,) as the delay model sees it
    converged, iterations : of the fixed point; an iteration is one evaluation of the association
    feasible : every tier's utilisation is below 1
    reason : None, or which tiers are not and by how much
    lost : a policy that looks at waits found no stable point, so that nothing is served
    history : (iterations, S) mean wait of each tier after each step, s (Fig. 6)
    advertised : (Q, S) finite waits that the policy looked at, s
    unsettled : None, or what is left open where the search did not converge
    """

    wait: np.ndarray
    association: np.ndarray
    costs: np.ndarray
    loads: tuple[TierLoad, ...]
    utilisation: np.ndarray
    converged: bool
    iterations: int
    feasible: bool
    reason: str | None
    lost: bool
    history: np.ndarray
    advertised: np.ndarray
    unsettled: str | None = None


def solve(
    system: System,
    policy: Policy,
    model: DelayModel,
    *,
    damping: float = 0.5,
    tolerance: float = 1e-10,
    max_iterations: int = 2000,
    start: OperatingPoint | None = None,
) -> OperatingPoint:
    """The operating point W̄ = Q(A(W̄)) of a policy (Theory D1-D3), by Newton's method.

    It is the point that :func:`damped` reaches where damping settles, in fewer steps; ties
    between costs, beside which damping cycles, do not matter here. ``damping`` is the η of the
    correction steps of delay models other than Erlang-C.

    Parameters
    ----------
    tolerance : largest relative change of a wait, or of a Newton step, at the stop
    max_iterations : evaluations of the association
    start : the operating point of a neighbouring problem with the same types and profiles
    """
    if not isinstance(system.radio, PowerLaw):
        # A radio model without closed geometry has its own quadrature (Theory H4).
        from testbed.theory.extensions import radio_law

        return radio_law.solve(system, policy, model, tolerance=tolerance, start=start)
    if not policy.load_aware:
        return _blind(system, policy, model)
    search = Search(system, policy, model, tolerance, np.zeros((max_iterations, system.shape[1])))
    warm = None if start is None else start.advertised
    if isinstance(model, ErlangC):
        wait, converged = erlang_waits(search, warm)
    else:
        wait, converged = fitted_waits(search, damping, warm)
    return assemble(search, wait, converged)


def _blind(system: System, policy: Policy, model: DelayModel) -> OperatingPoint:
    """A policy that looks at no waits has one association, whatever the load (Theory C7, D3)."""
    search = Search(system, policy, model, 0.0, np.zeros((0, system.shape[1])), used=1)
    return assemble(search, np.zeros(system.shape), True)


def damped(
    system: System,
    policy: Policy,
    model: DelayModel,
    *,
    damping: float = 0.5,
    tolerance: float = 1e-10,
    max_iterations: int = 2000,
    start: OperatingPoint | None = None,
    spare: float = SPARE_SERVERS[0],
) -> OperatingPoint:
    """The paper's iteration as it stands: W̄ ← (1 − η)W̄ + η·Q(A(W̄)) from 0 (Theory D1).

    It can cycle where W̄ sits beside a tie of two costs, and then says that it did not converge.
    Kept for Fig. 6 and as the reference that :func:`solve` must agree with.
    """
    if not policy.load_aware:
        return _blind(system, policy, model)
    search = Search(system, policy, model, tolerance, np.zeros((max_iterations, system.shape[1])))
    wait = np.zeros(system.shape) if start is None else start.advertised.copy()
    settled = False
    while search.used < max_iterations and not settled:
        search.history[search.used] = wait.mean(axis=0)
        search.used += 1
        association = associate(system, policy.fixed_cost(system.residual, wait))
        target = penalised_means(system, model, association, spare)
        settled = relative_change(target, wait, search.floor) < tolerance
        if not settled:
            wait = (1.0 - damping) * wait + damping * target
    return assemble(search, wait, settled)


def assemble(search: Search, wait: np.ndarray, converged: bool) -> OperatingPoint:
    """The operating point at which nodes advertise ``wait`` (Q, S), finite, seconds."""
    system, policy, model = search.system, search.policy, search.model
    types, tiers = system.shape
    costs = np.ascontiguousarray(policy.fixed_cost(system.residual, wait))
    association = associate(system, costs)
    loads = tuple(system.tier_load(association, s) for s in range(tiers))
    rho = np.array([model.utilisation(load) for load in loads])
    actual = np.full((types, tiers), np.inf)
    for s in range(tiers):
        if rho[s] < 1:
            actual[:, s] = model.mean(loads[s])
    feasible = bool((rho < 1).all())
    return OperatingPoint(
        wait=actual,
        association=association,
        costs=costs,
        loads=loads,
        utilisation=rho,
        converged=converged,
        iterations=search.used + search.relaxed,
        feasible=feasible,
        reason=None if feasible else overload_reason(system, policy, loads, rho, converged),
        lost=policy.load_aware and not feasible,
        history=search.history[: search.used],
        advertised=wait,
        unsettled=None if converged else unsettled_reason(system, actual, wait),
    )
