"""Device time measured: a real GPU's run replayed through it, and through the simulator.

Run by hand, not by pytest::

    python tests/bench/bench_device_time.py [--device rtx4090] [--scale 0.5] [--out DIR]

A measured run (``meta.json`` and ``requests.jsonl`` of a folder, prompts of its trace) is replayed
through one vLLM engine in device time, and the same requests through the simulator. ``--out`` keeps
figures, stamps and a plot. The load average stands beside the figures: on a machine that others
use, lateness is theirs too.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
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

        async def watch() -> float:
            """How long at most this driver was kept from running, s: its stamps err by as much."""
            longest = 0.0
            while True:
                before = time.perf_counter()
                try:
                    await asyncio.sleep(0.02)
                except asyncio.CancelledError:
                    return longest
                longest = max(longest, time.perf_counter() - before - 0.02)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await asyncio.gather(*(one(i) for i in range(len(arrival))))
        watching.cancel()
        print(f"driver held up for {await watching * 1e3:.0f} ms at most")
        load = await engine.load()
    finally:
        await engine.stop()
    return rows, load, facts


def real(options: argparse.Namespace) -> dict[str, Any]:
    from cluster.devices import load_device
    from testbed.measured_run import read_run
    from testbed.simulation.engine_model import EngineConfig, simulate_engine
    from testbed.simulation.validate import engine_blocks
    from testbed.workload.trace import read_trace

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
    config = EngineConfig(
        token_budget=facts.token_budget,
        max_sequences=facts.max_sequences,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        max_model_len=facts.max_model_len,
        async_scheduling=profile.async_scheduling,
    )
    recorded = read_trace(options.trace, block_size=facts.block_size)
    blocks, offsets = engine_blocks(recorded, facts.block_size)
    result: dict[str, Any] = {
        "clock": facts.clock,
        "what": "a measured run replayed through vLLM in device time and through the simulator",
        "engine": {"name": facts.name, "version": facts.version, **facts.extra},
        "pool": {"num_blocks": facts.num_blocks, "block_size": facts.block_size},
        "requests": len(run.arrival),
        "preemptions": load.preemptions,
        "pace": {**vars(pace), "late_share": pace.late_share},
        "time_scale": options.scale,
        "load_average": {"before": before, "after": after},
        "unit": "s",
    }
    named = {
        "real GPU": (run.arrival, run.queued, run.first_token, run.finished),
        "device time": (rows[:, 0], rows[:, 1], rows[:, 3], rows[:, 4]),
    }
    # As the measured run took requests in, and as the engine here did: queueing magnifies the
    # milliseconds between the two.
    for title, arrival in {"simulator": run.arrival, "simulator, as sent": rows[:, 0]}.items():
        order = np.argsort(arrival, kind="stable")
        trace = simulate_engine(
            config,
            profile.step_time,
            arrival[order],
            run.input_tokens[order],
            run.output_tokens[order],
            block_hashes=np.concatenate([blocks[offsets[i] : offsets[i + 1]] for i in order]),
            block_offsets=np.concatenate([[0], np.cumsum(np.diff(offsets)[order])]),
            log=True,
        )
        print(f"{title}: {trace.steps} steps, {trace.preemptions.sum()} preemptions")
        named[title] = (trace.arrival, trace.queued, trace.first_token, trace.finished)
    for title, rows_of in {
        "TTFT from arrival, s": lambda t: t[2] - t[0],
        "TTFT from the engine's queue, s": lambda t: t[2] - t[1],
        "Latency from arrival, s": lambda t: t[3] - t[0],
    }.items():
        shown = {name: figures(rows_of(stamps)) for name, stamps in named.items()}
        table(title, shown, "real GPU")
        for simulator in [name for name in shown if name.startswith("simulator")]:
            change = (shown["device time"] / shown[simulator] - 1) * 100
            name = f"device time vs {simulator}"
            print(f"{name:34s}" + "".join(f"{x:+11.2f}%" for x in change))
        result[title] = {
            name: dict(zip(FIGURES, map(float, row), strict=True)) for name, row in shown.items()
        }
    if options.out:
        keep(options.out, result, run, named)
    return result


def keep(folder: Path, result: dict[str, Any], run: Any, named: dict[str, Any]) -> None:
    """Figures as JSON, every request's stamps as CSV, the laws of TTFT as SVG."""
    from testbed.outcome import dump_json, write_atomically
    from testbed.reporting.style import INK, PALETTE, panels, save, styled

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "device-time.json", dump_json(result, indent=True) + b"\n")
    stamps = ("arrival", "queued", "first_token", "finished")
    with gzip.open(folder / "requests.csv.gz", "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["request", "input_tokens", "output_tokens"]
            + [
                f"{name.replace(' ', '_')}_{s}"
                for name in ("real GPU", "device time")
                for s in stamps
            ]
        )
        for i, request in enumerate(run.names):
            times = [f"{column[i]:.6f}" for n in ("real GPU", "device time") for column in named[n]]
            writer.writerow([request, int(run.input_tokens[i]), int(run.output_tokens[i]), *times])

    @styled
    def draw() -> Any:
        figure, axes = panels(1, 1)
        axis = axes[0][0]
        for (name, dash), colour in zip(
            {"real GPU": "-", "device time": (0, (5, 2)), "simulator": (0, (1.2, 1.2))}.items(),
            (INK, *PALETTE),
            strict=False,
        ):
            _, queued, first, _ = named[name]
            values = np.sort(first - queued)
            share = np.arange(1, len(values) + 1) / len(values)
            axis.step(values, share, where="post", label=name, linestyle=dash, color=colour)
        axis.set_xlabel("TTFT from the engine's queue, s")
        axis.set_ylabel("fraction of requests")
        axis.set_ylim(0, 1)
        axis.legend(loc="lower right")
        figure.suptitle(f"{run.engine.device}: measured, vLLM in device time, simulated")
        return figure

    save(draw(), folder / "ttft.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="rtx4090")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--run", default=str(RUN))
    parser.add_argument("--trace", default=str(TRACE))
    parser.add_argument("--step-log", help="write one row a step here")
    parser.add_argument("--out", type=Path, help="folder for figures, stamps and a plot")
    real(parser.parse_args())


if __name__ == "__main__":
    main()
