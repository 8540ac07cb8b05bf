"""Job: from nothing started to a record on disk, on this machine or on a Ray cluster's devices."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from calibration.check import check
from calibration.design import Effort
from calibration.facts import cpu_details
from calibration.load import RequestClass
from calibration.measure import FALLBACK, calibrate
from calibration.record import Calibration
from cluster.engines import make_engine
from cluster.engines.base import Placement
from testbed.errors import ClusterError, EngineError, TestbedError
from testbed.scenario import EngineSpec, Scenario

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Job:
    """What to calibrate, how thoroughly, and what to pin while doing so."""

    spec: EngineSpec
    effort: Effort = "quick"
    seed: int = 0
    max_prompt: int | None = None
    reference: tuple[int, int] | None = None
    profiles: Mapping[str, Sequence[np.ndarray]] = field(default_factory=lambda: {FALLBACK: []})
    classes: Mapping[str, Sequence[RequestClass]] = field(default_factory=dict)
    record: Calibration | None = None
    """Given: check this record instead of making one."""

    def options(self) -> dict[str, Any]:
        if self.record is not None:
            return {"record": self.record, "seed": self.seed}
        return {
            "effort": self.effort,
            "seed": self.seed,
            "max_prompt": self.max_prompt,
            "reference": self.reference,
            "profiles": self.profiles,
            "classes": self.classes,
        }


def spec_of(record: Calibration, file: Path) -> EngineSpec:
    """The engine that a record was measured on, as far as the record says.

    An emulated one is paced by the record in ``file`` itself.
    """
    engine = record.engine
    stated = {
        "num_blocks": engine.num_blocks,
        "block_size": engine.block_size,
        "token_budget": engine.token_budget,
        "max_sequences": engine.max_sequences,
        "max_model_len": engine.max_model_len,
        "dtype": engine.dtype,
        "calibration": str(file) if engine.name == "emulated" else None,
    }
    known = {k: v for k, v in stated.items() if v is not None}
    return EngineSpec(name=engine.name, model=record.model.name, **known)  # type: ignore[arg-type]


def job_of(scenario: Scenario, spec: EngineSpec, **changes: Any) -> Job:
    """A job that pins a scenario's profiles and loads each with the scenario's own request types.

    m_run and c_s speak of the mean request. Types keep their lengths; which of a profile's chains
    they share does not matter to time, so all are put behind the longest.
    """
    from testbed.workload.trace_stream import build_stream

    stream = build_stream(scenario, rate=1.0, count=max(2, len(scenario.requests)), seed=0)
    profiles, classes = {}, {}
    block = spec.block_size
    for s, profile in enumerate(scenario.profiles):
        chains = stream.pinned(s)
        profiles[profile.name] = chains
        longest = max((len(c) for c in chains), default=0)
        mix = []
        for q in scenario.requests:
            cached = int(min(profile.reusable[q.name], longest)) // block * block
            new = max(1, round(q.tokens) - cached)
            mix.append(RequestClass(q.name, q.probability, new, cached, max(1.0, q.output_tokens)))
        classes[profile.name] = tuple(c for c in mix if c.weight > 0)
    mean = [
        max(1, round(sum(q.probability * getattr(q, field) for q in scenario.requests)))
        for field in ("tokens", "output_tokens")
    ]
    return Job(
        spec=spec, profiles=profiles, classes=classes, reference=(mean[0], mean[1]), **changes
    )


# --- On this machine ---------------------------------------------------------------------------


def run_here(
    job: Job, folder: Path | None = None, progress: Progress | None = None, core: int | None = None
) -> Calibration | dict[str, Any]:
    """Start the engine in this process, measure, stop it whatever happens.

    ``folder`` holds the journal and the step log; what is there already is gone on with.
    """
    return asyncio.run(_alone(job, folder, progress, core))


async def _alone(
    job: Job, folder: Path | None, progress: Progress | None, core: int | None
) -> Calibration | dict[str, Any]:
    task = asyncio.current_task()
    assert task is not None
    # A job that is told to end must not leave its engine behind.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    bench = Bench(job.spec, None if folder is None else str(folder), core)
    try:
        if progress is not None:
            progress("starting the engine", 0, 1)
        await bench.start()
        return await bench.measure(job, progress)
    finally:
        await bench.stop()


class Bench:
    """One engine to measure on; as a Ray actor or in this process."""

    def __init__(self, spec: EngineSpec, folder: str | None, core: int | None = None) -> None:
        self._folder = folder
        step_log = None
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
            step_log = str(Path(folder) / "steps.bin")
        self._engine = make_engine(spec, Placement(core=core, step_log=step_log))
        self._facts: Any = None
        self._progress: tuple[str, int, int] = ("starting the engine", 0, 1)

    async def start(self) -> None:
        self._facts = await self._engine.start()

    async def measure(self, job: Job, progress: Progress | None = None) -> Any:
        def note(stage: str, done: int, total: int) -> None:
            self._progress = (stage, done, total)
            if progress is not None:
                progress(stage, done, total)

        options = job.options()
        if job.record is not None:
            return await check(self._engine, self._facts, progress=note, **options)
        return await calibrate(
            self._engine, self._facts, progress=note, resume_dir=self._folder, **options
        )

    async def progress(self) -> tuple[str, int, int]:
        return self._progress

    async def attempt(self, job: Job) -> Any:
        """Start and measure; an error a person can act on comes back as its line."""
        try:
            await self.start()
            return await self.measure(job)
        except TestbedError as error:
            return {"error": str(error)}

    async def stop(self) -> None:
        await self._engine.stop()


# --- On a Ray cluster --------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """A place for one engine: a kind of device and a node that has it."""

    kind: str
    node: str
    gpu: bool

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.kind.lower()).strip("-") or "device"


def run_on_cluster(
    job: Job, folder: Path | None = None, progress: Progress | None = None, core: int | None = None
) -> dict[str, Calibration | dict[str, Any]]:
    """One engine on each kind of device that the connected Ray cluster has, all at once.

    Returns
    -------
    Kind -> record (or the answer of a check).

    Raises
    ------
    ClusterError
        The cluster has no device for this engine, or an actor died.
    EngineError
        An engine could not start or measure.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from cluster.deployment import engine_environment

    devices = find_devices(job.spec)
    actors = {}
    try:
        for device in devices:
            options: dict[str, Any] = {
                "num_cpus": 0 if device.gpu else 1,
                "num_gpus": (job.spec.gpus_per_replica or 1) if device.gpu else 0,
                "max_concurrency": 1000,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(device.node, soft=False),
            }
            if environment := engine_environment(job.spec):
                options["runtime_env"] = environment
            where = None if folder is None else str((folder / device.slug).absolute())
            actors[device.kind] = ray.remote(Bench).options(**options).remote(job.spec, where, core)
        pending = {actor.attempt.remote(job): kind for kind, actor in actors.items()}
        answers: dict[str, Any] = {}
        while pending:
            done, _ = ray.wait(list(pending), timeout=1.0)
            for reference in done:
                answers[pending.pop(reference)] = ray.get(reference)
            for kind in pending.values():
                if progress is not None:
                    stage, at, total = ray.get(actors[kind].progress.remote())
                    progress(f"{kind}: {stage}" if len(devices) > 1 else stage, at, total)
        for kind, answer in answers.items():
            if isinstance(answer, dict) and "error" in answer:
                raise EngineError(f"{kind}: {answer['error']}")
        return answers
    except ray.exceptions.RayActorError as error:
        reason = next((x for x in str(error).splitlines() if x.strip()), repr(error))
        raise ClusterError(f"an engine's actor died: {reason}") from None
    finally:
        _stop(list(actors.values()))


