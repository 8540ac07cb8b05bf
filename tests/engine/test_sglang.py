"""SGLang behind the Engine surface, in its own environment, as an actor beside this one's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import psutil
import pytest

from cluster.engines import doctor, make_engine
from cluster.engines import sglang as sglang_engine
from cluster.engines.base import Placement, model_directory
from cluster.engines.sglang_arguments import server_arguments
from cluster.engines.step_log import read_steps
from testbed.cli import main
from testbed.errors import EngineError
from testbed.scenario import EngineSpec
from tests.engine.random_model import VOCABULARY, greedy, make_random_llama

pytestmark = pytest.mark.engine

BLOCK, POOL = 32, 80
PREFIX = 12 * BLOCK
SPEC = EngineSpec(
    name="sglang",
    dtype="float32",
    num_blocks=POOL,
    block_size=BLOCK,
    max_sequences=8,
    max_model_len=2048,
    token_budget=512,
    reuse="any",
)


class Held:
    """An engine in an actor, called as if it were here."""

    def __init__(self, actor):
        self.actor = actor

    def __call__(self, method: str, *args, **kwargs):
        import ray

        return ray.get(self.actor.call.remote(method, args, kwargs))

    def generate(self, tag: str, tokens, count: int = 1):
        return self("generate", tag, tokens, count)

    def together(self, tag: str, prompts, count: int):
        import ray

        return ray.get(
            [
                self.actor.call.remote("generate", (f"{tag}-{i}", tokens, count), {})
                for i, tokens in enumerate(prompts)
            ]
        )

    def processes(self) -> dict[int, str]:
        import ray

        return ray.get(self.actor.processes.remote())

    def held_blocks(self) -> int:
        return round(self("load").kv_usage * POOL)


def hold(spec: EngineSpec, placement: Placement, arguments: dict):
    """An actor in SGLang's environment with an engine that is not started yet."""
    import ray

    # Inside a function, so that it travels by value: the other environment has no tests.
    class Holder:
        def __init__(self, spec, placement, arguments):
            from cluster.engines.sglang import SglangEngine

            self.engine = SglangEngine(spec, placement, arguments=arguments)

        async def call(self, method, args, kwargs):
            return await getattr(self.engine, method)(*args, **kwargs)

        async def processes(self):
            here = psutil.Process()
            return {p.pid: p.name() for p in [here, *here.children(recursive=True)]}

    environment = {"env_vars": {"OMP_NUM_THREADS": "1"}}
    python = doctor.engine_python("sglang")
    if python != sys.executable:
        environment["py_executable"] = python
    kind = ray.remote(num_cpus=0, runtime_env=environment)(Holder)
    return Held(kind.remote(spec, placement, arguments))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def model(folder):
    return make_random_llama(folder / "model")


