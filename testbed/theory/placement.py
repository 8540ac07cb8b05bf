"""Placement: which share of the nodes should hold which profile (Theory F2)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import comb
from typing import Any

import numpy as np
from scipy.optimize import minimize

from testbed.errors import OutOfRangeError, ScenarioError
from testbed.routing.policies import Policy
from testbed.scenario import Scenario
from testbed.seeds import generator
from testbed.theory.constraints import PlacementSet
from testbed.theory.delay.base import DelayModel
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.predict import latency_at, pose
from testbed.theory.system import System

_TOLERANCE = 1e-8
_ITERATIONS = 300
_LARGEST_GRID = 100_000
_BEYOND = 1e-6
_STEP = 1e-4
"""Share by which a placement moves where a slope is taken."""


@dataclass(frozen=True)
class Placement:
    """A placement and its coverage.

    Attributes
    ----------
    fraction : {profile: π_s}
    coverage : P(τ₀) at its operating point; 0 where there is none
    feasible : the operating point is stable
    evaluations : operating points that the search solved
    method : ``spsa``, ``gradient`` or ``grid``
    refused : of the evaluations, those whose load the delay model was not fitted for; they count
        as worth nothing
    """

    fraction: dict[str, float]
    coverage: float
    feasible: bool
    evaluations: int
    method: str
    refused: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Objective:
    """π -> P(τ₀) at the load-association fixed point, each solve warm-started from a neighbour.

    A placement without a stable point is worth minus its worst overload, so that a search is
    drawn back towards the stable ones; one beyond what the delay model was fitted for is worth
    just less than nothing.
    """

    def __init__(self, system: System, policy: Policy, model: DelayModel, target: float) -> None:
        self.system, self.policy, self.model, self.target = system, policy, model, target
        self.evaluations = 0
        self.refused = 0
        self._start: OperatingPoint | None = None

    def __call__(self, fraction: np.ndarray) -> float:
        """The value of π, (S,): coverage in [0, 1], or negative."""
        self.evaluations += 1
        system = self.system.with_fraction(fraction)
        point = solve(
            system,
            self.policy,
            self.model,
            tolerance=_TOLERANCE,
            max_iterations=_ITERATIONS,
            start=self._start,
        )
        if not point.feasible:
            return -max(float(point.utilisation.max()) - 1.0, 1e-9)
        if point.converged:
            self._start = point
        try:
            return latency_at(system, point, self.model).coverage(self.target)
        except OutOfRangeError:
            self.refused += 1
            return -_BEYOND * float(point.utilisation.max())


def objective(
    scenario: Scenario, target: float | None = None, delay_model: str | None = None
) -> Objective:
    """The scenario's objective; τ₀ is its last coverage target unless given, s."""
    if target is None:
        if not scenario.targets.coverage_at:
            raise ScenarioError("targets.coverage_at: a placement needs a deadline to meet")
        target = scenario.targets.coverage_at[-1]
    return Objective(*pose(scenario, delay_model=delay_model), target)


