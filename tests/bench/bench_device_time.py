"""Device time measured: against a real GPU's run and the simulator, and how many replicas fit.

Run by hand, not by pytest::

    python tests/bench/bench_device_time.py real [--device rtx4090] [--scale 0.5]
    python tests/bench/bench_device_time.py hold [--device rtx4090] [--replicas 2 4 6] [--scale 1]

``real`` replays a measured run (``meta.json`` and ``requests.jsonl`` of a folder, prompts of its
trace) through one vLLM engine in device time, and the same requests through the simulator.
``hold`` starts replicas on Ray, loads each to a share of its capacity, and says how punctual
steps were. Both print the load average beside every figure: on a machine that others use,
lateness is theirs too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
RUN = DATA / "gpu" / "rtx4090-llama-3.1-8b"
TRACE = DATA / "traces" / "sharegpt" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
FIGURES = ("mean", "p50", "p90", "p95", "p99")


def figures(values: np.ndarray) -> np.ndarray:
    return np.array([values.mean(), *np.quantile(values, [0.5, 0.9, 0.95, 0.99])])


def load_average() -> str:
    return " ".join(f"{x:.1f}" for x in os.getloadavg())


def table(title: str, rows: dict[str, np.ndarray], against: str) -> None:
    """Figures in seconds, and in per cent of the row named ``against``."""
    print(f"\n{title}")
    print(f"{'':34s}" + "".join(f"{name:>12s}" for name in FIGURES))
    for name, row in rows.items():
        print(f"{name:34s}" + "".join(f"{x:12.4f}" for x in row))
    for name, row in rows.items():
        if name != against:
            change = (row / rows[against] - 1.0) * 100
            print(f"{name + ' vs ' + against:34s}" + "".join(f"{x:+11.2f}%" for x in change))


# --- Against a real run -----------------------------------------------------------------------


async def replay(
    device: str, scale: float, arrival: np.ndarray, prompts: list, outputs: list, log: str | None
):
    """One engine in device time, an open loop; stamps in device seconds since the start."""
    from cluster.engines import make_engine
    from cluster.engines.base import Placement
    from testbed.scenario import EngineSpec

    engine = make_engine(
        EngineSpec(device=device, time_scale=scale, reuse="any"), Placement(step_log=log)
    )
    began = time.perf_counter()
    facts = await engine.start()
    print(f"engine up after {time.perf_counter() - began:.1f} s (load average {load_average()})")
    rows = np.full((len(arrival), 5), np.nan)
    try:
        await engine.generate("warm-up", list(range(64)), 8)
        await engine.forget()
        start = time.perf_counter() + 0.5

        async def one(i: int) -> None:
            due = start + arrival[i] * scale
            await asyncio.sleep(due - time.perf_counter())
            sent = time.perf_counter()
            g = await engine.generate(f"r{i}", prompts[i], outputs[i])
            stamps = (sent, g.queued, g.scheduled, g.engine_first_token, g.finished)
            rows[i] = [(t - start) / scale for t in stamps]

        await asyncio.gather(*(one(i) for i in range(len(arrival))))
        load = await engine.load()
    finally:
        await engine.stop()
    return rows, load, facts


def real(options: argparse.Namespace) -> dict[str, Any]:
    from cluster.devices import load_device
    from testbed.measured_run import read_run
    from testbed.simulation.engine_model import EngineConfig, simulate_engine

    run = read_run(options.run)
    lines = [json.loads(line) for line in Path(options.trace).read_text().splitlines()]
    if len(lines) != len(run.arrival):
        raise SystemExit(f"{options.trace}: {len(lines)} requests, the run has {len(run.arrival)}")
    prompts = [lines[int(n.rsplit("-", 1)[-1])]["input_tok_ids"] for n in run.names]
    lengths = np.array([len(p) for p in prompts])
    assert (lengths == run.input_tokens).all(), "trace and run disagree on prompt lengths"
    outputs = run.output_tokens.astype(int).tolist()
    profile = load_device(options.device)

    before = load_average()
    rows, load, facts = asyncio.run(
        replay(options.device, options.scale, run.arrival, prompts, outputs, options.step_log)
    )
    after = load_average()
    pace = load.pace
    print(f"pool: {facts.num_blocks} blocks of {facts.block_size}; {facts.clock}")
    print(f"async scheduling: {facts.extra['async_scheduling']}; preemptions: {load.preemptions}")
    print(
        f"steps {pace.steps}, late {pace.late_steps} ({pace.late_share:.2%}), worst "
        f"{pace.worst_late * 1e3:.1f} ms, mean {pace.late_seconds / pace.steps * 1e3:.2f} ms, "
        f"device busy {pace.device_seconds:.1f} s; load average before {before}, after {after}"
    )
    kept = dict(
        token_budget=facts.token_budget,
        max_sequences=facts.max_sequences,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        max_model_len=facts.max_model_len,
    )
    result: dict[str, Any] = {"pace": vars(pace), "scale": options.scale, "load": [before, after]}
    named = {
        "real GPU": (run.arrival, run.queued, run.first_token, run.finished),
        "device time": (rows[:, 0], rows[:, 1], rows[:, 3], rows[:, 4]),
    }
    for title, asynchronous in (("simulator", profile.async_scheduling),):
        trace = simulate_engine(
            EngineConfig(async_scheduling=asynchronous, **kept),
            profile.step_time,
            run.arrival,
            run.input_tokens,
            run.output_tokens,
        )
        if np.isnan(trace.first_token).any():
            print(f"{title}: {np.isnan(trace.first_token).sum()} requests have no first token")
            continue
        print(f"{title}: {trace.steps} steps, {trace.preemptions.sum()} preemptions")
        named[title] = (trace.arrival, trace.queued, trace.first_token, trace.finished)
    for title, rows_of in {
        "TTFT from arrival, s": lambda t: t[2] - t[0],
        "TTFT from the engine's queue, s": lambda t: t[2] - t[1],
        "Latency from arrival, s": lambda t: t[3] - t[0],
    }.items():
        shown = {name: figures(rows_of(stamps)) for name, stamps in named.items()}
        table(title, shown, "real GPU")
        if "simulator" in shown:
            change = (shown["device time"] / shown["simulator"] - 1) * 100
            print(f"{'device time vs simulator':34s}" + "".join(f"{x:+11.2f}%" for x in change))
        result[title] = {
            name: dict(zip(FIGURES, map(float, row), strict=True)) for name, row in shown.items()
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    against = commands.add_parser("real")
    against.add_argument("--device", default="rtx4090")
    against.add_argument("--scale", type=float, default=1.0)
    against.add_argument("--run", default=str(RUN))
    against.add_argument("--trace", default=str(TRACE))
    against.add_argument("--step-log", help="write one row a step here")
    against.set_defaults(do=real)
    for command in (against,):
        command.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    result = options.do(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
