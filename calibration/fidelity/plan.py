"""FidelityPlan: which cells of which engine, and the folder that keeps what is done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from calibration.fidelity.two_tiers import POLICIES, POLICY_CELLS, TwoTiers
from calibration.fidelity.workload import NodeWorkload, study_workloads, trace_workloads
from calibration.record import Calibration
from cluster.devices import engine_on_device, load_device
from cluster.engines.base import model_config, model_directory, nominal_bytes_per_token
from cluster.experiment import unmeasured
from testbed.errors import CalibrationError
from testbed.outcome import dump_json, write_atomically
from testbed.scenario import EngineSpec, Memory, Prefill, Scenario
from testbed.simulation.engine_model import EngineConfig
from testbed.step_time import AnyStepTime
from testbed.workload.trace import read_trace

LOADS = (0.3, 0.6, 0.8, 0.9)
QUICK, FITTED = ("A", "B", "C"), ("trace", "deep")
ALL = (*QUICK, *FITTED, POLICY_CELLS)
SECONDS = {"quick": 25.0, "full": 120.0}
"""Wall-clock seconds of a cell."""
LONG_RUN = {"quick": 100_000, "full": 400_000}
"""Requests of the simulations that stand for the stationary law."""
LEAST_REQUESTS = 60
CPU_BLOCKS, CPU_MODEL_LEN = 1024, 4096
"""Pool, blocks, and longest request where neither device nor model says."""
MEAN_TOKENS = {True: 1600.0, False: 700.0}
"""Mean prompt that a trace is scaled down to, on a GPU's pace and on a CPU."""
MEASURED = ("prediction.json", "analysis.json", "checks.json")
"""Documents that a folder gets once an engine has run for it."""


@dataclass(frozen=True)
class FidelityPlan:
    """What is measured. ``spec`` has what a device decides written out."""

    spec: EngineSpec
    workloads: dict[str, NodeWorkload]
    loads: tuple[float, ...]
    effort: str
    seconds: float
    seed: int
    policies: bool = False

    @property
    def cells(self) -> list[tuple[str, float]]:
        """(workload or policy, load) of every cell, in the order of measurement."""
        names = [*self.workloads, *(POLICIES if self.policies else ())]
        return [(name, load) for name in names for load in self.loads]

    @property
    def step_time(self) -> AnyStepTime | None:
        """Known before the engine starts: in device time, and of the emulated engine."""
        if self.spec.device is not None:
            return load_device(self.spec.device).step_time
        if self.spec.name == "emulated":
            from cluster.engines.emulated import DEFAULT_STEP_TIME

            return DEFAULT_STEP_TIME
        return None

    def engine(self, workload: NodeWorkload) -> EngineSpec:
        """The engine of a workload's cells: with its slots."""
        return self.spec.model_copy(update={"max_sequences": workload.slots, "replicas": 1})

    def alone(self, workload: NodeWorkload) -> Scenario:
        """A scenario of one replica, for the deployment alone."""
        return unmeasured("fidelity", self.engine(workload), {"only": None})

    def config(self, workload: NodeWorkload) -> EngineConfig:
        """The same engine for the simulator."""
        spec = self.engine(workload)
        ahead = spec.gpus_per_replica > 0 and spec.name == "vllm"
        if spec.device is not None:
            ahead = load_device(spec.device).async_scheduling
        return EngineConfig(
            scheduler="sglang" if spec.name == "sglang" else "vllm",
            token_budget=max(spec.token_budget, spec.max_sequences),
            max_sequences=spec.max_sequences,
            block_size=spec.block_size,
            num_blocks=spec.num_blocks,
            max_model_len=spec.max_model_len,
            async_scheduling=ahead,
            pinned_blocks=workload.chain // spec.block_size,
        )

    def header(self) -> dict[str, Any]:
        """What a folder's cells have in common, to refuse to mix."""
        what = {n: w.what for n, w in self.workloads.items()}
        return {
            "engine": self.spec.model_dump(exclude_none=True),
            "loads": list(self.loads),
            "workloads": what | ({POLICY_CELLS: TwoTiers.what} if self.policies else {}),
            "effort": self.effort,
            "seconds": self.seconds,
            "seed": self.seed,
        }


