"""The engine model against a real engine on the same arrivals, from a calibration alone.

    python tests/bench/bench_paired_vllm.py --out out/paired

Starts one engine, calibrates it (or takes ``--calibration``), and sends it Poisson load at 0.3,
0.6, 0.8 and 0.9 of the capacity that the calibration implies: every load twice with the same
arrivals and lengths, in the order 0.6, 0.9, 0.3, 0.8, then again. The engine model serves the same
requests in virtual time. Printed for TTFT mean, p50, p90, p95 and p99, counted from the intended
send:

- measured, the mean of both runs, and how far they lie apart: the noise floor;
- the engine model's error, by the calibration alone;
- its error with every step as much slower or faster as the steps of the run were (the run's own
  speed, from the step log): what is left when the machine's drift is taken out.

Unloaded requests before each run give its speed as well. What was measured is kept in ``--out``;
a killed bench goes on where it was. No figure is asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import numpy as np

from calibration.crosscheck import capacity_from_steps
from calibration.load import COLUMNS, Load, RequestClass
from calibration.measure import calibrate
from calibration.paired import engine_config, simulate_same, simulated_alone
from calibration.prompts import Prompts
from calibration.record import Calibration
from calibration.steps import relative_step_time, step_rows
from cluster.engines import make_engine
from cluster.engines.base import Engine, EngineFacts, Placement
from cluster.engines.step_log import STEP_COLUMNS, read_steps
from testbed.outcome import dump_json, write_atomically
from testbed.scenario import EngineSpec
from testbed.step_time import StepTime

LOADS = (0.6, 0.9, 0.3, 0.8)
CHAIN = 896
CLASSES = (
    RequestClass("chat, cached", 0.5, 128, CHAIN, 16.0),
    RequestClass("short, cold", 0.3, 384, 0, 16.0),
    RequestClass("long, cold", 0.2, 1024, 0, 16.0),
)
QUANTILES = (0.5, 0.9, 0.95, 0.99)
ALONE = 15
SEED = 11


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--calibration", type=Path, help="a record of this engine")
    parser.add_argument("--effort", default="quick")
    parser.add_argument("--seconds", type=float, default=48.0, help="of each run")
    parser.add_argument("--core", type=int, default=1)
    asked = parser.parse_args()
    task = asyncio.current_task()
    assert task is not None
    # A bench that is told to end must not leave its engine behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    asked.out.mkdir(parents=True, exist_ok=True)
    spec = EngineSpec(name=asked.engine, num_blocks=600, max_sequences=16, max_model_len=2048)
    log = asked.out / "steps.bin"
    engine = make_engine(spec, Placement(core=asked.core, step_log=str(log)))
    try:
        facts = await engine.start()
        record = await _record(engine, facts, asked)
        await _measure(engine, facts, record, asked.out, asked.seconds, log)
    finally:
        await engine.stop()
    summary = summarise(record, facts, asked.out, log)
    write_atomically(asked.out / "paired.json", dump_json(summary, indent=True))
    show(summary)


async def _record(engine: Engine, facts: EngineFacts, asked: argparse.Namespace) -> Calibration:
    kept = asked.out / "calibration.json"
    if asked.calibration is not None:
        return Calibration.load(asked.calibration)
    if not kept.exists():
        folder = asked.out / "calibration.partial"
        # Its steps are logged beside those of the runs, by rows of the one file.
        record = await calibrate(
            engine, facts, effort=asked.effort, max_prompt=1536, seed=SEED, resume_dir=folder
        )
        record.save(kept)
    return Calibration.load(kept)


async def _measure(
    engine: Engine, facts: EngineFacts, record: Calibration, out: Path, seconds: float, log: Path
) -> None:
    assert record.step_time is not None
    chain = Prompts(SEED, facts.vocabulary, "paired chain").cold(CHAIN)
    await engine.pin("chain", chain)
    pinned = CHAIN // facts.block_size
    capacity = capacity_from_steps(CLASSES, record.step_time, facts, pinned, SEED)
    for repeat in (0, 1):
        for rho in LOADS:
            path = out / f"run-{rho:g}-{repeat}.json"
            if path.exists():
                continue
            load = Load(engine, facts, CLASSES, chain, seed=SEED, stream="paired")
            alone = await load.unloaded(ALONE, 0.02)
            first = _rows(log)
            run = await load.poisson(rho * capacity, seconds, f"load {rho}")
            kept = {
                "load": rho,
                "repeat": repeat,
                "capacity": capacity,
                "rate": rho * capacity,
                "pinned": pinned,
                "alone": alone.tolist(),
                "first": first,
                "last": _rows(log),
                "run": {c: np.asarray(run[c]).tolist() for c in COLUMNS},
            }
            write_atomically(path, dump_json(kept))
            print(f"load {rho:g}, run {repeat + 1}: {len(run['intended'])} requests", flush=True)


def _rows(log: Path) -> int:
    return log.stat().st_size // (8 * len(STEP_COLUMNS)) if log.exists() else 0


def summarise(record: Calibration, facts: EngineFacts, out: Path, log: Path) -> dict[str, Any]:
    """Measured, predicted and predicted at the run's speed, by load."""
    assert record.step_time is not None
    runs = [json.loads(p.read_text()) for p in sorted(out.glob("run-*.json"))]
    # Calibration of the unloaded requests: those before the first run of all, in time.
    before = np.median(np.array(min(runs, key=lambda r: r["first"])["alone"]), axis=1)
    steps = read_steps(log)
    rows = []
    for rho in sorted({r["load"] for r in runs}):
        pair = [r for r in runs if r["load"] == rho]
        seen, said, paced, speeds, idle = [], [], [], [], []
        for r in pair:
            rows_of = step_rows(steps, [(r["first"], r["last"])])
            speed = relative_step_time(rows_of, record.step_time) or 1.0
            seen.append(_figures(np.array(r["run"]["first"]) - np.array(r["run"]["intended"])))
            said.append(_figures(_predict(record, facts, r, before, 1.0)))
            paced.append(_figures(_predict(record, facts, r, before, speed)))
            speeds.append(speed)
            idle.append(float(np.mean(np.median(np.array(r["alone"]), axis=1) / before)))
        measured = {k: float(np.mean([s[k] for s in seen])) for k in seen[0]}
        rows.append(
            {
                "load": rho,
                "requests": len(pair[0]["run"]["intended"]),
                "measured": measured,
                "runs_apart_percent": {
                    k: 100 * (seen[-1][k] / seen[0][k] - 1) for k in measured if len(seen) > 1
                },
                "error_percent": _errors(said, measured),
                "error_percent_at_run_speed": _errors(paced, measured),
                "run_relative_time": speeds,
                "unloaded_relative_time": idle,
            }
        )
    return {
        "what": "TTFT from the intended send, s; relative time: 1.03 is 3 % slower than calibrated",
        "engine": {"name": facts.name, "version": facts.version, "model": facts.model},
        "capacity_requests_per_second": runs[0]["capacity"],
        "classes": [vars(c) for c in CLASSES],
        "step_time": record.step_time.model_dump(mode="json"),
        "loads": rows,
    }


