"""Remote fetch: the least of local, fetch and recompute, alike in theory and simulation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.presets import preset
from testbed.scenario import Backhaul, Prefill
from testbed.simulation import simulate
from testbed.simulation.system import System as SimulatedSystem
from testbed.theory import predict
from testbed.theory.extensions.remote_fetch import (
    FETCH,
    LOCAL,
    RECOMPUTE,
    fetch_time,
    retrieve,
)
from testbed.theory.prefill import prefill_time
from testbed.theory.system import System

PREFILL = Prefill(overhead=0.004, linear=4e-4, quadratic=5e-9)


def with_backhaul(**backhaul):
    scenario = preset("paper-baseline")
    return scenario.replace(simulation={"backhaul": backhaul})


@settings(max_examples=25, deadline=None)
@given(
    hits=st.lists(st.integers(0, 1000), min_size=3, max_size=3),
    present=st.lists(st.booleans(), min_size=3, max_size=3),
    rate=st.floats(1e5, 1e12),
    latency=st.floats(0, 0.5),
    decompression=st.floats(0, 1e-8),
    context=st.floats(0, 2e-6),
)
def test_takes_the_least_of_all_ways(hits, present, rate, latency, decompression, context):
    prefill = PREFILL.model_copy(update={"context": context})
    back = Backhaul(rate=rate, latency=latency, decompression=decompression, interference=0.3)
    h, there = np.array([hits], dtype=float), np.array(present)
    found = retrieve(prefill, np.array([1000.0]), h, there, 1e5, back)
    for s in range(3):
        ways = [
            float(prefill_time(prefill, 1000 - h[0, s], h[0, s])),
            float(prefill_time(prefill, 1000, 0)),
        ]
        for t in range(3):
            if there[t] and h[0, t] > h[0, s]:
                size = (h[0, t] - h[0, s]) * 1e5
                moved = latency + size / rate + size * decompression * 1.3
                assert fetch_time(back, np.array(size)) == pytest.approx(moved)
                ways.append(moved + float(prefill_time(prefill, 1000 - h[0, t], h[0, t])))
        assert found.residual[0, s] == pytest.approx(min(ways), rel=1e-12, abs=1e-15)
        if found.mode[0, s] == FETCH:
            assert found.size[0, s] > 0 and found.fetch[0, s] > 0
        else:
            assert found.size[0, s] == 0 and found.fetch[0, s] == 0
            kept = h[0, s] if found.mode[0, s] == LOCAL else 0.0
            assert found.reusable[0, s] == kept


def test_recomputes_where_reuse_costs_more_than_it_saves():
    """New tokens that attend to cached ones at a price can make a hit worth less than nothing."""
    prefill = Prefill(linear=1e-4, context=1e-6)
    back = Backhaul(rate=1e15)
    hits = np.array([[500.0, 0.0]])
    found = retrieve(prefill, np.array([1000.0]), hits, np.array([True, True]), 1e5, back)
    assert found.mode.tolist() == [[RECOMPUTE, LOCAL]]
    assert found.residual[0, 0] == pytest.approx(0.1)


def test_slow_links_leave_the_baseline_and_fast_ones_bring_the_deepest_state_everywhere():
    base = System.from_scenario(preset("paper-baseline"))
    slow = System.from_scenario(with_backhaul(rate=1.0))
    fast = System.from_scenario(with_backhaul(rate=1e18))
    np.testing.assert_array_equal(slow.residual, base.residual)
    np.testing.assert_allclose(fast.residual, base.residual.min(axis=1, keepdims=True) * np.ones(3))
    np.testing.assert_array_equal(
        fast.reusable, base.reusable.max(axis=1, keepdims=True) * np.ones(3)
    )
    np.testing.assert_allclose(fast.saving + fast.residual, base.saving + base.residual)


def test_a_faster_link_never_slows_a_request():
    left = [
        System.from_scenario(with_backhaul(rate=r, latency=0.01)).residual
        for r in (1e7, 1e8, 1e9, 1e10)
    ]
    for slow, fast in itertools.pairwise(left):
        assert (fast <= slow + 1e-15).all()


def test_a_profile_that_no_node_holds_cannot_be_fetched():
    present = np.array([True, False])
    hits = np.array([[0.0, 900.0]])
    back = Backhaul(rate=1e12)
    found = retrieve(PREFILL, np.array([1000.0]), hits, present, 1e5, back)
    assert found.mode[0, 0] == LOCAL


def test_another_placement_fetches_from_what_it_deploys():
    scenario = with_backhaul(rate=1e10)
    base = System.from_scenario(scenario)
    data = scenario.to_dict()
    for mix in ((0.5, 0.5, 0.0), (0.7, 0.0, 0.3), (1.0, 0.0, 0.0)):
        for profile, share in zip(data["profiles"], mix, strict=True):
            profile["fraction"] = share
        asked = System.from_scenario(type(scenario).from_dict(data))
        moved = base.with_fraction(np.array(mix))
        for name in ("residual", "reusable", "saving", "occupancy"):
            np.testing.assert_allclose(getattr(moved, name), getattr(asked, name), rtol=1e-12)


def test_theory_and_simulation_share_every_number():
    scenario = with_backhaul(rate=4e8, latency=0.02, decompression=2e-10, interference=0.5)
    theory, simulated = System.from_scenario(scenario), SimulatedSystem.of(scenario)
    np.testing.assert_array_equal(theory.residual, simulated.prefill)
    np.testing.assert_array_equal(theory.occupancy, simulated.occupancy)
    np.testing.assert_array_equal(theory.reusable, simulated.reusable)
    assert (simulated.fetch > 0).any() and (simulated.fetch < simulated.prefill).all()


@pytest.mark.slow
def test_predicts_what_simulation_finds():
    scenario = with_backhaul(rate=4e8, latency=0.02)
    predicted = predict(scenario)
    seen = simulate(scenario, requests=25_000, seed=3)
    assert predicted.offloading_ratio > predict(preset("paper-baseline")).offloading_ratio
    for path in ("ttft.coverage.0.8", "ttft.mean", "offloading_ratio", "reusable_prefix_tokens"):
        low, high = seen.confidence[path]
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        assert abs(predicted.figure(path) - middle) <= 2.0 * half, path
