"""Deployment: the replicas of one scenario, started, watched, restarted and stopped."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from cluster.devices import on_device
from cluster.engines.base import EngineFacts, Placement
from cluster.wire import Link, ReplicaLost
from testbed.errors import ClusterError, EngineError, ScenarioError
from testbed.scenario import EngineSpec, Profile, Scenario
from testbed.tier_engine import profile_prefill
from testbed.workload.stream import RequestStream

LOOPBACK = "127.0.0.1"
START_TIMEOUT_SECONDS = 600.0


@dataclass
class Node:
    """One replica as the router sees it."""

    id: int
    profile: int
    actor: Any
    link: Link
    facts: EngineFacts
    clock_offset: float
    clock_error: float
    metrics_port: int
    host: str
    pids: list[int]
    alive: bool = True
    pinned: dict[str, Any] = field(default_factory=dict)


def replica_profiles(scenario: Scenario, replicas: int) -> list[int]:
    """Profile index of each replica, counts proportional to π_s by largest remainder.

    Raises
    ------
    ScenarioError
        There are fewer replicas than profiles with nodes.
    """
    fractions = np.array([s.fraction for s in scenario.profiles])
    needed = int(np.count_nonzero(fractions))
    if replicas < needed:
        raise ScenarioError(
            f"engine.replicas: {replicas} replicas cannot stand for {needed} profiles with nodes"
        )
    quota = fractions * replicas
    counts = np.where(fractions > 0, np.maximum(1, np.floor(quota)), 0).astype(int)
    while counts.sum() > replicas:
        over = np.where(counts > 1, counts - quota, -np.inf)
        counts[int(np.argmax(over))] -= 1
    while counts.sum() < replicas:
        counts[int(np.argmax(quota - counts))] += 1
    return [s for s, n in enumerate(counts) for _ in range(n)]


def replica_spec(scenario: Scenario, profile: Profile) -> EngineSpec:
    """The engine of one profile's replicas: its own kind and calibration, a pool of M bytes.

    c_s is not forced on the engine: the pool less what is pinned is what bounds it, as A9 says.
    """
    spec = scenario.engine
    if spec is None:
        raise ScenarioError("engine: a run needs this section")
    changes: dict[str, Any] = {}
    if profile.engine is not None:
        changes["name"] = profile.engine
    if profile.calibration is not None:
        changes["calibration"] = profile.calibration
    if spec.num_blocks is None and spec.device is None:
        # One block more than M holds: the engine keeps one for itself (vLLM's null block).
        block_bytes = scenario.memory.per_token * spec.block_size
        changes["num_blocks"] = int(scenario.memory.capacity // block_bytes) + 1
    return spec.model_copy(update=changes)


class Deployment:
    """Replicas of a scenario on the connected Ray cluster.

    Use :func:`deployed`, which stops everything on success, error and Ctrl-C.
    """

    def __init__(
        self,
        scenario: Scenario,
        *,
        log_dir: str | Path | None = None,
        seed: int = 0,
        bind: str = LOOPBACK,
    ) -> None:
        scenario = on_device(scenario)
        if scenario.engine is None:
            raise ScenarioError("engine: a run needs this section")
        self.scenario = scenario
        self.nodes: list[Node] = []
        self.restarts = 0
        self._profiles = replica_profiles(scenario, scenario.engine.replicas)
        self._log_dir = None if log_dir is None else Path(log_dir).absolute()
        self._seed = seed
        self._bind = bind
        self._secret = secrets.token_hex(16)
        self._actors: list[Any] = []
        self._chains: dict[int, list[np.ndarray]] = {}

    # -- start --

    def start(self, progress: Callable[[str], None] = lambda _: None) -> None:
        """Start every replica at once and wait until all serve.

        Raises
        ------
        ClusterError
            The cluster has too few cores or GPUs, or a replica does not come up.
        """
        import ray

        specs = [replica_spec(self.scenario, self.scenario.profiles[s]) for s in self._profiles]
        self._check_resources(specs)
        progress(f"starting {len(specs)} replicas")
        self._actors = [self._create(i, spec) for i, spec in enumerate(specs)]
        replies = [a.start.remote(self._bind) for a in self._actors]
        try:
            started = ray.get(replies, timeout=START_TIMEOUT_SECONDS)
        except ray.exceptions.GetTimeoutError:
            raise ClusterError(f"replicas did not start in {START_TIMEOUT_SECONDS:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"a replica died while starting: {_first_line(error)}") from None
        for i, answer in enumerate(started):
            self.nodes.append(self._node(i, self._actors[i], answer))
        clocks = sorted({n.facts.clock for n in self.nodes})
        if len(clocks) > 1:
            raise ClusterError(
                f"profiles[*].engine: replicas in {' and in '.join(clocks)} cannot share a run"
            )

    def _check_resources(self, specs: list[EngineSpec]) -> None:
        import ray

        have = ray.cluster_resources()
        gpus = sum(s.gpus_per_replica for s in specs)
        if gpus > have.get("GPU", 0):
            raise ClusterError(
                f"engine.gpus_per_replica: {gpus:g} GPUs are needed, the cluster has "
                f"{have.get('GPU', 0):g}"
            )
        cores = sum(_cores(s) for s in specs)
        if cores > have.get("CPU", 0):
            raise ClusterError(
                f"engine.replicas: {len(specs)} computing CPU replicas need {cores:g} cores, the "
                f"cluster has {have.get('CPU', 0):g}"
            )

    def _create(self, i: int, spec: EngineSpec) -> Any:
        import ray

        from cluster.replica import Replica

        profile = self.scenario.profiles[self._profiles[i]]
        cores = sorted(os.sched_getaffinity(0))
        on_cpu = spec.gpus_per_replica == 0
        step_log = None if self._log_dir is None else str(self._log_dir / f"steps-{i}.bin")
        placement = Placement(
            core=cores[i % len(cores)] if on_cpu else None,
            step_log=step_log,
            seed=self._seed,
        )
        options: dict[str, Any] = {
            "num_cpus": _cores(spec),
            "num_gpus": spec.gpus_per_replica,
            "max_concurrency": 1000,
            "max_restarts": 0,
        }
        if environment := engine_environment(spec):
            options["runtime_env"] = environment
        return (
            ray.remote(Replica)
            .options(**options)
            .remote(
                spec,
                placement,
                profile.name,
                profile_prefill(self.scenario, profile),
                self.scenario.routing.telemetry_window,
                self._secret,
            )
        )

    def _node(self, i: int, actor: Any, answer: dict[str, Any]) -> Node:
        if "error" in answer:
            raise EngineError(answer["error"])
        local = answer["host"] == socket.gethostname()
        if not local and self._bind == LOOPBACK:
            raise ClusterError(
                f"replica {i} runs on {answer['host']}: bind to a reachable address (--bind)"
            )
        host = self._bind if local or self._bind != "0.0.0.0" else answer["host"]
        link = Link(host if host != "0.0.0.0" else LOOPBACK, answer["port"], self._secret)
        # One machine has one monotonic clock; another one's is measured.
        offset, error = (0.0, 0.0) if local else link.clock_offset()
        return Node(
            id=i,
            profile=self._profiles[i],
            actor=actor,
            link=link,
            facts=answer["facts"],
            clock_offset=offset,
            clock_error=error,
            metrics_port=answer["metrics_port"],
            host=answer["host"],
            pids=answer["pids"],
        )

    # -- profiles --

    def adopt(self, scenario: Scenario) -> None:
        """Serve another scenario with the replicas that stand: same engine, same replica counts.

        Profiles may hold other prefixes, under other names, as long as nothing is pinned.

        Raises
        ------
        ScenarioError
            The scenario needs other replicas than those that run.
        """
        import ray

        scenario = on_device(scenario)
        if _served_by(scenario) != _served_by(self.scenario):
            raise ScenarioError("engine: not the engine of the running replicas")
        if replica_profiles(scenario, len(self.nodes)) != self._profiles:
            raise ScenarioError("profiles[*].fraction: other replica counts than those that run")
        if [s.engine for s in scenario.profiles] != [s.engine for s in self.scenario.profiles]:
            raise ScenarioError("profiles[*].engine: not the engines of the running replicas")
        if self._chains and scenario.profiles != self.scenario.profiles:
            raise ScenarioError("profiles: the running replicas have pinned other profiles")
        self.scenario = scenario
        ray.get(
            [
                n.actor.adopt.remote(
                    scenario.profiles[n.profile].name,
                    profile_prefill(scenario, scenario.profiles[n.profile]),
                    scenario.routing.telemetry_window,
                )
                for n in self.nodes
            ]
        )

    def measure(
        self,
        job: Callable[..., Any],
        *,
        progress: Callable[[str, int, int], None] = lambda *_: None,
        each: Callable[[int], dict[str, Any]] = lambda _: {},
        **options: Any,
    ) -> list[Any]:
        """Run ``job(engine, facts, …)`` on every replica at once; one result per node.

        Parameters
        ----------
        each : options that differ between nodes, by node id
        progress : (stage, done, total) of the first node, polled twice a second

        Raises
        ------
        EngineError
            A job ended with one of the testbed's own errors.
        """
        import ray

        replies = [n.actor.measure.remote(job, **{**options, **each(n.id)}) for n in self.nodes]
        pending = replies
        while pending:
            _, pending = ray.wait(pending, num_returns=len(pending), timeout=0.5)
            progress(*ray.get(self.nodes[0].actor.progress.remote()))
        results = ray.get(replies)
        for result in results:
            if isinstance(result, dict) and "error" in result:
                raise EngineError(result["error"])
        return list(results)

    def pin(self, stream: RequestStream) -> None:
        """Pin on every node its profile's chains, replacing nothing: call once per deployment."""
        import ray

        self._chains = {s: stream.pinned(s) for s in set(self._profiles)}
        replies = ray.get([n.actor.pin.remote(self._chains[n.profile]) for n in self.nodes])
        for node, reply in zip(self.nodes, replies, strict=True):
            if "error" in reply:
                name = self.scenario.profiles[node.profile].name
                raise EngineError(f"profile {name!r}: {reply['error']}")
            node.pinned = reply

    def forget(self) -> None:
        """Leave only pinned prefixes in every cache."""
        import ray

        ray.get([n.actor.forget.remote() for n in self.nodes if n.alive])

    # -- health --

    def restart(self, node: Node) -> None:
        """Replace a dead replica by a new one with its profile pinned again (blocks)."""
        import ray

        node.alive = False
        node.link.close()
        with suppress(Exception):  # it may be dead already, in any way
            ray.kill(node.actor)
        if node.host == socket.gethostname():
            _end_processes(node.pids)
        spec = replica_spec(self.scenario, self.scenario.profiles[node.profile])
        actor = self._create(node.id, spec)
        self._actors[node.id] = actor
        answer = ray.get(actor.start.remote(self._bind), timeout=START_TIMEOUT_SECONDS)
        fresh = self._node(node.id, actor, answer)
        reply = ray.get(actor.pin.remote(self._chains.get(node.profile, [])))
        if "error" in reply:
            raise EngineError(reply["error"])
        node.actor, node.link, node.pids = fresh.actor, fresh.link, fresh.pids
        node.facts, node.metrics_port, node.pinned = fresh.facts, fresh.metrics_port, reply
        node.clock_offset, node.clock_error = fresh.clock_offset, fresh.clock_error
        self.restarts += 1
        node.alive = True

    # -- stop --

    def stop(self) -> None:
        """Stop every replica and make sure that no process of theirs is left."""
        import ray

        for node in self.nodes:
            with suppress(ReplicaLost):
                node.link.close()
        stopping = []
        here = socket.gethostname()
        pids = [pid for node in self.nodes if node.host == here for pid in node.pids]
        for actor in self._actors:
            with suppress(ray.exceptions.RayError):
                stopping.append(actor.stop.remote())
        with suppress(ray.exceptions.RayError):
            ray.wait(stopping, num_returns=len(stopping), timeout=20)
        for actor in self._actors:
            with suppress(ray.exceptions.RayError):
                ray.kill(actor)
        _end_processes(pids)
        self.nodes = []
        self._actors = []


