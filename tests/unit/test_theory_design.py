"""Design: placement, density, depth, scores and sweeps (Theory F)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.scenario import Scenario
from testbed.theory import parse_sweep, predict, sweep
from testbed.theory.constraints import PlacementSet
from testbed.theory.density import plan_density
from testbed.theory.placement import objective, plan_placement, simplex_grid
from testbed.theory.prefill import prefill_saving
from testbed.theory.score import marginal_depth, prefix_score
from testbed.theory.sweep import with_value

BASELINE = preset("paper-baseline")
MODEST = settings(max_examples=40, deadline=None)


def asked(intensity: float) -> Scenario:
    return BASELINE.with_field("demand.intensity", intensity)


# --- The allowed set and its projection (F2) -------------------------------------------------


@st.composite
def sets(draw: st.DrawFn) -> tuple[PlacementSet, np.random.Generator]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.integers(2, 8))
    inside = rng.dirichlet(np.ones(size))
    upper = np.array([rng.uniform(0, 3e9, size), (rng.random(size) < 0.5).astype(float)])
    # Bounds that the placement ``inside`` satisfies, so that the set is not empty.
    bound = upper @ inside * rng.uniform(1.0, 1.3, 2)
    least = np.zeros(size)
    least[0] = inside[0] * rng.uniform(0, 1)
    return PlacementSet(least, upper, bound), rng


@MODEST
@given(sets())
def test_the_projection_is_the_nearest_allowed_placement(
    drawn: tuple[PlacementSet, np.random.Generator],
) -> None:
    """It is allowed, and (z − y)·(x − y) ≤ 0 for every allowed x: the variational inequality."""
    allowed, rng = drawn
    size = len(allowed.least)
    z = rng.normal(0.2, 0.7, size)
    y = allowed.project(z)
    assert allowed.contains(y, 1e-9)
    for _ in range(20):
        x = allowed.project(rng.dirichlet(np.ones(size)) + rng.normal(0, 0.3, size))
        assert (z - y) @ (x - y) <= 1e-8
    assert allowed.project(y) == pytest.approx(y, abs=1e-9)


@MODEST
@given(st.integers(1, 10), st.integers(0, 2**32 - 1))
def test_the_projection_onto_the_simplex_has_a_closed_form(size: int, seed: int) -> None:
    z = np.random.default_rng(seed).normal(0, 1, size)
    y = PlacementSet(np.zeros(size), np.zeros((0, size)), np.zeros(0)).project(z)
    ordered = np.sort(z)[::-1]
    levels = (np.cumsum(ordered) - 1) / np.arange(1, size + 1)
    level = levels[np.flatnonzero(ordered > levels)[-1]]
    assert y == pytest.approx(np.maximum(z - level, 0), abs=1e-12)
    assert y.sum() == pytest.approx(1.0, abs=1e-14)


def test_the_optional_constraints_are_kept() -> None:
    allowed = PlacementSet.of(
        BASELINE, memory_budget=8e7, least_fallback=0.3, deep=("deep",), most_deep=0.2
    )
    y = allowed.project(np.array([0.0, 0.2, 0.8]))
    assert y[0] >= 0.3 and y[2] <= 0.2 + 1e-12
    assert y @ [0, 33554432, 352321536] <= 8e7 * (1 + 1e-12)
    # With that little memory the budget binds before the cap on the deep tier.
    assert y @ [0, 33554432, 352321536] == pytest.approx(8e7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"least_fallback": 1.2}, r"least_fallback: 1.2 is not in \[0, 1\]"),
        ({"deep": ("abyss",)}, "'abyss' is not a profile"),
        ({"memory_budget": -1.0}, "memory_budget"),
        (
            {"fallback": "deep", "least_fallback": 0.5, "deep": ("deep",), "most_deep": 0.2},
            "exclude each other",
        ),
        ({"fallback": "deep", "least_fallback": 0.5, "memory_budget": 1e6}, "exclude each other"),
    ],
)
def test_impossible_constraints_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        PlacementSet.of(BASELINE, **options)


# --- Placement (F2) --------------------------------------------------------------------------


def test_the_grid_is_the_simplex() -> None:
    points = list(simplex_grid(3, 10))
    assert len(points) == 66 and len({tuple(p) for p in points}) == 66
    assert all(p.sum() == pytest.approx(1.0) and (p >= 0).all() for p in points)
    # Each point is one tenth away from the one before: warm starts stay near.
    steps = [np.abs(a - b).sum() for a, b in pairwise(points)]
    assert max(steps) < 0.2 + 1e-9


@pytest.mark.parametrize("intensity", [4.0, 10.0, 14.0])
def test_the_stochastic_search_is_not_worse_than_the_grid(intensity: float) -> None:
    scenario = asked(intensity)
    allowed = PlacementSet.of(scenario, memory_budget=1.5e8, least_fallback=0.1)
    grid = plan_placement(scenario, allowed, method="grid", parts=20)
    found = plan_placement(scenario, allowed, evaluations=250, seed=3)
    assert found.feasible and found.evaluations <= 250
    assert found.coverage >= grid.coverage - 1e-6
    climbed = plan_placement(scenario, allowed, method="gradient")
    assert climbed.feasible and climbed.evaluations <= 120
    assert climbed.coverage >= grid.coverage - 1e-4
    for plan in (found, climbed):
        assert allowed.contains(np.array(list(plan.fraction.values())), 1e-9)
    check = scenario.to_dict()
    for profile in check["profiles"]:
        profile["fraction"] = found.fraction[profile["name"]]
    again = predict(Scenario.from_dict(check)).ttft.coverage["0.8"]
    assert again == pytest.approx(found.coverage, abs=1e-6)


def test_an_overload_everywhere_is_not_a_placement() -> None:
    plan = plan_placement(asked(200.0), method="grid", parts=5)
    assert not plan.feasible and plan.coverage == 0.0


def test_searches_repeat_and_refuse_nonsense() -> None:
    first, second = (plan_placement(asked(8.0), evaluations=60, seed=1) for _ in range(2))
    assert first == second
    with pytest.raises(ScenarioError, match="'annealing' is not one of"):
        plan_placement(BASELINE, method="annealing")
    with pytest.raises(ScenarioError, match="take fewer parts"):
        plan_placement(BASELINE, method="grid", parts=1000)
    value = objective(BASELINE)
    assert value(np.array([0.4, 0.4, 0.2])) == pytest.approx(0.69219369, abs=1e-7)
    assert value(np.array([0.99, 0.005, 0.005])) > 0
    assert objective(asked(30.0))(np.array([0.4, 0.4, 0.2])) < 0


# --- Density (F3) ----------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [0.5, 0.9, 0.95])
def test_the_density_is_the_least_that_is_enough(wanted: float) -> None:
    plan = plan_density(BASELINE, wanted)
    assert plan.density is not None and plan.monotone and plan.reason is None
    at = BASELINE.with_field("nodes.density", plan.density)
    assert predict(at).ttft.coverage["0.8"] == pytest.approx(wanted, abs=1e-8)
    below = BASELINE.with_field("nodes.density", 0.999 * plan.density)
    assert predict(below).ttft.coverage["0.8"] < wanted
    densities = [d for d, _ in plan.checked]
    assert densities == sorted(densities)


def test_a_density_beyond_reach_says_the_limit() -> None:
    plan = plan_density(BASELINE.replace(policy="nearest"), 0.6)
    assert plan.density is None
    assert plan.coverage == pytest.approx(0.52)
    assert "the limit is 0.52" in str(plan.reason)
    deadline = plan_density(BASELINE, 0.9, deadline=0.1)
    assert deadline.density is None and deadline.coverage == 0.0


def test_coverage_that_falls_with_density_is_said() -> None:
    """Queue-unaware routing draws more load to the deep tier as nodes get denser."""
    plan = plan_density(BASELINE.replace(policy="prefix_only"), 0.8)
    assert plan.density is not None and not plan.monotone
    assert "coverage falls from" in str(plan.reason)


def test_density_planning_refuses_nonsense() -> None:
    with pytest.raises(ScenarioError, match=r"coverage: 1 is not in \(0, 1\)"):
        plan_density(BASELINE, 1.0)
    with pytest.raises(ScenarioError, match="deadline"):
        plan_density(BASELINE, 0.9, deadline=-1.0)


# --- Scores and depth (F1, F5) ---------------------------------------------------------------


def test_the_score_is_saving_per_byte() -> None:
    score = prefix_score(BASELINE, [0.5, 0.5, 0.2], [2000.0, 2000.0, 2000.0], [500.0, 0.0, 500.0])
    saved = float(prefill_saving(BASELINE.prefill, 2000.0, 500.0))
    assert score[0] == pytest.approx(0.5 * saved / (500 * 131072))
    assert score[1] == 0.0
    assert score[2] == pytest.approx(0.4 * score[0])


def test_the_marginal_rule_stops_at_the_best_depth() -> None:
    for rate in (1.0, 6.0, 12.0, 16.0):
        steps = marginal_depth(BASELINE, rate)
        totals = [s.total for s in steps]
        assert totals == sorted(totals, reverse=True)
        assert [s.depth for s in steps] == sorted(s.depth for s in steps)
        memory = BASELINE.memory
        for s in steps:
            used = s.depth * memory.per_token + s.concurrency * memory.per_sequence
            assert used <= memory.capacity * (1 + 1e-9)
    light, heavy = marginal_depth(BASELINE, 1.0)[-1], marginal_depth(BASELINE, 16.0)[-1]
    # The optimum moves shallower with load (Fig. 7).
    assert heavy.depth < light.depth and heavy.concurrency > light.concurrency
    assert marginal_depth(BASELINE, 1e4)[0].wait == np.inf


# --- Sweeps ----------------------------------------------------------------------------------


def test_a_sweep_asks_each_value() -> None:
    field, values = parse_sweep("demand.intensity=2:6:5")
    outcomes = sweep(BASELINE, field, values)
    for value, outcome in zip(values, outcomes, strict=True):
        alone = predict(asked(float(value)))
        assert outcome.ttft.coverage["0.8"] == pytest.approx(alone.ttft.coverage["0.8"], abs=1e-9)
        assert outcome.scenario["demand"]["intensity"] == value
    assert outcomes[1].iterations <= predict(asked(3.0)).iterations


def test_a_share_takes_from_the_others_in_proportion() -> None:
    moved = with_value(BASELINE, "requests[2].probability", 0.6)
    assert [q.probability for q in moved.requests] == pytest.approx([0.2, 0.2, 0.6])
    moved = with_value(BASELINE, "profiles[0].fraction", 0.1)
    assert [s.fraction for s in moved.profiles] == pytest.approx([0.1, 0.6, 0.3])
    whole = with_value(BASELINE, "profiles[0].fraction", 1.0)
    assert [s.fraction for s in whole.profiles] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("demand.intensity", "is not FIELD=from:to:count"),
        ("demand.intensity=1:2", "is not FIELD=from:to:count"),
        ("demand.intensity=a:2:3", "in numbers"),
        ("demand.intensity=1:2:0", "do not span"),
        ("demand.intensity=1:inf:3", "finite"),
        ("demand.intensity=1:2:2.5", "in numbers"),
    ],
)
def test_a_malformed_sweep_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        parse_sweep(text)


def test_a_sweep_of_a_field_that_is_not_there_is_refused() -> None:
    with pytest.raises(ScenarioError, match="intensty"):
        sweep(BASELINE, "demand.intensty", [1.0])
    with pytest.raises(ScenarioError, match="no such field"):
        sweep(BASELINE, "profiles[9].fraction", [0.1])
    with pytest.raises(ScenarioError, match=r"not in \[0, 1\]"):
        sweep(BASELINE, "profiles[0].fraction", [1.5])
