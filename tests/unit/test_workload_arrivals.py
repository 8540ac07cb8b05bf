"""Arrivals: variability that was asked for, recorded times kept, streams that do not correlate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.scenario import WorkloadSpec
from testbed.workload.arrivals import (
    diurnal_arrivals,
    gamma_arrivals,
    jittered,
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


def test_a_course_gives_each_part_its_counts_and_stays_poisson_inside() -> None:
    course = [(100.0, 1.0), (50.0, 0.0), (250.0, 3.0)]
    arrival = diurnal_arrivals(42.5, N, course, 3)
    assert (np.diff(arrival) >= 0).all()
    lap, within = np.divmod(arrival, 400.0)
    whole = within[lap < 2]  # the last day is cut off by the count
    counts = np.histogram(whole, [0.0, 100.0, 150.0, 400.0])[0]
    # 42.5/s on average over 400 s: 20/s, 0 and 60/s.
    expected = np.array([2 * 2000.0, 0.0, 2 * 15000.0])
    assert counts[1] == 0
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected.max())
    inside = within[(lap == 0) & (within > 150)] - 150
    assert index_of_dispersion(inside, 1.0) == pytest.approx(1.0, abs=5 * np.sqrt(2 / 250))
    assert arrival_statistics(inside).lag1 == pytest.approx(0.0, abs=4 / np.sqrt(len(inside)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=5),
    st.sampled_from([1.0, 3.0]),
)
def test_a_course_changes_the_clock_alone(parts: list[tuple[int, int]], cv2: float) -> None:
    """Between arrivals the course does as much as the plain stream's clock went on."""
    course = [(float(s), float(w)) for s, w in parts]
    if not any(w for _, w in course):
        with pytest.raises(ScenarioError, match="one of them above 0"):
            diurnal_arrivals(1.0, 5, course, 1)
        return
    arrival = diurnal_arrivals(2.0, 50, course, 1, cv2)
    edges = np.concatenate([[0.0], np.cumsum([s for s, _ in course])])
    done = np.concatenate([[0.0], np.cumsum([s * w for s, w in course])])
    lap, within = np.divmod(arrival, edges[-1])
    clock = (lap * done[-1] + np.interp(within, edges, done)) * edges[-1] / done[-1]
    assert clock == pytest.approx(gamma_arrivals(2.0, 50, cv2, 1), rel=1e-9)


def test_streams_of_types_do_not_move_one_another() -> None:
    a, types_a = split_streams(np.array([30.0, 20.0, 0.0]), 20_000, 7)
    b, types_b = split_streams(np.array([30.0, 90.0, 0.0]), 20_000, 7)
    both = min(a[-1], b[-1])
    assert np.array_equal(a[(types_a == 0) & (a <= both)], b[(types_b == 0) & (b <= both)])
    assert len(a) == 20_000 and (np.diff(a) >= 0).all() and set(types_a) == {0, 1}
    seconds = int(a[-1])
    counts = [np.histogram(a[types_a == q], np.arange(seconds + 1))[0] for q in (0, 1)]
    assert np.corrcoef(counts)[0, 1] == pytest.approx(0.0, abs=4 / np.sqrt(seconds))
    assert [c.mean() for c in counts] == pytest.approx([30.0, 20.0], rel=0.05)


def test_a_stream_of_each_type_has_the_given_cv2_and_their_sum_less() -> None:
    arrival, kinds = split_streams(np.full(8, 5.0), N, 3, cv2=4.0)
    n = N / 8
    for q in range(8):
        found = arrival_statistics(arrival[kinds == q])
        assert found.cv2 == pytest.approx(4.0, abs=5 * 4.0 * np.sqrt(18 / n))
        assert found.lag1 == pytest.approx(0.0, abs=4.5 / np.sqrt(n))
    merged = arrival_statistics(arrival)
    assert merged.cv2 is not None and 1.0 < merged.cv2 < 2.5


@pytest.mark.parametrize("mode", ["verbatim", "jitter", "poisson", "gamma"])
def test_any_mode_gives_the_rate_asked_for(mode: str) -> None:
    trace = trace_of(
        [[i % 3] for i in range(400)], arrival=[float(i * i % 977) for i in range(400)]
    )
    rows = np.arange(400)
    for count in (400, 1000):
        spec = WorkloadSpec(arrivals=mode, cv2=2.0)  # type: ignore[arg-type]
        arrival = trace_arrivals(trace, rows, count, spec, rate=8.0, seed=1)
        assert len(arrival) == count and (np.diff(arrival) >= 0).all()
        rate = (count - 1) / (arrival[-1] - arrival[0])
        exact = mode in ("verbatim", "jitter")
        assert rate == pytest.approx(8.0, rel=1e-9 if exact else 0.35)


def test_verbatim_times_are_only_stretched() -> None:
    trace = trace_of([[1], [2], [3]], arrival=[0.0, 1.0, 5.0])
    rows, spec = np.arange(3), WorkloadSpec(arrivals="verbatim")
    own = trace_arrivals(trace, rows, 3, spec, rate=None, seed=0)
    assert own.tolist() == [0.0, 1.0, 5.0]
    fast = trace_arrivals(trace, rows, 3, spec, rate=4.0, seed=0)
    assert fast == pytest.approx(np.array([0.0, 0.1, 0.5]))
    twice = trace_arrivals(trace, rows, 6, spec, rate=None, seed=0)
    assert twice == pytest.approx(np.array([0.0, 1.0, 5.0, 7.5, 8.5, 12.5]))


@pytest.mark.parametrize(
    ("mode", "rate", "message"),
    [
        ("verbatim", 1.0, "arrive all at once"),
        ("poisson", None, "arrive all at once"),
        ("poisson", 0.0, "rate: 0 is not a number > 0"),
        ("poisson", float("nan"), "rate: nan is not a number > 0"),
    ],
)
def test_impossible_arrivals_are_refused(mode: str, rate: float | None, message: str) -> None:
    trace = trace_of([[1], [2]], arrival=[3.0, 3.0])
    with pytest.raises(ScenarioError, match=message):
        spec = WorkloadSpec(arrivals=mode)  # type: ignore[arg-type]
        trace_arrivals(trace, np.arange(2), 2, spec, rate=rate, seed=0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrivals": "diurnal"}, "course: diurnal arrivals need it"),
        ({"course": [[60.0, 1.0]]}, "course: diurnal arrivals need it, and no others have it"),
        ({"arrivals": "diurnal", "course": [[60.0, 0.0]]}, "no part has a rate above 0"),
        ({"window": [5.0, 5.0]}, "window: it ends before it begins"),
    ],
)
def test_workloads_that_contradict_themselves_are_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        WorkloadSpec.model_validate(fields)


def test_windows_count_from_their_start() -> None:
    trace = trace_of([[1], [2], [3], [4]])
    cut = trace.window(1.0, 3.0)
    assert cut.arrival.tolist() == [0.0, 1.0]
    assert [int(c) for c in cut.blocks] == [1, 2] and cut.block_offsets.tolist() == [0, 1, 2]
