"""PolicyCells: every policy at every load on two replicas, predicted and then measured."""

from __future__ import annotations

import gzip
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibration.fidelity.analysis import Trial, analyse
from calibration.fidelity.measurement import check_engine, why_invalid
from calibration.fidelity.network import TwoTierNetwork
from calibration.fidelity.plan import LEAST_REQUESTS, LONG_RUN, FidelityPlan, Folder, now
from calibration.fidelity.two_tiers import (
    POLICIES,
    POLICY_CELLS,
    TYPES,
    TwoTiers,
    share_of_tiers,
)
from cluster.deployment import Deployment, deployed
from cluster.experiment import stream_of
from cluster.replay import Progress as ReplayProgress
from cluster.run import run
from testbed.environment import environment
from testbed.outcome import Outcome, RequestRecord, dump_json, read_records, write_atomically
from testbed.scenario import Scenario

LONGEST_RUN = 200_000
"""Most requests of a network simulation: each one is kept."""
CHECK_REQUESTS, CHECK_LOAD = 24, 0.1
WARM_UP = 3.0
"""s of load before a run."""
STAMPS = ("intended", "radio", "sent", "dispatched", "received", "first_token", "finished")
COUNTS = ("index", "input_tokens", "output_tokens", "cached_tokens")


class PolicyCells:
    """The policy cells of a bench; goes on where it stopped."""

    def __init__(
        self,
        plan: FidelityPlan,
        folder: Folder,
        tiers: TwoTiers,
        *,
        say: Callable[[str], None],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.plan = plan
        self.folder = folder
        self.tiers = tiers
        self.network = TwoTierNetwork(tiers)
        self._say = say
        self._progress = progress

    def predict(self, deadline: float | None = None) -> None:
        """Write what every model says of every cell, where it is not written yet."""
        for policy in POLICIES:
            for load in self.plan.loads:
                cell = f"{policy}-{load:g}"
                if deadline is not None and time.monotonic() > deadline:
                    return
                if self.folder.read(cell, "models.json") is not None:
                    continue
                self._say(f"predicting {cell}")
                asked = self.tiers.at(policy, load)
                count = min(LONG_RUN[self.plan.effort], LONGEST_RUN)
                said = self.tiers.predict(asked)
                said |= self.network.predict(asked, count, self.plan.seed + 7919)
                self.folder.write(
                    {"policy": policy, "load": load, "scenario": _shown(asked), **said},
                    cell, "models.json",
                )  # fmt: skip

    def measure(self, enough_time: Callable[[], bool]) -> None:
        """Measure what is missing, while there is time."""
        todo = [
            (policy, load)
            for policy in POLICIES
            for load in self.plan.loads
            if self.folder.read(f"{policy}-{load:g}", "analysis.json") is None
        ]
        if not todo or not enough_time():
            return
        first = self.tiers.served(self.tiers.scenario)
        with deployed(first, seed=self.plan.seed, progress=self._say) as nodes:
            for node, config in zip(nodes.nodes, self.tiers.configs, strict=True):
                check_engine(config, node.facts)
            nodes.pin(stream_of(first, 1.0, 10, self.plan.seed))
            visit = (self.folder.read(POLICY_CELLS, "checks.json") or {"checks": []})["checks"]
            overhead = self._check(nodes, "before", visit)
            for policy, load in todo:
                if not enough_time():
                    break
                self._cell(nodes, policy, load, overhead)
            self._check(nodes, "after", visit)

    def _check(self, nodes: Deployment, when: str, visit: list[dict[str, Any]]) -> float:
        """s beyond the simulation that a request takes through router, wire and an engine that is
        mostly idle; and how fast the machine is against the check before."""
        load = self.plan.loads[0]
        predicted = self.folder.read(f"nearest-{load:g}", "models.json")
        assert predicted is not None  # predict() came first
        asked = self.tiers.asked("nearest", predicted["rate"] * CHECK_LOAD / load)
        seed = self.plan.seed + 17
        _, records = self._run(nodes, asked, CHECK_REQUESTS, seed, f"check {when}")
        ttft = _ttft(records, CHECK_REQUESTS)
        beyond = ttft - self.network.simulate(asked, CHECK_REQUESTS, seed)
        names = [r.type for r in records]
        usual = [
            float(np.median([r.ttft for r in records if r.type == name]))
            for name, *_ in TYPES
            if name in names
        ]
        check: dict[str, Any] = {
            "when": when,
            "at": now(),
            "overhead": float(np.nanmedian(beyond)),
            "overhead_quartiles": np.nanquantile(beyond, [0.25, 0.75]).tolist(),
            "unloaded_ttft": usual,
            "requests": CHECK_REQUESTS,
        }
        if when != "before":
            then = np.array(visit[-1]["unloaded_ttft"])
            check["relative_time"] = float(np.exp(np.mean(np.log(usual / then))))
        visit.append(check)
        self.folder.write(
            {"checks": visit, "environment": environment()}, POLICY_CELLS, "checks.json"
        )
        return check["overhead"]

    def _cell(self, nodes: Deployment, policy: str, load: float, overhead: float) -> None:
        cell = f"{policy}-{load:g}"
        models = self.folder.read(cell, "models.json")
        assert models is not None  # predict() came first
        asked = self.tiers.asked(policy, models["rate"])
        count = round(models["rate"] * self.plan.seconds / self.plan.spec.time_scale)
        count = max(LEAST_REQUESTS, count)
        # Policies at one load see the same requests.
        seed = self.plan.seed + round(1000 * load)
        simulated = self.network.simulate(asked, count, seed) + overhead
        said = self.folder.write(
            {**models, "models_written_at": models["written_at"], "overhead": overhead,
             "requests": count, "seed": seed, "paired": _listed(simulated)},
            cell, "prediction.json",
        )  # fmt: skip
        jitter = self.network.poll_jitter(asked, count, seed)
        started = now()
        outcome, records = self._run(nodes, asked, count, seed, cell)
        self._keep(cell, records)
        done = np.array([r.index for r in records])
        trials = [
            Trial(name, _placed(self.network.as_routed(records, late=late) + overhead, done, count))
            for name, late in (
                ("the router chose other nodes", False),
                ("the router chose other nodes, and late sends", True),
            )
        ]
        whole = np.isfinite(simulated) & np.isin(np.arange(count), done)
        found = analyse(
            said,
            _ttft(records, count)[whole],
            simulated[whole],
            [Trial(t.cause, t.ttft[whole]) for t in trials],
            overhead=overhead,
            seed=self.plan.seed,
            jitter=jitter,
        )
        device = outcome.extra.get("device_time")
        as_promised = float(np.mean([r.cached_tokens == r.reusable_tokens for r in records]))
        facts = {
            "started_at": started,
            "pace": None if device is None else {**device, "late": device["late_share"]},
            "speed": None,
            "dispatch_lag": outcome.extra["dispatch_lag"],
            "cached_as_asked": as_promised,
            "routed": share_of_tiers(outcome),
            "invalid_reason": outcome.invalid_reason or why_invalid(None, as_promised),
            "endings": outcome.requests.model_dump() if outcome.requests else None,
        }
        self.folder.write({**facts, **found}, cell, "analysis.json")

    def _run(
        self, nodes: Deployment, asked: Scenario, count: int, seed: int, label: str
    ) -> tuple[Outcome, list[RequestRecord]]:
        """One replay; its outcome and the requests that were completed, in order of arrival."""
        real = self.tiers.served(asked)
        nodes.adopt(real)

        def show(at: ReplayProgress) -> None:
            self._progress(label, at.ended, at.total)

        with tempfile.TemporaryDirectory() as kept:
            path = Path(kept) / "records.jsonl"
            outcome = run(
                real, nodes, stream_of, requests=count, seed=seed, records_path=path,
                warm_up_seconds=WARM_UP, progress=show,
            )  # fmt: skip
            records = sorted(read_records(path), key=lambda r: r.index)
        return outcome, [r for r in records if r.ending == "completed"]

    def _keep(self, cell: str, records: Sequence[RequestRecord]) -> None:
        """Write a cell's requests, a column a stamp."""
        table: dict[str, Any] = {
            name: [round(getattr(r, name) or 0.0, 6) for r in records] for name in STAMPS
        }
        table |= {name: [getattr(r, name) for r in records] for name in COUNTS}
        table |= {name: [getattr(r, name) for r in records] for name in ("type", "profile")}
        packed = gzip.compress(dump_json(table), mtime=0)
        write_atomically(self.folder.path / cell / "requests.json.gz", packed)


def _ttft(records: Sequence[RequestRecord], count: int) -> np.ndarray:
    """TTFT (count,) s by place in the order of arrival; NaN where a request did not complete."""
    each = np.array([r.ttft for r in records], dtype=float)
    return _placed(each, np.array([r.index for r in records]), count)


def _placed(values: np.ndarray, index: np.ndarray, count: int) -> np.ndarray:
    all_ = np.full(count, np.nan)
    all_[index] = values
    return all_


def _listed(values: np.ndarray) -> list[float | None]:
    return [round(x, 6) if np.isfinite(x) else None for x in values.tolist()]


def _shown(asked: Scenario) -> dict[str, Any]:
    """The scenario without the place of its calibration on this machine."""
    scenario = asked.to_dict()
    if record := scenario["engine"].get("calibration"):
        scenario["engine"]["calibration"] = Path(record).name
    return scenario
