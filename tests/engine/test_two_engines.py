"""vLLM and SGLang replicas side by side in one run, one of which is lost and comes back."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from cluster.deployment import deployed
from cluster.engines import doctor
from cluster.experiment import stream_of
from cluster.run import run
from cluster.session import ray_session
from testbed.outcome import read_records
from tests.unit.scenarios import small

pytestmark = pytest.mark.engine


@pytest.fixture
def both_engines():
    for status in doctor.engine_status():
        if status["engine"] in ("vllm", "sglang") and not status["runs"]:
            pytest.skip(f"{status['problem']}: {status['remedy']}")
    with ray_session() as cluster:
        yield cluster


def kill_when_serving(records, pid: int, victim: list[int]) -> None:
    """Kill a process once ten requests of the run have ended, however fast the machine is."""
    while not (records.exists() and records.read_bytes().count(b"\n") >= 10):
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    victim.append(pid)


def test_both_serve_one_run_and_no_request_is_lost_with_a_replica(both_engines, tmp_path):
    scenario = small(policy="load_aware").with_field("engine.name", "vllm")
    scenario = scenario.with_field("profiles[1].engine", "sglang")
    records = tmp_path / "records.jsonl"
    killed: list[int] = []
    with deployed(scenario, log_dir=tmp_path) as nodes:
        plain, deep = nodes.nodes
        assert [n.facts.name for n in nodes.nodes] == ["vllm", "sglang"]
        assert plain.facts.clock == deep.facts.clock == "wall clock"
        assert plain.facts.bytes_per_token == deep.facts.bytes_per_token == 2048
        nodes.pin(stream_of(scenario, 6.0, 10, 1))
        assert [n.pinned["tokens"] for n in nodes.nodes] == [0, 1024]
        # SGLang takes the end of a child for a crash and ends its whole process with it.
        alive = [psutil.Process(p) for p in deep.pids if psutil.pid_exists(p)]
        child = next(p.pid for p in alive if "schedul" in p.name())
        before = list(deep.pids)
        killer = threading.Thread(
            target=kill_when_serving, args=(records, child, killed), daemon=True
        )
        killer.start()
        outcome = run(
            scenario,
            nodes,
            stream_of,
            requests=80,
            seed=3,
            records_path=records,
            warm_up_seconds=1.0,
        )
        assert killed == [child]
        assert nodes.restarts == 1
        assert deep.alive
        assert not set(before) & set(deep.pids)
        assert [n.pinned["tokens"] for n in nodes.nodes] == [0, 1024]
        deep.link.ask({"do": "status"}, timeout=30.0)
        pids = [p for n in nodes.nodes for p in n.pids]
    assert outcome.requests is not None
    assert outcome.requests.sent == 80
    counts = outcome.requests
    assert counts.completed + counts.failed + counts.rejected == 80
    assert counts.completed >= 78  # what was under way at the kill may have run out of tries
    assert any("was lost and restarted" in w for w in outcome.warnings)
    served = [r for r in read_records(records) if r.ending == "completed"]
    assert {r.profile for r in served} == {"fallback", "deep"}
    for r in served:
        # Whatever the engine: the same record fields on one clock, and only what was promised.
        assert r.cached_tokens == r.reusable_tokens // 32 * 32
        assert r.received <= r.queued <= r.scheduled <= r.engine_first_token <= r.first_token
        assert r.first_token <= r.finished
    names = {n["name"] for n in outcome.environment["engine"].values()}
    assert names == {"vllm", "sglang"}
    _, left = psutil.wait_procs(
        [psutil.Process(p) for p in [*before, *pids] if psutil.pid_exists(p)], timeout=30
    )
    assert not left
