"""Calibration on running engines: known parameters come back; two runs agree."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calibration import crowding
from calibration.check import check, compare
from calibration.crosscheck import crowd_points
from calibration.crowding import CrowdedStages
from calibration.design import DESIGNS, Crowd
from calibration.journal import Journal
from calibration.measure import ENGINE_PREFILL, calibrate
from calibration.record import Calibration
from calibration.speed import speed_check
from cluster.engines import make_engine
from cluster.engines.base import Engine, EngineFacts, Placement
from cluster.engines.step_log import read_steps
from testbed.errors import CalibrationError, EngineError
from testbed.scenario import EngineSpec, Prefill
from testbed.step_time import COEFFICIENTS, StepTime
from testbed.theory.prefill import prefill_time

pytestmark = pytest.mark.engine

KNOWN = StepTime(
    c_pre=2e-2, p=3e-3, c_both=2e-3, a=6e-5, b=4e-8, d=9e-8, c_dec=8e-3, e=5e-4, f=1e-6
)


class Killed(Exception):
    pass


class Running:
    """A started engine in an event loop of its own, for tests of one module."""

    def __init__(self, spec: EngineSpec, placement: Placement) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine: Engine = make_engine(spec, placement)
        self.facts: EngineFacts = self(self.engine.start)

    def __call__(self, job: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(job(*args, **options), self._loop).result(300)

    def close(self) -> None:
        self(self.engine.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> Iterator[Running]:
    """An emulated engine whose step time is known, with a pool that binds before its seats."""
    folder = tmp_path_factory.mktemp("known")
    source = {
        "schema_version": 1,
        "source": {"kind": "emulated", "tool": "test"},
        "engine": {"name": "emulated"},
        "model": {"name": "tiny-llama"},
        "device": {"kind": "other", "name": "none"},
        "step_time": KNOWN.model_dump(),
    }
    Calibration.from_dict(source).save(folder / "known.json")
    spec = EngineSpec(
        name="emulated",
        calibration=str(folder / "known.json"),
        num_blocks=201,
        max_sequences=16,
        max_model_len=4096,
    )
    running = Running(spec, Placement(step_log=str(folder / "steps.bin")))
    yield running
    running.close()


@pytest.fixture(scope="module")
def recovered(known) -> Calibration:
    chain = np.arange(300, 300 + 1600, dtype=np.int32)
    profiles = {"fallback": [], "deep": [chain]}
    return known(
        calibrate,
        known.engine,
        known.facts,
        effort="check",
        seed=5,
        max_prompt=1500,
        profiles=profiles,
        reference=(600, 40),
    )


def test_the_step_time_comes_back_within_two_per_cent(recovered):
    assert recovered.step_time is not None
    for name in COEFFICIENTS:
        assert getattr(recovered.step_time, name) == pytest.approx(
            getattr(KNOWN, name), rel=0.02
        ), name


def test_unloaded_prefill_comes_back_within_two_per_cent(recovered):
    at_engine = next(f for f in recovered.fits if f.name == ENGINE_PREFILL)
    fit = Prefill(**at_engine.coefficients)
    for p in recovered.prefill_points:
        true = KNOWN.prefill_seconds(p.new, p.cached)
        assert prefill_time(fit, p.new, p.cached) == pytest.approx(true, rel=0.02)
        # The caller's own times hold the delivery too, which is the machine's and varies.
        assert min(p.seconds) >= true
    assert {p.cached for p in recovered.prefill_points} > {0}
    assert recovered.extra["delivery_overhead"] > 0


def test_occupancy_comes_back_within_two_per_cent(recovered):
    for batch, output in [(1, 33), (8, 20)]:
        true = sum(
            KNOWN.seconds(decodes=batch, decode_context=batch * (500 + k))
            for k in range(output - 1)
        )
        assert recovered.occupancy(output, 500, 0, batch=batch) == pytest.approx(true, rel=0.02)
    for model in recovered.decode:
        batch = round(model.concurrency)
        step = KNOWN.seconds(decodes=batch, decode_context=batch * model.context_tokens)
        # Measured at the caller, whose clock is the wall's: its own error counts.
        error = np.hypot(model.standard_errors["base"], 24 * model.standard_errors["per_token"])
        assert abs(model.occupancy(25) - 24 * step) <= 0.02 * 24 * step + 3 * error


def test_pool_and_concurrency_come_back_exactly(known, recovered):
    kappa = known.facts.bytes_per_token
    assert recovered.memory.kappa == pytest.approx(kappa)
    assert recovered.memory.pool_bytes == pytest.approx(200 * 32 * kappa)
    fallback, deep = recovered.c_s
    assert (fallback.profile, deep.profile) == ("fallback", "deep")
    assert deep.persistent_bytes == pytest.approx(50 * 32 * kappa)
    # 600 tokens fill 19 blocks and the outputs of the probe at most 2 more.
    assert fallback.limit == deep.limit == "pool"
    assert 200 // 21 <= fallback.measured <= 200 // 19
    assert 150 // 21 <= deep.measured <= 150 // 19
    assert fallback.formula == int(200 * 32 * kappa // fallback.per_sequence.value)


CROWDS = (
    Crowd(0, 2, 300, 0, 128),
    Crowd(4, 1, 200, 320, 64),
    Crowd(4, 2, 100, 0, 2048),
    Crowd(8, 2, 64, 0, 128),
)


async def crowds(engine: Engine, facts: EngineFacts) -> list[dict[str, Any]]:
    """Samples of :data:`CROWDS` on an idle engine."""
    journal = Journal(None, {})
    design = replace(DESIGNS["full"], crowd_least=2, crowd_most=2)
    stages = CrowdedStages(engine, facts, design, journal, seed=9, longest=1024)
    await stages.warm_up()
    try:
        await stages.pin_chain()
        await stages.crowds()
    finally:
        await stages.unpin_chain()
    await engine.forget()
    return journal.samples("crowd")


def test_prefills_among_others_take_what_the_step_time_says(known, monkeypatch):
    monkeypatch.setattr(crowding, "crowd_grid", lambda *_: list(CROWDS))
    points, report = crowd_points(known(crowds, known.engine, known.facts), KNOWN)
    assert len(points) == len(CROWDS)
    for point in points:
        assert point.median == pytest.approx(point.predicted, rel=0.02)
    assert report is not None and report.relative_error < 0.02


def test_nothing_of_a_calibration_stays_in_the_engine(known, recovered):
    load = known(known.engine.load)
    assert load.kv_usage == 0 and load.running == load.waiting == 0


def test_an_unchanged_engine_holds_and_keeps_its_speed(known, recovered):
    found = known(check, known.engine, known.facts, record=recovered, seed=6)
    assert found["holds"], found["reasons"]
    speed = known(speed_check, known.engine, recovered, seed=7, budget=2.0)
    low, high = speed["interval"]
    assert low <= speed["relative_time"] <= high and low - 0.02 <= 1.0 <= high + 0.02


def test_a_killed_calibration_goes_on(known, tmp_path, monkeypatch):
    """What was measured before the kill is not measured again."""
    short = replace(
        DESIGNS["check"],
        prefill_budget=1.0,
        decode_repeats=1,
        decode_outputs=(3, 9),
        relay_budget=0.2,
        relay_least=4,
        mix_budget=0.5,
        mix_least=8,
    )
    monkeypatch.setitem(DESIGNS, "check", short)
    options = {"effort": "check", "seed": 8, "max_prompt": 128, "resume_dir": tmp_path}
    stages: list[str] = []

    def killer(stage: str, done: int, total: int) -> None:
        stages.append(stage)
        if stage == "decode":
            raise Killed

    with pytest.raises(Killed):
        known(calibrate, known.engine, known.facts, progress=killer, **options)
    before = (tmp_path / "points.jsonl").read_bytes().count(b'"stage":"prefill"')
    record = known(calibrate, known.engine, known.facts, **options)
    after = (tmp_path / "points.jsonl").read_bytes().count(b'"stage":"prefill"')
    assert before == after > 0
    assert record.extra["resumed_samples"] > 0 and record.decode


# --- the emulated engine itself ------------------------------------------------------------------


def emulated(**changes: Any) -> EngineSpec:
    values = {"name": "emulated", "num_blocks": 65, "max_model_len": 1024, "max_sequences": 4}
    return EngineSpec(**{**values, **changes})


@pytest.mark.parametrize("reuse", ["pinned", "any"])
async def test_an_emulated_pin_holds_and_reuse_is_as_asked(reuse):
    engine = make_engine(emulated(reuse=reuse))
    await engine.start()
    try:
        draw = np.random.default_rng(1)
        chain = draw.integers(256, 4096, 330)
        assert await engine.pin("p", chain) == 320
        with pytest.raises(EngineError, match="pinned already"):
            await engine.pin("p", chain)
        assert (await engine.load()).kv_usage == pytest.approx(10 / 64)
        for i in range(6):  # more than the pool holds beside the pin
            await engine.generate(f"e{i}", draw.integers(256, 4096, 600), 2)
        again = draw.integers(256, 4096, 400)
        first = await engine.generate("a", np.r_[chain[:320], draw.integers(256, 4096, 40)], 2)
        cold = await engine.generate("b", again, 2)
        warm = await engine.generate("c", again, 2)
        assert (first.cached_tokens, cold.cached_tokens) == (320, 0)
        assert warm.cached_tokens == (0 if reuse == "pinned" else 384)
        await engine.forget()
        assert (await engine.generate("d", again, 1)).cached_tokens == 0
        assert (await engine.generate("f", chain, 1)).cached_tokens == 320
        await engine.unpin("p")
        with pytest.raises(EngineError, match="nothing is pinned"):
            await engine.unpin("p")
    finally:
        await engine.stop()
        await engine.stop()
    with pytest.raises(EngineError):
        await engine.generate("z", [1, 2], 1)


async def test_emulated_stamps_are_in_order_and_steps_are_logged(tmp_path):
    engine = make_engine(emulated(), Placement(step_log=str(tmp_path / "steps.bin")))
    await engine.start()
    draw = np.random.default_rng(2)
    served = await asyncio.gather(
        *(engine.generate(f"{i}", draw.integers(256, 4096, 90), 5) for i in range(6))
    )
    await engine.stop()
    for g in served:
        stamps = (g.received, g.queued, g.scheduled, g.engine_first_token, g.first_token)
        assert list(stamps) == sorted(stamps) and g.first_token <= g.finished
        assert len(g.token_ids) == len(g.token_times) == 5
    steps = read_steps(tmp_path / "steps.bin")
    assert steps["new_tokens"].sum() == 6 * 90 and steps["decodes"].sum() == 6 * 4
    assert steps["running"].max() == 4 and steps["waiting"].max() >= 1
    assert (steps["started"][1:] >= steps["finished"][:-1] - 1e-9).all()


async def test_an_emulated_engine_refuses_what_it_cannot_serve(tmp_path):
    with pytest.raises(EngineError, match="one or the other"):
        await make_engine(emulated(device="rtx4090", calibration="x.json")).start()
    with pytest.raises(CalibrationError, match=r"none.json: No such file"):
        await make_engine(emulated(calibration="none.json")).start()
    (tmp_path / "c.json").write_text('{"schema_version": 1}')
    with pytest.raises(CalibrationError, match="this record has none to emulate"):
        await make_engine(emulated(calibration=str(tmp_path / "c.json"))).start()
    engine = make_engine(emulated(num_blocks=9))
    await engine.start()
    try:
        with pytest.raises(EngineError, match="longer than"):
            await engine.generate("a", np.zeros(1024, dtype=int), 1)
        with pytest.raises(EngineError, match="more than the pool"):
            await engine.generate("b", np.zeros(400, dtype=int), 1)
    finally:
        await engine.stop()


# --- as a Ray job --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ray_cluster(tmp_path_factory) -> Iterator[dict[str, str]]:
    """A local cluster that asks for a token, as one started by hand does; yields the environment.

    It runs in the foreground as a child of this process and is ended by its process id alone:
    ``ray stop`` would end every cluster of the machine.
    """
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        pytest.skip("Ray is not installed here")
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Ray's sockets need a short path
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    gcs, dashboard = (str(p) for p in free_ports(2))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment.pop("RAY_ADDRESS", None)
    command = [ray, "start", "--head", "--block", f"--port={gcs}", "--num-cpus=1"]
    command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}"]
    command += ["--object-store-memory=100000000", f"--temp-dir={folder}"]
    head = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    address = f"http://127.0.0.1:{dashboard}"
    deadline = time.monotonic() + 120
    while status_without_token(address) is None:
        assert head.poll() is None and time.monotonic() < deadline, "the cluster did not start"
        time.sleep(0.5)
    yield {**environment, "RAY_API_SERVER_ADDRESS": address, "RAY_FOLDER": str(folder)}
    head.terminate()
    head.wait(60)
    shutil.rmtree(folder, ignore_errors=True)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def status_without_token(address: str) -> int | None:
    try:
        return urllib.request.urlopen(f"{address}/api/jobs/", timeout=5).status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def sources(folder: Path) -> list[Path]:
    """Files of an unpacked upload, without what Python compiled there since."""
    return [p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts]


def test_calibration_runs_as_a_submitted_job(ray_cluster, tmp_path):
    assert status_without_token(ray_cluster["RAY_API_SERVER_ADDRESS"]) == 401
    out = tmp_path / "record.json"
    command = [Path(sys.executable).with_name("ray"), "job", "submit", "--working-dir", ".", "--"]
    command += ["python", "-m", "calibration", "--engine", "emulated", "--out", str(out)]
    command += ["--num-blocks", "101", "--max-model-len", "512", "--max-sequences", "2"]
    deadline = time.monotonic() + 60
    while True:
        job = subprocess.run(
            command,
            cwd=Path(__file__).resolve().parents[2],
            env=ray_cluster,
            capture_output=True,
            text=True,
            timeout=240,
        )
        # The dashboard answers before the agent that starts jobs has registered with it.
        if "No available agent" not in job.stderr + job.stdout or time.monotonic() > deadline:
            break
        time.sleep(2)
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-2000:]
    record = Calibration.load(out)
    assert record.engine.name == "emulated" and record.prefill is not None
    assert out.with_suffix(".html").stat().st_size > 10_000
    assert not (tmp_path / "record.partial").exists()
    uploads = Path(ray_cluster["RAY_FOLDER"]).glob(
        "session_*/runtime_resources/working_dir_files/_ray_pkg_*/"
    )
    uploads = [u for u in uploads if u.is_dir()]
    assert uploads
    for upload in uploads:
        names = {p.name for p in upload.iterdir()}
        assert names >= {"calibration", "cluster", "testbed"}
        left_out = [".git", ".venv", "results"]
        assert not [p for name in left_out for p in (upload / name).rglob("*") if p.is_file()]
        assert sum(p.stat().st_size for p in sources(upload)) < 5e6


# --- vLLM --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm(tmp_path_factory) -> Iterator[Running]:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here")
    folder = tmp_path_factory.mktemp("vllm")
    spec = EngineSpec(name="vllm", num_blocks=400, max_sequences=4, max_model_len=2048)
    running = Running(spec, Placement(step_log=str(folder / "steps.bin")))
    yield running
    running.close()


def test_the_budget_of_a_step_can_be_moved(vllm, monkeypatch):
    few = [Crowd(0, 1, 256, 0, 64), Crowd(2, 1, 256, 128, 64), Crowd(0, 2, 64, 0, 2048)]
    monkeypatch.setattr(crowding, "crowd_grid", lambda *_: few)
    path = vllm.engine.placement.step_log
    before = len(read_steps(path)["started"])
    samples = vllm(crowds, vllm.engine, vllm.facts)
    steps = {k: v[before:] for k, v in read_steps(path).items()}
    # No step of those crowds held more than 64 tokens; with the engine's own budget, two prompts
    # of 64 share one.
    small = (steps["prefills"] > 0) & (steps["new_tokens"] + steps["decodes"] == 64)
    assert small.sum() >= 2 * (4 + 4)
    assert (steps["new_tokens"] == 128).any()
    assert {Crowd(*s["crowd"]) for s in samples if s["together"]} == set(few)
    with pytest.raises(EngineError, match="not between 1 and"):
        vllm(vllm.engine.limit_step, 10**6)


def test_two_runs_on_vllm_agree_within_their_own_errors(vllm):
    first, second = (
        vllm(calibrate, vllm.engine, vllm.facts, effort="check", seed=seed, max_prompt=1024)
        for seed in (1, 2)
    )
    found = compare(first.prefill_points, second.prefill_points)
    # Both records state how far the machine's speed moved over their own passes.
    moved = [r.extra["drift"]["standard_deviation"] or 0.0 for r in (first, second)]
    level = abs(np.log(found["relative_time"]))
    width = np.log(found["interval"][1] / found["interval"][0]) / 2
    assert level <= width + 1.96 * np.hypot(*moved)
    for record in (first, second):
        assert record.memory.kappa == pytest.approx(vllm.facts.bytes_per_token)
        assert record.step_time is not None and record.c_s[0].measured == 4
        assert {p.cached for p in record.prefill_points} > {0}
