"""Experiment: one scenario on a cluster, from nothing started to nothing left running."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.deployment import LOOPBACK, deployed
from cluster.devices import on_device
from cluster.metrics import RouterMetrics
from cluster.replay import Progress
from cluster.run import run
from cluster.session import ray_session
from testbed.errors import ScenarioError
from testbed.outcome import Outcome, write_atomically
from testbed.routing.policies import get_policy
from testbed.scenario import EngineSpec, Scenario
from testbed.workload.stream import RequestStream
from testbed.workload.trace_stream import build_stream


def stream_of(scenario: Scenario, rate: float, count: int, seed: int) -> RequestStream:
    """The scenario's own requests, as :func:`cluster.run.run` asks for them."""
    return build_stream(scenario, rate=rate, count=count, seed=seed)


def unmeasured(name: str, engine: EngineSpec, profiles: Mapping[str, str | None]) -> Scenario:
    """Replicas to start before anything is known of their engine: all else is a placeholder.

    ``profiles`` : {profile: its own engine, or None for that of ``engine``}
    """
    share = 1.0 / len(profiles)
    return Scenario.from_dict(
        {
            "name": name,
            "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
            "nodes": {"density": 1.0},
            "demand": {"intensity": 1.0},
            "prefill": {"linear": 1e-4},
            "memory": {"capacity": 1e12, "per_sequence": 1e9, "per_token": 1.0},
            "requests": [{"name": "any", "probability": 1.0, "tokens": 1}],
            "profiles": [
                {"name": n, "fraction": share, "persistent_bytes": 0, "reusable": {"any": 0}}
                | ({"engine": own} if own else {})
                for n, own in profiles.items()
            ],
            "engine": engine.model_dump(exclude_none=True),
        },
        name,
    )


def run_scenario(
    scenario: Scenario,
    *,
    requests: int,
    seed: int = 0,
    out: str | Path | None = None,
    resume: bool = False,
    bind: str = LOOPBACK,
    metrics_port: int | None = None,
    say: Callable[[str], None] = lambda _: None,
    progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """Start replicas, pin the profiles, replay, stop; the whole of ``testbed run``.

    Parameters
    ----------
    out : folder that gets scenario.yaml, records.jsonl (as requests end), outcome.json and the
        step logs; a folder that holds records already is refused unless ``resume``
    metrics_port : router's Prometheus port on loopback; ``None`` for a free one

    Raises
    ------
    TestbedError
        One line about what is wrong; nothing is left running.
    """
    if scenario.engine is None:
        raise ScenarioError("engine: a run needs this section")
    get_policy(scenario.policy)
    scenario = on_device(scenario)
    assert scenario.engine is not None
    folder = None if out is None else Path(out)
    records = None
    if folder is not None:
        records = folder / "records.jsonl"
        if records.exists() and not resume:
            raise ScenarioError(f"--out: {folder} holds records of a run; --resume goes on with it")
        kept = folder / "scenario.yaml"
        if resume and kept.exists() and Scenario.load(kept) != scenario:
            raise ScenarioError(f"--resume: {kept} is another scenario than the one given")
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(kept, scenario.to_yaml())
    # A stream that cannot be built is found before anything is started.
    rate = scenario.demand.intensity * scenario.engine.replicas / scenario.nodes.density
    stream = stream_of(scenario, rate, requests, seed)
    metrics = RouterMetrics()
    try:
        say(f"metrics at http://127.0.0.1:{_serve(metrics, metrics_port)}/metrics")
        with ray_session() as cluster:
            say(f"using {cluster}")
            with deployed(scenario, progress=say, log_dir=folder, seed=seed, bind=bind) as nodes:
                nodes.pin(stream)
                outcome = run(
                    scenario,
                    nodes,
                    stream_of,
                    requests=requests,
                    seed=seed,
                    records_path=records,
                    resume=resume,
                    metrics=metrics,
                    progress=progress,
                )
    finally:
        metrics.close()
    if folder is not None:
        outcome.save(folder / "outcome.json")
    return outcome


def _serve(metrics: RouterMetrics, port: int | None) -> int:
    try:
        return metrics.serve(port or 0)
    except OSError as error:
        raise ScenarioError(f"--metrics-port: {port}: {error.strerror}") from None
