"""FixedPoint: W̄ = Q(A(W̄)) for any association, whatever geometry it comes from (Theory D1).

The compiled iteration of ``theory.operating_point`` knows one geometry. Here the association is a
function; Newton's method works on the utilisations ρ, in which a wait's steep rise near 1 is
smooth: the waits that belong to ρ give an association, which gives utilisations R(ρ), and ρ = R(ρ)
is sought. The Jacobian is taken by differences, one association a tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import root

from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel, TierLoad
from testbed.theory.delay.search_model import search_model
from testbed.theory.operating_point import SPARE_SERVERS, OperatingPoint
from testbed.theory.overload import overload_growth, overload_reason, unsettled_reason
from testbed.theory.system import System

Association = Callable[[np.ndarray], np.ndarray]
"""Advertised waits (Q, S), s -> A_sq (Q, S)."""

MOST_BUSY = 1.0 - 1e-6
"""Utilisation of a shared link at which its transfers are taken never to end."""
_DAMPED_STEPS = 200
_DIFFERENCE = 1e-5
_HALVINGS = 12


@dataclass(frozen=True)
class FixedPoint:
    """Advertised waits (Q, S), s; the association under them; utilisation (S,); the iterations."""

    wait: np.ndarray
    association: np.ndarray
    utilisation: np.ndarray
    converged: bool
    iterations: int
    history: np.ndarray


def settle(
    system: System,
    model: DelayModel,
    associate: Association,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 100,
    start: np.ndarray | None = None,
) -> FixedPoint:
    """The waits that nodes advertise and have (Theory D1).

    Parameters
    ----------
    associate : the association under advertised waits
    tolerance : largest change of a utilisation at the stop
    max_iterations : Newton steps
    start : (Q, S) waits of a neighbouring problem, s

    A tier past its capacity gets the finite, growing penalty wait of
    :func:`~testbed.theory.operating_point.penalised_means`; ``utilisation`` then says ≥ 1.
    """
    search = _Search(system, model, associate)
    wait = np.zeros(system.shape) if start is None else np.array(start, dtype=float)
    wait[:, system.density <= 0] = 0.0
    history = [search.tier_mean(wait)]
    converged = False
    for spare in SPARE_SERVERS:
        curves = search.curves(associate(wait), spare)
        rho = np.minimum([c.here for c in curves], 1.0)
        for _ in range(max_iterations):
            rho, moved = search.step(rho, curves)
            before = wait
            wait = search.waits(rho, curves)
            history.append(search.tier_mean(wait))
            association = associate(wait)
            # The mix of a tier shapes its curve: refit where the step has led.
            curves = search.curves(association, spare)
            after = search.waits(rho, curves)
            scale = max(float(wait.max()), 1e-6)
            drift = max(float(np.abs(after - wait).max()), float(np.abs(wait - before).max()))
            converged = moved < tolerance and drift < 1e2 * tolerance * scale
            if converged:
                break
        over = float(((rho - 1.0) * system.concurrency).max())
        if not converged or over <= -spare or over > 100.0 * spare:
            break
    association = associate(wait)
    return FixedPoint(
        wait=wait,
        association=association,
        utilisation=search.utilisation(association),
        converged=converged,
        iterations=search.evaluations,
        history=np.array(history),
    )


def operating_point(
    system: System,
    policy: Policy,
    model: DelayModel,
    associate: Association,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 100,
    start: OperatingPoint | None = None,
) -> OperatingPoint:
    """The operating point of a policy whose association is ``associate`` (Theory D1-D3).

    A policy that looks at no waits is asked once, with waits of 0.
    """
    found = FixedPoint(
        wait=np.zeros(system.shape),
        association=np.empty(0),
        utilisation=np.empty(0),
        converged=True,
        iterations=1,
        history=np.zeros((0, system.shape[1])),
    )
    if policy.load_aware:
        found = settle(
            system,
            search_model(model),
            associate,
            tolerance=tolerance,
            max_iterations=max_iterations,
            start=None if start is None else start.advertised,
        )
    association = associate(found.wait)
    loads = tuple(system.tier_load(association, s) for s in range(system.shape[1]))
    rho = np.array([model.utilisation(load) for load in loads])
    actual = np.full(system.shape, np.inf)
    for s in np.flatnonzero(rho < 1):
        actual[:, s] = model.mean(loads[s])
    feasible = bool((rho < 1).all())
    return OperatingPoint(
        wait=actual,
        association=association,
        costs=policy.fixed_cost(system.residual, found.wait),
        loads=loads,
        utilisation=rho,
        converged=found.converged,
        iterations=found.iterations,
        feasible=feasible,
        reason=None if feasible else overload_reason(system, policy, loads, rho, found.converged),
        lost=policy.load_aware and not feasible,
        history=found.history,
        advertised=found.wait,
        unsettled=None if found.converged else unsettled_reason(system, actual, found.wait),
    )


def shared_links(
    demand: Callable[[np.ndarray], np.ndarray], links: int, *, tolerance: float = 1e-8
) -> tuple[np.ndarray, bool]:
    """Utilisations ϱ = demand(ϱ) of links that their users shun as they fill (Theory H5, H7).

    Parameters
    ----------
    demand : ϱ (L,), each at most :data:`MOST_BUSY` -> the utilisation that it would cause

    Returns
    -------
    ϱ, (L,), and whether it is a fixed point. A link asked for more stands at :data:`MOST_BUSY`.
    """
    rho = np.zeros(links)
    # Demand falls as ϱ grows: a damped start lands near the answer, a root finder ends it.
    for _ in range(_DAMPED_STEPS):
        moved = np.clip(demand(rho), 0.0, MOST_BUSY) - rho
        rho = rho + 0.5 * moved
        if np.abs(moved).max() < 1e-3:
            break

    def missing(x: np.ndarray, *_: object) -> np.ndarray:
        return demand(np.clip(x, 0.0, MOST_BUSY)) - x

    answer = root(missing, rho, method="hybr", tol=0.1 * tolerance)
    found = np.clip(answer.x, 0.0, MOST_BUSY)
    if np.abs(np.clip(demand(found), 0.0, MOST_BUSY) - found).max() < 1e2 * tolerance:
        return found, True
    return rho, bool(np.abs(np.clip(demand(rho), 0.0, MOST_BUSY) - rho).max() < 1e2 * tolerance)


@dataclass(frozen=True)
class _Curve:
    """A tier's mean waits against its utilisation at a fixed mix of types, s."""

    model: DelayModel
    load: TierLoad
    here: float
    ceiling: float
    growth: float

    def wait(self, rho: float) -> np.ndarray:
        """(Q,) seconds; a straight line above the ceiling (Theory D1)."""
        unit = self.model.utilisation(self.load)
        if unit <= 0 or rho <= 0:
            return np.zeros_like(self.load.weights)
        at = min(rho, self.ceiling)
        mean = self.model.mean(self.load.scaled(at / unit))
        if rho <= self.ceiling:
            return mean
        level = float(self.load.weights @ mean)
        return mean * (1.0 + self.growth * (rho - self.ceiling) / level)


