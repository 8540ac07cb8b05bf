"""MemoryNodes: compute nodes and memory nodes as two point processes (Theory H7).

Compute nodes form a Poisson process of density λ_c and cache nothing, so that all c = ⌊M/m_run⌋
sequences run there. Memory nodes form another of density λ_m, independent of it, and each holds one
profile with probability π_s. A request goes to the compute node nearest to its user, which takes
the cheapest way to the prompt's state: the nearest memory node of some profile, or none,

    y = min( g(L), min_s [ latency + κh_sq·(1/(rate·(1 − ϱ_s)) + unpacking) + g(L − h_sq | h_sq)
                           + path(R_s) ] ).

Seen from a compute node, chosen by where the user is, the memory process is still Poisson of the
same law: R_s is exponential in area and independent of the distance to the user. The two distances
thus separate, and the association with memory is that of the baseline with one more competitor,
recompute, whose cost g(L) is certain. Two loads arise: the compute queue, and the memory nodes'
links, processor-sharing with utilisation ϱ_s (as in ``bandwidth``), which their users shun as they
fill. Choosing the pair jointly, among several compute nodes, can only gain; the model leaves that
gain out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.outcome import figure_key
from testbed.radio import PowerLaw, RadioModel, radio_model
from testbed.scenario import Backhaul, Scenario
from testbed.theory.delay.base import ExcessDelay, TierLoad, get_delay_model
from testbed.theory.extensions.fixed_point import MOST_BUSY, shared_links
from testbed.theory.geometry import cost_nodes
from testbed.theory.prefill import prefill_time
from testbed.tier_engine import one_engine

RECOMPUTE = "recompute"
"""Name of the way that fetches nothing."""
_PANELS = 400
_VOID = 37.0


@dataclass(frozen=True)
class MemoryPool:
    """The memory nodes, whose profiles and fractions are the scenario's.

    Attributes
    ----------
    density : λ_m, memory nodes per km²
    backhaul : rate of a memory node's link, latency, decompression
    path : what distance between compute and memory node adds, s
    """

    density: float
    backhaul: Backhaul
    path: PowerLaw


@dataclass(frozen=True)
class PairPoint:
    """Compute–memory pairs at their operating point.

    Attributes
    ----------
    association : (Q, S + 1) share of each type's requests that fetch from profile s; the last
        column recomputes
    link_utilisation : (S,) ϱ_s of a memory node's link
    load : of a compute node
    feasible, converged, reason : as in the baseline
    """

    pairs: _Pairs
    association: np.ndarray
    link_utilisation: np.ndarray
    load: TierLoad
    law: ExcessDelay | None
    converged: bool
    reason: str | None

    @property
    def feasible(self) -> bool:
        return self.reason is None

    @property
    def mean(self) -> float:
        """E[TTFT], s; infinite where the compute nodes are overloaded."""
        if self.law is None or not self.feasible:
            return math.inf
        ways = self.pairs.ways(self.link_utilisation)
        p = self.pairs.probability
        state = sum(p[q] * float(w.mass @ w.cost) for q, w in enumerate(ways))
        wait = float(self.load.weights @ self.law.mean)
        delay, mass = self._radio
        return float(mass @ delay) + state + wait

    def to_dict(self, scenario: Scenario) -> dict[str, Any]:
        """Plain values, with coverage at the scenario's targets."""
        names = [s.name for s in scenario.profiles]
        columns = [*names, RECOMPUTE]
        return {
            "feasible": self.feasible,
            "reason": self.reason,
            "converged": self.converged,
            "association": {
                q.name: dict(zip(columns, map(float, row), strict=True))
                for q, row in zip(scenario.requests, self.association, strict=True)
            },
            "link_utilisation": dict(zip(names, map(float, self.link_utilisation), strict=True)),
            "compute": {
                "arrival_rate": self.load.arrival_rate,
                "concurrency": self.load.concurrency,
                "mean_wait": float(self.load.weights @ self.law.mean)
                if self.law is not None
                else math.inf,
            },
            "ttft": {
                "mean": self.mean,
                "coverage": {figure_key(t): self.coverage(t) for t in scenario.targets.coverage_at},
            },
        }

    @cached_property
    def _radio(self) -> tuple[np.ndarray, np.ndarray]:
        """Radio delays to the nearest compute node, s, and their probabilities, each (U,)."""
        edge = _VOID * np.linspace(0.0, 1.0, _PANELS + 1) ** 2.5
        mass = -np.diff(np.exp(-edge))
        middle = 0.5 * (edge[1:] + edge[:-1])
        distance = np.sqrt(middle / (np.pi * self.pairs.compute_density))
        return self.pairs.radio.delay(distance), mass / mass.sum()

    def coverage(self, seconds: float) -> float:
        """P(TTFT ≤ τ): radio, state and wait are independent (Theory E2)."""
        if self.law is None or not self.feasible:
            return 0.0
        delay, mass = self._radio
        total = 0.0
        for q, way in enumerate(self.pairs.ways(self.link_utilisation)):
            met = self.law.cdf(q, seconds - way.cost[:, None] - delay) @ mass
            total += self.pairs.probability[q] * float(way.mass @ met)
        return total


@dataclass(frozen=True)
class _Ways:
    """How one type gets its state: cost (N,) s with probability mass (N,), and its sources.

    The last entry is recompute. ``share`` (S,) is the probability of each profile.
    """

    cost: np.ndarray
    mass: np.ndarray
    share: np.ndarray


