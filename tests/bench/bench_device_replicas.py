"""Device time measured: how many replicas of a GPU a machine holds, at which time scale.

Run by hand, not by pytest::

    python tests/bench/bench_device_replicas.py hold [--replicas 2 4 6] [--scale 1]
    python tests/bench/bench_device_replicas.py scenario --traffic mooncake --replicas 6 --out DIR

``hold`` starts replicas on Ray, loads each to a share of its capacity, and says how punctual steps
were; ``scenario`` writes what it would ask as files for ``testbed run``. The load average stands
beside every figure: on a machine that others use, lateness is theirs too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOONCAKE = ROOT.parent / "shared" / "data" / "traces" / "mooncake" / "conversation_trace.jsonl"
RADIO = {"model": "power_law", "xi": 0.05, "alpha": 2.0}
PINNED_SHARE, OUTPUTS, BATCH = 0.3, 2048, 12.0


def load_average() -> str:
    return " ".join(f"{x:.1f}" for x in os.getloadavg())


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
    fit = commands.add_parser("hold", help="how punctual some replicas are")
    fit.add_argument("--seconds", type=float, default=30.0)
    fit.add_argument("--policies", nargs="+", default=["load_aware"])
    fit.add_argument("--json", type=Path, help="write the figures here")
    ask = commands.add_parser("scenario", help="what hold asks, as scenario files")
    ask.add_argument("--out", type=Path, required=True)
    for command in (fit, ask):
        command.add_argument("--device", default="rtx4090")
        command.add_argument("--replicas", type=int, nargs="+", default=[2, 4, 6])
        command.add_argument("--scale", type=float, nargs="+", default=[1.0])
        command.add_argument("--traffic", choices=("chat", "mooncake"), default="chat")
        command.add_argument("--load", type=float, default=0.6)
    options = parser.parse_args()
    if options.command == "scenario":
        write(options)
        return
    result = hold(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
