"""DeviceClock: steps back to back while there is work, whatever the host does; lateness counted."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engines.device_time_clock import LATE, SPIN, DeviceClock, Ledger, Pace
from cluster.pace import pace_facts, pace_problem, together

SECONDS = st.floats(min_value=1e-3, max_value=2.0)
DELAYS = st.floats(min_value=0.0, max_value=3.0)


class Host:
    """A clock that moves when slept on or read, and oversleeps by ``late`` seconds."""

    def __init__(self) -> None:
        self.time = 100.0
        self.late = 0.0

    def now(self) -> float:
        self.time += 1e-6
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds + self.late


@pytest.fixture
def ledger():
    kept = Ledger.create()
    yield kept
    kept.unlink()
    kept.close()


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(SECONDS, DELAYS), min_size=1, max_size=20),
    scale=st.sampled_from([0.25, 1.0, 3.0]),
    depth=st.sampled_from([1, 2]),
)
def test_a_busy_device_never_waits_for_its_host(steps, scale, depth):
    """Steps follow each other without a gap however late each is handed over or waited for."""
    host = Host()
    clock = DeviceClock(scale, now=host.now, sleep=host.sleep)
    under_way, bounds = [], []
    for seconds, delay in steps:
        clock.ask()
        step = clock.submit(seconds)
        bounds.append(step)
        under_way.append(step)
        if len(under_way) == depth:
            clock.finish(under_way.pop(0))
            host.time += delay
            clock.rest(unfinished=True)
    for before, after in itertools.pairwise(bounds):
        assert after.start == before.end
    total = sum(s for s, _ in steps) * scale
    assert bounds[-1].end - bounds[0].start == pytest.approx(total, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(seconds=SECONDS, pause=st.floats(min_value=1e-3, max_value=5.0))
def test_after_idleness_a_step_starts_when_it_is_asked_for(seconds, pause):
    host = Host()
    clock = DeviceClock(1.0, now=host.now, sleep=host.sleep)
    clock.ask()
    first = clock.submit(seconds)
    clock.finish(first)
    clock.rest(unfinished=False)
    host.time += pause
    clock.ask()
    asked = host.time
    host.time += 0.01  # putting the step together is part of it
    assert clock.submit(seconds).start == asked


def test_nothing_to_do_ends_the_chain_only_when_no_step_is_under_way():
    host = Host()
    clock = DeviceClock(1.0, now=host.now, sleep=host.sleep)
    clock.ask()
    step = clock.submit(0.5)
    clock.nothing_to_do()
    assert clock.submit(0.5).start == step.end
    clock.finish(step)
    clock.finish(clock.submit(0.1))
    clock._under_way = 0
    clock.nothing_to_do()
    host.time += 7.0
    clock.ask()
    assert clock.submit(0.1).start == host.time


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(st.tuples(SECONDS, DELAYS), min_size=1, max_size=20),
    scale=st.sampled_from([0.25, 1.0, 3.0]),
)
def test_lateness_is_counted_in_device_seconds(steps, scale):
    host = Host()
    ledger = Ledger.create()
    try:
        clock = DeviceClock(scale, ledger, now=host.now, sleep=host.sleep)
        late = []
        for seconds, delay in steps:
            clock.ask()
            step = clock.submit(seconds)
            host.late = delay
            clock.finish(step)
            late.append(max(0.0, host.time - step.end) / scale)
            clock.rest(unfinished=True)
        pace = ledger.read()
        assert pace.steps == len(steps)
        assert pace.device_seconds == pytest.approx(sum(s for s, _ in steps))
        assert pace.late_seconds == pytest.approx(sum(late), rel=1e-6, abs=1e-9)
        assert pace.worst_late == pytest.approx(max(late), rel=1e-6, abs=1e-9)
        assert pace.late_steps == sum(x > LATE * s for x, (s, _) in zip(late, steps, strict=True))
    finally:
        ledger.unlink()
        ledger.close()


@given(seconds=SECONDS)
@settings(max_examples=20, deadline=None)
def test_a_punctual_host_hands_over_at_the_end_and_not_before(seconds):
    host = Host()
    clock = DeviceClock(1.0, now=host.now, sleep=host.sleep)
    clock.ask()
    step = clock.submit(seconds)
    clock.finish(step)
    assert step.end <= host.time < step.end + SPIN


def test_a_ledger_is_shared_through_its_path(ledger):
    other = Ledger(ledger.path)
    ledger.unlink()
    pace = Pace(steps=3, late_steps=1, device_seconds=0.5, late_seconds=0.1, worst_late=0.07)
    other.write(pace)
    assert ledger.read() == pace
    ledger.restart()
    assert other.read() == Pace()
    other.close()


def test_pace_of_several_devices_is_their_sum_and_their_worst():
    paces = {0: Pace(99, 0, 2.0, 0.25, 0.001), 1: Pace(1, 1, 0.5, 0.25, 0.2)}
    total = together(paces.values())
    assert total == Pace(100, 1, 2.5, 0.5, 0.2)
    assert pace_problem(paces) is None  # one of a hundred is at the limit, not past it
    worse = {**paces, 2: Pace(10, 1, 1.0, 0.1, 0.1)}
    assert "device time" in (pace_problem(worse) or "")
    facts = pace_facts(paces, 2.0)
    assert facts["late_share"] == 0.01
    assert facts["late_share_by_node"] == {0: 0.0, 1: 1.0}
    assert facts["time_scale"] == 2.0


def test_no_steps_are_no_problem():
    assert pace_problem({0: Pace()}) is None
