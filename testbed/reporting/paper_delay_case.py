"""DelayCase: a preset under any delay model, on one engine.

All models are given the same engine: the step time under which one request alone takes the time
that the preset says. They differ in what happens under load: Erlang-C serves c requests side by
side at that pace, an engine that batches continuously runs prefills in series through one token
budget.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.reporting.paper_model import PaperModel
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.step_time import StepTime
from testbed.theory.delay import DelayModel, get_delay_model
from testbed.theory.geometry import associate
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.system import System

OUTPUTS = 18.0
"""Generated tokens: 17 decode steps make up the preset's decode occupancy."""
BUDGET = 8192
"""Tokens in a step: no prompt of the presets is cut alone."""
TOLERANCE = 1e-7
PRECISION = 0.002
"""Relative precision of the greatest intensity."""
MOST_DOUBLINGS = 12


@dataclass(frozen=True)
class DelayCase:
    """A preset under one delay model, which keeps what it has solved.

    Attributes
    ----------
    outputs : tokens that every request generates
    unsettled : names of the operating points whose search did not converge
    """

    scenario: Scenario
    name: str
    outputs: float = OUTPUTS
    unsettled: list[str] = field(default_factory=list)

    @cached_property
    def paper(self) -> PaperModel:
        return PaperModel(self.scenario)

    @cached_property
    def model(self) -> DelayModel:
        return get_delay_model(self.name)

    @cached_property
    def system(self) -> System:
        return in_steps(self.paper.system, self.scenario, self.outputs)

    @cached_property
    def one_mix(self) -> DelayModel:
        """The model for a single tier, whose mix is given: a chain of its own."""
        return get_delay_model("step_chain") if self.name == "step_chain_mix" else self.model

    def latency(self, policy: str, system: System, start: OperatingPoint | None = None) -> Latency:
        solver = self.scenario.solver
        model = self.one_mix if system.shape[1] == 1 else self.model
        point = solve(
            system,
            get_policy(policy),
            model,
            damping=solver.damping,
            tolerance=TOLERANCE,
            max_iterations=solver.max_iterations,
            start=start,
        )
        if not point.converged:
            what = f"{policy} at intensity {system.intensity:.4g}, density {system.node_density:g}"
            self.unsettled.append(f"{what}, mix {np.round(system.fraction, 3).tolist()}")
        return Latency(system, point, model)

    def at(self, intensity: float, **changed: Any) -> System:
        return replace(self.system, intensity=intensity, **changed)

    def coverage(self, policy: str, system: System) -> float:
        return self.latency(policy, system).coverage(self.paper.deadline)

    def with_outputs(self, factor: float) -> DelayCase:
        """The case with ``factor`` times the decode steps, each as long as before."""
        types = [
            {
                **q.model_dump(mode="json", exclude_none=True),
                "decode_occupancy": factor * q.decode_occupancy,
            }
            for q in self.scenario.requests
        ]
        outputs = 1.0 + factor * (self.outputs - 1.0)
        return DelayCase(self.scenario.replace(requests=types), self.name, outputs)

    def greatest_unaware(self, policy: str, system: System) -> float:
        """The intensity at which the first tier saturates; the association does not depend on it
        (Theory D3)."""
        rule = get_policy(policy)
        association = associate(system, rule.fixed_cost(system.residual, np.zeros(system.shape)))
        loads = [system.tier_load(association, s) for s in range(system.shape[1])]
        model = self.one_mix if len(loads) == 1 else self.model
        busiest = max(model.utilisation(x) for x in loads if x.arrival_rate > 0)
        return system.intensity / busiest

    def greatest(self) -> float:
        """The intensity beyond which load-aware finds no stable operating point, by bisection.

        Raises
        ------
        ScenarioError
            None was found below :data:`MOST_DOUBLINGS` doublings of the queue-unaware one.
        """

        def stable(intensity: float) -> bool:
            return self.latency("load_aware", self.at(intensity)).point.feasible

        low = self.greatest_unaware("prefix_only", self.system)
        for _ in range(MOST_DOUBLINGS):
            if not stable(2.0 * low):
                break
            low *= 2.0
        else:
            raise ScenarioError(f"{self.scenario.name}: {self.name} is never overloaded")
        high = 2.0 * low
        while high / low > 1.0 + PRECISION:
            middle = float(np.sqrt(low * high))
            low, high = (middle, high) if stable(middle) else (low, middle)
        return low


def in_steps(system: System, scenario: Scenario, outputs: float = OUTPUTS) -> System:
    """The system with the engine whose unloaded occupancy is the scenario's (Theory A10).

    Raises
    ------
    ScenarioError
        Types have different decode occupancies: one step time cannot give them all.
    """
    decode = {q.decode_occupancy for q in scenario.requests}
    if len(decode) != 1:
        raise ScenarioError(f"{scenario.name}: decode occupancies differ between types")
    prefill = scenario.prefill
    step = StepTime(
        c_pre=prefill.overhead,
        a=prefill.linear,
        b=prefill.quadratic,
        d=prefill.context,
        c_dec=decode.pop() / (outputs - 1.0),
    )
    return replace(
        system,
        step_time=step,
        token_budget=BUDGET,
        output_tokens=np.full(len(system.types), outputs),
    )
