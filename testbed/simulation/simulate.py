"""simulate: a scenario in virtual time, answered like ``predict`` and ``run``."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any, Literal

import numpy as np

import testbed
from testbed.errors import ScenarioError, TestbedError
from testbed.outcome import Outcome
from testbed.radio import radio_model
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario, SimulationSpec
from testbed.simulation.engine_network import simulate_engines
from testbed.simulation.network import simulate_network
from testbed.simulation.requests import poisson_types
from testbed.simulation.service import service_law
from testbed.simulation.spatial import simulate_tiers
from testbed.simulation.summary import summarise
from testbed.simulation.system import System
from testbed.simulation.tally import Tally
from testbed.step_time import OperatorStepTime, StepTime
from testbed.theory import predict
from testbed.theory.delay import get_delay_model
from testbed.theory.operating_point import solve
from testbed.theory.system import System as TheorySystem
from testbed.tier_engine import tier_step_times

Space = Literal["palm", "torus"]
Progress = Callable[[int], None]
"""Called with the number of requests completed since the last call."""


def simulate(
    scenario: Scenario,
    *,
    requests: int,
    seed: int = 0,
    replications: int = 1,
    space: Space | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
    step_time: StepTime | OperatorStepTime | None = None,
) -> Outcome:
    """Simulate ``requests`` measured requests of ``scenario``; the same seed, the same outcome.

    Parameters
    ----------
    requests : measured requests of each replication; the warm-up comes on top
    seed : of every random stream; policies under one seed see the same requests
    replications : independent runs, joined before the intervals are computed
    space : overrides ``simulation.space``
    executor : runs the replications; default: a process each when there are several
    progress : called with counts of completed requests (of finished replications when several)
    step_time : of the nodes' engine, for ``simulation.node_model: engine``; default: those
        of ``engine.calibration`` and ``profiles[*].calibration``

    Raises
    ------
    ScenarioError
        The scenario or an argument cannot be simulated.
    """
    if requests < 2:
        raise ScenarioError(f"requests: {requests} is fewer than 2")
    if replications < 1:
        raise ScenarioError(f"replications: {replications} is fewer than 1")
    if seed < 0:
        raise ScenarioError(f"seed: {seed} is negative")
    if space is not None:
        spec = scenario.simulation or SimulationSpec()
        changed = {**spec.model_dump(mode="json", exclude_none=True), "space": space}
        scenario = scenario.replace(simulation=changed)
    system = System.of(scenario)
    started = time.perf_counter()
    if replications == 1:
        parts = [replicate(scenario, requests, seed, 0, progress, step_time)]
    elif executor is not None:
        parts = _gather(executor, scenario, requests, seed, replications, progress, step_time)
    else:
        with ProcessPoolExecutor(replications, mp_context=get_context("spawn")) as pool:
            parts = _gather(pool, scenario, requests, seed, replications, progress, step_time)
    seconds = time.perf_counter() - started
    tally, random_layout = parts[0].tally, parts[0].random_layout
    if len(parts) > 1:
        tally = tally.merge([p.tally for p in parts[1:]], whole=random_layout)
    facts = dict(parts[0].facts)
    facts["replications"] = replications
    facts["warm_up"] = {
        "requests": parts[0].warm_up,
        "dropped_by_mser": [p.dropped for p in parts],
        "stationary": all(p.stationary for p in parts),
    }
    if random_layout:
        facts["intervals"] = (
            "over layouts of nodes, one a replication"
            if len(parts) > 1
            else "for this layout of nodes; replications draw others"
        )
    warnings = list(parts[0].warnings)
    if not facts["warm_up"]["stationary"]:
        warnings.append("TTFT still drifts in the second half of a run: not stationary")
    outcome = summarise(
        scenario,
        system,
        tally,
        seed=seed,
        warnings=tuple(warnings),
        extra={"simulation": facts},
        stream=parts[0].stream if len(parts) == 1 else None,
        environment={
            "testbed": testbed.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "seconds": round(seconds, 3),
        },
    )
    beside = beside_theory(scenario, outcome)
    return outcome.model_copy(update={"extra": {**outcome.extra, "theory": beside}})


@dataclass
class Replication:
    """One run: its tally and what has to be said of it. Picklable."""

    tally: Tally
    warm_up: int
    dropped: int = 0
    stationary: bool = True
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    random_layout: bool = False
    stream: str | None = None


def replicate(
    scenario: Scenario,
    requests: int,
    seed: int,
    number: int,
    progress: Progress | None = None,
    step_time: StepTime | OperatorStepTime | None = None,
) -> Replication:
    """Replication ``number`` of a scenario, in this process."""
    spec = scenario.simulation or SimulationSpec()
    system = System.of(scenario)
    warm_up = spec.warm_up
    if warm_up is None:
        # A trace is replayed from an empty network, as it would be on the cluster.
        replay = scenario.workload is not None and scenario.workload.trace is not None
        warm_up = 0 if replay else max(1000, requests // 5)
    tally = Tally(requests, len(system.types), len(system.profiles), scenario.targets.coverage_at)
    run = Replication(tally, warm_up)
    if number:
        # Replication 0 keeps the seed itself, so that one replication is the plain run.
        seed = int(
            np.random.SeedSequence(seed, spawn_key=(number,)).generate_state(1, np.uint64)[0]
        )
    policy = get_policy(scenario.policy)
    wait, warning = _advertised(scenario, spec)
    if spec.node_model == "engine":
        engines = simulate_engines(
            scenario,
            system,
            tally,
            step_time=step_time or _calibrated(scenario),
            wait=wait,
            warm_up=warm_up,
            seed=seed,
            progress=progress,
        )
        run.facts, run.warnings = engines.facts, [*warning, *engines.warnings]
        run.random_layout, run.stream = engines.random_layout, engines.stream
        run.facts["node_model"] = "engine"
        run.dropped, run.stationary = tally.trim()
        return run
    law = service_law(spec)
    if _independent_tiers(scenario, spec, wait):
        assert wait is not None
        simulate_tiers(
            system,
            radio_model(scenario.radio, scenario.nodes.density),
            policy,
            wait,
            law,
            tally,
            warm_up=warm_up,
            seed=seed,
            progress=progress,
        )
        run.facts = {
            "space": "palm: exact nearest distances, one representative node per tier",
            "waits": f"tier means of predict ({scenario.delay_model})"
            if policy.load_aware
            else "not looked at",
        }
    else:
        network = simulate_network(
            scenario,
            system,
            law,
            tally,
            wait=wait,
            warm_up=warm_up,
            seed=seed,
            progress=progress,
        )
        run.facts, run.warnings = network.facts, [*warning, *network.warnings]
        run.random_layout, run.stream = network.random_layout, network.stream
    run.facts["node_model"] = law.name
    run.dropped, run.stationary = tally.trim()
    return run


def beside_theory(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """What the analytical model says of each figure with an interval, and how far off it is.

    Where the model's assumptions hold, most predictions lie inside; where they do not (cells of
    different size, another service law, waits of single nodes), ``error`` is its error.
    """
    try:
        predicted = predict(scenario)
    except TestbedError as error:
        return {"reason": f"no prediction: {error}"}
    figures: dict[str, Any] = {}
    for path, (low, high) in outcome.confidence.items():
        said, seen = predicted.figure(path), outcome.figure(path)
        figures[path] = {
            "predicted": said,
            "simulated": seen,
            "error": (said - seen) / seen if seen and np.isfinite(said) else None,
            "inside": low <= said <= high,
        }
    inside = sum(f["inside"] for f in figures.values())
    return {
        "delay_model": predicted.delay_model,
        "inside": f"{inside} of {len(figures)} predictions lie in the 95 % interval",
        "figures": figures,
    }


def _advertised(
    scenario: Scenario, spec: SimulationSpec
) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The waits that the policy is told, (Q, S) seconds, or None where nodes tell their own; and
    what has to be said of that."""
    if not get_policy(scenario.policy).load_aware:
        return np.zeros((len(scenario.requests), len(scenario.profiles))), ()
    queues_in_palm = spec.space == "palm" and spec.node_model != "engine"
    if spec.waits == "node" or (spec.waits is None and not queues_in_palm):
        return None, ()
    # Whatever is wrong with the scenario's names and files is an error under any waits.
    get_delay_model(scenario.delay_model)
    try:
        return theory_waits(scenario), ()
    except ScenarioError as error:
        if spec.waits == "theory":
            raise
        return None, (f"nodes advertise their own waits, since theory has none to tell: {error}",)