def _predict(
    record: Calibration, facts: EngineFacts, kept: dict[str, Any], alone: np.ndarray, speed: float
) -> np.ndarray:
    """TTFT of the same requests, what surrounds the steps added as it is when unloaded."""
    assert record.step_time is not None
    step = StepTime.from_vector(record.step_time.vector() * speed)
    config = engine_config(facts, kept["pinned"], record.idle_start)
    kinds = np.array(kept["run"]["kind"], dtype=int)
    trace = simulate_same(config, step, CLASSES, kept["run"])
    around = alone - simulated_alone(config, record.step_time, CLASSES)
    return trace.ttft + around[kinds]


def _figures(ttft: np.ndarray) -> dict[str, float]:
    values = np.quantile(ttft, QUANTILES)
    names = [f"p{100 * z:g}" for z in QUANTILES]
    return {"mean": float(ttft.mean()), **dict(zip(names, map(float, values), strict=True))}


def _errors(said: list[dict[str, float]], seen: dict[str, float]) -> dict[str, float]:
    return {k: 100 * (float(np.mean([s[k] for s in said])) / seen[k] - 1) for k in seen}


def show(summary: dict[str, Any]) -> None:
    names = ["mean", *(f"p{100 * z:g}" for z in QUANTILES)]
    print(f"\n{'load':>5} {'':<28}" + "".join(f"{n:>9}" for n in names))
    for row in summary["loads"]:
        lines = (
            ("measured, ms", {k: 1e3 * v for k, v in row["measured"].items()}, "9.1f"),
            ("its two runs apart, %", row["runs_apart_percent"], "+9.1f"),
            ("engine model, error %", row["error_percent"], "+9.1f"),
            ("at the run's own speed, %", row["error_percent_at_run_speed"], "+9.1f"),
        )
        for label, values, form in lines:
            cells = "".join(f"{values[n]:{form}}" if n in values else f"{'–':>9}" for n in names)
            print(f"{row['load']:>5g} {label:<28}{cells}")
        speeds = ", ".join(f"{s:.3f}" for s in row["run_relative_time"])
        idle = ", ".join(f"{s:.3f}" for s in row["unloaded_relative_time"])
        print(f"      relative time of the runs' steps {speeds}; of unloaded requests {idle}")


if __name__ == "__main__":
    asyncio.run(main())