@contextmanager
def deployed(
    scenario: Scenario, *, progress: Callable[[str], None] = lambda _: None, **options: Any
) -> Iterator[Deployment]:
    """A started deployment, stopped at the end of the block whatever happens in it."""
    deployment = Deployment(scenario, **options)
    try:
        deployment.start(progress)
        yield deployment
    finally:
        deployment.stop()


def _served_by(scenario: Scenario) -> EngineSpec | None:
    """The engine as it was started; the calibration that names it may come later."""
    spec = scenario.engine
    return None if spec is None else spec.model_copy(update={"calibration": None})


def engine_environment(spec: EngineSpec) -> dict[str, Any]:
    """Ray's runtime environment of an engine that lives in a virtual environment of its own."""
    if spec.name != "sglang":
        return {}
    from cluster.engines.doctor import engine_python

    python = engine_python(spec.name)
    return {} if python == sys.executable else {"py_executable": python}


def _cores(spec: EngineSpec) -> float:
    """Cores that a replica computes on: none on a GPU, in device time, or without a model."""
    computes = spec.gpus_per_replica == 0 and spec.device is None and spec.name != "emulated"
    return 1.0 if computes else 0.0


def _end_processes(pids: list[int], patience: float = 5.0) -> None:
    """Wait for processes of this machine to end, then end them."""
    own = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            own.append(psutil.Process(pid))
    _, left = psutil.wait_procs(own, timeout=patience)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=patience)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), repr(error))
