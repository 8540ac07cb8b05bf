"""Deployment on a private Ray cluster: all replicas serve, one may die, nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import orjson
import psutil
import pytest
import urllib3

from cluster.deployment import deployed
from cluster.experiment import stream_of
from cluster.metrics import RouterMetrics
from cluster.run import run
from cluster.session import ray_session
from testbed.errors import ClusterError, EngineError
from testbed.outcome import read_records
from tests.unit.scenarios import small

pytestmark = pytest.mark.engine
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def session():
    with ray_session() as cluster:
        yield cluster


def alive(pids: list[int]) -> list[int]:
    return [p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != "zombie"]


def test_a_private_cluster_is_started_beside_whatever_runs(session):
    assert session == "a private Ray cluster"


@pytest.mark.parametrize("imported_first", [True, False])
def test_token_authentication_is_on_whoever_imports_ray_first(imported_first):
    program = "import ray\n" if imported_first else ""
    program += (
        "import os\n"
        "from cluster.session import ray_session\n"
        "with ray_session(cpus=1) as cluster:\n"
        "    print(cluster, os.environ['RAY_AUTH_MODE'])\n"
    )
    unset = ("RAY_AUTH_MODE", "RAY_ADDRESS")
    answer = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if k not in unset},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == "a private Ray cluster token"


def test_a_run_accounts_for_every_request_and_leaves_nothing(session, tmp_path):
    scenario = small()
    metrics = RouterMetrics()
    port = metrics.serve()
    with deployed(scenario, log_dir=tmp_path) as nodes:
        pids = [p for n in nodes.nodes for p in n.pids]
        nodes.pin(stream_of(scenario, 5.0, 10, 1))
        assert [n.pinned["tokens"] for n in nodes.nodes] == [0, 1024]
        outcome = run(
            scenario,
            nodes,
            stream_of,
            requests=60,
            seed=1,
            records_path=tmp_path / "records.jsonl",
            metrics=metrics,
            warm_up_seconds=1.0,
        )
        text = urllib3.request("GET", f"http://127.0.0.1:{port}/metrics").data.decode()
        replica = urllib3.request(
            "GET", f"http://127.0.0.1:{nodes.nodes[1].metrics_port}/metrics"
        ).data.decode()
    metrics.close()
    assert outcome.kind == "measured"
    assert outcome.clock == "emulated"
    assert outcome.requests is not None
    assert outcome.requests.sent == outcome.requests.completed == 60
    records = list(read_records(tmp_path / "records.jsonl"))
    assert sorted(r.index for r in records) == list(range(60))
    # What the engine reused is what the profile promised, to the block.
    for r in records:
        assert r.cached_tokens == r.reusable_tokens // 32 * 32
        assert r.received <= r.queued <= r.scheduled <= r.first_token <= r.finished
    served = {
        n: sum(r.profile == n and r.ending == "completed" for r in records)
        for n in ("fallback", "deep")
    }
    for name, count in served.items():
        assert f'testbed_requests_total{{ending="completed",profile="{name}"}} {count:.1f}' in text
    assert 'testbed_engine_pinned_tokens{profile="deep"} 1024.0' in replica
    assert "token_ids" not in text + replica
    assert alive(pids) == []


def test_same_seed_same_requests_on_every_policy(session, tmp_path):
    scenario = small()
    with deployed(scenario) as nodes:
        nodes.pin(stream_of(scenario, 5.0, 10, 1))
        kept = {}
        for policy in ("nearest", "load_aware"):
            question = small(policy=policy)
            nodes.adopt(question)
            path = tmp_path / f"{policy}.jsonl"
            run(
                question,
                nodes,
                stream_of,
                requests=30,
                seed=4,
                records_path=path,
                warm_up_seconds=0.5,
            )
            kept[policy] = sorted(read_records(path), key=lambda r: r.index)
    for a, b in zip(kept["nearest"], kept["load_aware"], strict=True):
        assert (a.type, a.input_tokens, a.output_tokens) == (
            b.type,
            b.input_tokens,
            b.output_tokens,
        )
        assert a.intended == pytest.approx(b.intended, abs=1e-6)


def test_a_killed_replica_comes_back_with_its_profile(session, tmp_path):
    scenario = small(demand={"intensity": 4.0})
    with deployed(scenario) as nodes:
        nodes.pin(stream_of(scenario, 5.0, 10, 1))
        victim = nodes.nodes[1]
        first = victim.pids[0]
        threading.Timer(3.0, lambda: os.kill(first, signal.SIGKILL)).start()
        outcome = run(
            scenario, nodes, stream_of, requests=120, seed=2, records_path=tmp_path / "r.jsonl",
            warm_up_seconds=0.5,
        )  # fmt: skip
        assert victim.alive
        assert victim.pids[0] != first
        assert victim.pinned["tokens"] == 1024
        pids = [p for n in nodes.nodes for p in n.pids]
    counts = outcome.requests
    assert counts is not None
    assert counts.sent == 120
    assert counts.completed >= 118  # what was under way at the kill may have run out of tries
    assert any("was lost and restarted" in w for w in outcome.warnings)
    assert alive([first, *pids]) == []


def test_too_few_devices_and_pools_are_one_line(session):
    gpus = small().with_field("engine.gpus_per_replica", 1).with_field("engine.name", "vllm")
    with pytest.raises(ClusterError, match="2 GPUs are needed, the cluster has 0"):  # noqa: SIM117
        with deployed(gpus):
            pass
    many = small().with_field("engine.replicas", 64).with_field("engine.name", "vllm")
    with pytest.raises(ClusterError, match="64 computing CPU replicas need 64 cores"):  # noqa: SIM117
        with deployed(many):
            pass
    tight = small().with_field("engine.num_blocks", 16)
    with pytest.raises(EngineError, match="deep"):  # noqa: SIM117
        with deployed(tight) as nodes:
            nodes.pin(stream_of(tight, 5.0, 10, 1))


def command(*arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster", *arguments],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        # A background job is started with Ctrl-C ignored, and would hand that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,
    )


def test_the_command_prints_one_json_document_and_keeps_its_folder(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(small().to_yaml())
    out = tmp_path / "run"
    arguments = ["run", str(path), "--requests", "20", "--out", str(out), "--json"]
    ran = command(*arguments)
    stdout, stderr = ran.communicate(timeout=300)
    assert ran.returncode == 0, stderr.decode()
    assert orjson.loads(stdout)["requests"]["sent"] == 20
    assert {p.name for p in out.iterdir()} >= {"scenario.yaml", "records.jsonl", "outcome.json"}
    again = command(*arguments)
    _, stderr = again.communicate(timeout=60)
    assert again.returncode == 2
    assert b"holds records of a run; --resume goes on with it" in stderr
    assert b"Traceback" not in stderr


def test_control_c_leaves_no_process(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(small().to_yaml())
    out = tmp_path / "run"
    ran = command("run", str(path), "--requests", "500", "--out", str(out))
    records = out / "records.jsonl"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (records.exists() and records.stat().st_size > 0):
        time.sleep(0.2)
    children = [c.pid for c in psutil.Process(ran.pid).children(recursive=True)]
    assert children
    os.killpg(ran.pid, signal.SIGINT)
    ran.communicate(timeout=60)
    assert ran.returncode not in (0, 2)
    for _ in range(50):
        if not alive(children):
            break
        time.sleep(0.2)
    assert alive(children) == []
    # What ended before the interrupt is kept, and the rest is accounted for.
    assert len(list(read_records(records))) == 500
