"""SGLang in device time: its own scheduler and radix tree, stepping at a measured device's pace.

Laws on the device's own clock: no assertion is on how fast this machine is.
"""

from __future__ import annotations

import numpy as np
import pytest

from cluster.devices import load_device
from cluster.engines import doctor
from cluster.engines.base import Placement
from cluster.engines.step_log import read_steps
from testbed.scenario import EngineSpec
from testbed.step_time import step_seconds
from tests.engine.test_sglang import hold

pytestmark = pytest.mark.engine

BLOCK, BLOCKS = 16, 2588
SUMS = ("prefills", "new_tokens", "new_squared", "new_context", "decodes", "decode_context")
SCALE = 0.25
"""Wall seconds per device second: the test need not take the device's time."""


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 4000, length).astype(np.int32)


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("device") / "steps.bin"


@pytest.fixture(scope="module")
def gpu(log):
    status = next(s for s in doctor.engine_status() if s["engine"] == "sglang")
    if not status["runs"]:
        pytest.skip(f"{status['problem']}: {status['remedy']}")
    ray = pytest.importorskip("ray")
    ours = not ray.is_initialized()
    if ours:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    spec = EngineSpec(name="sglang", device="rtx4090", time_scale=SCALE)
    engine = hold(spec, Placement(step_log=str(log)), {})
    facts = engine("start")
    yield engine, facts
    engine("stop")
    ray.kill(engine.actor)
    if ours:
        ray.shutdown()


def test_an_rtx_4090_comes_up_with_its_pool(gpu):
    _, facts = gpu
    assert (facts.num_blocks, facts.block_size) == (BLOCKS, BLOCK)
    assert (facts.clock, facts.device) == ("device time", "NVIDIA GeForce RTX 4090")
    assert facts.extra["async_scheduling"]
    assert facts.extra["device_time"]["time_scale"] == SCALE


def test_every_step_takes_what_the_formula_says(gpu, log):
    """Chunked prefills and decodes: the step time is the one of vLLM's device time."""
    engine, _ = gpu
    engine("forget")
    first = len(read_steps(log)["started"])
    served = engine.together("mixed", [prompt(i, 900 + 700 * i) for i in range(4)], 12)
    assert all(len(g.token_ids) == 12 for g in served)
    steps = {name: column[first:] for name, column in read_steps(log).items()}
    vector = load_device("rtx4090").step_time.vector()
    taken = steps["finished"] - steps["started"]
    rows = zip(*(steps[name] for name in SUMS), strict=True)
    expected = [step_seconds(vector, int(p), n, s, c, int(d), x) for p, n, s, c, d, x in rows]
    assert taken == pytest.approx(expected, rel=1e-9)
    assert (steps["started"][1:] >= steps["finished"][:-1] - 1e-9).all()
    assert steps["new_tokens"].sum() == sum(900 + 700 * i for i in range(4))
    assert steps["decodes"].sum() == 4 * 11
    assert steps["new_tokens"].max() <= 2048


def test_a_pinned_prefix_is_reused_and_steps_are_counted(gpu):
    engine, _ = gpu
    prefix = prompt(9, 8000)
    assert engine("pin", "deep", prefix) == 8000
    engine("forget")
    assert round(engine("load").kv_usage * BLOCKS) == 500
    g = engine.generate("hit", np.concatenate([prefix, prompt(10, 40)]), 9)
    assert g.cached_tokens == 8000
    pace = engine("load").pace
    step_time = load_device("rtx4090").step_time
    expected = step_time.prefill_seconds(40, 8000) + sum(
        step_time.seconds(decodes=1, decode_context=8040.0 + i) for i in range(8)
    )
    assert pace.device_seconds >= expected * (1 - 1e-9)
    assert 0 <= pace.late_steps <= pace.steps
    engine("unpin", "deep")
