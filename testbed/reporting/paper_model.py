"""PaperModel: a three-profile scenario, asked again and again with one thing changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from testbed.errors import ScenarioError
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.theory.constraints import PlacementSet
from testbed.theory.delay import get_delay_model
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.placement import simplex_grid
from testbed.theory.system import System

POLICIES = {
    "load_aware": "load-aware",
    "prefix_only": "prefix-aware, queue-unaware",
    "nearest": "nearest node",
}


@dataclass(frozen=True)
class PaperModel:
    """The scenario whose figures are drawn. Its profiles are told apart by their memory: least is
    the fallback, most is deep; its request types by their length."""

    scenario: Scenario

    def __post_init__(self) -> None:
        if len(self.scenario.profiles) != 3 or len(self.scenario.requests) < 2:
            raise ScenarioError(
                f"{self.scenario.name}: the figures need three profiles and at least two request "
                f"types, not {len(self.scenario.profiles)} and {len(self.scenario.requests)}"
            )

    @cached_property
    def system(self) -> System:
        return System.from_scenario(self.scenario)

    @cached_property
    def order(self) -> tuple[int, int, int]:
        """Indices of the fallback, the shallow and the deep profile."""
        first, second, third = np.argsort(self.system.persistent, kind="stable")
        return int(first), int(second), int(third)

    @cached_property
    def short(self) -> int:
        return int(np.argmin(self.system.tokens))

    @cached_property
    def long(self) -> int:
        return int(np.argmax(self.system.tokens))

    @property
    def deadline(self) -> float:
        """τ₀, seconds: the first target of the scenario."""
        return self.scenario.targets.coverage_at[0]

    def role(self, s: int) -> str:
        return ("fallback", "shallow", "deep")[self.order.index(s)]

    def ask(
        self,
        policy: str = "load_aware",
        *,
        system: System | None = None,
        intensity: float | None = None,
        density: float | None = None,
        fraction: Sequence[float] | np.ndarray | None = None,
        probability: np.ndarray | None = None,
        start: OperatingPoint | None = None,
    ) -> Latency:
        """The latency at the operating point with what is given changed (Theory D, E)."""
        system = self.system if system is None else system
        system = replace(
            system,
            intensity=system.intensity if intensity is None else intensity,
            node_density=system.node_density if density is None else density,
            fraction=system.fraction if fraction is None else np.asarray(fraction, dtype=float),
            probability=system.probability if probability is None else probability,
        )
        model = get_delay_model(self.scenario.delay_model)
        solver = self.scenario.solver
        point = solve(
            system,
            get_policy(policy),
            model,
            damping=solver.damping,
            tolerance=solver.tolerance,
            max_iterations=solver.max_iterations,
            start=start,
        )
        return Latency(system, point, model)

    def coverage(self, policy: str = "load_aware", **changed: object) -> float:
        """P(τ₀) (Theory E2)."""
        return self.ask(policy, **changed).coverage(self.deadline)  # type: ignore[arg-type]

    def with_probability(self, q: int, value: float) -> np.ndarray:
        """p with p_q = value and the others in their proportions, (Q,)."""
        p = self.system.probability.copy()
        rest = p.sum() - p[q]
        scaled = p * (1.0 - value) / rest
        scaled[q] = value
        return scaled

    def mixes(self, step: float, least_fallback: float, most_deep: float) -> np.ndarray:
        """Every allowed placement on the simplex grid, (N, S) (Theory F2)."""
        names = self.system.names
        allowed = PlacementSet.of(
            self.scenario,
            fallback=names[self.order[0]],
            least_fallback=least_fallback,
            deep=(names[self.order[2]],),
            most_deep=most_deep,
        )
        grid = simplex_grid(len(names), round(1 / step))
        return np.array([pi for pi in grid if allowed.contains(pi)])
