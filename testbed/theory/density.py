"""Density: the fewest nodes per km² that meet a deadline often enough (Theory F3)."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.optimize import brentq

from testbed.errors import ScenarioError
from testbed.radio import PowerLaw, radio_model
from testbed.routing.policies import Policy
from testbed.scenario import Radio, Scenario
from testbed.theory.delay.base import DelayModel
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.predict import latency_at, pose
from testbed.theory.system import System

_REACH = 2.0**40
_CHECKS = 24
_FEW_CHECKS = 8
"""Where every density needs tables of its own (a second each)."""
_SLACK = 1e-9
_ROUGH_SLACK = 1e-3
"""Falls of coverage that are rounding: under a power law, and under any other radio model."""
_STALL = 1e-4
"""Coverage gained by twice the nodes below which more nodes are taken to bring nothing."""


@dataclass(frozen=True)
class DensityPlan:
    """The least density λ_b with P(τ₀) ≥ ζ.

    Attributes
    ----------
    density : nodes per km²; None where no density is enough
    coverage : P(τ₀) there, or the limit that no density exceeds
    deadline, wanted : τ₀ s and ζ
    monotone : coverage rose with density at every density that was checked; if not, a smaller
        density may do as well, and ``reason`` says where it fell
    reason : None, or why there is no density, or where coverage fell
    checked : (density, coverage) pairs, in order of density
    """

    density: float | None
    coverage: float
    deadline: float
    wanted: float
    monotone: bool
    reason: str | None
    checked: tuple[tuple[float, float], ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Coverage:
    """λ_b -> P(τ₀), remembering every value and warm-starting from the nearest density."""

    def __init__(
        self, system: System, radio: Radio, policy: Policy, model: DelayModel, deadline: float
    ) -> None:
        self.system, self.radio = system, radio
        self.policy, self.model, self.deadline = policy, model, deadline
        self.known: dict[float, float] = {}
        self._points: dict[float, OperatingPoint] = {}

    def __call__(self, density: float) -> float:
        if density not in self.known:
            # Nodes interfere: the radio may depend on how many there are (Theory H4).
            radio = radio_model(self.radio, density)
            system = replace(self.system, node_density=density, radio=radio)
            near = min(self._points, key=lambda d: abs(np.log(d / density)), default=None)
            point = solve(
                system,
                self.policy,
                self.model,
                start=None if near is None else self._points[near],
            )
            if point.feasible and point.converged:
                self._points[density] = point
            self.known[density] = latency_at(system, point, self.model).coverage(self.deadline)
        return self.known[density]


def limit_coverage(system: System, policy: Policy, deadline: float) -> float:
    """lim P(τ₀) as λ_b -> ∞: waits vanish, radio delays fall to that of no distance, prefills stay.

    A policy that looks at prefills reaches the shortest; ``nearest`` keeps the mix π. Interference
    that grows with the density keeps radio delays longer: then it is a bound, not the limit.
    """
    meets = system.residual + float(system.radio.delay(np.array(0.0))) <= deadline
    present = system.fraction > 0
    cost = policy.fixed_cost(system.residual, np.zeros(system.shape))[:, present]
    least = cost <= cost.min(axis=1, keepdims=True)
    share = np.where(least, system.fraction[present], 0.0)
    share /= share.sum(axis=1, keepdims=True)
    return float(system.probability @ (share * meets[:, present]).sum(axis=1))


def plan_density(
    scenario: Scenario,
    coverage: float,
    *,
    deadline: float | None = None,
    delay_model: str | None = None,
) -> DensityPlan:
    """The least density that meets ``deadline`` with probability ``coverage`` (Theory F3).

    The crossing is bracketed by doubling and halving from the scenario's own density and found
    by Brent's method. Coverage should rise with density; that is checked on a grid from a
    thousandth of the answer's bracket to its top, not assumed.

    Raises
    ------
    ScenarioError
        ``coverage`` is not in (0, 1), or there is no deadline.
    """
    if not 0 < coverage < 1:
        raise ScenarioError(f"coverage: {coverage:g} is not in (0, 1)")
    if deadline is None:
        if not scenario.targets.coverage_at:
            raise ScenarioError("targets.coverage_at: a density plan needs a deadline to meet")
        deadline = scenario.targets.coverage_at[-1]
    if not 0 < deadline < np.inf:
        raise ScenarioError(f"deadline: {deadline:g} is not a number of seconds > 0")
    system, policy, model = pose(scenario, delay_model=delay_model)
    value = _Coverage(system, scenario.radio, policy, model, deadline)
    limit = limit_coverage(system, policy, deadline)
    start = scenario.nodes.density

    def missing(density: float) -> float:
        return value(density) - coverage

    simple = isinstance(system.radio, PowerLaw)
    slack = _SLACK if simple else _ROUGH_SLACK
    high = start
    while missing(high) < 0 and high < start * _REACH and limit > coverage:
        if not simple and _stalled(value, high):
            limit = value(high)
            break
        high *= 2.0
    if missing(high) < 0:
        reason = (
            f"no density reaches coverage {coverage:g} at {deadline:g} s: the limit is {limit:.4g}"
        )
        monotone, fell = _rises(value, slack)
        return DensityPlan(
            None, limit, deadline, coverage, monotone,
            reason if fell is None else f"{reason}; {fell}", _checked(value),
        )  # fmt: skip
    low = high / 2.0
    while missing(low) >= 0 and low > start / _REACH:
        high, low = low, low / 2.0
    precision = 1e-12 if simple else 1e-6
    answer = float(np.exp(brentq(lambda x: missing(np.exp(x)), np.log(low), np.log(high),
                                 xtol=precision, rtol=precision)))  # fmt: skip
    while missing(answer) < 0:
        answer *= 1.0 + precision
    for density in np.geomspace(answer / 16.0, 2.0 * high, _CHECKS if simple else _FEW_CHECKS):
        value(float(density))
    monotone, fell = _rises(value, slack)
    return DensityPlan(answer, value(answer), deadline, coverage, monotone, fell, _checked(value))


def _stalled(value: _Coverage, density: float) -> bool:
    """Twice doubled, coverage stayed what it was: interference grows as fast as the signal."""
    steps = [value.known.get(density / 2.0**k) for k in range(3)]
    found = [v for v in steps if v is not None]
    return len(found) == 3 and found[-1] > 0 and max(found) - min(found) < _STALL


def _checked(value: _Coverage) -> tuple[tuple[float, float], ...]:
    return tuple(sorted(value.known.items()))


def _rises(value: _Coverage, slack: float) -> tuple[bool, str | None]:
    """Whether coverage rose at every density known, and where it first fell."""
    pairs = _checked(value)
    for (low, before), (high, after) in pairwise(pairs):
        if after < before - slack:
            return False, (
                f"coverage falls from {before:.6g} at {low:.4g} to {after:.6g} at {high:.4g} "
                f"nodes per km²: a smaller density may do"
            )
    return True, None
