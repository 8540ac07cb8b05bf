"""System: a scenario's constants as arrays, in the order of its request types and profiles."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.scenario import Scenario
from testbed.theory.extensions.remote_fetch import retrieve
from testbed.theory.prefill import prefill_time
from testbed.tier_engine import tier_decode, tier_prefill


@dataclass(frozen=True)
class System:
    """Q request types, S profiles.

    Attributes
    ----------
    probability : (Q,) p_q
    density : (S,) λ_s, nodes per km² (Theory A6)
    concurrency : (S,) c_s (Theory A9)
    prefill : (Q, S) residual prefill g(L_q − h_sq | h_sq), or a fetch and what it leaves, s
    fetch : (Q, S) seconds of ``prefill`` that are remote KV fetch (Theory H6)
    full_prefill : (Q, S) g(L_q), s
    occupancy : (Q, S) S_sq = residual prefill + D_q, s (Theory A10)
    reusable : (Q, S) tokens not computed, h_sq or what a fetch brings
    intensity : λ_req, requests/s per km²
    """

    types: tuple[str, ...]
    profiles: tuple[str, ...]
    probability: np.ndarray
    density: np.ndarray
    concurrency: np.ndarray
    prefill: np.ndarray
    fetch: np.ndarray
    full_prefill: np.ndarray
    occupancy: np.ndarray
    reusable: np.ndarray
    intensity: float

    @classmethod
    def of(cls, scenario: Scenario) -> System:
        requests, profiles = scenario.requests, scenario.profiles
        tokens = np.array([q.tokens for q in requests])
        hits = np.array([[s.reusable[q.name] for s in profiles] for q in requests])
        g, spec = tier_prefill(scenario), scenario.simulation
        if spec is not None and spec.backhaul is not None:
            present = np.array([s.fraction > 0 for s in profiles])
            found = retrieve(g, tokens, hits, present, scenario.memory.per_token, spec.backhaul)
            prefill, fetch, hits = found.residual, found.fetch, found.reusable
        else:
            prefill = prefill_time(g, tokens[:, None] - hits, hits)
            fetch = np.zeros_like(prefill)
        fraction = np.array([s.fraction for s in profiles])
        return cls(
            types=tuple(q.name for q in requests),
            profiles=tuple(s.name for s in profiles),
            probability=np.array([q.probability for q in requests]),
            density=fraction / fraction.sum() * scenario.nodes.density,
            concurrency=np.array([scenario.concurrency(s) for s in profiles]),
            prefill=prefill,
            fetch=fetch,
            full_prefill=prefill_time(g, tokens[:, None], 0.0),
            occupancy=prefill + tier_decode(scenario),
            reusable=hits,
            intensity=scenario.demand.intensity,
        )

    def capacity_margin(self) -> float:
        """(capacity − least demand)/capacity (Theory D2): negative cannot be served."""
        present = self.density > 0
        least = self.intensity * float(self.probability @ self.occupancy[:, present].min(axis=1))
        capacity = float(self.density @ self.concurrency)
        return (capacity - least) / capacity
