"""FidelityBench: predictions first, then the engine, cell by cell, going on where it stopped."""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from calibration.fidelity.analysis import analyse
from calibration.fidelity.measurement import (
    check_engine,
    lateness,
    run_speed,
    simulate_same,
    trials,
    why_invalid,
)
from calibration.fidelity.plan import LEAST_REQUESTS, LONG_RUN, FidelityPlan, Folder, now
from calibration.fidelity.policies import PolicyCells
from calibration.fidelity.prediction import predict_cell
from calibration.fidelity.replay import pin_chain, replay
from calibration.fidelity.two_tiers import POLICY_CELLS, TwoTiers
from calibration.fidelity.workload import NodeWorkload, Requests
from calibration.record import Calibration
from cluster.deployment import Deployment, deployed
from cluster.devices import load_device
from testbed.environment import environment
from testbed.errors import CalibrationError, EngineError
from testbed.outcome import dump_json, write_atomically
from testbed.seeds import generator
from testbed.simulation.engine_model import EngineConfig
from testbed.step_time import AnyStepTime

CHECK_REQUESTS = 16
SPACING = 0.12
"""s of idleness between two requests of a check."""
Progress = Callable[[str, int, int], None]


class FidelityBench:
    """One plan in one folder; ``predict`` and ``run`` may be called again to go on."""

    def __init__(
        self,
        plan: FidelityPlan,
        folder: Path,
        *,
        say: Callable[[str], None] = lambda _: None,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.plan = plan
        self.folder = Folder(folder, plan.header())
        self._say = say
        self._progress = progress

    # -- before an engine runs --

    def predict(
        self,
        step_time: AnyStepTime,
        config: EngineConfig,
        name: str,
        deadline: float | None = None,
    ) -> None:
        """Write what every model says of a workload's cells, where it is not written yet."""
        workload = self.plan.workloads[name]
        for load in self.plan.loads:
            cell = _cell(name, load)
            if deadline is not None and time.monotonic() > deadline:
                return
            if self.folder.read(cell, "models.json") is None:
                self._say(f"predicting {cell}")
                said = predict_cell(
                    workload, load, step_time, config,
                    requests=LONG_RUN[self.plan.effort], seed=self.plan.seed + 7919,
                )  # fmt: skip
                self.folder.write({**said, "config": config.model_dump()}, cell, "models.json")

    def predict_all(self, deadline: float | None = None) -> bool:
        """Predictions of the whole grid; False where some are still missing: the engine must be
        calibrated first, or no cell was begun after ``deadline`` (``time.monotonic()``)."""
        step_time = self.plan.step_time
        if step_time is None:
            return False
        for name, workload in self.plan.workloads.items():
            self.predict(step_time, self.plan.config(workload), name, deadline)
        if self.plan.policies:
            self._policies(step_time).predict(deadline)
        return all(self.folder.read(_cell(*c), "models.json") for c in self.plan.cells)

    # -- with the engine --

    def run(self, deadline: float | None = None) -> bool:
        """Measure what is missing; True when every cell is done.

        ``deadline`` : ``time.monotonic()`` by which the last cell must have ended.
        """
        self.predict_all()
        for name in self.plan.workloads:
            missing = [x for x in self.plan.loads if not self._done(name, x)]
            if not missing:
                continue
            if self._late(deadline):
                return False
            self._group(name, missing, deadline)
        if self.plan.policies:
            cells = self._policies(self.plan.step_time)
            cells.predict()
            cells.measure(lambda: not self._late(deadline))
        return all(self._done(*cell) for cell in self.plan.cells)

    def _policies(self, step_time: AnyStepTime | None) -> PolicyCells:
        """Cells with two replicas: from the step time that is known, or as just calibrated."""
        record = None
        if self.plan.spec.device is not None:
            record = Path(load_device(self.plan.spec.device).path)
        elif step_time is None:
            found = sorted(self.folder.path.glob("*/calibration.json"))
            if not found:
                raise CalibrationError(f"{POLICY_CELLS}: needs a workload that calibrates, as A")
            record = found[-1]
            step_time = Calibration.load(record).step_time
        assert step_time is not None  # a record of the bench has one
        tiers = TwoTiers(self.plan.spec, step_time, record)
        return PolicyCells(self.plan, self.folder, tiers, say=self._say, progress=self._progress)

    def _late(self, deadline: float | None) -> bool:
        """Whether another cell would end after the deadline."""
        return deadline is not None and time.monotonic() + 1.3 * self.plan.seconds > deadline

    def _done(self, name: str, load: float) -> bool:
        return self.folder.read(_cell(name, load), "analysis.json") is not None

    def _group(self, name: str, loads: list[float], deadline: float | None) -> None:
        """One start of the engine: calibration or check before, cells, checks between, after."""
        workload = self.plan.workloads[name]
        group = self.folder.path / name
        with (
            tempfile.TemporaryDirectory() as logs,
            deployed(
                self.plan.alone(workload), log_dir=logs, seed=self.plan.seed, progress=self._say
            ) as nodes,
        ):
            config = self.plan.config(workload)
            check_engine(config, nodes.nodes[0].facts)
            step_time = self.plan.step_time
            if step_time is None:
                step_time, config = self._calibrated(nodes, group, workload, config)
                self.predict(step_time, config, name)
            nodes.measure(pin_chain, tokens=workload.chain, seed=self.plan.seed)
            visit = (self.folder.read(name, "checks.json") or {"checks": []})["checks"]
            first = self._check(nodes, name, step_time, config, "before", visit)
            for k, load in enumerate(loads):
                if self._late(deadline):
                    break
                self._measure(nodes, name, load, step_time, config, visit[-1]["overhead"])
                last = k == len(loads) - 1
                when = "after" if last else "between"
                self._check(nodes, name, step_time, config, when, visit, first)

    def _calibrated(
        self, nodes: Deployment, group: Path, workload: NodeWorkload, config: EngineConfig
    ) -> tuple[AnyStepTime, EngineConfig]:
        """Step time of an engine that really computes, measured now unless it was already."""
        from calibration.measure import calibrate

        path = group / "calibration.json"
        if path.exists():
            record = Calibration.load(path)
        else:
            record = nodes.measure(
                calibrate, progress=self._progress, effort="quick", seed=self.plan.seed,
                max_prompt=min(workload.longest, self.plan.spec.max_model_len - 64),
            )[0]  # fmt: skip
            record.save(path)
        if record.step_time is None:
            raise EngineError("this engine writes no step log: its step time is not known")
        report = next(r for r in record.fits if r.name == "step_time")
        wake = max(0.0, report.coefficients["idle_start"])
        return record.step_time, config.model_copy(update={"wake_seconds": wake})

    def _check(
        self,
        nodes: Deployment,
        name: str,
        step_time: AnyStepTime,
        config: EngineConfig,
        when: str,
        visit: list[dict[str, Any]],
        first: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Requests one by one on the idle engine: what the way costs, how fast the machine is."""
        workload = self.plan.workloads[name]
        q = len(workload.new)
        each = max(3, -(-CHECK_REQUESTS // q))
        kind = generator(self.plan.seed, "check", len(visit)).permutation(np.repeat(range(q), each))
        load = workload.load(1.0, step_time, config)
        gap = 1.5 * load.residual_prefill[kind] + SPACING
        requests = Requests(
            np.concatenate([[0.0], np.cumsum(gap)[:-1]]),
            kind,
            workload.new[kind].astype(int),
            workload.cached[kind].astype(int),
            np.ones(len(kind), dtype=int),
        )
        found = nodes.measure(
            replay, requests=vars(requests), chain=workload.chain, chain_seed=self.plan.seed,
            seed=self.plan.seed, label=f"check-{len(visit)}-{when}",
        )[0]  # fmt: skip
        ttft = found["first_token"] - requests.arrival
        beyond = ttft - simulate_same(workload, requests, step_time, config, 0.0)
        usual = np.array([float(np.median(ttft[kind == j])) for j in range(q)])
        check = {
            "when": when,
            "at": now(),
            "overhead": float(np.median(beyond)),
            "overhead_quartiles": np.quantile(beyond, [0.25, 0.75]).tolist(),
            "unloaded_ttft": usual.tolist(),
            "requests": len(kind),
        }
        if first is not None:
            then = np.array(first["unloaded_ttft"])
            check["relative_time"] = float(np.exp(np.mean(np.log(usual / then))))
        visit.append(check)
        self.folder.write({"checks": visit, "environment": environment()}, name, "checks.json")
        return check

    def _measure(
        self,
        nodes: Deployment,
        name: str,
        load: float,
        step_time: AnyStepTime,
        config: EngineConfig,
        overhead: float,
    ) -> None:
        workload, cell = self.plan.workloads[name], _cell(name, load)
        models = self.folder.read(cell, "models.json")
        assert models is not None  # predict() came first
        rate = models["rate"]
        count = max(LEAST_REQUESTS, round(rate * self.plan.seconds / self.plan.spec.time_scale))
        seed = self.plan.seed + round(1000 * load)
        requests = workload.draw(rate, count, seed, exact=True)
        simulated = simulate_same(workload, requests, step_time, config, overhead)
        self.folder.write(
            {**models, "models_written_at": models["written_at"], "overhead": overhead,
             "requests": count, "seed": seed, "paired": np.round(simulated, 6)},
            cell, "prediction.json",
        )  # fmt: skip
        started = now()
        found = nodes.measure(
            replay, progress=self._progress, requests=vars(requests), chain=workload.chain,
            chain_seed=self.plan.seed, seed=seed, label=cell,
        )[0]  # fmt: skip
        self.keep(cell, workload, requests, step_time, config, overhead, started, found)

    def keep(
        self,
        cell: str,
        workload: NodeWorkload,
        requests: Requests,
        step_time: AnyStepTime,
        config: EngineConfig,
        overhead: float,
        started: str,
        found: dict[str, Any],
    ) -> None:
        """Write a cell's requests and its analysis."""
        steps = found.pop("steps")
        speed = run_speed(steps, step_time)
        facts = {
            "started_at": started, "pace": found.pop("pace"), "speed": speed,
            "preemptions": found.pop("preemptions"), "dispatch_lag": lateness(found),
            "cached_as_asked": float(np.mean(found["cached"] == requests.cached)),
        }  # fmt: skip
        facts["invalid_reason"] = why_invalid(facts["pace"], facts["cached_as_asked"])
        table = {k: np.round(np.nan_to_num(v, nan=-1.0), 6) for k, v in found.items()}
        packed = gzip.compress(dump_json({**table, "kind": requests.kind}), mtime=0)
        write_atomically(self.folder.path / cell / "requests.json.gz", packed)
        prediction = self.folder.read(cell, "prediction.json")
        assert prediction is not None
        ttft = found["first_token"] - found["intended"]
        analysis = analyse(
            prediction,
            ttft,
            simulate_same(workload, requests, step_time, config, overhead),
            trials(workload, requests, step_time, config, overhead, found, speed),
            overhead=overhead,
            seed=self.plan.seed,
        )
        self.folder.write({**facts, **analysis}, cell, "analysis.json")


def _cell(name: str, load: float) -> str:
    return f"{name}-{load:g}"
