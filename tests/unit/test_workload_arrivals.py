"""Arrivals: variability that was asked for, recorded times kept, streams that do not correlate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.workload.arrivals import (
    gamma_arrivals,
    jittered,
    piecewise_poisson,
    poisson_arrivals,
    split_streams,
    trace_arrivals,
)
from testbed.workload.statistics import arrival_statistics, index_of_dispersion
from testbed.workload.trace import read_trace
from tests.unit.workload_traces import published, trace_of

N = 40_000


def test_poisson_arrivals_have_unit_variability_and_no_memory() -> None:
    found = arrival_statistics(poisson_arrivals(5.0, N, 1))
    assert found.rate == pytest.approx(5.0, rel=4 / np.sqrt(N))
    assert found.cv2 == pytest.approx(1.0, abs=0.06)
    assert found.lag1 == pytest.approx(0.0, abs=4 / np.sqrt(N))
    # The variance of an index of dispersion over k windows is about 2/k.
    assert found.dispersion["1"] == pytest.approx(1.0, abs=4 * np.sqrt(2 / 8000))
    assert found.dispersion["10"] == pytest.approx(1.0, abs=4 * np.sqrt(2 / 800))


@pytest.mark.parametrize("cv2", [0.25, 1.0, 4.0])
def test_gamma_arrivals_have_the_given_cv2_and_disperse_to_it(cv2: float) -> None:
    found = arrival_statistics(gamma_arrivals(50.0, N, cv2, 2))
    assert found.rate == pytest.approx(50.0, rel=4 * np.sqrt(cv2 / N))
    # var(CV²) of a gamma law is about (2 + 4·CV²)·CV⁴/n.
    assert found.cv2 == pytest.approx(cv2, abs=5 * cv2 * np.sqrt((2 + 4 * cv2) / N))
    assert found.lag1 == pytest.approx(0.0, abs=4 / np.sqrt(N))
    # A renewal process' counts in a long window disperse as its gaps vary.
    assert found.dispersion["10"] == pytest.approx(cv2, rel=5 * np.sqrt(2 / 80))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=30), st.integers(0, 5))
def test_jitter_stays_within_the_grid_and_keeps_the_order(ticks: list[int], seed: int) -> None:
    recorded = 3.0 * np.sort(np.array(ticks))
    moved = jittered(recorded, 3.0, seed)
    assert ((moved >= recorded) & (moved < recorded + 3.0)).all()
    assert (np.diff(moved) >= 0).all()


def test_jitter_takes_the_grid_out_of_a_published_trace() -> None:
    trace = read_trace(published("mooncake/conversation_trace.jsonl"))
    assert trace.time_grid == pytest.approx(3.0)
    recorded = arrival_statistics(trace.arrival)
    moved = arrival_statistics(jittered(trace.arrival, trace.time_grid, 0))
    assert recorded.cv2 is not None and moved.cv2 is not None
    assert recorded.cv2 > 9 and recorded.dispersion["1"] > 7
    assert 0.9 < moved.cv2 < 1.2 and 0.9 < moved.dispersion["1"] < 1.2
    # What the record does say, the counts over many grid steps, stays.
    assert moved.dispersion["60"] == pytest.approx(recorded.dispersion["60"], rel=0.1)


def test_piecewise_rates_give_their_counts() -> None:
    edges, rates = np.array([0.0, 100.0, 150.0, 400.0]), np.array([20.0, 0.0, 60.0])
    arrival = piecewise_poisson(edges, rates, 3)
    counts = np.histogram(arrival, edges)[0]
    expected = rates * np.diff(edges)
    assert counts[1] == 0
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    inside = arrival[arrival > 150] - 150
    assert index_of_dispersion(inside, 1.0) == pytest.approx(1.0, abs=5 * np.sqrt(2 / 250))


def test_streams_of_types_do_not_move_one_another() -> None:
    a, types_a = split_streams(np.array([30.0, 20.0]), 400.0, 7)
    b, types_b = split_streams(np.array([30.0, 90.0]), 400.0, 7)
    assert np.array_equal(a[types_a == 0], b[types_b == 0])
    assert (np.diff(a) >= 0).all()
    counts = [np.histogram(a[types_a == q], np.arange(401))[0] for q in (0, 1)]
    assert np.corrcoef(counts)[0, 1] == pytest.approx(0.0, abs=4 / np.sqrt(400))
    assert [c.mean() for c in counts] == pytest.approx([30.0, 20.0], rel=0.05)


@pytest.mark.parametrize("mode", ["verbatim", "jitter", "poisson", "gamma"])
def test_any_mode_gives_the_rate_asked_for(mode: str) -> None:
    trace = trace_of(
        [[i % 3] for i in range(400)], arrival=[float(i * i % 977) for i in range(400)]
    )
    rows = np.arange(400)
    for count in (400, 1000):
        arrival = trace_arrivals(trace, rows, count, mode, rate=8.0, cv2=2.0, seed=1)
        assert len(arrival) == count and (np.diff(arrival) >= 0).all()
        rate = (count - 1) / (arrival[-1] - arrival[0])
        exact = mode in ("verbatim", "jitter")
        assert rate == pytest.approx(8.0, rel=1e-9 if exact else 0.35)


def test_verbatim_times_are_only_stretched() -> None:
    trace = trace_of([[1], [2], [3]], arrival=[0.0, 1.0, 5.0])
    rows = np.arange(3)
    own = trace_arrivals(trace, rows, 3, "verbatim", rate=None, cv2=1.0, seed=0)
    assert own.tolist() == [0.0, 1.0, 5.0]
    fast = trace_arrivals(trace, rows, 3, "verbatim", rate=4.0, cv2=1.0, seed=0)
    assert fast == pytest.approx(np.array([0.0, 0.1, 0.5]))
    twice = trace_arrivals(trace, rows, 6, "verbatim", rate=None, cv2=1.0, seed=0)
    assert twice == pytest.approx(np.array([0.0, 1.0, 5.0, 7.5, 8.5, 12.5]))


@pytest.mark.parametrize(
    ("mode", "rate", "message"),
    [
        ("verbatim", 1.0, "arrive all at once"),
        ("poisson", None, "arrive all at once"),
        ("uniform", 1.0, "'uniform' is not one of verbatim"),
        ("poisson", 0.0, "rate: 0 is not a number > 0"),
        ("poisson", float("nan"), "rate: nan is not a number > 0"),
    ],
)
def test_impossible_arrivals_are_refused(mode: str, rate: float | None, message: str) -> None:
    trace = trace_of([[1], [2]], arrival=[3.0, 3.0])
    with pytest.raises(ScenarioError, match=message):
        trace_arrivals(trace, np.arange(2), 2, mode, rate=rate, cv2=1.0, seed=0)


def test_windows_count_from_their_start() -> None:
    trace = trace_of([[1], [2], [3], [4]])
    cut = trace.window(1.0, 3.0)
    assert cut.arrival.tolist() == [0.0, 1.0]
    assert [int(c) for c in cut.blocks] == [1, 2] and cut.block_offsets.tolist() == [0, 1, 2]
