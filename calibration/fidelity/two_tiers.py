"""TwoTiers: two replicas behind the router, as a scenario, and what theory says of it.

One replica pins nothing, the other a prefix of each request type. Radio, router and engines are in
every figure: theory is :func:`testbed.theory.predict`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import nnls

from calibration.fidelity.prediction import PROBABILITIES, model_names
from cluster.engines.base import model_config, model_directory, nominal_bytes_per_token
from testbed.errors import CalibrationError, TestbedError
from testbed.outcome import Outcome, figure_key
from testbed.prefill import prefill_time
from testbed.routing.policies import get_policy
from testbed.scenario import EngineSpec, Prefill, Scenario
from testbed.simulation.engine_model import EngineConfig
from testbed.simulation.engine_network import engine_config
from testbed.step_time import AnyStepTime
from testbed.theory import predict
from testbed.theory.delay.step_chain_node import chunked
from testbed.theory.operating_point import OperatingPoint
from testbed.theory.predict import pose, settle

POLICIES = ("nearest", "prefix_only", "load_aware")
POLICY_CELLS = "policies"
TYPES = (("chat", 0.7, 700, 32, 512), ("document", 0.3, 1600, 32, 1024))
"""Name, probability, prompt, mean outputs, tokens that the deep replica pins."""
SLOTS = 12
OUTPUT_SCV = 1.0 - 1.0 / 32
"""Squared coefficient of variation of geometric lengths, which typed streams generate."""
PRECISION, MOST_STEPS = 1e-3, 20
"""Of the search for the intensity at which the busiest node of a load-aware policy has a load."""
REPLICAS = 2


@dataclass(frozen=True)
class TwoTiers:
    """Two replicas of one engine, with their step time.

    Attributes
    ----------
    spec : the engine as it is served, with what a device decides written out
    step_time : what calibration says a step takes
    record : the calibration record that it comes from; without one nothing is scheduled ahead
    """

    spec: EngineSpec
    step_time: AnyStepTime
    record: Path | None = None

    what: ClassVar[str] = (
        f"{REPLICAS} replicas behind the router, one with prefixes pinned; "
        + ", ".join(
            f"{p:.0%} {n} tokens of which {h:,} may be cached ({name})"
            for name, p, n, _, h in TYPES
        )
        + f"; 32 outputs, geometric; {SLOTS} slots"
    )

    @cached_property
    def scenario(self) -> Scenario:
        """A fallback and a deep tier of one node each, at 1 request/s per km².

        Raises
        ------
        CalibrationError
            The engine's pool is not known.
        """
        if self.spec.num_blocks is None:
            raise CalibrationError("engine.num_blocks: the pool is needed")
        kappa = nominal_bytes_per_token(model_config(model_directory(self.spec.model)), 2)
        block = self.spec.block_size
        holds = {name: h // block * block for name, _, _, _, h in TYPES}
        mean = sum(p * (n + m) for _, p, n, m, _ in TYPES)
        calibration = None if self.record is None else str(self.record)
        engine = self.spec.model_copy(
            update={"device": None, "calibration": calibration, **_STAFFED}
        )
        return Scenario.from_dict(
            {
                "name": "two tiers",
                "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
                "nodes": {"density": 1.0},
                "demand": {"intensity": 1.0},
                "prefill": self._prefill.model_dump(),
                "memory": {
                    "capacity": (self.spec.num_blocks - 1) * block * kappa,
                    "per_sequence": mean * kappa,
                    "per_token": kappa,
                },
                "requests": [
                    {
                        "name": name,
                        "probability": p,
                        "tokens": n,
                        "output_tokens": m,
                        "decode_occupancy": (m - 1.0) * self.step_time.seconds((), 1, n + 0.5 * m),
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
                "targets": {"coverage_at": [0.5], "quantiles": list(PROBABILITIES)},
                "engine": engine.model_dump(exclude_none=True),
            },
            POLICY_CELLS,
        )

    @cached_property
    def _prompts(self) -> tuple[np.ndarray, np.ndarray]:
        """(n, h) of the prompts that are asked about, cold and after a hit, (4, 2), and the
        seconds that each takes unloaded by the step time, (4,)."""
        asked = np.array([(n - h, h) for _, _, n, _, deep in TYPES for h in (0, deep)], dtype=float)
        budget = max(self.spec.token_budget, SLOTS)
        return asked, np.array([chunked(self.step_time, n, h, budget) for n, h in asked])

    @property
    def _prefill(self) -> Prefill:
        """g(n | h) of the step time at the prompts that are asked about."""
        (n, h), said = self._prompts[0].T, self._prompts[1]
        forms = np.column_stack([np.ones_like(n), n, n * n, n * h])
        fitted, _ = nnls(forms / said[:, None], np.ones_like(said))
        return Prefill(**dict(zip(Prefill.model_fields, fitted.tolist(), strict=True)))

    @property
    def prefill_error(self) -> float:
        """Largest relative error of g(n | h) against the step time."""
        (n, h), said = self._prompts[0].T, self._prompts[1]
        return float(np.abs(prefill_time(self.scenario.prefill, n, h) / said - 1.0).max())

    @property
    def configs(self) -> list[EngineConfig]:
        """The engines of both tiers, for the simulator."""
        return [engine_config(self.scenario, s) for s in range(REPLICAS)]

    def served(self, asked: Scenario) -> Scenario:
        """A scenario on the engine that serves it, in device time where that is what it runs in."""
        return asked.replace(engine=self.spec.model_copy(update=_STAFFED))

    def rate(self, asked: Scenario) -> float:
        """Requests/s of both replicas."""
        return asked.demand.intensity * REPLICAS / asked.nodes.density

    def asked(self, policy: str, rate: float) -> Scenario:
        """The scenario at ``rate`` requests/s of both replicas."""
        scenario = self.scenario.replace(policy=policy)
        return scenario.with_field("demand.intensity", rate * scenario.nodes.density / REPLICAS)

    def at(self, policy: str, load: float) -> Scenario:
        """The scenario at the intensity at which the busiest node is at ``load`` of its capacity,
        under this policy, by the step chain."""
        asked = self.scenario.replace(policy=policy)
        system, rule, model = pose(asked, delay_model=_label(policy), step_time=self.step_time)

        def point(intensity: float, start: OperatingPoint | None = None) -> OperatingPoint:
            return settle(asked, replace(system, intensity=intensity), rule, model, start=start)

        # Blind to waits, a policy loads its nodes in proportion; one that looks at them less than
        # so. Saturation is kept away from: it takes long to find out.
        intensity, found = 1e-3, point(1e-3)
        for _ in range(MOST_STEPS):
            off = load / float(found.utilisation.max()) if found.feasible else 0.9
            intensity *= off
            if abs(off - 1.0) < PRECISION or not rule.load_aware:
                break
            found = point(intensity, found if found.feasible else None)
        return asked.with_field("demand.intensity", intensity)

    def operating_point(self, asked: Scenario) -> OperatingPoint:
        """Where the step chain's waits and the association cause each other."""
        posed = pose(asked, delay_model=_label(asked.policy), step_time=self.step_time)
        return settle(asked, *posed)

    def predict(self, asked: Scenario) -> dict[str, Any]:
        """What every delay model says, as in
        :func:`calibration.fidelity.prediction.predict_cell`."""
        models: dict[str, list[float] | None] = {}
        left_out: dict[str, str] = {}
        routed: dict[str, Any] = {}
        for name in model_names():
            label = _label(asked.policy) if name == "step_chain" else name
            try:
                outcome = predict(asked, delay_model=label, step_time=self.step_time)
            except TestbedError as error:
                models[name], left_out[name] = None, str(error).removeprefix("delay_model: ")
                continue
            models[name] = _figures(outcome)
            if models[name] is None:
                left_out[name] = "no stable point at this rate"
            routed[name] = share_of_tiers(outcome)
        return {
            "rate": self.rate(asked),
            "models": models,
            "left_out": left_out,
            "routed": routed,
            "prefill_error": self.prefill_error,
        }


_STAFFED = {"replicas": REPLICAS, "max_sequences": SLOTS}


def _label(policy: str) -> str:
    """The step chain for a policy: inside a fixed point every iteration has its own mix."""
    name = "step_chain_mix" if get_policy(policy).load_aware else "step_chain"
    return f"{name}:{OUTPUT_SCV!r}"


def _figures(outcome: Outcome) -> list[float] | None:
    quantiles = outcome.ttft.quantiles
    figures = [outcome.ttft.mean, *(quantiles[figure_key(z)] for z in PROBABILITIES)]
    return figures if outcome.feasible and np.isfinite(figures).all() else None


def share_of_tiers(outcome: Outcome) -> dict[str, float]:
    """Share of all requests that each tier serves."""
    flow = {name: tier.arrival_rate * tier.density for name, tier in outcome.tiers.items()}
    total = sum(flow.values())
    return {name: x / total for name, x in flow.items()}
