"""Search: the compiled Newton iteration brought to an operating point (Theory D1).

Overloaded tiers get straight-line waits from a number of spare servers on, at first many and then
few; difficult associations are approached from longer radio delays; delay models other than
Erlang-C are fitted, solved and refitted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad
from testbed.theory.delay.erlang_c import scaled_wait
from testbed.theory.geometry import associate, radio_area
from testbed.theory.newton import newton
from testbed.theory.overload import overload_growth, penalised_means
from testbed.theory.system import System

NEGLIGIBLE_WAIT = 1e-6
"""Waits are compared relative to at least this share of the mean residual prefill: below it a
change of W̄ moves nothing that is reported."""

SPARE_SERVERS = (0.1, 1e-3, 1e-5, 1e-7)
"""Free servers below which a node's wait is continued by a straight line, from soft to sharp."""

_DIFFERENCE = 1e-4
"""Relative step in the load at which a delay model's slope is taken."""

STRETCHES = tuple(4.0**k for k in (6, 12, 18, 24))
"""Radio delays, relative to the real ones, from which a difficult problem is approached."""

_COARSE = 1e-3
_PATIENCE = 40
_LARGEST_LOG = 460.0

_ARC = 0.03
"""Share of the cost scale at which a step counts as one of waits rather than of utilisation."""


@dataclass
class Search:
    """One call of :func:`solve`: the compiled iteration, its budget and its history."""

    system: System
    policy: Policy
    model: DelayModel
    tolerance: float
    history: np.ndarray
    used: int = 0

    def __post_init__(self) -> None:
        system = self.system
        self.utilisation = np.zeros(system.shape[1])
        nodes = np.where(system.density > 0, system.density, np.inf)
        self.flow = np.ascontiguousarray(system.intensity * system.probability[:, None] / nodes)
        self.fixed = np.ascontiguousarray(
            self.policy.fixed_cost(system.residual, np.zeros(system.shape))
        )
        self.area, self.power, _ = radio_area(system)
        prefill = float(system.probability @ system.residual.mean(axis=1))
        spread = float(np.ptp(system.residual[:, system.density > 0], axis=1).max())
        near = float(system.radio.delay(np.array(1.0 / np.sqrt(np.pi * system.node_density))))
        # Every prompt may be a full hit: the radio delay is then the only scale.
        self.floor = NEGLIGIBLE_WAIT * max(prefill, near, 1e-300)
        self.arc = _ARC * max(spread + near, 1e-300)

    def settle(self, level: np.ndarray, spare: float, curve: _Curve) -> bool:
        """Bring ``level`` (S,) to the operating point of the curves, in place."""
        first = level.copy()
        if self._run(level, spare, curve, 1.0, self.tolerance):
            return True
        # Where radio delays are short beside other differences of cost the association is all or
        # nothing and its derivative says little: come from longer radio delays, by steps that
        # shorten where one fails.
        stretch = 1.0
        for stretch in STRETCHES:
            level[:] = first
            if self._run(level, spare, curve, stretch, _COARSE):
                break
        factor = 4.0
        while stretch > 1.0 and factor > 1.02:
            shorter = max(stretch / factor, 1.0)
            trial = level.copy()
            if self._run(
                trial, spare, curve, shorter, self.tolerance if shorter == 1.0 else _COARSE
            ):
                level[:], stretch = trial, shorter
            else:
                factor **= 0.5
        if stretch > 1.0:
            return self._run(level, spare, curve, 1.0, self.tolerance, len(self.history))
        return True

    def _run(
        self,
        level: np.ndarray,
        spare: float,
        curve: _Curve,
        stretch: float,
        tolerance: float,
        patience: int = _PATIENCE,
    ) -> bool:
        room = self.history[self.used : self.used + patience]
        if not len(room):
            return False
        steps, converged = newton(
            self.flow, self.fixed, np.ascontiguousarray(self.policy.wait_weight * curve.share),
            np.ascontiguousarray(curve.burden),
            self.system.concurrency, curve.exponent, curve.unit,
            curve.growth, self.area * stretch**-self.power, self.power, spare, level,
            self.floor, self.arc, tolerance, self.utilisation, room,
        )  # fmt: skip
        self.used += steps
        return converged

    def conclusive(self, spare: float) -> bool:
        """The straight line was not used, or a sharper one would change nothing.

        Where the overload exceeds a hundred times the spare servers, waits are so long that only
        their differences count, and these no longer depend on how sharp the line is.
        """
        over = float(((self.utilisation - 1.0) * self.system.concurrency).max())
        return over <= -spare or over > 100.0 * spare or self.system.capacity_margin <= 0


@dataclass(frozen=True)
class _Curve:
    """W̄_qs = share_qs·unit_s·f_s(ρ_s), as `newton` takes it."""

    share: np.ndarray
    burden: np.ndarray
    exponent: np.ndarray
    unit: np.ndarray
    growth: np.ndarray


