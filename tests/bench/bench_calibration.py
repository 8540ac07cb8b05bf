"""What calibration and the emulated engine cost, as ratios measured in one run.

    python tests/bench/bench_calibration.py

The emulated engine: how late its steps are delivered against how long they take, and how many
steps a second it could make if they took no time. Calibration: what a check, a speed check and the
step regression take beside the measuring they belong to.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np

from calibration.measure import calibrate
from calibration.speed import speed_check
from calibration.steps import fit_steps, step_rows
from cluster.engines import make_engine
from cluster.engines.base import Placement
from cluster.engines.emulated import DEFAULT_STEP_TIME, EmulatedEngine
from cluster.engines.step_log import read_steps
from testbed.scenario import EngineSpec
from testbed.step_time import StepTime


async def pacing(step_time: StepTime | None, seconds: float) -> tuple[float, np.ndarray]:
    """(steps/s, lateness) of an emulated engine under a closed loop of 8."""
    spec = EngineSpec(name="emulated", num_blocks=2000, max_sequences=8, max_model_len=2048)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.bin"
        engine = make_engine(spec, Placement(step_log=str(log)))
        await engine.start()
        assert isinstance(engine, EmulatedEngine)
        if step_time is not None:
            engine._step_time = step_time
            await engine.forget()
        end = time.perf_counter() + seconds

        async def client(i: int) -> None:
            draw = np.random.default_rng(i)
            while time.perf_counter() < end:
                await engine.generate(f"{i}", draw.integers(256, 4096, 128), 64)

        started = time.perf_counter()
        await asyncio.gather(*(client(i) for i in range(8)))
        elapsed = time.perf_counter() - started
        late = engine.lateness()
        await engine.stop()
        return len(read_steps(log)["started"]) / elapsed, late


async def main() -> None:
    _, late = await pacing(None, 4.0)
    step = DEFAULT_STEP_TIME.seconds(decodes=8, decode_context=8 * 160)
    p50, p99 = np.quantile(late, [0.5, 0.99])
    print(
        f"emulated decode step {1e3 * step:.2f} ms, delivered late by p50 "
        f"{100 * p50 / step:.2f} %, "
        f"p99 {100 * p99 / step:.1f} % of a step"
    )
    bare, _ = await pacing(StepTime(), 2.0)
    print(
        f"emulated engine without pacing: {bare:.0f} steps/s, {bare * step:.1f} times what it paces"
    )

    spec = EngineSpec(name="emulated", num_blocks=900, max_sequences=8, max_model_len=2048)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "steps.bin"
        engine = make_engine(spec, Placement(step_log=str(log)))
        facts = await engine.start()
        at = time.perf_counter()
        record = await calibrate(engine, facts, effort="check", max_prompt=1024)
        whole = time.perf_counter() - at
        at = time.perf_counter()
        speed = await speed_check(engine, record, budget=3.0)
        checked = time.perf_counter() - at
        await engine.stop()
        rows = step_rows(read_steps(log))
        at = time.perf_counter()
        fit_steps(rows)
        fitting = time.perf_counter() - at
    low, high = speed["interval"]
    print(
        f"calibrate(check) {whole:.1f} s; its step regression ({len(rows)} steps) takes "
        f"{100 * fitting / whole:.1f} % of that"
    )
    print(
        f"speed_check {checked / whole:.2f} of it, states the speed within "
        f"± {50 * (high - low):.2f} %"
    )


if __name__ == "__main__":
    asyncio.run(main())