def _stop(actors: list[Any]) -> None:
    import ray

    stops = [actor.stop.remote() for actor in actors]
    if stops:
        ray.wait(stops, num_returns=len(stops), timeout=60.0)
    for actor in actors:
        ray.kill(actor)


def find_devices(spec: EngineSpec) -> list[Device]:
    """One device of each kind: GPUs where the cluster has them and the engine computes, else CPUs.

    A GPU's kind is Ray's accelerator type, a CPU's its model name.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [n for n in ray.nodes() if n["Alive"]]
    computes = spec.name != "emulated" and spec.device is None
    found: dict[str, Device] = {}
    if computes:
        for node in nodes:
            if node["Resources"].get("GPU", 0) >= max(1.0, spec.gpus_per_replica):
                types = [
                    r.partition(":")[2]
                    for r in node["Resources"]
                    if r.startswith("accelerator_type:")
                ]
                kind = types[0] if types else "GPU"
                found.setdefault(kind, Device(kind, node["NodeID"], True))
    if found:
        return list(found.values())
    if spec.gpus_per_replica > 0:
        raise ClusterError(f"no node has {spec.gpus_per_replica:g} GPUs")
    for node in nodes:
        if node["Resources"].get("CPU", 0) < 1:
            continue
        place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        details = ray.get(
            ray.remote(cpu_details).options(num_cpus=0, scheduling_strategy=place).remote()
        )
        kind = details.get("model", "CPU")
        found.setdefault(kind, Device(kind, node["NodeID"], False))
    if not found:
        raise ClusterError("no node of the cluster has a core for an engine")
    return list(found.values())


# --- Files -------------------------------------------------------------------------------------


def partial_folder(out: Path) -> Path:
    """Where a calibration keeps its samples until it is done."""
    return out.with_name(f"{out.stem}.partial")


def keep_samples(out: Path) -> Path | None:
    """Give the samples of a finished calibration their lasting name; the last ones go."""
    partial = partial_folder(out)
    if not partial.exists():
        return None
    lasting = out.with_name(f"{out.stem}.samples")
    if lasting.exists():
        shutil.rmtree(lasting)
    partial.rename(lasting)
    return lasting


def save_all(out: Path, records: Mapping[str, Calibration], *, page: bool = True) -> list[Path]:
    """Record, page and plots of each kind; the kind joins the name where there are several."""
    from calibration.report import save_plots, write_calibration_report

    written = []
    for kind, record in records.items():
        slug = Device(kind, "", False).slug
        path = out if len(records) == 1 else out.with_name(f"{out.stem}-{slug}{out.suffix}")
        record.save(path)
        written.append(path)
        if page:
            written.append(write_calibration_report(path.with_suffix(".html"), record))
            written += save_plots(path.with_name(f"{path.stem}-plots"), record)
    return written


def on_cluster() -> bool:
    """Whether a Ray cluster is named, as inside a submitted job."""
    return bool(os.environ.get("RAY_ADDRESS"))
