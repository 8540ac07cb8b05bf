"""Device time measured: against a real GPU's run and the simulator, and how many replicas fit.

Run by hand, not by pytest::

    python tests/bench/bench_device_time.py real [--device rtx4090] [--scale 0.5] [--out DIR]
    python tests/bench/bench_device_time.py hold [--device rtx4090] [--replicas 2 4 6] [--scale 1]
    python tests/bench/bench_device_time.py scenario --traffic mooncake --replicas 6 --out DIR

``real`` replays a measured run (``meta.json`` and ``requests.jsonl`` of a folder, prompts of its
trace) through one vLLM engine in device time, and the same requests through the simulator;
``--out`` keeps figures, stamps and a plot. ``hold`` starts replicas on Ray, loads each to a share
of its capacity, and says how punctual steps were; ``scenario`` writes what it would ask as files
for ``testbed run``. Both print the load average beside every figure:
on a machine that others use, lateness is theirs too.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gzip
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT.parent / "shared" / "data"
RUN = DATA / "gpu" / "rtx4090-llama-3.1-8b"
TRACE = DATA / "traces" / "sharegpt" / "sharegpt-llama-3.1-8b-300-sps10.jsonl"
RADIO = {"model": "power_law", "xi": 0.05, "alpha": 2.0}
MOONCAKE = DATA / "traces" / "mooncake" / "conversation_trace.jsonl"
PINNED_SHARE, OUTPUTS, BATCH = 0.3, 2048, 12.0
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


# --- How many replicas fit --------------------------------------------------------------------


def question(device: str, traffic: str, replicas: int, load: float, scale: float) -> Any:
    """A scenario on a device: its prefill, memory and limits from the record.

    ``load`` is the utilisation that theory predicts of the busiest tier under ``nearest``.
    """
    from calibration.record import Calibration
    from cluster.devices import engine_on_device, load_device
    from testbed.scenario import EngineSpec, Memory, Scenario, WorkloadSpec
    from testbed.theory import predict
    from testbed.workload.derivation import derive
    from testbed.workload.forest import PrefixForest
    from testbed.workload.scaling import scale_requests
    from testbed.workload.trace import read_trace

    record = Calibration.load(load_device(device).path)
    assert record.m_run is not None and record.memory.kappa and record.memory.pool_bytes
    engine = engine_on_device(EngineSpec(device=device, replicas=replicas, time_scale=scale))
    memory = Memory(
        capacity=record.memory.pool_bytes,
        per_sequence=record.m_run.value,
        per_token=record.memory.kappa,
    )
    if traffic == "mooncake":
        trace = read_trace(MOONCAKE)
        pool = record.memory.pool_bytes / record.memory.kappa
        workload = WorkloadSpec(
            trace=os.path.relpath(MOONCAKE, ROOT),
            # What fits beside the deepest profile with its outputs; longer ones are counted.
            max_tokens=min(engine.max_model_len, int((1 - PINNED_SHARE) * pool) - OUTPUTS),
        )
        kept = scale_requests(trace, PrefixForest.of(trace), workload, engine)
        mean = float((kept.input_tokens + kept.output_tokens).mean())
        scenario = derive(
            trace,
            prefill=record.prefill_or_raise(),
            memory=memory.model_copy(update={"per_sequence": mean * memory.per_token}),
            radio=RADIO,
            budget=PINNED_SHARE * memory.capacity,
            profiles=3,
            engine=engine,
            workload=workload,
            decode_seconds=lambda n: record.occupancy(max(n, 1.0), mean, batch=2.0),
            name=f"Mooncake on {replicas} x {device}",
        ).scenario
    else:
        types = [("chat", 0.7, 700, 220), ("document", 0.3, 2400, 120)]
        scenario = Scenario.from_dict(
            {
                "name": "chat",
                "radio": RADIO,
                "nodes": {"density": 1.0},
                "demand": {"intensity": 1.0},
                "prefill": record.prefill_or_raise().model_dump(),
                "memory": memory.model_dump(),
                "requests": [
                    {
                        "name": name,
                        "probability": p,
                        "tokens": n,
                        "output_tokens": m,
                        "decode_occupancy": record.occupancy(m, n, batch=BATCH),
                    }
                    for name, p, n, m in types
                ],
                "profiles": [
                    {
                        "name": "fallback",
                        "fraction": 0.5,
                        "persistent_bytes": 0,
                        "reusable": {"chat": 0, "document": 0},
                    },
                    {
                        "name": "deep",
                        "fraction": 0.5,
                        "persistent_bytes": (512 + 2048) * memory.per_token,
                        "reusable": {"chat": 512, "document": 2048},
                    },
                ],
                "engine": engine.model_dump(exclude_none=True),
            }
        )
    nearest = predict(scenario.replace(policy="nearest"))
    busiest = max(tier.utilisation for tier in nearest.tiers.values())
    return scenario.with_field("demand.intensity", scenario.demand.intensity * load / busiest)


def write(options: argparse.Namespace) -> dict[str, Any]:
    """The question of one load as scenario files, a policy each, for the commands of ``testbed``.

    The paths in them are relative to the repository. ``simulate`` finds the engine model in them.
    """
    from cluster.devices import device_path
    from testbed.routing.policies import POLICIES

    asked = question(
        options.device, options.traffic, options.replicas[0], options.load, options.scale[0]
    )
    record = os.path.relpath(device_path(options.device), ROOT)
    asked = asked.with_field("engine.calibration", record)
    asked = asked.replace(
        simulation={"node_model": "engine", "nodes": options.replicas[0], "waits": "node"}
    )
    options.out.mkdir(parents=True, exist_ok=True)
    for policy in POLICIES:
        text = asked.replace(policy=policy).to_yaml()
        (options.out / f"scenario-{policy}.yaml").write_text(text)
    rate = asked.demand.intensity * options.replicas[0] / asked.nodes.density
    print(f"{options.out}: {len(POLICIES)} scenarios, {rate:.3f} requests/s for all replicas")
    return {"rate": rate}


def cpu_seconds(pids: list[int]) -> float:
    import psutil

    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # a replica that was lost
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def held(options: argparse.Namespace, replicas: int, scale: float) -> dict[str, Any]:
    """One deployment, loaded under each policy for ``--seconds`` of wall clock."""
    import psutil

    from cluster.deployment import deployed
    from cluster.experiment import stream_of
    from cluster.run import run
    from cluster.session import ray_session

    asked = question(options.device, options.traffic, replicas, options.load, scale)
    rate = asked.demand.intensity * replicas / asked.nodes.density
    count = max(20, round(rate * options.seconds / scale))
    rows = []
    with ray_session():
        began = time.perf_counter()
        with deployed(asked) as nodes:
            started = time.perf_counter() - began
            nodes.pin(stream_of(asked, rate, count, 1))
            pids = [pid for n in nodes.nodes for pid in n.pids]
            memory = sum(psutil.Process(p).memory_full_info().pss for p in pids)
            for policy in options.policies:
                cpu, wall, before = cpu_seconds(pids), time.perf_counter(), load_average()
                outcome = run(
                    asked.replace(policy=policy), nodes, stream_of, requests=count, seed=1
                )
                wall = time.perf_counter() - wall
                pace = outcome.extra["device_time"]
                rows.append(
                    {
                        "replicas": replicas,
                        "scale": scale,
                        "traffic": options.traffic,
                        "policy": policy,
                        "requests": outcome.requests.model_dump() if outcome.requests else None,
                        "ttft_p50": outcome.ttft.quantiles["0.5"],
                        "steps_per_wall_second": pace["steps"] / wall,
                        "late_share": pace["late_share"],
                        "mean_late_wall": pace["mean_late"] * scale,
                        "worst_late_wall": pace["worst_late"] * scale,
                        "dispatch_lag_p99": outcome.extra["dispatch_lag"]["p99"],
                        "cores_used": (cpu_seconds(pids) - cpu) / wall,
                        "valid": outcome.valid,
                        "start_seconds": started,
                        "memory_bytes": memory,
                        "load_average": [before, load_average()],
                    }
                )
                row = rows[-1]
                print(
                    f"{replicas:8d} {scale:6g} {policy:12s} {count:6d} "
                    f"{row['steps_per_wall_second']:8.1f} {row['late_share']:8.2%} "
                    f"{row['mean_late_wall'] * 1e3:8.2f} {row['worst_late_wall'] * 1e3:8.1f} "
                    f"{row['dispatch_lag_p99'] * scale * 1e3:8.2f} {row['cores_used']:6.2f} "
                    f"{row['ttft_p50']:8.3f} {outcome.valid!s:6s} {started:6.0f} "
                    f"{memory / 1e9:6.1f}  [{before} | {row['load_average'][1]}]",
                    flush=True,
                )
                if not outcome.valid:
                    print(f"         {outcome.invalid_reason}", flush=True)
    return {"rows": rows}


def hold(options: argparse.Namespace) -> dict[str, Any]:
    print(
        f"{options.traffic} traffic at load {options.load:g} on {options.device}, "
        f"{os.cpu_count()} cores\n"
        "replicas  scale policy       requests steps/s     late   mean ms worst ms  "
        "lag ms  cores TTFT p50 valid  start s     GB  [load average before | after]",
        flush=True,
    )
    rows = []
    for scale in options.scale:
        for replicas in options.replicas:
            rows.extend(held(options, replicas, scale)["rows"])
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    against = commands.add_parser("real", help="against a measured run and the simulator")
    against.add_argument("--scale", type=float, default=1.0)
    against.add_argument("--run", default=str(RUN))
    against.add_argument("--trace", default=str(TRACE))
    against.add_argument("--step-log", help="write one row a step here")
    against.add_argument("--out", type=Path, help="folder for figures, stamps and a plot")
    against.set_defaults(do=real)
    fit = commands.add_parser("hold", help="how punctual some replicas are")
    fit.add_argument("--seconds", type=float, default=30.0)
    fit.add_argument("--policies", nargs="+", default=["load_aware"])
    fit.set_defaults(do=hold)
    ask = commands.add_parser("scenario", help="what hold asks, as scenario files")
    ask.add_argument("--out", type=Path, required=True)
    ask.set_defaults(do=write)
    for command in (fit, ask):
        command.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 6])
        command.add_argument("--scale", type=float, nargs="+", default=[1.0])
        command.add_argument("--traffic", choices=("chat", "mooncake"), default="chat")
        command.add_argument("--load", type=float, default=0.6)
    for command in (against, fit, ask):
        command.add_argument("--device", default="rtx4090")
        command.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    result = options.do(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