class _Search:
    def __init__(self, system: System, model: DelayModel, associate: Association) -> None:
        self.system, self.model, self.associate = system, model, associate
        self.evaluations = 0

    def tier_mean(self, wait: np.ndarray) -> np.ndarray:
        return self.system.probability @ wait

    def utilisation(self, association: np.ndarray) -> np.ndarray:
        tiers = range(self.system.shape[1])
        return np.array(
            [self.model.utilisation(self.system.tier_load(association, s)) for s in tiers]
        )

    def curves(self, association: np.ndarray, spare: float) -> list[_Curve]:
        found = []
        for s in range(self.system.shape[1]):
            load = self.system.tier_load(association, s)
            here = self.model.utilisation(load)
            found.append(
                _Curve(
                    model=self.model,
                    load=load if load.arrival_rate > 0 else replace(load, arrival_rate=1.0),
                    here=here,
                    ceiling=1.0 - spare / load.concurrency,
                    growth=overload_growth(self.system, self.model, s, spare),
                )
            )
        return found

    def waits(self, rho: np.ndarray, curves: list[_Curve]) -> np.ndarray:
        return np.column_stack([c.wait(float(r)) for c, r in zip(curves, rho, strict=True)])

    def missing(self, rho: np.ndarray, curves: list[_Curve]) -> np.ndarray:
        """R(ρ) − ρ, (S,)."""
        self.evaluations += 1
        return self.utilisation(self.associate(self.waits(rho, curves))) - rho

    def step(self, rho: np.ndarray, curves: list[_Curve]) -> tuple[np.ndarray, float]:
        """One safeguarded Newton step; the new ρ and how far it moved."""
        residual = self.missing(rho, curves)
        size = len(rho)
        jacobian = np.empty((size, size))
        for s in range(size):
            moved = rho.copy()
            change = _DIFFERENCE * max(rho[s], 0.1)
            moved[s] += change
            jacobian[:, s] = (self.missing(moved, curves) - residual) / change
        try:
            direction = np.linalg.solve(jacobian, -residual)
        except np.linalg.LinAlgError:
            direction = residual
        norm = float(np.abs(residual).max())
        part = 1.0
        for _ in range(_HALVINGS):
            trial = np.maximum(rho + part * direction, 0.0)
            if float(np.abs(self.missing(trial, curves)).max()) < norm or norm == 0:
                return trial, float(np.abs(trial - rho).max())
            part *= 0.5
        # No decrease along Newton's direction: a small plain step leaves the spot.
        trial = np.maximum(rho + 0.1 * residual, 0.0)
        return trial, float(np.abs(trial - rho).max())
