"""How fast one engine is simulated on one core. Run: python tests/bench/bench_engine_model.py

Everything is measured in one run, each figure the median of several, in CPU seconds of this
process (other work on the machine then matters little) and in wall seconds beside it. The plain
reference of the unit tests, the same scheduler in ordinary Python, runs on the same requests:
the ratio to it does not depend on the machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import csv
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from testbed.operator_profile import read_profile  # noqa: E402
from testbed.simulation.engine_model import (  # noqa: E402
    EngineConfig,
    EngineTrace,
    simulate_engine,
)
from testbed.step_time import OperatorStepTime, StepTime  # noqa: E402
from tests.unit.engine_reference import Reference, Sequence  # noqa: E402

SHARED = ROOT.parent / "shared" / "data"
CONVERSATIONS = SHARED / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv"
PROFILE = SHARED / "gpu" / "rtx4090-llama-3.1-8b" / "profile"
VIDUR = (460.0, 730.0)
"""Requests/s of the public simulator Vidur on such a machine and this workload."""

LINEAR = StepTime(c_pre=4e-3, a=4e-5, b=3e-8, d=6e-8, c_dec=2.5e-3, e=1e-4, f=3e-7)
GPU = StepTime(c_pre=0.013, a=7e-5, b=4e-9, d=4e-9, c_dec=0.0155, e=1e-4, f=1e-7)


def measure(run: Callable[[], EngineTrace], repeats: int = 7) -> tuple[EngineTrace, float, float]:
    """The trace, and median CPU and wall seconds."""
    trace = run()
    cpu, wall = [], []
    for _ in range(repeats):
        c, w = time.process_time(), time.perf_counter()
        trace = run()
        cpu.append(time.process_time() - c)
        wall.append(time.perf_counter() - w)
    return trace, float(np.median(cpu)), float(np.median(wall))


def line(
    name: str, count: int, trace: EngineTrace, cpu: float, wall: float, more: str = ""
) -> float:
    print(
        f"  {name:<62} {count / cpu:>12,.0f} requests/s  {trace.steps / cpu / 1e6:>6.1f} M steps/s"
        f"  (wall {count / wall:>11,.0f}){more}"
    )
    return count / cpu


def poisson(rate: float, count: int, seed: int) -> np.ndarray:
    return np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))


def unlimited() -> None:
    print("One engine, no cache, no memory limit (goal: 5,000,000 and 1,000,000 requests/s)")
    for name, count, outputs, rate in (
        ("prefill only, load 0.6", 500_000, 1, 20.0),
        ("prefill only, load 0.9", 500_000, 1, 30.0),
        ("16 outputs, load 0.6", 200_000, 16, 15.0),
    ):
        arrival = poisson(rate, count, 1)
        inputs, each = np.full(count, 512), np.full(count, outputs)
        line(name, count, *measure(lambda a=arrival, i=inputs, o=each: serve(None, a, i, o), 5))
    count = 200_000
    arrival, inputs, each = poisson(15.0, count, 1), np.full(count, 512), np.full(count, 16)
    hashes, offsets = np.arange(count * 32), np.arange(count + 1) * 32
    print("  what pool and prefix cache add, 16 outputs:")
    base = measure(lambda: serve(None, arrival, inputs, each), 5)[1]
    for name, options in (
        ("KV pool of 2,000 blocks", {}),
        ("and prefix cache, every prompt its own", {"hashes": hashes, "offsets": offsets}),
    ):
        trace, cpu, wall = measure(lambda o=options: serve(2000, arrival, inputs, each, **o), 5)
        line(name, count, trace, cpu, wall, f"  x{cpu / base:.2f} time")


def serve(blocks, arrival, inputs, outputs, hashes=None, offsets=None, step=LINEAR, **options):
    options.setdefault("prefix_caching", hashes is not None)
    config = EngineConfig(num_blocks=blocks, **options)
    return simulate_engine(
        config, step, arrival, inputs, outputs, block_hashes=hashes, block_offsets=offsets
    )


def conversations(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of real conversations (the trace that Splitwise published) up to 4,096 tokens."""
    with CONVERSATIONS.open() as file:
        rows = [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]
    table = np.array([r for r in rows if sum(r) <= 4096 and min(r) >= 1])
    chosen = table[np.random.default_rng(1).integers(0, len(table), count)]
    return chosen[:, 0], chosen[:, 1]