def erlang_waits(search: Search, start: np.ndarray | None) -> tuple[np.ndarray, bool]:
    """Advertised waits (Q, S) at the operating point of Erlang-C tiers, and convergence."""
    system = search.system
    tiers = system.shape[1]
    level = np.zeros(tiers) if start is None else start.max(axis=0)
    level[system.density <= 0] = 0.0
    everyone = system.probability @ system.occupancy
    converged = False
    for spare in SPARE_SERVERS:
        curve = _Curve(
            share=np.ones(system.shape),
            burden=system.occupancy / system.concurrency,
            exponent=np.full(tiers, -1.0),
            unit=np.ones(tiers),
            growth=np.array(
                [
                    m * scaled_wait(c, 1.0 - spare / c)[0] / (spare / c)
                    for m, c in zip(everyone, system.concurrency, strict=True)
                ]
            ),
        )
        converged = search.settle(level, spare, curve)
        if not converged or search.conclusive(spare):
            break
    return np.broadcast_to(level, system.shape).copy(), converged


def fitted_waits(
    search: Search, damping: float, start: np.ndarray | None
) -> tuple[np.ndarray, bool]:
    """The same for any delay model: its wait curves are fitted at the loads, solved, refitted.

    A fit ω = m·ρ^k/(1 − ρ) meets the model's mean and slope at the present load, so the refitting
    converges like Newton's method in the load; what the mix does to the wait enters with the next
    fit, damped by η when the change grows.
    """
    system, policy, model = search.system, search.policy, Remembered(search.model)
    wait = np.zeros(system.shape) if start is None else start.copy()
    wait[:, system.density <= 0] = 0.0
    level = np.zeros(system.shape[1])
    converged = False
    for spare in SPARE_SERVERS:
        ceiling = 1.0 - spare / system.concurrency
        old: _Curve | None = None
        growth: np.ndarray | None = None
        last, grew = np.inf, False
        association = associate(system, policy.fixed_cost(system.residual, wait))
        while search.used < len(search.history):
            curve = _fit(system, model, association, ceiling, growth)
            if old is not None:
                curve = _blend(old, curve, damping if grew else 1.0)
            old = curve
            if not search.settle(level, spare, curve):
                break
            before, wait = wait, curve.share * level
            association = associate(system, policy.fixed_cost(system.residual, wait))
            if growth is None and (search.utilisation > ceiling).any():
                # The slope of the straight line costs evaluations beside saturation, where a
                # model is slowest: it is asked for only where a tier is on that line.
                growth = np.array(
                    [overload_growth(system, model, s, spare) for s in range(system.shape[1])]
                )
                old = None
                continue
            target = penalised_means(system, model, association, spare)
            change = relative_change(target, wait, search.floor)
            grew, last = change > last, change
            moved = relative_change(before, wait, search.floor)
            converged = min(change, moved) < search.tolerance
            if converged:
                break
        if not converged or search.conclusive(spare):
            break
    return wait, converged


class Remembered(DelayModel):
    """A delay model whose mean is asked for once at each load: a fit's load is the last target's,
    and models that follow every step of an engine take seconds."""

    def __init__(self, model: DelayModel) -> None:
        self.model = model
        self.name = model.name
        self._means: dict[tuple[str, float, bytes], np.ndarray] = {}

    def utilisation(self, load: TierLoad) -> float:
        return self.model.utilisation(load)

    def excess(self, load: TierLoad) -> ExcessDelay:
        return self.model.excess(load)

    def mean(self, load: TierLoad) -> np.ndarray:
        key = (load.profile, load.arrival_rate, load.weights.tobytes())
        if key not in self._means:
            self._means[key] = self.model.mean(load)
        return self._means[key]


def _fit(
    system: System,
    model: DelayModel,
    association: np.ndarray,
    ceiling: np.ndarray,
    growth: np.ndarray | None,
) -> _Curve:
    """Curves through the model's mean and slope at each tier's load; ``ceiling`` (S,)."""
    types, tiers = system.shape
    share = np.ones((types, tiers))
    burden = system.occupancy / system.concurrency
    exponent = np.ones(tiers)
    unit = np.zeros(tiers)
    for s in range(tiers):
        load = system.tier_load(association, s)
        if load.arrival_rate <= 0:
            load = replace(load, arrival_rate=1.0)
        rho = model.utilisation(load)
        if rho <= 0:
            continue
        if load.offered_load > 0:
            burden[:, s] *= rho / (load.offered_load / load.concurrency)
        at = min(max(rho, 1e-3), float(ceiling[s]))
        here = model.mean(load if at == rho else load.scaled(at / rho))
        before = model.mean(load.scaled(at / rho * (1.0 - _DIFFERENCE)))
        mean, mean_before = float(load.weights @ here), float(load.weights @ before)
        if mean <= 0:
            continue
        share[:, s] = here / mean
        if mean_before > 0:
            steepness = np.log(mean / mean_before) / -np.log1p(-_DIFFERENCE)
            # A wait that vanishes like ρ^k is fitted with a k that its unit can still hold.
            most = _LARGEST_LOG / max(-np.log(at), 1e-300)
            exponent[s] = min(max(steepness - at / (1.0 - at), 0.0), most)
        unit[s] = mean * (1.0 - at) * at ** -exponent[s]
    if growth is None:
        growth = np.maximum(unit * ceiling**exponent / (1.0 - ceiling) ** 2, 1e-300)
    return _Curve(share, burden, exponent, unit, growth)


def _blend(old: _Curve, new: _Curve, part: float) -> _Curve:
    def mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1.0 - part) * a + part * b

    return _Curve(*(mix(getattr(old, f.name), getattr(new, f.name)) for f in fields(_Curve)))


def relative_change(target: np.ndarray, wait: np.ndarray, floor: float) -> float:
    return float((np.abs(target - wait) / np.maximum(np.maximum(target, wait), floor)).max())
