"""Run: a scenario on real engines, wall clock, one outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.deployment import Deployment, Node
from cluster.devices import memory_warnings, on_device
from cluster.engines.device_time_clock import Pace, prepare_driver
from cluster.metrics import RouterMetrics
from cluster.pace import pace_facts, pace_problem, read_pace
from cluster.replay import Progress, Replay, check_stream
from cluster.router import Router
from testbed.environment import environment
from testbed.errors import ScenarioError, TestbedError
from testbed.outcome import Clock, Outcome, RecordWriter, RequestRecord, read_records
from testbed.scenario import Scenario
from testbed.seeds import WARM_UP, generator
from testbed.simulation.summary import summarise
from testbed.simulation.system import System
from testbed.simulation.tally import Served, Tally
from testbed.theory.prefill import prefill_saving, prefill_time
from testbed.tier_engine import tier_prefill
from testbed.workload.stream import RequestStream

LAG_LIMIT = 0.05
"""Dispatch lag, as a share of the median TTFT, past which an outcome is marked invalid."""
PATIENCE_SECONDS = 600.0
"""After the last arrival, until what has no answer counts as failed: long outputs and backlogs of
a GPU take minutes, and a replica that dies is noticed at once."""
WAITED_SECONDS = 0.001
"""A request has waited when the engine scheduled it this long after it took it in."""
StreamBuilder = Callable[[Scenario, float, int, int], RequestStream]


def run(
    scenario: Scenario,
    deployment: Deployment,
    build: StreamBuilder,
    *,
    requests: int,
    seed: int = 0,
    records_path: str | Path | None = None,
    resume: bool = False,
    metrics: RouterMetrics | None = None,
    progress: Callable[[Progress], None] | None = None,
    warm_up_seconds: float = 8.0,
) -> Outcome:
    """Replay ``requests`` requests on a deployment whose profiles are pinned.

    The deployment stands for an area n/λ_b, so that requests arrive at λ_req·n/λ_b.

    Parameters
    ----------
    build : ``build(scenario, rate, count, seed)`` gives the stream
    records_path : JSONL that grows as requests end; with ``resume``, those in it are kept
    warm_up_seconds : load from another seed before the run; every cache then forgets its prompts,
        while the advertised waits go on from there

    Raises
    ------
    ScenarioError
        A request does not fit the engine, before anything is sent.
    """
    scenario = on_device(scenario)
    spec = scenario.engine
    if spec is None:
        raise ScenarioError("engine: a run needs this section")
    rate = scenario.demand.intensity * len(deployment.nodes) / scenario.nodes.density
    stream = build(scenario, rate, requests, seed)
    check_stream(stream, spec.max_model_len)
    done = _kept(records_path) if resume else []
    if records_path is not None and not resume:
        Path(records_path).parent.mkdir(parents=True, exist_ok=True)
        Path(records_path).unlink(missing_ok=True)
    if any(node.facts.clock == "device time" for node in deployment.nodes):
        prepare_driver()
    if warm_up_seconds > 0:
        _warm_up(scenario, deployment, build, rate, seed, warm_up_seconds)
    deployment.forget()

    router = Router(scenario, deployment, stream, seed, metrics)
    restarts: list[threading.Thread] = []
    reported: set[int] = set()
    lock = threading.Lock()
    lost: list[str] = []

    def on_lost(node: Node) -> None:
        with lock:
            if node.id in reported:
                return
            reported.add(node.id)

        def bring_back() -> None:
            try:
                deployment.restart(node)
                lost.append(f"replica {node.id} was lost and restarted")
            except Exception as error:  # whatever ended it, the run goes on with the rest
                lost.append(f"replica {node.id} was lost; its restart failed: {error}")
            with lock:
                reported.discard(node.id)

        thread = threading.Thread(target=bring_back, name=f"restart-{node.id}", daemon=True)
        restarts.append(thread)
        thread.start()

    writer = RecordWriter(records_path) if records_path is not None else None
    try:
        replay = Replay(
            stream,
            router,
            on_record=writer.write if writer is not None else lambda _: None,
            metrics=metrics,
            on_node_lost=on_lost,
            time_scale=spec.time_scale,
            patience=PATIENCE_SECONDS,
            skip=frozenset(r.index for r in done),
        )
        router.start_telemetry(on_lost)
        records = replay.run(progress)
    finally:
        router.stop_telemetry()
        if writer is not None:
            writer.close()
        for thread in restarts:
            thread.join(timeout=120)
    records = sorted([*done, *records], key=lambda r: r.index)
    return observe(
        scenario,
        stream,
        records,
        deployment,
        seed=seed,
        warnings=(*memory_warnings(scenario), *lost),
        resumed=len(done),
        paces=read_pace(deployment),
    )


def _kept(path: str | Path | None) -> list[RequestRecord]:
    if path is None or not Path(path).exists():
        return []
    return [r for r in read_records(path) if r.ending == "completed"]


def _warm_up(
    scenario: Scenario,
    deployment: Deployment,
    build: StreamBuilder,
    rate: float,
    seed: int,
    seconds: float,
) -> None:
    """Load from its own seed: code paths, clocks and allocators are warm, no prompt is kept."""
    other = int(generator(seed, WARM_UP).integers(1, 2**31))
    stream = build(scenario, rate, max(4, int(rate * seconds)), other)
    router = Router(scenario, deployment, stream, other)
    router.start_telemetry()
    try:
        Replay(
            stream,
            router,
            on_record=lambda _: None,
            patience=PATIENCE_SECONDS,
            time_scale=scenario.engine.time_scale if scenario.engine is not None else 1.0,
        ).run()
    finally:
        router.stop_telemetry()


def observe(
    scenario: Scenario,
    stream: RequestStream,
    records: Sequence[RequestRecord],
    deployment: Deployment,
    *,
    seed: int,
    warnings: tuple[str, ...] = (),
    resumed: int = 0,
    paces: dict[int, Pace] | None = None,
) -> Outcome:
    """The outcome of a replay from its records, by the estimators that simulation uses.

    Raises
    ------
    TestbedError
        No request was completed: there is nothing to measure.
    """
    system = System.of(scenario)
    completed = [r for r in records if r.ending == "completed"]
    if not completed:
        reasons = sorted({r.reason or "?" for r in records})
        raise TestbedError(f"no request of {len(records)} was completed: {reasons[0]}")
    served = _served(scenario, system, completed)
    tally = Tally(
        len(stream), len(system.types), len(system.profiles), scenario.targets.coverage_at
    )
    tally.add(served)
    tally.rejected = sum(r.ending == "rejected" for r in records)
    tally.failed = sum(r.ending == "failed" for r in records)
    duration = float(stream.arrival[-1])
    replicas = np.bincount([n.profile for n in deployment.nodes], minlength=len(system.profiles))
    tally.expose(replicas * duration)
    lag = _quantiles([r.dispatch_lag for r in completed])
    overhead = _quantiles(
        [r.queued - r.intended - r.radio for r in completed if r.queued is not None]
    )
    idle = _idle_overhead(completed)
    facts = deployment.nodes[0].facts
    clock: Clock = facts.clock  # type: ignore[assignment]
    environment_facts = {
        **environment(),
        "engine": {n.id: _node_facts(scenario, n) for n in deployment.nodes},
        "workload": stream.facts,
    }
    outcome = summarise(
        scenario,
        system,
        tally,
        seed=seed,
        warnings=warnings,
        environment=environment_facts,
        stream=stream.fingerprint(seed),
    )
    median = outcome.ttft.quantiles.get("0.5", float(np.median(served.ttft)))
    invalid = None
    if lag and lag["p99"] > LAG_LIMIT * median:
        invalid = (
            f"dispatch lag p99 of {lag['p99'] * 1e3:.2f} ms is more than {LAG_LIMIT:.0%} of the "
            f"median TTFT of {median * 1e3:.1f} ms"
        )
    if paces:
        invalid = "; ".join(p for p in (invalid, pace_problem(paces)) if p) or None
    extra = {
        **outcome.extra,
        "requested_rate": len(stream) / duration,
        "achieved_rate": len(completed) / max(r.finished or 0.0 for r in completed),
        "duration_seconds": duration,
        "dispatch_lag": lag,
        "harness_overhead": {
            "all": overhead,
            "idle_replica": idle,
            "what": "engine's arrival stamp − intended send − emulated radio, s",
        },
        "ttft_from_send": {
            "mean": float(np.mean([r.ttft_from_send for r in completed])),
            **_quantiles([r.ttft_from_send for r in completed]),
        },
        "cached_tokens": float(np.mean([r.cached_tokens for r in completed])),
        "promised_tokens": float(np.mean([r.reusable_tokens for r in completed])),
        "resumed_records": resumed,
        "restarts": deployment.restarts,
        "wait_probability": f"share scheduled more than {WAITED_SECONDS * 1e3:g} ms after arrival",
        "placement": "palm",
    }
    if paces and scenario.engine is not None:
        extra["device_time"] = pace_facts(paces, scenario.engine.time_scale)
    return outcome.model_copy(
        update={
            "kind": "measured",
            "clock": clock,
            "tiers": _waited(outcome, completed),
            "valid": invalid is None,
            "invalid_reason": invalid,
            "extra": extra,
        }
    )


def _served(scenario: Scenario, system: System, completed: Sequence[RequestRecord]) -> Served:
    types = {q: i for i, q in enumerate(system.types)}
    profiles = {s: i for i, s in enumerate(system.profiles)}
    length = np.array([r.input_tokens for r in completed], dtype=float)
    cached = np.array([r.cached_tokens for r in completed], dtype=float)
    first = np.array([r.first_token for r in completed], dtype=float)
    arrived = np.array([r.received for r in completed], dtype=float)
    begun = np.array([r.scheduled if r.scheduled is not None else r.received for r in completed])
    tier = np.array([profiles[r.profile or ""] for r in completed])
    prefill = tier_prefill(scenario).of(tier)
    full = prefill_time(prefill, length, 0.0)
    return Served(
        index=np.array([r.index for r in completed]),
        kind=np.array([types[r.type] for r in completed]),
        profile=tier,
        ttft=np.array([r.ttft for r in completed], dtype=float),
        wait=first - arrived - prefill_time(prefill, length - cached, cached),
        occupancy=np.array([r.finished for r in completed], dtype=float) - begun.astype(float),
        distance=np.array([r.distance for r in completed], dtype=float),
        reused=cached,
        saved=prefill_saving(prefill, length, cached),
        full=full,
    )


def _waited(outcome: Outcome, completed: Sequence[RequestRecord]) -> dict[str, Any]:
    """Tiers with the share of requests that the engine kept waiting, from its own stamps."""
    tiers = dict(outcome.tiers)
    for name, tier in tiers.items():
        waits = [
            r.scheduled - r.queued > WAITED_SECONDS
            for r in completed
            if r.profile == name and r.scheduled is not None and r.queued is not None
        ]
        if waits:
            share = float(np.mean(waits))
            tiers[name] = tier.model_copy(update={"wait_probability": share})
            outcome.confidence.pop(f"tiers.{name}.wait_probability", None)
    return tiers


def _idle_overhead(completed: Sequence[RequestRecord]) -> dict[str, float]:
    """Overhead of the requests that found their replica empty."""
    by_node: dict[int, list[RequestRecord]] = {}
    for r in completed:
        by_node.setdefault(r.node if r.node is not None else -1, []).append(r)
    found: list[float | None] = []
    for records in by_node.values():
        free = 0.0
        for r in sorted(records, key=lambda r: r.dispatched or 0.0):
            if r.queued is not None and r.dispatched is not None and r.dispatched >= free:
                found.append(r.queued - r.intended - r.radio)
            free = max(free, r.finished or 0.0)
    return {**_quantiles(found), "requests": float(len(found))}


def _quantiles(values: Sequence[float | None]) -> dict[str, float]:
    known = [v for v in values if v is not None]
    if not known:
        return {}
    p50, p90, p99 = np.quantile(known, [0.5, 0.9, 0.99])
    return {"p50": float(p50), "p90": float(p90), "p99": float(p99)}


def _node_facts(scenario: Scenario, node: Node) -> dict[str, Any]:
    facts = node.facts
    return {
        "profile": scenario.profiles[node.profile].name,
        "name": facts.name,
        "version": facts.version,
        "model": facts.model,
        "dtype": facts.dtype,
        "device": facts.device,
        "num_blocks": facts.num_blocks,
        "block_size": facts.block_size,
        "token_budget": facts.token_budget,
        "max_sequences": facts.max_sequences,
        "bytes_per_token": facts.bytes_per_token,
        "pinned": node.pinned,
        "clock_error_seconds": node.clock_error,
        **facts.extra,
    }
