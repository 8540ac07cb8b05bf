"""Periods: placements over time within a migration budget, against enumeration and simulation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.presets import preset
from testbed.routing.migration import migrate
from testbed.simulation import simulate
from testbed.simulation.placement import move_bytes
from testbed.theory.extensions.periods import (
    Period,
    best_path,
    coverage_table,
    plan_periods,
    transport_bytes,
)
from testbed.theory.placement import simplex_grid

SCENARIO = preset("paper-baseline")
CANDIDATES = np.array([pi for pi in simplex_grid(3, 3)])
DAY = (Period(1.5), Period(6.0), Period(3.0, (0.2, 0.3, 0.5)), Period(9.0, weight=2.0))
BYTES = move_bytes(SCENARIO)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), budget=st.floats(0.0, 2.0))
def test_dynamic_programme_finds_the_best_of_all_sequences(seed, budget):
    rng = np.random.default_rng(seed)
    periods, size = 3, 4
    coverage, weight = rng.random((periods, size)), rng.random(periods)
    bytes_ = rng.random((size, size)) * 2
    np.fill_diagonal(bytes_, 0.0)
    first = np.append(0.0, rng.random(size - 1) * 2)
    path = best_path(coverage, weight, bytes_, first, budget)

    def value(p):
        return sum(weight[k] * coverage[k, n] for k, n in enumerate(p))

    def affordable(p):
        return first[p[0]] <= budget and all(
            bytes_[a, b] <= budget for a, b in itertools.pairwise(p)
        )

    allowed = [p for p in itertools.product(range(size), repeat=periods) if affordable(p)]
    assert affordable(path.tolist())
    assert value(path) == pytest.approx(max(map(value, allowed)))


def test_bytes_between_placements_are_the_cheapest_moves():
    own = np.array([0.4, 0.4, 0.2])
    some = CANDIDATES[::3]
    plain = np.array([[0.0, 3.0, 9.0], [0.0, 0.0, 9.0], [0.0, 3.0, 0.0]])
    for cost in (BYTES, plain):
        row = transport_bytes(some, cost, own)[0]
        expected = [migrate(own, target, cost, np.inf).cost for target in some]
        np.testing.assert_allclose(row, expected, rtol=1e-9, atol=1e-6)
        assert np.diag(transport_bytes(some, cost)).max() <= 1e-6
    # Going by way of a third placement is never cheaper.
    square = transport_bytes(CANDIDATES, plain)
    through = square[:, :, None] + square[None, :, :]
    assert (square <= through.min(axis=1) + 1e-9).all()


def test_a_plan_keeps_its_budget_and_more_budget_never_hurts():
    budgets = [0.0, 4e7, np.inf]
    plans = [plan_periods(SCENARIO, DAY, CANDIDATES, BYTES, b) for b in budgets]
    for plan, budget in zip(plans, budgets, strict=True):
        assert (plan.moved <= budget * (1 + 1e-6) + 1e-6).all()
        np.testing.assert_allclose(plan.fraction.sum(axis=1), 1.0)
        assert plan.value == pytest.approx(
            np.average(plan.coverage, weights=[p.weight for p in DAY])
        )
    value = [plan.value for plan in plans]
    assert (np.diff(value) >= -1e-12).all() and value[-1] > value[0]


def test_no_budget_keeps_the_placement_and_a_free_one_takes_the_best_of_each_period():
    own = np.array([0.4, 0.4, 0.2])
    still = plan_periods(SCENARIO, DAY, CANDIDATES, BYTES, 0.0)
    np.testing.assert_allclose(still.fraction, np.tile(own, (4, 1)))
    free = plan_periods(SCENARIO, DAY, CANDIDATES, BYTES, np.inf)
    table = coverage_table(SCENARIO, DAY, np.vstack([own, CANDIDATES]))
    np.testing.assert_allclose(free.coverage, table.max(axis=1))


def test_planning_ahead_beats_going_greedily():
    """A budget that allows half of a change a period: only a plan starts it in time."""
    coverage = np.array([[0.5, 0.5, 0.5], [0.0, 0.1, 1.0]])
    bytes_ = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]])
    path = best_path(coverage, np.ones(2), bytes_, bytes_[0], 1.0)
    assert path.tolist() == [1, 2]


@pytest.mark.slow
def test_planned_coverage_against_simulation():
    plan = plan_periods(SCENARIO, DAY, CANDIDATES, BYTES, 4e7)
    for k in (1, 2):
        data = SCENARIO.to_dict()
        for profile, share in zip(data["profiles"], plan.fraction[k], strict=True):
            profile["fraction"] = float(share)
        for request, p in zip(data["requests"], DAY[k].probability or (0.4, 0.4, 0.2), strict=True):
            request["probability"] = p
        data["demand"]["intensity"] = DAY[k].intensity
        seen = simulate(type(SCENARIO).from_dict(data), requests=15_000, seed=5)
        low, high = seen.confidence["ttft.coverage.0.8"]
        assert abs(plan.coverage[k] - 0.5 * (low + high)) <= high - low


@pytest.mark.parametrize(
    ("periods", "budget", "message"),
    [
        ((), 1.0, "none is given"),
        (DAY, -1.0, "not at least 0"),
        ((Period(0.0),), 1.0, "intensity"),
        ((Period(1.0, (0.5, 0.5)),), 1.0, "2 values for 3"),
        ((Period(1.0, (0.5, 0.5, 0.5)),), 1.0, "the sum is 1.5"),
        ((Period(1.0, weight=0.0),), 1.0, "weights"),
    ],
)
def test_says_what_is_wrong(periods, budget, message):
    with pytest.raises(ScenarioError, match=message):
        plan_periods(SCENARIO, periods, CANDIDATES, BYTES, budget)


def test_says_how_much_budget_the_nearest_candidate_needs():
    with pytest.raises(ScenarioError, match="needs 5"):
        best_path(np.ones((1, 2)), np.ones(1), np.zeros((2, 2)), np.array([5.0, 9.0]), 1.0)
