"""PolicyCells: two replicas behind the router, every policy at every load.

The same bench with the whole system in it: radio, router, two engines, one of which pins a
prefix. Theory is :func:`testbed.theory.predict`, the simulator a network of engine models on the
same requests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from calibration.fidelity.analysis import analyse
from calibration.fidelity.plan import FidelityPlan, Folder, now
from calibration.fidelity.prediction import BATCHES, counted, figures_of, model_names
from calibration.record import Calibration
from cluster.deployment import deployed
from cluster.devices import load_device
from cluster.engines.base import model_config, model_directory, nominal_bytes_per_token
from cluster.experiment import stream_of
from cluster.replay import Progress as ReplayProgress
from cluster.run import run
from testbed.errors import CalibrationError, TestbedError
from testbed.outcome import Outcome, read_records
from testbed.routing.policies import get_policy
from testbed.scenario import Memory, Scenario
from testbed.simulation.simulate import replicate
from testbed.theory import predict

POLICIES = ("nearest", "prefix_only", "load_aware")
LOADS = (0.3, 0.6, 0.8)
"""Shares of what the busiest node completes under ``nearest``, by the step chain."""
TYPES = (("chat", 0.7, 700, 32, 512), ("document", 0.3, 1600, 32, 1024))
"""Name, probability, prompt, outputs, tokens that the deep profile holds."""
SLOTS = 12
OUTPUT_SCV = 1.0 - 1.0 / 32
"""Typed streams generate geometric lengths."""
QUANTILES = (0.5, 0.9, 0.99)
LONG_RUN = {"quick": 20_000, "full": 60_000}
CHECK_REQUESTS = 24
WARM_UP = 3.0
"""s of load before a run."""


class PolicyCells:
    """The policy cells of a bench; goes on where it stopped."""

    def __init__(
        self,
        plan: FidelityPlan,
        folder: Folder,
        *,
        say: Callable[[str], None],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.plan = plan
        self.folder = folder
        self._say = say
        self._progress = progress

    def record(self) -> Path:
        """The calibration that predictions are made from.

        Raises
        ------
        CalibrationError
            There is none yet: cells of one engine come first.
        """
        if self.plan.spec.device is not None:
            return Path(load_device(self.plan.spec.device).path)
        found = sorted(self.folder.path.glob("*/calibration.json"))
        if not found:
            raise CalibrationError("policies: no calibration in this folder to predict from")
        return found[-1]

    def questions(self) -> dict[str, tuple[str, float, Scenario]]:
        """{cell: (policy, load, scenario)}; the scenario names the calibration it is asked with."""
        base = two_tiers(self.plan, self.record())
        label = f"step_chain:{OUTPUT_SCV!r}"
        nearest = predict(base.replace(policy="nearest"), delay_model=label)
        busiest = max(tier.utilisation for tier in nearest.tiers.values())
        found = {}
        for load in LOADS:
            for policy in POLICIES:
                asked = base.replace(policy=policy).with_field(
                    "demand.intensity", base.demand.intensity * load / busiest
                )
                found[f"{policy}-{load:g}"] = (policy, load, asked)
        return found

    def predict(self) -> None:
        """Write what every model says of every cell, where it is not written yet."""
        for cell, (policy, load, asked) in self.questions().items():
            if self.folder.read(cell, "models.json") is None:
                self._say(f"predicting {cell}")
                said = predict_policy(asked, LONG_RUN[self.plan.effort], self.plan.seed + 7919)
                scenario = asked.to_dict()
                # By name: where the record lies is nobody's business but this machine's.
                scenario["engine"]["calibration"] = self.record().name
                self.folder.write(
                    {"policy": policy, "load": load, "scenario": scenario, **said},
                    cell, "models.json",
                )  # fmt: skip

    def missing(self) -> list[str]:
        cells = [f"{policy}-{load:g}" for load in LOADS for policy in POLICIES]
        return [c for c in cells if self.folder.read(c, "analysis.json") is None]

    def measure(self, enough_time: Callable[[], bool]) -> bool:
        """Measure what is missing while there is time; True when all is done."""
        questions = self.questions()
        todo = self.missing()
        if not todo or not enough_time():
            return not todo
        first = served_by(questions[todo[0]][2], self.plan)
        with deployed(first, seed=self.plan.seed, progress=self._say) as nodes:
            nodes.pin(stream_of(first, 1.0, 10, self.plan.seed))
            overhead = self._way(nodes, questions[todo[0]][2])
            for cell in todo:
                if not enough_time():
                    return False
                self._cell(nodes, cell, questions[cell][2], overhead)
        return True

    def _way(self, nodes: Any, asked: Scenario) -> float:
        """s beyond the simulation that a request takes through router, wire and an idle engine."""
        slow = asked.replace(policy="nearest").with_field("demand.intensity", 0.6)
        seed = self.plan.seed + 17
        _, ttft, simulated = self._run(nodes, slow, CHECK_REQUESTS, seed, "check")
        return float(np.median(ttft - simulated))

    def _run(
        self, nodes: Any, asked: Scenario, count: int, seed: int, label: str
    ) -> tuple[Outcome, np.ndarray, np.ndarray]:
        """One replay; TTFT measured and simulated of the same requests, (N,) s each."""
        real = served_by(asked, self.plan)
        nodes.adopt(real)
        path = self.folder.path / label / "records.jsonl"

        def show(at: ReplayProgress) -> None:
            self._progress(label, at.ended, at.total)

        outcome = run(
            real, nodes, stream_of, requests=count, seed=seed, records_path=path,
            warm_up_seconds=WARM_UP, progress=show,
        )  # fmt: skip
        simulated = simulated_ttft(asked, count, seed)
        ttft = np.full(count, np.nan)
        for record in read_records(path):
            if record.ttft is not None:
                ttft[record.index] = record.ttft
        whole = np.isfinite(ttft) & np.isfinite(simulated)
        return outcome, ttft[whole], simulated[whole]

    def _cell(self, nodes: Any, cell: str, asked: Scenario, overhead: float) -> None:
        models = self.folder.read(cell, "models.json")
        assert models is not None  # predict() came first
        spec = self.plan.spec
        rate = asked.demand.intensity * 2 / asked.nodes.density
        count = max(60, round(rate * self.plan.seconds / spec.time_scale))
        seed = self.plan.seed + 31
        said = {**models, "models_written_at": models["written_at"], "overhead": overhead,
                "requests": count, "rate": rate}  # fmt: skip
        self.folder.write(said, cell, "prediction.json")
        started = now()
        outcome, ttft, simulated = self._run(nodes, asked, count, seed, cell)
        outcome.save(self.folder.path / cell / "outcome.json")
        found = analyse(
            said, ttft, simulated + overhead, [], overhead=overhead, seed=self.plan.seed
        )
        device = outcome.extra.get("device_time")
        facts = {
            "started_at": started,
            "pace": None if device is None else {"late": device["late_share"]},
            "speed": None,
            "dispatch_lag": outcome.extra["dispatch_lag"],
            "valid": outcome.valid,
            "invalid_reason": outcome.invalid_reason,
        }
        self.folder.write({**facts, **found}, cell, "analysis.json")


def two_tiers(plan: FidelityPlan, record: Path) -> Scenario:
    """A fallback and a deep tier of one node each, from a calibration."""
    calibration = Calibration.load(record)
    spec = plan.spec
    kappa = nominal_bytes_per_token(model_config(model_directory(spec.model)), 2)
    if spec.num_blocks is None:
        raise CalibrationError("engine.num_blocks: the pool is needed")
    capacity = (spec.num_blocks - 1) * spec.block_size * kappa
    mean = sum(p * (n + m) for _, p, n, m, _ in TYPES)
    engine = spec.model_copy(
        update={"device": None, "replicas": 2, "calibration": str(record), "max_sequences": SLOTS}
    )
    block = spec.block_size
    holds = {name: h // block * block for name, _, _, _, h in TYPES}
    return Scenario.from_dict(
        {
            "name": "two tiers",
            "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
            "nodes": {"density": 1.0},
            "demand": {"intensity": 1.0},
            "prefill": calibration.prefill_or_raise().model_dump(),
            "memory": Memory(
                capacity=capacity, per_sequence=mean * kappa, per_token=kappa
            ).model_dump(),
            "requests": [
                {
                    "name": name,
                    "probability": p,
                    "tokens": n,
                    "output_tokens": m,
                    "decode_occupancy": calibration.occupancy(m, n),
                }
                for name, p, n, m, _ in TYPES
            ],
            "profiles": [
                {
                    "name": "fallback",
                    "fraction": 0.5,
                    "persistent_bytes": 0,
                    "reusable": dict.fromkeys(holds, 0),
                },
                {
                    "name": "deep",
                    "fraction": 0.5,
                    "persistent_bytes": sum(holds.values()) * kappa,
                    "reusable": holds,
                },
            ],
            "targets": {"coverage_at": [0.5], "quantiles": list(QUANTILES)},
            "engine": engine.model_dump(exclude_none=True),
        },
        "fidelity",
    )


def served_by(asked: Scenario, plan: FidelityPlan) -> Scenario:
    """The scenario on the plan's own engine, in device time where that is what it runs in."""
    spec = plan.spec.model_copy(update={"replicas": 2, "max_sequences": SLOTS})
    return asked.replace(engine=spec)


