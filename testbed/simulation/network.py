"""Network: many nodes, one clock; the same policies, telemetry and faults as on the cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from testbed.radio import radio_model
from testbed.routing.admission import fallback_profile
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario, SimulationSpec
from testbed.seeds import generator
from testbed.simulation import network_kernel as kernel
from testbed.simulation import network_state as state
from testbed.simulation.network_events import stop_counting
from testbed.simulation.network_state import (
    Chunk,
    Network,
    Rules,
    Tables,
    new_network,
    no_requests,
    with_more_room,
)
from testbed.simulation.placement import Layout, lay_out, move_bytes, whole_counts
from testbed.simulation.radio_table import RadioTable, tabulate
from testbed.simulation.requests import CHUNK, Costs
from testbed.simulation.service import ServiceLaw
from testbed.simulation.system import System
from testbed.simulation.tally import Served, Tally
from testbed.simulation.traffic import Traffic

_FINEST_PERIOD = 64
"""A telemetry period of 0 is simulated as this part of the window."""


@dataclass
class NetworkRun:
    """What a run leaves beside its tally."""

    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    random_layout: bool = False
    stream: str | None = None


def simulate_network(
    scenario: Scenario,
    system: System,
    law: ServiceLaw,
    tally: Tally,
    *,
    wait: np.ndarray | None,
    warm_up: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> NetworkRun:
    """Send ``tally.requests`` requests through a network of queues.

    ``wait`` (Q, S) seconds is what the policy is told of every node of a tier; None: each node
    advertises its own windowed mean.
    """
    spec = scenario.simulation or SimulationSpec()
    layout = lay_out(scenario, system, spec, seed)
    run = NetworkRun(random_layout=layout.random)
    traffic = Traffic.of(scenario, system, law, layout, tally.requests, warm_up, seed)
    rules = network_rules(scenario, system, spec, law, advertised=wait is None)
    tables = network_tables(scenario, system, spec, layout, traffic.costs, wait)
    net = idle_network(rules, layout, len(system.profiles))
    radio = tabulate(radio_model(scenario.radio, scenario.nodes.density), layout.longest)
    rng = generator(seed, "failures")
    profiles = len(system.profiles)
    per_profile = 1 if layout.palm else scenario.routing.candidates_per_profile
    near = np.full((profiles, per_profile), -1, dtype=np.int64)
    far = np.full((profiles, per_profile), np.inf)
    kernel.start(rules, net, rng)
    for chunk in traffic.chunks():
        net, _ = _drive(
            rules, tables, net, layout, radio, chunk, False, rng, near, far, tally, progress
        )
    stop_counting(net, traffic.last)
    nothing = no_requests(profiles)
    net, _ = _drive(
        rules, tables, net, layout, radio, nothing, True, rng, near, far, tally, progress
    )
    if net.counters.real[state.BACK_IN_TIME]:
        raise RuntimeError("the event list ran back in time")
    tally.expose(net.nodes.seconds[:profiles])
    describe(run, scenario, system, spec, layout, rules, traffic)
    _count(run, system, spec, net)
    spread(run, net.nodes.real[:, state.WORK_DONE], system, layout, traffic.seconds)
    return run


def network_rules(
    scenario: Scenario, system: System, spec: SimulationSpec, law: ServiceLaw, *, advertised: bool
) -> Rules:
    """The constants of a run; ``advertised``: nodes tell their own waits to a policy that asks."""
    policy, routing, failures = get_policy(scenario.policy), scenario.routing, spec.failures
    high = routing.admission_high or 0.0
    return Rules(
        palm=spec.space == "palm",
        by_tier=law.by_tier,
        advertised=advertised and policy.load_aware,
        attempts=1 if failures is None else failures.attempts,
        fallback=system.profiles.index(fallback_profile(scenario)),
        prefill_weight=policy.prefill_weight,
        wait_weight=policy.wait_weight,
        margin=routing.margin_z,
        close_at=high,
        reopen_at=high if routing.admission_low is None else routing.admission_low,
        period=routing.telemetry_period or routing.telemetry_window / _FINEST_PERIOD,
        delay=routing.telemetry_delay,
        window=routing.telemetry_window,
        detection=0.0 if failures is None else failures.detection,
        mean_uptime=0.0 if failures is None else failures.mean_uptime,
        mean_downtime=0.0 if failures is None else failures.mean_downtime,
        epoch=spec.catalogue_period or 0.0,
        budget=0.0 if spec.migration is None else spec.migration.budget,
        load_rate=0.0 if spec.backhaul is None else spec.backhaul.rate,
    )


def network_tables(
    scenario: Scenario,
    system: System,
    spec: SimulationSpec,
    layout: Layout,
    costs: Costs,
    wait: np.ndarray | None,
) -> Tables:
    """The arrays of a run; ``wait`` (Q, S) seconds where the policy is told fixed waits."""
    target = np.zeros(0, dtype=np.int64)
    if spec.migration is not None:
        fractions = np.array([spec.migration.target.get(s, 0.0) for s in system.profiles])
        target = whole_counts(fractions, len(layout.assigned))
    return Tables(
        prefill=np.ascontiguousarray(costs.prefill),
        reuse=np.ascontiguousarray(costs.reuse),
        full=np.ascontiguousarray(costs.full),
        decode=np.ascontiguousarray(costs.decode),
        wait=np.zeros_like(system.prefill) if wait is None else np.ascontiguousarray(wait),
        concurrency=system.concurrency.astype(np.int64),
        target=target,
        move_bytes=move_bytes(scenario),
    )


def idle_network(rules: Rules, layout: Layout, profiles: int) -> Network:
    """The nodes of a layout at time 0."""
    return new_network(
        layout.assigned,
        profiles,
        snapshots=math.ceil(rules.delay / rules.period) + 2,
        attempts=rules.attempts,
        palm=layout.palm,
        records=CHUNK,
    )


def _drive(
    rules: Rules,
    tables: Tables,
    net: Network,
    layout: Layout,
    radio: RadioTable,
    chunk: Chunk,
    last: bool,
    rng: np.random.Generator,
    near: np.ndarray,
    far: np.ndarray,
    tally: Tally,
    progress: Callable[[int], None] | None,
) -> tuple[Network, int]:
    """Run the kernel through a chunk, making room and flushing records as it asks."""
    done = 0
    while True:
        why, done = kernel.advance(
            rules, tables, net, layout.plane, radio, chunk, done, last, rng, near, far
        )
        if why == kernel.MORE_ROOM:
            net = with_more_room(net)
            continue
        _flush(net, tally, progress)
        if why != kernel.FLUSH:
            return net, done


def _flush(net: Network, tally: Tally, progress: Callable[[int], None] | None) -> None:
    """Move ended requests from the kernel's buffer into the tally."""
    count = int(net.counters.number[state.RECORDS])
    net.counters.number[state.RECORDS] = 0
    if count == 0:
        return
    number, real = net.records.number[:count], net.records.real[:count]
    ending = number[:, state.R_ENDING]
    tally.rejected += int((ending == state.REJECTED).sum())
    tally.failed += int((ending == state.FAILED).sum())
    ended = ending == state.COMPLETED
    number, real = number[ended], real[ended]
    tally.add(
        Served(
            index=number[:, state.R_PLACE],
            kind=number[:, state.R_KIND],
            profile=number[:, state.R_PROFILE],
            ttft=real[:, state.R_TTFT],
            wait=real[:, state.R_WAIT],
            occupancy=real[:, state.R_OCCUPANCY],
            distance=real[:, state.R_DISTANCE],
            reused=real[:, state.R_REUSED],
            saved=real[:, state.R_SAVED],
            full=real[:, state.R_FULL],
        )
    )
    if progress is not None:
        progress(count)