@dataclass(frozen=True)
class _Pairs:
    """The scenario as arrays: Q types, S profiles in memory."""

    probability: np.ndarray
    whole: np.ndarray
    partial: np.ndarray
    hits: np.ndarray
    size: np.ndarray
    decode: np.ndarray
    output_tokens: np.ndarray
    tokens: np.ndarray
    memory_density: np.ndarray
    compute_density: float
    intensity: float
    radio: RadioModel
    pool: MemoryPool

    @classmethod
    def of(cls, scenario: Scenario, pool: MemoryPool) -> _Pairs:
        one_engine(scenario, "a network of memory nodes")
        requests, profiles = scenario.requests, scenario.profiles
        tokens = np.array([q.tokens for q in requests])
        hits = np.array([[s.reusable[q.name] for s in profiles] for q in requests])
        fraction = np.array([s.fraction for s in profiles])
        return cls(
            probability=np.array([q.probability for q in requests]),
            whole=prefill_time(scenario.prefill, tokens, 0.0),
            partial=prefill_time(scenario.prefill, tokens[:, None] - hits, hits),
            hits=hits,
            size=hits * scenario.memory.per_token,
            decode=np.array([q.decode_occupancy for q in requests]),
            output_tokens=np.array([q.output_tokens for q in requests]),
            tokens=tokens,
            memory_density=fraction / fraction.sum() * pool.density,
            compute_density=scenario.nodes.density,
            intensity=scenario.demand.intensity,
            radio=radio_model(scenario.radio, scenario.nodes.density),
            pool=pool,
        )

    def costs(self, rho: np.ndarray) -> np.ndarray:
        """Cost of fetching from a memory node next door, (Q, S), s; infinite for no state."""
        back = self.pool.backhaul
        unpacking = back.decompression * (1.0 + back.interference)
        moved = back.latency + self.size * (1.0 / (back.rate * (1.0 - rho)) + unpacking)
        return np.where(self.size > 0, moved + self.partial, np.inf)

    def ways(self, rho: np.ndarray) -> list[_Ways]:
        path = self.pool.path
        power = 2.0 / path.alpha
        area = np.pi * self.memory_density * path.xi**-power
        found = []
        for q, costs in enumerate(self.costs(rho)):
            limit = self.whole[q]
            useful = np.where(costs < limit, costs, np.inf)
            if not np.isfinite(useful[area > 0]).any():
                nothing = np.zeros(len(area))
                found.append(_Ways(np.array([limit]), np.ones(1), nothing))
                continue
            start, beyond, slope, weight = cost_nodes(
                useful, area, power, np.array([limit]), np.zeros(1)
            )
            y = start + beyond
            inside = y <= limit
            joint = slope[inside] * weight[inside, None]
            fetched = joint.sum(axis=1)
            found.append(
                _Ways(
                    cost=np.append(y[inside], limit),
                    mass=np.append(fetched, 1.0 - fetched.sum()),
                    share=joint.sum(axis=0),
                )
            )
        return found

    def association(self, rho: np.ndarray) -> np.ndarray:
        shares = np.array([w.share for w in self.ways(rho)])
        return np.column_stack([shares, 1.0 - shares.sum(axis=1)])

    def link_demand(self, rho: np.ndarray) -> np.ndarray:
        """ϱ_s = (λ_req/λ_m,s)·Σ_q p_q A_sq κh_sq/rate, (S,)."""
        moved = self.probability @ (self.association(rho)[:, :-1] * self.size)
        return np.divide(
            self.intensity * moved / self.pool.backhaul.rate,
            self.memory_density,
            out=np.zeros_like(moved),
            where=self.memory_density > 0,
        )

    def load(self, rho: np.ndarray, concurrency: int) -> TierLoad:
        """What a compute node has to do: a sequence's slot is held while its state arrives.

        The path's own delay lies before the slot is taken.
        """
        association = self.association(rho)
        ways = np.column_stack(
            [np.where(np.isfinite(self.costs(rho)), self.costs(rho), 0.0), self.whole]
        )
        residual = (association * ways).sum(axis=1)
        fetched = (association[:, :-1] * self.hits).sum(axis=1)
        return TierLoad(
            arrival_rate=self.intensity / self.compute_density,
            weights=self.probability,
            residual_prefill=residual,
            new_tokens=self.tokens - fetched,
            cached_tokens=fetched,
            occupancy=residual + self.decode,
            output_tokens=self.output_tokens,
            concurrency=concurrency,
        )


def solve(scenario: Scenario, pool: MemoryPool) -> PairPoint:
    """The operating point of compute–memory pairs (Theory H7).

    Raises
    ------
    ScenarioError
        A density or rate that is not positive, or a delay model that needs an engine's own load.
    """
    if not pool.density > 0:
        raise ScenarioError(f"memory nodes: a density of {pool.density:g} per km² holds nothing")
    pairs = _Pairs.of(scenario, pool)
    rho, converged = shared_links(pairs.link_demand, len(pairs.memory_density))
    load = pairs.load(rho, scenario.memory.concurrency())
    model = get_delay_model(scenario.delay_model)
    reasons = []
    busy = model.utilisation(load)
    if busy >= 1:
        reasons.append(f"compute nodes have utilisation {busy:.4g}")
    reasons += [
        f"the links of memory nodes of {s.name} are full"
        for s, r in zip(scenario.profiles, rho, strict=True)
        if r >= MOST_BUSY
    ]
    return PairPoint(
        pairs=pairs,
        association=pairs.association(rho),
        link_utilisation=rho,
        load=load,
        law=model.excess(load) if busy < 1 else None,
        converged=converged,
        reason="; ".join(reasons) or None,
    )
