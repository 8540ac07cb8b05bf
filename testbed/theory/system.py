"""System: a scenario as the arrays of the theory, computed once (Theory A, B)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from testbed.radio import RadioModel, radio_model
from testbed.scenario import Scenario
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import TierLoad
from testbed.theory.extensions.remote_fetch import Retrieval, retrieve
from testbed.theory.prefill import prefill_saving, residual_prefill
from testbed.tier_engine import tier_decode, tier_lookahead, tier_prefill


@dataclass(frozen=True)
class System:
    """Arrays over request types Q and profiles S.

    Attributes
    ----------
    types, names : of the requests and of the profiles
    probability : (Q,) p_q, sums to 1
    tokens, output_tokens : (Q,) L_q and generated tokens
    reusable : (Q, S) h_sq tokens
    residual : (Q, S) g(L − h | h), s (Theory A8, H1)
    saving : (Q, S) ΔG_sq, s (Theory A5)
    occupancy : (Q, S) S_sq, s (Theory A10)
    fraction : (S,) π_s, sums to 1
    persistent : (S,) B_s, bytes
    concurrency : (S,) c_s (Theory A9)
    node_density : λ_b, nodes per km²
    intensity : λ_req, requests/s per km²
    radio : distance -> delay
    step_time : of the calibrated engine, or of each tier's, (S,), where there is one
    token_budget : of the engine
    lookahead : the tier's engine forms a step while the one before it runs, (S,); absent: none does
    fetch : what each request does about state that other present profiles hold (Theory H6)
    """

    types: tuple[str, ...]
    names: tuple[str, ...]
    probability: np.ndarray
    tokens: np.ndarray
    output_tokens: np.ndarray
    reusable: np.ndarray
    residual: np.ndarray
    saving: np.ndarray
    occupancy: np.ndarray
    fraction: np.ndarray
    persistent: np.ndarray
    concurrency: np.ndarray
    node_density: float
    intensity: float
    radio: RadioModel
    step_time: AnyStepTime | Sequence[AnyStepTime] | None = None
    token_budget: int | None = None
    lookahead: Sequence[bool] | None = None
    fetch: Callable[..., Retrieval] | None = None

    @classmethod
    def from_scenario(
        cls, scenario: Scenario, step_time: AnyStepTime | Sequence[AnyStepTime] | None = None
    ) -> System:
        """Assemble the arrays; decimal rounding in probabilities and fractions is removed."""
        types, profiles = scenario.requests, scenario.profiles
        probability = np.array([q.probability for q in types])
        fraction = np.array([s.fraction for s in profiles])
        tokens = np.array([q.tokens for q in types])
        reusable = np.array([[s.reusable[q.name] for s in profiles] for q in types])
        prefill = tier_prefill(scenario)
        residual = residual_prefill(prefill, tokens[:, None], reusable)
        saving = prefill_saving(prefill, tokens[:, None], reusable)
        spec = scenario.simulation
        fetch = None
        if spec is not None and spec.backhaul is not None:
            fetch = partial(
                retrieve,
                prefill,
                tokens,
                reusable,
                per_token=scenario.memory.per_token,
                backhaul=spec.backhaul,
            )
            found = fetch(present=fraction > 0)
            whole = residual + saving
            residual, reusable = found.residual, found.reusable
            saving = whole - residual
        return cls(
            types=tuple(q.name for q in types),
            names=tuple(s.name for s in profiles),
            probability=probability / probability.sum(),
            tokens=tokens,
            output_tokens=np.array([q.output_tokens for q in types]),
            reusable=reusable,
            residual=residual,
            saving=saving,
            occupancy=residual + tier_decode(scenario),
            fraction=fraction / fraction.sum(),
            persistent=np.array([s.persistent_bytes for s in profiles]),
            concurrency=np.array([scenario.concurrency(s) for s in profiles]),
            node_density=scenario.nodes.density,
            intensity=scenario.demand.intensity,
            radio=radio_model(scenario.radio, scenario.nodes.density),
            step_time=step_time,
            token_budget=None if scenario.engine is None else scenario.engine.token_budget,
            lookahead=None if step_time is None else tier_lookahead(scenario),
            fetch=fetch,
        )

    @cached_property
    def density(self) -> np.ndarray:
        """λ_s = π_s·λ_b, nodes per km², (S,) (Theory A6)."""
        return self.fraction * self.node_density

    @property
    def shape(self) -> tuple[int, int]:
        """(Q, S)."""
        return len(self.types), len(self.names)

    def with_fraction(self, fraction: np.ndarray) -> System:
        """The same system under another placement π, (S,); only present profiles can be fetched."""
        fraction = np.asarray(fraction, dtype=float)
        present = fraction > 0
        if self.fetch is None or (present == (self.fraction > 0)).all():
            return replace(self, fraction=fraction)
        found = self.fetch(present=present)
        return replace(
            self,
            fraction=fraction,
            reusable=found.reusable,
            residual=found.residual,
            saving=self.residual + self.saving - found.residual,
            occupancy=self.occupancy - self.residual + found.residual,
        )

    def tier_load(self, association: np.ndarray, s: int) -> TierLoad:
        """The load of one node of tier s under A_sq, (Q, S) (Theory B1-B4).

        A tier that nobody uses has no mixture of its own; it gets the mixture of all requests,
        at arrival rate 0, so that its service rate is a number.
        """
        flow = self.probability * association[:, s]
        total = float(flow.sum())
        density = float(self.density[s])
        busy = total > 0 and density > 0
        hit = self.reusable[:, s]
        return TierLoad(
            arrival_rate=self.intensity * total / density if busy else 0.0,
            weights=flow / total if busy else self.probability,
            residual_prefill=self.residual[:, s],
            new_tokens=self.tokens - hit,
            cached_tokens=hit,
            occupancy=self.occupancy[:, s],
            output_tokens=self.output_tokens,
            concurrency=int(self.concurrency[s]),
            profile=self.names[s],
            types=self.types,
            step_time=self.step_time[s] if isinstance(self.step_time, Sequence) else self.step_time,
            token_budget=self.token_budget,
            lookahead=self.lookahead is not None and self.lookahead[s],
        )

    @cached_property
    def capacity(self) -> float:
        """λ_b Σ_s π_s c_s, busy servers per km² (Theory D2)."""
        return float(self.density @ self.concurrency)

    @cached_property
    def least_demand(self) -> float:
        """λ_req Σ_q p_q min_s S_sq over the tiers that have nodes, servers per km² (Theory D2)."""
        least = self.occupancy[:, self.density > 0].min(axis=1)
        return float(self.intensity * (self.probability @ least))

    @property
    def capacity_margin(self) -> float:
        """(capacity − least demand)/capacity; negative: no routing can serve it (Theory D2)."""
        return (self.capacity - self.least_demand) / self.capacity