def describe(
    run: NetworkRun,
    scenario: Scenario,
    system: System,
    spec: SimulationSpec,
    layout: Layout,
    rules: Rules,
    traffic: Traffic,
) -> None:
    """State the choices of a run beside its figures."""
    policy, routing, facts = get_policy(scenario.policy), scenario.routing, run.facts
    facts["space"] = layout.description
    facts["nodes"] = {s: int((layout.assigned == i).sum()) for i, s in enumerate(system.profiles)}
    if not policy.load_aware:
        facts["waits"] = "not looked at"
    elif rules.advertised:
        facts["waits"] = (
            f"each node's own mean, damped over {routing.telemetry_window:g} s, every "
            f"{rules.period:g} s, {routing.telemetry_delay:g} s old"
        )
    else:
        facts["waits"] = f"tier means of predict ({scenario.delay_model})"
    facts["radio"] = "policies see the mean delay at a distance, requests a drawn one"
    if not layout.palm:
        users = spec.users
        facts["users"] = users.pattern + (
            ", a new place for every request"
            if users.count is None
            else f", {users.count} that stay, mobility {users.mobility}"
        )
    if traffic.stream is not None:
        facts["workload"] = traffic.stream.facts
        run.stream = traffic.fingerprint
    facts["requests_per_second"] = traffic.rate
    facts["virtual_seconds"] = traffic.seconds


def _count(run: NetworkRun, system: System, spec: SimulationSpec, net: Network) -> None:
    """What happened to the nodes."""
    facts, number, real = run.facts, net.counters.number, net.counters.real
    if spec.failures is not None:
        facts["failures"] = int(number[state.FAILURES])
    if spec.migration is not None:
        facts["migration"] = {
            "moves": int(number[state.MOVES]),
            "bytes": float(real[state.BYTES_MOVED]),
            "nodes": {
                s: int((net.nodes.number[:, state.ASSIGNED] == i).sum())
                for i, s in enumerate(system.profiles)
            },
        }
    facts["events"] = int(number[state.EVENTS])
    facts["room_for_live_requests"] = len(net.slots.number)


def spread(
    run: NetworkRun, work: np.ndarray, system: System, layout: Layout, seconds: float
) -> None:
    """How unequally nodes are loaded: what a model of mean loads does not see (Theory H8).

    ``work`` (N,) is the occupancy that each node served, seconds.
    """
    if seconds <= 0:
        return
    rho = work / (seconds * system.concurrency[layout.assigned])
    levels = (0.0, 0.1, 0.5, 0.9, 0.99, 1.0)
    run.facts["node_utilisation"] = {
        s: {f"{z:g}": float(np.quantile(rho[layout.assigned == i], z)) for z in levels}
        for i, s in enumerate(system.profiles)
        if (layout.assigned == i).any()
    }
    over = int((rho >= 1).sum())
    run.facts["overloaded_nodes"] = over
    if over:
        run.warnings.append(
            f"{over} of {len(rho)} nodes are offered more than they can serve: their queues grow "
            "for as long as the run lasts"
        )
