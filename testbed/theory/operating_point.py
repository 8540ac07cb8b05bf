"""OperatingPoint: the waits and the association that cause each other (Theory D)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel, TierLoad
from testbed.theory.geometry import associate
from testbed.theory.system import System

NEGLIGIBLE_WAIT = 1e-6
"""Waits are compared relative to at least this share of the mean residual prefill: below it a
change of W̄ moves nothing that is reported."""

_CEILINGS = (0.9, 0.99, 0.999, 1 - 1e-4, 1 - 1e-6, 1 - 1e-8, 1 - 1e-10)
"""Utilisations above which the wait is continued by a straight line, from soft to sharp."""


@dataclass(frozen=True)
class OperatingPoint:
    """A consistent (W̄, A), or the closest to it.

    Attributes
    ----------
    wait : (Q, S) W̄, s; infinite at a tier with ρ ≥ 1
    association : (Q, S) A_sq
    costs : (Q, S) K_sq that the association minimised together with the radio delay, s
    loads : one :class:`TierLoad` per profile
    utilisation : (S,) as the delay model sees it
    converged, iterations : of the fixed point
    feasible, reason : every tier with traffic below 1, or which one is not and by how much
    history : (iterations, S) mean over types of the wait after each step, s (Fig. 6)
    advertised : (Q, S) finite waits to start a neighbouring problem from
    lost : a policy that looks at waits found no stable point: nothing is served
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
    history: np.ndarray
    advertised: np.ndarray
    lost: bool


def penalised_mean(model: DelayModel, load: TierLoad, ceiling: float) -> tuple[np.ndarray, float]:
    """Mean excess delay (Q,) and utilisation; past ``ceiling`` the mean grows in a straight line.

    That keeps the wait of an overloaded tier finite and increasing in its load (Theory D1).
    """
    rho = model.utilisation(load)
    if rho <= ceiling:
        return model.mean(load), rho
    at_ceiling = model.mean(load.scaled(ceiling / rho))
    return at_ceiling * (1.0 + (rho - ceiling) / (1.0 - ceiling)), rho


def solve(
    system: System,
    policy: Policy,
    model: DelayModel,
    *,
    damping: float = 0.5,
    tolerance: float = 1e-10,
    max_iterations: int = 2000,
    start: np.ndarray | None = None,
) -> OperatingPoint:
    """The operating point W̄ = Q(A(W̄)) of a policy (Theory D1-D3).

    A policy that looks at no waits has nothing to iterate. For the others Anderson's
    acceleration with mixing η = ``damping`` is applied to the damped iteration; the stop rule is
    a largest relative change below ``tolerance``. ``start`` (Q, S) warm-starts it.
    """
    types, tiers = system.shape
    if not policy.load_aware:
        costs = policy.fixed_cost(system.residual, np.zeros(tiers))
        association = associate(system, costs)
        return _point(system, model, association, costs, True, 1, np.zeros((0, tiers)), None)

    floor = NEGLIGIBLE_WAIT * float(system.probability @ system.residual.mean(axis=1))
    wait = np.zeros((types, tiers)) if start is None else np.array(start, dtype=float)
    history: list[np.ndarray] = []
    iterations = 0
    converged = False
    association = np.zeros((types, tiers))
    costs = wait

    def image(w: np.ndarray, ceiling: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        k = policy.fixed_cost(system.residual, w)
        a = associate(system, k)
        out = np.empty_like(w)
        rho = np.empty(tiers)
        for s in range(tiers):
            out[:, s], rho[s] = penalised_mean(model, system.tier_load(a, s), ceiling)
        return out, a, rho

    for ceiling in _CEILINGS:
        memory = _Anderson(damping)
        converged = False
        while iterations < max_iterations:
            iterations += 1
            target, association, rho = image(wait, ceiling)
            costs = policy.fixed_cost(system.residual, wait)
            change = np.abs(target - wait) / np.maximum(np.maximum(target, wait), floor)
            if change.max() < tolerance:
                converged = True
                break
            wait = memory.step(wait, target)
            history.append(wait.mean(axis=0))
        if not converged or rho.max() <= ceiling:
            break
    return _point(system, model, association, costs, converged, iterations, np.array(history), wait)


class _Anderson:
    """Safeguarded Anderson acceleration of w ← (1 − η) w + η Q(w), kept at or above 0."""

    def __init__(self, damping: float, depth: int = 5) -> None:
        self.damping = damping
        self.depth = depth
        self.points: list[np.ndarray] = []
        self.residuals: list[np.ndarray] = []
        self.best = np.inf

    def step(self, wait: np.ndarray, target: np.ndarray) -> np.ndarray:
        f = (target - wait).ravel()
        norm = float(np.abs(f).max())
        if norm > 2.0 * self.best:
            self.points.clear()
            self.residuals.clear()
        self.best = min(self.best, norm)
        self.points.append(wait.ravel())
        self.residuals.append(f)
        del self.points[: -self.depth - 1], self.residuals[: -self.depth - 1]
        plain = wait.ravel() + self.damping * f
        if len(self.points) == 1:
            return plain.reshape(wait.shape)
        dx = np.diff(np.array(self.points), axis=0).T
        df = np.diff(np.array(self.residuals), axis=0).T
        gamma = np.linalg.lstsq(df, f, rcond=1e-10)[0]
        proposal = plain - (dx + self.damping * df) @ gamma
        proposal = np.where(proposal >= 0, proposal, plain)
        return np.maximum(proposal, 0.0).reshape(wait.shape)


def _point(
    system: System,
    model: DelayModel,
    association: np.ndarray,
    costs: np.ndarray,
    converged: bool,
    iterations: int,
    history: np.ndarray,
    advertised: np.ndarray | None,
) -> OperatingPoint:
    types, tiers = system.shape
    loads = tuple(system.tier_load(association, s) for s in range(tiers))
    rho = np.array([model.utilisation(load) for load in loads])
    wait = np.full((types, tiers), np.inf)
    for s in range(tiers):
        if rho[s] < 1:
            wait[:, s] = model.mean(loads[s])
    worst = int(np.argmax(rho))
    feasible = bool(rho[worst] < 1)
    reason = None if feasible else _overload(system, loads, rho)
    return OperatingPoint(
        wait=wait,
        association=association,
        costs=costs,
        loads=loads,
        utilisation=rho,
        converged=converged,
        iterations=iterations,
        feasible=feasible,
        reason=reason,
        history=history,
        advertised=np.where(np.isfinite(wait), wait, 0.0) if advertised is None else advertised,
        lost=advertised is not None and not feasible,
    )


def _overload(system: System, loads: tuple[TierLoad, ...], rho: np.ndarray) -> str:
    """Which tiers cannot serve what they get, and by how much (Theory D1)."""
    parts = [
        f"{system.names[s]}: utilisation {rho[s]:.4g}, {loads[s].arrival_rate:.4g} requests/s per "
        f"node against {loads[s].arrival_rate / rho[s]:.4g} that it can serve"
        for s in np.argsort(-rho)
        if rho[s] >= 1
    ]
    text = "; ".join(parts)
    if system.capacity_margin < 0:
        text += (
            f"; no routing can serve this: the least demand is {system.least_demand:.4g} busy "
            f"servers per km², the capacity {system.capacity:.4g}"
        )
    return text