def _independent_tiers(scenario: Scenario, spec: SimulationSpec, wait: np.ndarray | None) -> bool:
    """Nothing couples the tiers: fixed waits, Poisson arrivals, and nodes that stay as they are."""
    return (
        spec.space == "palm"
        and wait is not None
        and poisson_types(scenario)
        and spec.failures is None
        and spec.catalogue_period is None
        and scenario.routing.admission_high is None
    )


def _calibrated(scenario: Scenario) -> tuple[StepTime | OperatorStepTime, ...]:
    steps = tier_step_times(scenario)
    if steps is None:
        raise ScenarioError(
            "engine.calibration: simulation.node_model engine needs a calibrated step time"
        )
    return steps


def theory_waits(scenario: Scenario) -> np.ndarray:
    """The mean waits W̄ that ``predict`` finds, (Q, S) seconds: what its policy is told.

    Raises
    ------
    ScenarioError
        There is no stable operating point to advertise.
    """
    solver = scenario.solver
    point = solve(
        TheorySystem.from_scenario(scenario),
        get_policy(scenario.policy),
        get_delay_model(scenario.delay_model),
        damping=solver.damping,
        tolerance=solver.tolerance,
        max_iterations=solver.max_iterations,
    )
    if not (point.feasible and point.converged):
        raise ScenarioError(
            f"no stable operating point to advertise ({point.reason or 'not converged'})"
        )
    return point.wait


def _gather(
    executor: Executor,
    scenario: Scenario,
    requests: int,
    seed: int,
    replications: int,
    progress: Progress | None,
    step_time: StepTime | OperatorStepTime | None,
) -> list[Replication]:
    futures = [
        executor.submit(replicate, scenario, requests, seed, k, None, step_time)
        for k in range(replications)
    ]
    parts = []
    for future in futures:
        parts.append(future.result())
        if progress is not None:
            progress(requests)
    return parts
