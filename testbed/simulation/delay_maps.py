"""Delay maps: the law of a node's excess delay, tabulated by simulation (Theory H3).

For every profile one node is simulated at a few loads of one mix of requests, and the excess
delays of each type become the table that ``delay_model: delay_map:FILE`` reads. All loads see the
same requests, and what sampling leaves out of order is put in order: at a higher rate no delay
becomes more likely to be short (isotonic regression over the rates, which keeps every CDF rising).

The mix of a tier follows from the association, and that from the delays: the map is made again
for the mix that it leads to until that stays put.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from testbed.errors import ScenarioError
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario, SimulationSpec
from testbed.seeds import generator
from testbed.simulation.engine_farm import NOISE
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.simulation.engine_network import engine_config
from testbed.simulation.queue import waits
from testbed.simulation.service import ServiceLaw, service_law
from testbed.simulation.system import System
from testbed.step_time import AnyStepTime
from testbed.theory.delay import get_delay_model
from testbed.theory.delay.base import DelayModel
from testbed.theory.delay.delay_map import MIX_TOLERANCE, DelayMap, DelayMapFile, DelayTable
from testbed.theory.operating_point import solve
from testbed.theory.prefill import prefill_time
from testbed.theory.system import System as TheorySystem
from testbed.tier_engine import profile_prefill

LOADS = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95)
"""Shares of a node's capacity at which it is simulated."""

_WARM_UP = 0.1
_LEAST_SHARE = 0.02
"""Share that a type gets at least in a simulated mix, so that its law is known at all."""


def delay_map(
    scenario: Scenario,
    *,
    requests: int = 100_000,
    seed: int = 0,
    loads: Sequence[float] = LOADS,
    step_time: AnyStepTime | Sequence[AnyStepTime] | None = None,
    rounds: int = 3,
    progress: Callable[[int], None] | None = None,
) -> DelayMapFile:
    """Tabulate the excess delay of every profile's node.

    Parameters
    ----------
    requests : simulated at each load, warm-up of a tenth included
    loads : shares of the node's capacity, rising within (0, 1)
    step_time : the nodes are engine models with it, or with each profile's; without, queues as
        ``simulation.node_model``
    rounds : most times that the map is made for the mix that it leads to
    progress : called with counts of simulated requests

    Raises
    ------
    ScenarioError
        Loads out of order, or too few requests for a tail.
    """
    shares = np.asarray(loads, dtype=float)
    if len(shares) == 0 or shares[0] <= 0 or shares[-1] >= 1 or (np.diff(shares) <= 0).any():
        raise ScenarioError(f"loads: {tuple(loads)} are not rising within (0, 1)")
    if requests < 1000:
        raise ScenarioError(f"requests: {requests} are too few for a table; give 1,000 or more")
    each = step_time if isinstance(step_time, Sequence) else [step_time] * len(scenario.profiles)
    mix = tier_mixes(scenario, get_delay_model("erlang_c"))
    for _ in range(max(1, rounds)):
        tables = [
            _table(scenario, s, mix[:, s], requests, seed, shares, each[s], progress)
            for s in range(len(scenario.profiles))
            if scenario.profiles[s].fraction > 0
        ]
        file = DelayMapFile(tables=tuple(tables))
        after = tier_mixes(scenario, DelayMap(file))
        if 0.5 * np.abs(after - mix).sum(axis=0).max() <= MIX_TOLERANCE / 2:
            break
        mix = after
    return file


def tier_mixes(scenario: Scenario, model: DelayModel) -> np.ndarray:
    """Share of each type in a tier's arrivals at the operating point, (Q, S) (Theory B2).

    A type gets at least 2 %; a tier that nobody uses gets the mix of all requests.
    """
    system = TheorySystem.from_scenario(scenario)
    point = solve(
        system,
        get_policy(scenario.policy),
        model,
        damping=scenario.solver.damping,
        max_iterations=scenario.solver.max_iterations,
    )
    flow = system.probability[:, None] * point.association
    total = flow.sum(axis=0)
    used = np.where(total > 0, flow / np.where(total > 0, total, 1), system.probability[:, None])
    mix = np.maximum(used, _LEAST_SHARE)
    return np.asarray(mix / mix.sum(axis=0))


@dataclass(frozen=True)
class _Node:
    """One node of a profile: capacity, requests/s, and excess delays of Poisson arrivals."""

    capacity: float
    excess: Callable[[np.ndarray], np.ndarray]