def spsa(
    value: Objective,
    allowed: PlacementSet,
    *,
    evaluations: int = 2000,
    seed: int = 0,
    start: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Maximise by simultaneous-perturbation stochastic approximation with projection, then polish.

    Two evaluations estimate the slope along a random ±1 direction; the step is projected onto the
    allowed set (Spall's gains a/(k + A)^0.602, c/k^0.101). The last quarter of the budget moves
    shares between pairs of profiles by shrinking amounts from the best placement seen, which
    settles the digits that a stochastic step leaves open.

    Parameters
    ----------
    evaluations : budget of objective evaluations
    seed : of the perturbations
    start : (S,) a placement to begin from; the middle of the allowed set by default

    Returns
    -------
    The best placement seen, (S,), and its value.
    """
    rng = generator(seed, "spsa")
    size = len(allowed.least)
    here = allowed.project(np.full(size, 1.0 / size) if start is None else start)
    best, best_value = here, value(here)
    used = 1
    steps = max((3 * evaluations // 4 - 1) // 2, 0)
    slope_scale = 0.0
    for k in range(steps):
        spread = 0.1 / (k + 1) ** 0.101
        delta = rng.choice([-1.0, 1.0], size)
        up, down = allowed.project(here + spread * delta), allowed.project(here - spread * delta)
        value_up, value_down = value(up), value(down)
        used += 2
        for place, worth in ((up, value_up), (down, value_down)):
            if worth > best_value:
                best, best_value = place, worth
        moved = up - down
        length = float(moved @ moved)
        if length <= 0:
            continue
        slope = (value_up - value_down) / length * moved
        # The gain is set by the slopes themselves: the first steps move about a tenth.
        slope_scale = max(slope_scale, float(np.abs(slope).max()))
        if slope_scale > 0:
            gain = 0.1 / slope_scale * ((1 + 0.05 * steps) / (k + 1 + 0.05 * steps)) ** 0.602
            here = allowed.project(here + gain * slope)
    return _polish(value, allowed, best, best_value, evaluations - used)


def _polish(
    value: Objective, allowed: PlacementSet, best: np.ndarray, best_value: float, budget: int
) -> tuple[np.ndarray, float]:
    """Move shares between pairs of profiles while that helps, by less and less."""
    size = len(best)
    amount = 0.05
    while amount > 1e-4 and budget > 0:
        improved = False
        for i in range(size):
            for j in range(size):
                if i == j or budget <= 0 or best[j] <= allowed.least[j]:
                    continue
                trial = best.copy()
                trial[i] += amount
                trial[j] -= amount
                trial = allowed.project(trial)
                if np.abs(trial - best).max() < 1e-12:
                    continue
                budget -= 1
                worth = value(trial)
                if worth > best_value + 1e-12:
                    best, best_value, improved = trial, worth, True
        if not improved:
            amount *= 0.5
    return best, best_value


def gradient_search(
    value: Objective,
    allowed: PlacementSet,
    *,
    evaluations: int = 2000,
    start: np.ndarray | None = None,
) -> tuple[np.ndarray, float]:
    """Climb along the slope by sequential quadratic programming, from ``start`` and the middle.

    Of S profiles a slope takes S evaluations, so that a climb is done in dozens of them. It wants
    an objective without noise, such as closed forms and fitted surfaces give, and ends on the hill
    that it started on.

    Returns
    -------
    The best placement seen, (S,), and its value.
    """
    size = len(allowed.least)
    middle = allowed.project(np.full(size, 1.0 / size))
    first = middle if start is None else allowed.project(start)
    best, best_value = first, value(first)

    def worth(point: np.ndarray) -> float:
        return -value(np.maximum(point, 0.0))

    rules: list[dict[str, Any]] = [{"type": "eq", "fun": lambda x: x.sum() - 1.0}]
    if len(allowed.upper):
        scale = np.maximum(np.abs(allowed.upper).max(axis=1), 1e-300)
        rules.append({"type": "ineq", "fun": lambda x: (allowed.bound - allowed.upper @ x) / scale})
    for here in (first, middle):
        left = evaluations - value.evaluations
        if left <= size:
            break
        found = minimize(  # type: ignore[call-overload,unused-ignore]
            worth,
            here,
            method="SLSQP",
            bounds=[(low, 1.0) for low in allowed.least],
            constraints=rules,
            options={"eps": _STEP, "ftol": 1e-8, "maxiter": left // (size + 1)},
        )
        place = allowed.project(found.x)
        reached = value(place)
        if reached > best_value:
            best, best_value = place, reached
    return best, best_value


def simplex_grid(size: int, parts: int) -> Iterator[np.ndarray]:
    """All π with entries in multiples of 1/``parts``, neighbours next to each other, (S,)."""

    def fill(left: int, places: int, forward: bool) -> Iterator[tuple[int, ...]]:
        if places == 1:
            yield (left,)
            return
        order = range(left + 1) if forward else range(left, -1, -1)
        for n in order:
            for rest in fill(left - n, places - 1, (n % 2 == 0) == forward):
                yield (n, *rest)

    for entry in fill(parts, size, True):
        yield np.array(entry, dtype=float) / parts


def grid_search(
    value: Objective, allowed: PlacementSet, parts: int = 20
) -> tuple[np.ndarray, float]:
    """The best allowed placement on the simplex grid: a reproducible benchmark (Theory F2).

    Raises
    ------
    ScenarioError
        The grid has more than 100,000 points, or none that is allowed.
    """
    size = len(allowed.least)
    count = comb(parts + size - 1, size - 1)
    if count > _LARGEST_GRID:
        raise ScenarioError(
            f"placement: a grid of {parts} parts over {size} profiles has {count} points; "
            f"take fewer parts"
        )
    best: np.ndarray | None = None
    best_value = -np.inf
    for place in simplex_grid(size, parts):
        if allowed.contains(place):
            worth = value(place)
            if worth > best_value:
                best, best_value = place, worth
    if best is None:
        raise ScenarioError(f"placement: no point of a grid of {parts} parts is allowed")
    return best, best_value


def plan_placement(
    scenario: Scenario,
    allowed: PlacementSet | None = None,
    *,
    target: float | None = None,
    delay_model: str | None = None,
    method: str = "spsa",
    evaluations: int = 2000,
    parts: int = 20,
    seed: int = 0,
) -> Placement:
    """The placement of greatest coverage (Theory F2).

    ``method`` is ``spsa``, ``gradient`` or ``grid``.
    """
    value = objective(scenario, target, delay_model)
    if allowed is None:
        allowed = PlacementSet.of(scenario)
    start = np.array([s.fraction for s in scenario.profiles])
    if method == "spsa":
        best, worth = spsa(value, allowed, evaluations=evaluations, seed=seed, start=start)
    elif method == "gradient":
        best, worth = gradient_search(value, allowed, evaluations=evaluations, start=start)
    elif method == "grid":
        best, worth = grid_search(value, allowed, parts)
    else:
        raise ScenarioError(f"placement: method {method!r} is not one of gradient, grid, spsa")
    return Placement(
        fraction=dict(zip(value.system.names, map(float, best), strict=True)),
        coverage=max(float(worth), 0.0),
        feasible=bool(worth >= 0),
        evaluations=value.evaluations,
        method=method,
        refused=value.refused,
    )