@pytest.fixture(scope="module")
def engines(folder, model):
    """(engine that reuses anything and evicts by priority, engine that reuses pins alone)."""
    status = next(s for s in doctor.engine_status() if s["engine"] == "sglang")
    if not status["runs"]:
        pytest.skip(f"{status['problem']}: {status['remedy']}")
    ray = pytest.importorskip("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    spec = SPEC.model_copy(update={"model": str(model)})
    plain = SPEC.model_copy(update={"reuse": "pinned", "dtype": "bfloat16"})
    steps = Placement(core=0, step_log=str(folder / "steps.bin"))
    both = [
        hold(spec, steps, {"radix_eviction_policy": "priority"}),
        hold(plain, Placement(core=0), {}),
    ]
    started = ray.get([held.actor.call.remote("start", (), {}) for held in both])
    yield [(held, facts) for held, facts in zip(both, started, strict=True)]
    for held in both:
        ray.kill(held.actor)
    if ours:
        ray.shutdown()


@pytest.fixture(scope="module")
def engine(engines):
    return engines[0][0]


@pytest.fixture(scope="module")
def pinned_only(engines):
    return engines[1][0]


def prompt(seed: int, length: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, VOCABULARY, length).astype(np.int32)


def with_suffix(prefix: np.ndarray, seed: int, length: int = 20) -> np.ndarray:
    return np.concatenate([prefix, prompt(1000 + seed, length)])


def evict_everything(engine: Held, tag: str) -> None:
    """Prompts of three times the pool, of the lowest priority."""
    for i in range(3 * POOL * BLOCK // 480):
        engine.generate(f"evict-{tag}-{i}", prompt(10_000 + 97 * i + sum(tag.encode()), 480))


def test_facts(engines):
    (_, exact), (_, plain) = engines
    assert (exact.name, exact.version.split(".")[0]) == ("sglang", "0")
    assert exact.num_blocks == plain.num_blocks == POOL
    assert exact.block_size == BLOCK
    assert exact.vocabulary == VOCABULARY
    assert exact.bytes_per_token == 2 * 2 * 2 * 32 * 4
    assert (exact.dtype, plain.dtype) == ("float32", "bfloat16")
    assert not exact.extra["random_weights"]
    assert plain.extra["random_weights"]


def test_stamps_are_in_order_on_one_clock(engine):
    before = time.perf_counter()
    g = engine.generate("stamps", prompt(8, 300), 5)
    after = time.perf_counter()
    stamps = [g.received, g.queued, g.scheduled, g.engine_first_token, g.first_token, g.finished]
    assert [before, *stamps, after] == sorted([before, *stamps, after])
    assert len(g.token_ids) == len(g.token_times) == 5
    assert list(g.token_times) == sorted(g.token_times)
    assert g.token_times[0] == g.first_token
    assert g.preemptions == 0


@pytest.mark.parametrize("seed", [7, 17, 27])
def test_greedy_output_is_hugging_faces_at_every_hit_depth(engine, model, seed):
    tokens = with_suffix(prompt(seed, PREFIX), seed)
    expected = greedy(model, tokens.tolist(), 16)
    assert len(set(expected)) > 4  # the text says something about the prompt
    for depth in (0, 2 * BLOCK, PREFIX):
        engine("forget")
        if depth:
            engine("pin", "answer", tokens[:depth])
        g = engine.generate(f"greedy-{seed}-{depth}", tokens, 16)
        assert g.cached_tokens == depth
        assert list(g.token_ids) == expected
        if depth:
            engine("unpin", "answer")


def test_priority_yields_under_pressure_and_a_lock_does_not(engine):
    """Three prefixes under two loads: plain, of high eviction priority, and pinned by a lock."""
    engine("forget")
    plain, ranked, held = prompt(1, PREFIX), prompt(2, PREFIX), prompt(3, PREFIX)
    empty = engine.held_blocks()
    engine.generate("plain", plain)
    engine("_serve", "ranked", ranked, 1, priority=100)
    assert engine("pin", "held", held) == PREFIX
    # Only the lock takes its bytes out of the pool; priority leaves them for whoever needs them.
    assert engine.held_blocks() - empty == PREFIX // BLOCK

    def cached(tag: str) -> list[int]:
        return [
            engine.generate(f"{tag}-{i}", with_suffix(p, i)).cached_tokens
            for i, p in enumerate((plain, ranked, held))
        ]

    evict_everything(engine, "light")
    assert cached("light")[1:] == [PREFIX, PREFIX]
    # One request that needs all of the pool but the pinned prefix.
    engine.generate("heavy", prompt(4, 2000), 8)
    lost_plain, lost_ranked, kept = cached("heavy")
    assert lost_plain == lost_ranked == 0
    assert kept == PREFIX
    assert engine.held_blocks() - empty == PREFIX // BLOCK
    engine("unpin", "held")
    assert engine.held_blocks() == empty
    engine.generate("free", prompt(5, 2040), 8)
    evict_everything(engine, "free")
    assert engine.generate("gone", with_suffix(held, 9)).cached_tokens == 0


def test_pinned_bytes_are_gone_from_what_requests_can_use(engine, folder):
    """Requests that just fit the empty pool together have to take turns beside a pinned prefix."""

    def most_running(tag: str) -> int:
        rows = len(read_steps(folder / "steps.bin")["started"])
        engine.together(tag, [prompt(50 + i, 552) for i in range(4)], 24)
        return int(read_steps(folder / "steps.bin")["running"][rows:].max())

    engine("forget")
    assert most_running("free") == 4
    engine("pin", "heavy", prompt(6, PREFIX))
    engine("forget")
    assert most_running("beside") < 4
    engine("unpin", "heavy")


def test_shared_ancestors_are_stored_once(engine):
    engine("forget")
    before = engine.held_blocks()
    root = prompt(4, 4 * BLOCK)
    for i in range(3):
        engine("pin", f"chain-{i}", np.concatenate([root, prompt(40 + i, 2 * BLOCK)]))
    assert engine.held_blocks() - before == 4 + 3 * 2  # Theory A4: each unique token once
    engine("unpin", "chain-0")
    # The root stays as long as one chain holds it.
    assert engine.held_blocks() - before == 4 + 2 * 2
    engine("unpin", "chain-1")
    engine("unpin", "chain-2")
    assert engine.held_blocks() == before


def test_forgetting_keeps_pins_and_drops_the_rest(engine):
    kept, plain = prompt(5, PREFIX), prompt(6, PREFIX)
    engine("pin", "kept", kept)
    engine.generate("to-forget", with_suffix(plain, 0))
    engine("forget")
    assert engine.generate("f1", with_suffix(kept, 5)).cached_tokens == PREFIX
    assert engine.generate("f2", with_suffix(plain, 6)).cached_tokens == 0
    engine("unpin", "kept")


def test_the_step_log_accounts_for_every_token(engine, folder):
    rows = len(read_steps(folder / "steps.bin")["started"])
    engine("forget")
    g = engine.generate("logged", prompt(9, 700), 6)
    assert g.cached_tokens == 0
    steps = {k: v[rows:] for k, v in read_steps(folder / "steps.bin").items()}
    assert steps["new_tokens"].sum() == 700
    assert steps["prefills"].sum() == 2  # a budget of 512: two chunks
    assert steps["decodes"].sum() == 5  # the first token comes out of the prefill
    # Σ n² + 2 Σ n·h is the square of the prompt, however it was cut.
    assert (steps["new_squared"] + 2 * steps["new_context"]).sum() == 700**2
    assert (steps["decode_context"][-5:] == 700 + np.arange(5)).all()
    assert not (steps["prefills"] * steps["decodes"]).any()  # SGLang does not mix them
    for before, after in (
        ("started", "scheduled"),
        ("scheduled", "computed"),
        ("computed", "finished"),
    ):
        assert (steps[before] <= steps[after]).all()


def test_a_limit_cuts_prompts_into_smaller_steps_until_it_is_lifted(engine, folder):
    def chunks(tag: str) -> list[float]:
        rows = len(read_steps(folder / "steps.bin")["started"])
        engine("forget")
        assert engine.generate(tag, prompt(9, 500)).cached_tokens == 0
        return list(read_steps(folder / "steps.bin")["new_tokens"][rows:])

    assert chunks("whole") == [500]
    engine("limit_step", 128)
    assert chunks("cut") == [128, 128, 128, 116]
    engine("limit_step", None)
    assert chunks("again") == [500]
    with pytest.raises(EngineError, match="513 tokens are not between 32 and 512"):
        engine("limit_step", 513)


def test_bad_requests_are_one_line(engine):
    with pytest.raises(EngineError, match=r"longer than the engine's limit of 2048"):
        engine.generate("long", prompt(10, 2040), 10)
    with pytest.raises(EngineError, match="do not fill one block"):
        engine("pin", "tiny", prompt(11, BLOCK - 1))
    with pytest.raises(EngineError, match="nothing is pinned under this name"):
        engine("unpin", "nobody")
    engine("pin", "half", prompt(12, 1280))
    with pytest.raises(EngineError, match=r"pool of 2560 tokens, 1280 of them pinned"):
        engine.generate("beside", prompt(13, 1300), 4)
    with pytest.raises(EngineError, match=r"pin 'second': .* does not fit in the KV pool"):
        engine("pin", "second", prompt(14, 1280))
    engine("unpin", "half")
    assert engine.generate("after", prompt(13, 1300), 4).cached_tokens == 0
    assert engine("load").running == 0


def test_only_pinned_prefixes_are_reused_when_the_scenario_says_so(pinned_only):
    deep, plain = prompt(1, PREFIX), prompt(2, PREFIX)
    pinned_only("pin", "root", deep[: 4 * BLOCK])
    for i in range(2):
        assert pinned_only.generate(f"plain-{i}", with_suffix(plain, i)).cached_tokens == 0
        # The tree holds all of it; what is pinned is reused.
        hit = pinned_only.generate(f"deep-{i}", with_suffix(deep, i))
        assert hit.cached_tokens == 4 * BLOCK
    pinned_only("pin", "deep", deep)
    assert pinned_only.generate("deeper", with_suffix(deep, 5)).cached_tokens == PREFIX
    pinned_only("unpin", "deep")
    pinned_only("unpin", "root")
    assert pinned_only.generate("none", with_suffix(deep, 6)).cached_tokens == 0


def wait_for_running(engine: Held, count: int) -> None:
    deadline = time.monotonic() + 60
    while engine("load").running != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_cancelled_request_leaves_the_engine(engine):
    import ray

    long = engine.actor.call.remote("generate", ("cancelled", prompt(1, 500), 1500), {})
    wait_for_running(engine, 1)
    ray.cancel(long)
    wait_for_running(engine, 0)
    with pytest.raises((ray.exceptions.TaskCancelledError, ray.exceptions.RayTaskError)):
        ray.get(long)


def test_stopping_ends_requests_leaves_no_process_and_is_safe_twice(engine):
    import ray

    started = {pid for pid, name in engine.processes().items() if "sglang" in name}
    assert len(started) == 1  # the scheduler; ids need no detokenizer
    long = engine.actor.call.remote("generate", ("interrupted", prompt(1, 500), 1500), {})
    wait_for_running(engine, 1)
    engine("stop")
    engine("stop")
    with pytest.raises(EngineError, match="request interrupted: the engine was stopped"):
        ray.get(long)
    assert not any(psutil.pid_exists(pid) for pid in started)
    with pytest.raises(EngineError, match="not running"):
        engine.generate("late", prompt(1, 10))


def test_a_dying_child_takes_the_actor_with_it(pinned_only):
    """SGLang's own doing; whoever deploys the actor restarts it."""
    import ray

    processes = pinned_only.processes()
    child = next(pid for pid, name in processes.items() if "schedul" in name)
    os.kill(child, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        for i in range(100):
            pinned_only.generate(f"unheard-{i}", prompt(i, 10))
    gone, alive = psutil.wait_procs(
        [psutil.Process(pid) for pid in processes if psutil.pid_exists(pid)], timeout=30
    )
    assert not alive, (gone, alive)


def test_a_process_of_a_background_job_can_still_be_ended_by_sglang():
    """Shells without job control have it ignore SIGQUIT, by which SGLang ends its process."""
    program = (
        "import os, signal, threading, time\n"
        "from cluster.engines.sglang_workplace import let_sigquit_end_this_process as let\n"
        "signal.signal(signal.SIGQUIT, signal.SIG_IGN)\n"
        "thread = threading.Thread(target=let)\n"
        "thread.start()\n"
        "thread.join()\n"
        "os.kill(os.getpid(), signal.SIGQUIT)\n"
        "time.sleep(60)\n"
    )
    repository = Path(doctor.__file__).parents[2]
    ended = subprocess.run([sys.executable, "-c", program], cwd=repository, timeout=50)
    assert ended.returncode == -signal.SIGQUIT


# -- what cannot start, one line each; no engine is started --


async def test_an_engine_that_is_not_installed_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", None)
    monkeypatch.setattr(sglang_engine, "entry_points", lambda group: [_Named("testbed_cpu")])
    with pytest.raises(EngineError, match=r"SGLang cannot be imported .* 'make sglang'"):
        await make_engine(SPEC.model_copy(update={"model": "tiny-llama"})).start()


async def test_a_missing_platform_is_one_line(monkeypatch):
    monkeypatch.setattr(sglang_engine, "entry_points", lambda group: [])
    with pytest.raises(EngineError, match=r"no platform for a CPU .* make sglang"):
        await make_engine(SPEC.model_copy(update={"model": "tiny-llama"})).start()


async def test_a_version_without_the_seams_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(__version__="0.4.1"))
    monkeypatch.setitem(sys.modules, "sglang.srt", None)
    monkeypatch.setattr(sglang_engine, "entry_points", lambda group: [_Named("testbed_cpu")])
    with pytest.raises(EngineError, match=r"SGLang 0\.4\.1 lacks an extension point"):
        await make_engine(SPEC.model_copy(update={"model": "tiny-llama"})).start()


async def test_impossible_sizes_are_one_line(monkeypatch):
    with pytest.raises(EngineError, match=r"engine\.max_model_len: 9000 is more than .* 8192"):
        await make_engine(SPEC.model_copy(update={"max_model_len": 9000})).start()
    tiny = SPEC.model_copy(update={"num_blocks": 2, "block_size": 8})
    with pytest.raises(
        EngineError, match=r"engine\.num_blocks: a KV pool of 2 blocks .* too small"
    ):
        server_arguments(tiny, model_directory("tiny-llama"), 0, on_cpu=True)


def found(**changes):
    return {
        "sglang": "0.5.23",
        "sglang_seams": True,
        "platforms": ["testbed_cpu"],
        "testbed": True,
        "ray": "2.60.0",
    } | changes


@pytest.mark.parametrize(
    ("environment", "line"),
    [
        (None, "SGLang is not installed, neither here nor in .venv-sglang"),
        (found(sglang="0.4.1", sglang_seams=False), "SGLang 0.4.1 has no entry point"),
        (found(platforms=[]), "platform for a machine without a GPU is not installed"),
        (found(testbed=False), "SGLang's environment cannot import this testbed"),
        (found(ray="2.1.0"), "SGLang's environment has Ray 2.1.0, this one 2.60.0"),
    ],
)
def test_an_environment_that_cannot_serve_is_one_line_and_exit_code_two(
    environment, line, monkeypatch, tmp_path, capsys
):
    here = {"sglang": None, "vllm": "0.32.0", "ray": "2.60.0"}
    own = tmp_path / "bin" / "python"
    own.parent.mkdir()
    own.touch()
    monkeypatch.setattr(doctor, "sglang_environment", lambda: tmp_path)
    monkeypatch.setattr(doctor, "has_cuda", lambda: False)
    monkeypatch.setattr(doctor, "_probe", lambda python: environment if python == own else here)
    monkeypatch.setattr(
        sys,
        "argv",
        ["testbed", "calibrate", "--engine", "sglang", "--out", str(tmp_path / "record.json")],
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("testbed: engine.name: sglang: ")
    assert line in said
    assert said.endswith("make sglang")


class _Named:
    def __init__(self, name: str) -> None:
        self.name = name


def test_the_doctor_says_what_would_make_sglang_run(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "sglang_environment", lambda: tmp_path / "nowhere")
    monkeypatch.setattr(doctor, "has_cuda", lambda: False)
    status = {s["engine"]: s for s in doctor.engine_status()}
    assert set(status) == {"vllm", "sglang", "emulated"}
    if status["sglang"]["runs"]:
        pytest.skip("SGLang is installed in this environment itself")
    assert status["sglang"]["remedy"] == "make sglang"
    with pytest.raises(EngineError, match=r"engine\.name: sglang: SGLang is not installed.*make"):
        doctor.engine_python("sglang")
    with pytest.raises(EngineError, match="is not an engine of this testbed"):
        doctor.engine_python("other")


def test_the_requirements_pin_every_version():
    folder = Path(doctor.__file__).parent / "sglang_cpu"
    for name in ("requirements.txt", "requirements-alone.txt"):
        lines = (folder / name).read_text().splitlines()
        wanted = [line for line in lines if line and not line.startswith("#")]
        assert wanted
        assert all("==" in line for line in wanted)
