"""Search: the compiled Newton iteration brought to an operating point (Theory D1).

Overloaded tiers get straight-line waits from a number of spare servers on, at first many and then
few; difficult associations are approached from longer radio delays. Delay models other than
Erlang-C are fitted (`fitted`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel
from testbed.theory.delay.erlang_c import scaled_wait
from testbed.theory.geometry import association_kernel, radio_area
from testbed.theory.newton import newton
from testbed.theory.relaxation import relax, tier_work
from testbed.theory.system import System
from testbed.theory.wait_curve import penalised_level, supported

NEGLIGIBLE_WAIT = 1e-6
"""Waits are compared relative to at least this share of the mean residual prefill: below it a
change of W̄ moves nothing that is reported."""

SPARE_SERVERS = (0.1, 1e-3, 1e-5, 1e-7)
"""Free servers below which a node's wait is continued by a straight line, from soft to sharp."""

STRETCHES = tuple(4.0**k for k in (6, 12, 18, 24))
"""Radio delays, relative to the real ones, from which a difficult problem is approached."""

_COARSE = 1e-3
_CLOSER = (1e-3, 1e-5, 1e-7, 1e-9, 1e-11, 1e-13)
"""Tolerances by which a stretched problem is brought to :data:`_CLOSE`."""
_CLOSE = 1e-2
"""Utilisation, or share of the radio delay, by which a stretched problem's point may be off."""
_ROUNDINGS = 10.0 * float(np.finfo(float).eps)
_PATIENCE = 40

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
    relaxed: int = 0

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
        self.near = max(near, 1e-300)
        # Every prompt may be a full hit: the radio delay is then the only scale.
        self.floor = NEGLIGIBLE_WAIT * max(prefill, near, 1e-300)
        self.arc = _ARC * max(spread + near, 1e-300)

    def sufficient(self, level: np.ndarray) -> float:
        """The tolerance that is worth reaching beside the levels (S,).

        Costs round to 10⁻¹⁶ of themselves: where radio delays are a small part of the costs, an
        association between tied tiers is no finer than that rounding against the delays, and a
        tier of few nodes feels it most.
        """
        present = self.system.density > 0
        largest = float(self.fixed[:, present].max() + level[present].max())
        few = float(self.system.fraction[present].min())
        return max(self.tolerance, min(_ROUNDINGS * largest / (self.near * few), _COARSE))

    def settle(self, level: np.ndarray, spare: float, curve: Curve) -> bool:
        """Bring ``level`` (S,) to the operating point of the curves, in place."""
        first = level.copy()
        if self._run(level, spare, curve, 1.0, self.sufficient(level)):
            return True
        # Where radio delays are short beside other differences of cost the association is all or
        # nothing and its derivative says little: come from longer radio delays, by steps that
        # shorten where one fails.
        stretch = 1.0
        for stretch in STRETCHES:
            level[:] = first
            if self._approach(level, spare, curve, stretch):
                break
        factor = 4.0
        last: tuple[float, np.ndarray] | None = None
        while stretch > 1.0 and factor > 1.02:
            shorter = max(stretch / factor, 1.0)
            trial = level.copy()
            if last is not None:
                # Between tiers whose costs tie the waits differ in proportion to radio delays.
                trial += (level - last[1]) * ((stretch - shorter) / (last[0] - stretch))
                np.maximum(trial, 0.0, out=trial)
            if (
                self._run(trial, spare, curve, shorter, self.sufficient(trial))
                if shorter == 1.0
                else self._approach(trial, spare, curve, shorter)
            ):
                last = stretch, level.copy()
                level[:], stretch = trial, shorter
            else:
                factor **= 0.5
        if stretch > 1.0:
            self.relax(level, spare, curve)
            near = level.copy()
            # Where no routing can carry the load waits are penalties, and a coarse point will do.
            hopeless = self.system.capacity_margin < 0
            last_resort = _COARSE if hopeless else self.sufficient(level)
            if self._run(level, spare, curve, 1.0, last_resort, len(self.history)):
                return True
            if self.mismatch(near, spare, curve) < self.mismatch(level, spare, curve):
                level[:] = near
            return False
        return True

    def relax(self, level: np.ndarray, spare: float, curve: Curve) -> None:
        self.relaxed += relax(
            self.flow, self.fixed, self.policy.wait_weight * curve.share, curve.burden,
            self.system.concurrency, curve.exponent, curve.unit, curve.growth,
            self.area, self.power, spare, level, self.floor,
            (len(self.history) - self.used - self.relaxed) // 2,
        )  # fmt: skip

    def _approach(self, level: np.ndarray, spare: float, curve: Curve, stretch: float) -> bool:
        """Come so near at a stretch that utilisations agree: between tiers whose costs tie waits
        must be right to a part of the radio delays, whatever their own size."""
        for tolerance in _CLOSER:
            if not self._run(level, spare, curve, stretch, tolerance):
                return False
            if self.mismatch(level, spare, curve, stretch) < _CLOSE:
                return True
        return False

    def mismatch(
        self, level: np.ndarray, spare: float, curve: Curve, stretch: float = 1.0
    ) -> float:
        """Largest |ρ − ρ̂|: the utilisation that a tier gets and the one its wait stands for.

        Tiers whose wait is right to a small part of the radio delays count as 0."""
        costs = self.fixed + self.policy.wait_weight * curve.share * level
        area = self.area * stretch**-self.power
        got = self.flow * association_kernel(costs, area, self.power)
        worst = 0.0
        for s in np.flatnonzero((self.flow * curve.burden).sum(axis=0) > 0):
            servers = int(self.system.concurrency[s])
            rho, mean = tier_work(
                got[:, s], self.flow[:, s], curve.burden[:, s], servers, curve.exponent[s],
                curve.unit[s],
            )  # fmt: skip
            ceiling = 1.0 - spare / servers
            shape = servers, float(curve.exponent[s]), mean, float(curve.growth[s])
            wait, _ = penalised_level(*shape, rho, ceiling)
            if abs(wait - level[s]) > _CLOSE * self.near * stretch:
                expected, _ = supported(*shape, float(level[s]), ceiling, rho)
                worst = max(worst, abs(rho - expected))
        return worst

    def _run(
        self,
        level: np.ndarray,
        spare: float,
        curve: Curve,
        stretch: float,
        tolerance: float,
        patience: int = _PATIENCE,
    ) -> bool:
        room = self.history[self.used : min(self.used + patience, len(self.history) - self.relaxed)]
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
class Curve:
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
        curve = Curve(
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
        softer = level.copy()
        converged = search.settle(level, spare, curve)
        if not converged and spare < SPARE_SERVERS[0]:
            # The last point that settled says more than one that did not.
            level[:] = softer
        if not converged or search.conclusive(spare):
            break
    return np.broadcast_to(level, system.shape).copy(), converged


def relative_change(target: np.ndarray, wait: np.ndarray, floor: float) -> float:
    return float((np.abs(target - wait) / np.maximum(np.maximum(target, wait), floor)).max())