def _table(
    scenario: Scenario,
    s: int,
    mix: np.ndarray,
    requests: int,
    seed: int,
    shares: np.ndarray,
    step_time: AnyStepTime | None,
    progress: Callable[[int], None] | None,
) -> DelayTable:
    system, spec = System.of(scenario), scenario.simulation or SimulationSpec()
    name = scenario.profiles[s].name
    kind = generator(seed, "delay map", name, "types").choice(len(mix), requests, p=mix)
    gaps = generator(seed, "delay map", name, "arrivals").standard_exponential(requests)
    if step_time is not None:
        node = _engine_node(scenario, s, kind, seed, step_time)
        what = f"engine model, {step_time.kind} step time"
    else:
        law = service_law(spec)
        node = _queue_node(system, s, kind, mix, law, seed)
        what = f"FCFS queue, {law.name} service"
    skip = int(_WARM_UP * requests)
    samples: dict[float, dict[str, np.ndarray]] = {}
    for share in shares:
        rate = float(share * node.capacity)
        excess = node.excess(np.cumsum(gaps) / rate)
        samples[rate] = {q: excess[skip:][kind[skip:] == i] for i, q in enumerate(system.types)}
        if progress is not None:
            progress(requests)
    table = DelayTable.from_samples(
        name,
        dict(zip(system.types, map(float, mix), strict=True)),
        int(system.concurrency[s]),
        node.capacity,
        samples,
        source=f"{what}; {requests} requests a load, seed {seed}",
    )
    return table.model_copy(update={"cdf": _ordered(np.array(table.cdf))})


def _queue_node(
    system: System, s: int, kind: np.ndarray, mix: np.ndarray, law: ServiceLaw, seed: int
) -> _Node:
    own = system.occupancy[kind, s]
    work = law.work(generator(seed, "delay map", "service"), len(kind))
    mean = float(mix @ system.occupancy[:, s])
    service = work * (mean if law.by_tier else own)
    servers = int(system.concurrency[s])
    return _Node(servers / mean, lambda arrival: waits(arrival, service, servers))


def _engine_node(
    scenario: Scenario,
    s: int,
    kind: np.ndarray,
    seed: int,
    step_time: AnyStepTime,
) -> _Node:
    config = engine_config(scenario, s)
    prefill = profile_prefill(scenario, scenario.profiles[s])
    types = scenario.requests
    tokens = np.array([max(1, round(q.tokens)) for q in types])[kind]
    stop = 1 / np.array([max(1.0, q.output_tokens) for q in types])[kind]
    outputs = generator(seed, "delay map", "outputs").geometric(stop)
    outputs = np.minimum(outputs, config.max_model_len - tokens)
    if (outputs < 1).any():
        raise ScenarioError(
            f"engine.max_model_len: {config.max_model_len} is no longer than a prompt of "
            f"{tokens.max()} tokens"
        )
    reuse = np.floor([scenario.profiles[s].reusable[q.name] for q in types]).astype(int)[kind]

    def excess(arrival: np.ndarray) -> np.ndarray:
        trace = simulate_engine(config, step_time, arrival, tokens, outputs, reusable_tokens=reuse)
        if trace.rejected.any():
            raise ScenarioError(f"profiles[{s}]: its pool cannot hold every request type")
        cached = trace.cached_tokens.astype(float)
        delay = trace.ttft - prefill_time(prefill, tokens - cached, cached)
        return np.where(np.abs(delay) < NOISE, 0.0, delay)

    return _Node(saturation(config, step_time, tokens, outputs, reuse), excess)


def saturation(
    config: EngineConfig,
    step_time: AnyStepTime,
    tokens: np.ndarray,
    outputs: np.ndarray,
    reuse: np.ndarray,
) -> float:
    """Requests/s that an engine completes with everything waiting from the start.

    Between the first and last fifth of completions, where the batch is as full as it gets.
    """
    n = len(tokens)
    trace = simulate_engine(config, step_time, np.zeros(n), tokens, outputs, reusable_tokens=reuse)
    done = np.sort(trace.finished[~trace.rejected])
    low, high = int(0.2 * len(done)), int(0.8 * len(done))
    return float((high - low) / (done[high] - done[low]))


def _ordered(cdf: np.ndarray) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """CDFs (rates, types, seconds) made falling in the rate, as near to the samples as can be."""
    out = cdf.copy()
    for q in range(cdf.shape[1]):
        for w in np.flatnonzero((np.diff(cdf[:, q], axis=0) > 0).any(axis=0)):
            out[:, q, w] = isotonic_regression(cdf[:, q, w], increasing=False).x
    # Averages may differ in the last digit from what they were made of.
    out = np.clip(np.maximum.accumulate(out, axis=2), 0.0, 1.0)
    return tuple(tuple(tuple(map(float, row)) for row in at_rate) for at_rate in out)