def make_plan(
    *,
    engine: str,
    device: str | None = None,
    model: str = "tiny-llama",
    trace: Path | None = None,
    effort: str = "quick",
    workloads: tuple[str, ...] = (),
    loads: tuple[float, ...] = LOADS,
    seconds: float | None = None,
    time_scale: float = 1.0,
    gpus: float = 0.0,
    seed: int = 1,
) -> FidelityPlan:
    """A plan from what a command line says.

    Raises
    ------
    CalibrationError
        No such workload or load; a trace is needed and not given.
    """
    names = workloads or QUICK
    if not workloads and effort == "full":
        names = ALL if trace is not None else (*QUICK, POLICY_CELLS)
    computing = device is None and gpus == 0
    given: dict[str, Any] = {"name": engine, "model": model, "device": device, "replicas": 1}
    given |= {"time_scale": time_scale, "gpus_per_replica": gpus}
    if computing:
        given |= {"num_blocks": CPU_BLOCKS, "max_model_len": CPU_MODEL_LEN}
    spec = engine_on_device(EngineSpec.model_validate(given))
    known = study_workloads()
    if any(name in FITTED for name in names):
        if trace is None:
            raise CalibrationError("--trace: the workloads 'trace' and 'deep' are fitted to one")
        known |= _fitted(trace, spec, gpu=not computing)
    for name in names:
        if name not in known and name != POLICY_CELLS:
            raise CalibrationError(f"--workloads: {name!r} is not one of {', '.join(ALL)}")
    for load in loads:
        if not 0 < load < 1:
            raise CalibrationError(f"--loads: {load:g} is not in (0, 1)")
    chosen = {name: known[name] for name in names if name != POLICY_CELLS}
    if device is not None:
        chosen = {name: _told(workload) for name, workload in chosen.items()}
    return FidelityPlan(
        spec, chosen, loads, effort, seconds or SECONDS[effort], seed, POLICY_CELLS in names
    )


def _told(workload: NodeWorkload) -> NodeWorkload:
    """One slot less where the slots are the engine section's default, which a device takes for
    "as recorded"."""
    if workload.slots != EngineSpec.model_fields["max_sequences"].default:
        return workload
    slots = workload.slots - 1
    what = workload.what.replace(f"{workload.slots} slots", f"{slots} slots")
    return replace(workload, slots=slots, what=what)


def _fitted(path: Path, spec: EngineSpec, *, gpu: bool) -> dict[str, NodeWorkload]:
    kappa = nominal_bytes_per_token(model_config(model_directory(spec.model)), 2)
    if spec.num_blocks is None:
        raise CalibrationError("engine.num_blocks: the pool is needed to fit a deep profile")
    pool = spec.num_blocks * spec.block_size
    prefill = Prefill(linear=1e-4)  # its scale does not matter to which prefixes are worth most
    if spec.device is not None:
        prefill = Calibration.load(load_device(spec.device).path).prefill_or_raise()
    scale = min(1.0, MEAN_TOKENS[gpu] / float(read_trace(path).input_tokens.mean()))
    memory = Memory(capacity=pool * kappa, per_sequence=0.05 * pool * kappa, per_token=kappa)
    longest = min(spec.max_model_len - 64, pool // 2)
    return trace_workloads(path, prefill, memory, spec.block_size, round(scale, 4), longest)


class Folder:
    """What is kept of a bench: whole files, each with the time at which it was written.

    Predictions depend neither on how long a cell is measured nor on the time scale: until the
    first measurement a folder takes others.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path = path
        plan = path / "plan.json"
        self.header = header = orjson.loads(dump_json(header))
        if plan.exists():
            before = orjson.loads(plan.read_bytes())
            measured = any(p for name in MEASURED for p in path.glob(f"*/{name}"))
            asked, kept = header, before
            if not measured:
                asked, kept = _predicted_from(header), _predicted_from(before)
            for key, value in asked.items():
                if kept.get(key) != value:
                    raise CalibrationError(
                        f"--out: {path} holds a bench with another {key}; use another folder"
                    )
            if before != header:
                write_atomically(plan, dump_json(header, indent=True))
            return
        if path.exists() and any(path.iterdir()):
            raise CalibrationError(f"--out: {path} is not empty and holds no bench")
        write_atomically(plan, dump_json(header, indent=True))

    @classmethod
    def existing(cls, path: Path) -> Folder:
        """The folder of a bench as it stands.

        Raises
        ------
        CalibrationError
            It holds none.
        """
        plan = path / "plan.json"
        if not plan.is_file():
            raise CalibrationError(f"--out: {path} holds no bench")
        return cls(path, orjson.loads(plan.read_bytes()))

    def read(self, *names: str) -> dict[str, Any] | None:
        """A document, or None where there is none yet."""
        path = self.path.joinpath(*names)
        return orjson.loads(path.read_bytes()) if path.exists() else None

    def write(self, document: dict[str, Any], *names: str) -> dict[str, Any]:
        """Keep a document, stamped; what stands there is replaced."""
        stamped = {"written_at": now(), **document}
        write_atomically(self.path.joinpath(*names), dump_json(stamped))
        return stamped


def _predicted_from(header: dict[str, Any]) -> dict[str, Any]:
    """The part of a header that predictions depend on."""
    engine = {k: v for k, v in header.get("engine", {}).items() if k != "time_scale"}
    return {**{k: v for k, v in header.items() if k != "seconds"}, "engine": engine}


def now() -> str:
    """UTC to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
