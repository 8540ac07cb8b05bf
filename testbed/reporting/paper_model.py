"""PaperModel: a three-profile scenario, asked again and again with one thing changed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from testbed.errors import ScenarioError
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.theory.delay import get_delay_model
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint, solve
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
        """Every placement on the simplex grid with π_fallback and π_deep inside their bounds.

        Shape (N, S); a fraction may be 0.
        """
        fallback, shallow, deep = self.order
        found = []
        for a, b, c in _compositions(round(1 / step), 3):
            if a * step < least_fallback - 1e-9 or c * step > most_deep + 1e-9:
                continue
            pi = np.zeros(3)
            pi[[fallback, shallow, deep]] = np.array([a, b, c]) * step
            found.append(pi)
        return np.array(found)


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, parts - 1):
            yield first, *rest