def vidur() -> None:
    if not CONVERSATIONS.exists():
        print(f"{CONVERSATIONS} is not there: the comparison with Vidur needs its lengths")
        return
    count = 2000
    inputs, outputs = conversations(count)
    arrival = poisson(3.0, count, 2)
    whole = inputs // 16
    offsets = np.concatenate([[0], np.cumsum(whole)])
    own = np.random.default_rng(3).integers(0, 2**62, offsets[-1])
    # Half of each prompt shared with the same of 50 conversations before it.
    shared = own.copy()
    for i in range(count):
        half = whole[i] // 2
        shared[offsets[i] : offsets[i] + half] = (i % 50) * 100_000 + np.arange(half)
    print(
        f"Vidur's workload: {count} requests, {inputs.mean():.0f} + {outputs.mean():.0f} tokens, "
        f"3 a second (Vidur: {VIDUR[0]:.0f} to {VIDUR[1]:.0f} requests/s; goal 500 times that)"
    )
    steps: list[tuple[str, StepTime | OperatorStepTime]] = [("linear step time", GPU)]
    if PROFILE.is_dir():
        steps.append(("operator profile", read_profile(PROFILE, layers=32).step_time))
    for label, step in steps:
        for name, hashes, overlapped in (
            ("no pool", None, False),
            ("pool and cache, lengths only as Vidur's", None, False),
            ("the same, overlapped", None, True),
            ("pool and cache, 64-bit hashes, own prompts", own, False),
            ("pool and cache, 64-bit hashes, shared prefixes", shared, False),
        ):
            blocks = None if name == "no pool" else 10_000
            trace, cpu, wall = measure(
                lambda b=blocks, h=hashes, o=overlapped, s=step: serve(
                    b,
                    arrival,
                    inputs,
                    outputs,
                    hashes=h,
                    offsets=None if h is None else offsets,
                    step=s,
                    async_scheduling=o,
                    prefix_caching=b is not None,
                    max_model_len=4096,
                ),
                15,
            )
            rate = count / cpu
            line(
                f"{label}: {name}",
                count,
                trace,
                cpu,
                wall,
                f"  x{rate / VIDUR[1]:,.0f} to x{rate / VIDUR[0]:,.0f}",
            )
    plain(arrival[:200], inputs[:200], outputs[:200], own, offsets)


def plain(arrival, inputs, outputs, contents, offsets) -> None:
    config = EngineConfig(num_blocks=10_000, max_model_len=4096)
    sequences = [
        Sequence(
            i,
            float(arrival[i]),
            int(inputs[i]),
            int(inputs[i] + outputs[i]),
            contents[offsets[i] : offsets[i + 1]].tolist(),
            known=int(inputs[i]),
        )
        for i in range(len(arrival))
    ]
    start = time.process_time()
    Reference(config, GPU, sequences).run()
    slow = time.process_time() - start
    trace, fast, _ = measure(
        lambda: serve(
            10_000,
            arrival,
            inputs,
            outputs,
            hashes=contents[: offsets[len(arrival)]],
            offsets=offsets[: len(arrival) + 1],
            step=GPU,
            max_model_len=4096,
        )
    )
    agree = np.allclose([s.finished for s in sequences], trace.finished, rtol=1e-9)
    print(
        f"  the same in plain Python: {len(arrival) / slow:,.0f} requests/s; compiled is "
        f"{slow / fast:,.0f} times as fast (all finishing times equal: {agree})"
    )


if __name__ == "__main__":
    unlimited()
    vidur()