def predict_policy(asked: Scenario, long_run: int, seed: int) -> dict[str, Any]:
    """Every delay model and a long simulation of a policy cell."""
    models: dict[str, list[float] | None] = {}
    left_out: dict[str, str] = {}
    inside = get_policy(asked.policy).load_aware
    for name in model_names():
        label = name
        if name == "step_chain":
            # Inside the fixed point every iteration has its own mix.
            label = f"{'step_chain_mix' if inside else name}:{OUTPUT_SCV!r}"
        try:
            outcome = predict(asked, delay_model=label)
        except TestbedError as error:
            models[name], left_out[name] = None, str(error).removeprefix("delay_model: ")
            continue
        figures = [outcome.ttft.mean, *(outcome.ttft.quantiles[f"{q:g}"] for q in QUANTILES)]
        models[name] = figures if np.isfinite(figures).all() else None
        if models[name] is None:
            left_out[name] = outcome.reason or "no finite answer"
    ttft = simulated_ttft(asked, long_run, seed)
    ttft = ttft[counted(len(ttft))]
    batches = np.array([figures_of(x) for x in np.array_split(ttft, BATCHES)])
    return {
        "models": models,
        "left_out": left_out,
        "simulator": {
            "figures": figures_of(ttft).tolist(),
            "standard_errors": (batches.std(axis=0, ddof=1) / np.sqrt(BATCHES)).tolist(),
            "requests": long_run,
        },
        "simulator_without_lookahead": None,
    }


def simulated_ttft(asked: Scenario, count: int, seed: int) -> np.ndarray:
    """TTFT (N,) s by the network of engine models, request by request."""
    scenario = asked.replace(
        simulation={"node_model": "engine", "nodes": 2, "waits": "node", "warm_up": 0}
    )
    tally = replicate(scenario, count, seed, 0).tally
    if tally.exact is None:
        raise CalibrationError(f"policies: {count} requests are too many to keep one by one")
    return tally.exact
