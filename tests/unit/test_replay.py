"""Replay and router: the schedule is open loop, every request ends once, endings add up."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cluster.replay import Replay, check_stream
from cluster.router import Router
from testbed.errors import ScenarioError
from testbed.outcome import Counts
from testbed.workload.stream import typed_stream
from tests.unit.fake_replica import UNLUCKY, FakeReplica
from tests.unit.scenarios import small


@pytest.fixture
def fakes():
    made: list[FakeReplica] = []

    def make(*options: dict) -> list[FakeReplica]:
        made.extend(FakeReplica(**o) for o in options)
        return made

    yield make
    for fake in made:
        fake.close()


def deployment(fakes: list[FakeReplica]) -> SimpleNamespace:
    return SimpleNamespace(nodes=[f.node(i, i) for i, f in enumerate(fakes)])


def replay(scenario, nodes, count=60, rate=200.0, seed=1, **options):
    stream = typed_stream(scenario, count, rate, seed)
    router = Router(scenario, nodes, stream, seed)
    seen: list = []
    run = Replay(stream, router, on_record=seen.append, **options)
    return stream, run.run(lead=0.05), seen


def ending_counts(records) -> Counts:
    endings = [r.ending for r in records]
    return Counts(
        sent=len(records),
        completed=endings.count("completed"),
        rejected=endings.count("rejected"),
        failed=endings.count("failed"),
    )


def test_every_request_ends_once_at_its_own_time(fakes):
    scenario = small()
    stream, records, seen = replay(scenario, deployment(fakes({}, {})))
    assert [r.index for r in records] == list(range(len(stream)))
    assert sorted(r.index for r in seen) == [r.index for r in records]
    assert ending_counts(records).completed == len(stream)
    # The schedule is that of the stream, whatever came back when.
    assert np.allclose([r.intended for r in records], stream.arrival, atol=1e-9)
    for r in records:
        assert r.dispatched is not None and r.sent is not None and r.first_token is not None
        assert r.dispatch_lag >= 0
        assert r.intended <= r.sent <= r.dispatched <= r.first_token
        assert r.ttft >= r.radio


def test_a_slow_server_does_not_hold_back_the_schedule(fakes):
    stream, records, _ = replay(small(), deployment(fakes({"service": 0.5}, {"service": 0.5})))
    span = stream.arrival[-1] - stream.arrival[0]
    assert span < 0.5  # closed loop would take half a second a request
    intended = np.array([r.intended for r in records])
    dispatched = np.array([r.dispatched for r in records])
    # All had left before the first answer came back.
    assert dispatched.max() < intended.min() + span + 0.5


def test_a_dead_replica_costs_retries_not_requests(fakes):
    nodes = deployment(fakes({"die_after": 5}, {}))
    stream, records, _ = replay(small(policy="nearest"), nodes)
    assert len(records) == len(stream)
    counts = ending_counts(records)
    assert counts.sent == len(stream)
    late = [r for r in records if r.attempts > 1]
    assert late
    assert all(r.node == 1 for r in late if r.ending == "completed")
    assert not nodes.nodes[0].alive


def test_with_no_node_left_requests_fail_or_are_rejected_with_a_reason(fakes):
    nodes = deployment(fakes({"die_after": 2}, {"die_after": 2}))
    stream, records, _ = replay(small(), nodes)
    counts = ending_counts(records)
    assert counts.sent == len(stream)
    assert counts.completed <= 4
    assert all(r.reason for r in records if r.ending != "completed")
    assert all(r.ttft is None for r in records if r.ending != "completed")


def test_an_engine_failure_is_counted_with_its_reason(fakes):
    scenario = small()
    stream = typed_stream(scenario, 20, 200.0, 1)
    stream.output_tokens[[3, 7]] = UNLUCKY
    router = Router(scenario, deployment(fakes({}, {})), stream, 1)
    records = Replay(stream, router, on_record=lambda _: None).run(lead=0.05)
    assert [r.index for r in records if r.ending == "failed"] == [3, 7]
    assert {r.reason for r in records if r.ending == "failed"} == {"unlucky"}


def test_unanswered_requests_are_given_up_and_counted(fakes):
    nodes = deployment(fakes({"service": 60.0}, {"service": 60.0}))
    stream, records, _ = replay(small(), nodes, count=10, patience=0.3)
    assert ending_counts(records).failed == len(stream)


def test_distances_do_not_depend_on_the_policy(fakes):
    nodes = deployment(fakes({}, {}))
    runs = {}
    for policy in ("nearest", "load_aware"):
        for node in nodes.nodes:
            node.alive = True
        scenario = small(policy=policy)
        stream = typed_stream(scenario, 30, 100.0, 5)
        runs[policy] = Router(scenario, nodes, stream, 5)
    same = [
        (runs["nearest"].choose(i, {1}).distance, runs["load_aware"].choose(i, {1}).distance)
        for i in range(30)
    ]
    assert all(a == b for a, b in same)


def test_nearest_goes_to_the_least_radio_delay(fakes):
    nodes = deployment(fakes({}, {}))
    scenario = small(policy="nearest")
    stream = typed_stream(scenario, 50, 100.0, 2)
    router = Router(scenario, nodes, stream, 2)
    for i in range(50):
        best = router.choose(i, set())
        other = router.choose(i, {best.node.id})
        assert best.radio <= other.radio


def test_time_scale_stretches_the_wall_clock_not_the_figures(fakes):
    scenario = small()
    stream, records, _ = replay(scenario, deployment(fakes({}, {})), count=20, time_scale=3.0)
    assert np.allclose([r.intended for r in records], stream.arrival, atol=1e-9)


def test_a_prompt_beyond_the_engine_is_refused_before_anything_is_sent():
    stream = typed_stream(small(), 20, 10.0, 0)
    with pytest.raises(ScenarioError, match=r"engine\.max_model_len: request \d+ has 1200"):
        check_stream(stream, 1000)
