"""ProfileProposal: the candidate profiles of a trace within a budget, measured and pruned."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.prefill import residual_prefill
from testbed.scenario import EngineSpec, Memory, Prefill, Scenario, WorkloadSpec
from testbed.workload.derivation import Derivation, derive, feasible, type_names
from testbed.workload.forest import PrefixForest
from testbed.workload.profiles import (
    MIN_SUPPORT,
    CandidateProfile,
    ForestValue,
    SupportOf,
    candidates,
    choose,
    undominated,
)
from testbed.workload.scaling import scale_requests
from testbed.workload.trace import Trace
from testbed.workload.types import TypeClusters, cluster

EXAMPLE_PREFILL = Prefill(linear=2.0e-4, quadratic=2.0e-8)
EXAMPLE_MEMORY = Memory(capacity=2.0e10, per_sequence=5.0e8, per_token=131_072)
"""Stand-ins where nothing was calibrated: an 8-billion-parameter model (32 layers, 8 KV heads of
128, 16 bits: 131,072 bytes a token). Whoever shows figures made with them says so."""

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BYTES = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([KMGT]?)(i?)(B?)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> float:
    """``8GB``, ``512 MiB``, ``2e9`` as bytes; decimal units, binary with an ``i``.

    Raises
    ------
    ScenarioError
        The text is not a number of bytes.

    >>> parse_bytes("8GB"), parse_bytes("1KiB")
    (8000000000.0, 1024.0)
    """
    found = _BYTES.fullmatch(text)
    if found is None or (found[3] and not found[2]):
        raise ScenarioError(f"budget: {text!r} is not a number of bytes such as 8GB or 512MiB")
    scale = _UNITS[found[2].upper()]
    if found[3]:
        scale = 1024 ** "KMGT".index(found[2].upper()) * 1024
    return float(found[1]) * scale


@dataclass(frozen=True)
class ProfileProposal:
    """What ``testbed profiles`` prints.

    ``considered`` counts the candidates, ``dominated`` those that another one beats.
    ``leading`` are the ends of the radix edges of highest score Γ (Theory F1). ``clusters`` are
    the request types against the chosen profiles, with what they lose.
    """

    trace: dict[str, Any]
    requests: int
    dropped: dict[str, int]
    budget: float
    full_prefill: float
    profiles: list[CandidateProfile]
    concurrency: list[int]
    considered: int
    dominated: int
    infeasible: int
    leading: list[dict[str, Any]]
    paths: int
    supported_paths: int
    min_support: int
    support_of: SupportOf
    type_names: list[str]
    clusters: TypeClusters

    def to_dict(self) -> dict[str, Any]:
        return {
            "trace": self.trace,
            "requests": self.requests,
            "dropped": self.dropped,
            "budget_bytes": self.budget,
            "mean_full_prefill_seconds": self.full_prefill,
            "paths": self.paths,
            "paths_with_enough_support": self.supported_paths,
            "min_support": self.min_support,
            "support_of": self.support_of,
            "candidates": self.considered,
            "dominated": self.dominated,
            "infeasible": self.infeasible,
            "profiles": [
                {
                    "name": p.name,
                    "method": p.method,
                    "persistent_bytes": p.persistent_bytes,
                    "concurrency": c,
                    "vertices": p.vertices,
                    "coverage": p.coverage,
                    "coverage_beyond_common": p.selective,
                    "mean_reusable_tokens": float(p.reusable.mean()),
                    "saved_seconds": p.saved_seconds,
                    "saved_share": p.saved_seconds / self.full_prefill,
                    "upper_bound_seconds": p.upper_bound,
                    "pinned_blocks": list(p.pinned_blocks),
                }
                for p, c in zip(self.profiles, self.concurrency, strict=True)
            ],
            "types": [
                {
                    "name": name,
                    "probability": float(self.clusters.probability[q]),
                    "tokens": float(self.clusters.tokens[q]),
                    "reusable": {
                        p.name: float(h)
                        for p, h in zip(self.profiles, self.clusters.reusable[q], strict=True)
                    },
                }
                for q, name in enumerate(self.type_names)
            ],
            "types_loss_tokens": {
                p.name: float(x) for p, x in zip(self.profiles, self.clusters.loss, strict=True)
            },
            "types_length_loss_tokens": self.clusters.length_loss,
            "leading_vertices": self.leading,
        }


def propose(
    trace: Trace,
    *,
    budget: float,
    count: int = 6,
    prefill: Prefill = EXAMPLE_PREFILL,
    memory: Memory = EXAMPLE_MEMORY,
    engine: EngineSpec | None = None,
    workload: WorkloadSpec | None = None,
    types: int | None = 4,
    error_bound: float | None = None,
    min_support: int = MIN_SUPPORT,
    support_of: SupportOf = "requests",
    leading: int = 10,
) -> ProfileProposal:
    """Candidate profiles of a trace: scored, pruned of dominated ones, ``count`` chosen.

    Parameters
    ----------
    budget : bytes a profile may keep
    count : profiles, the fallback included
    types : number of request types, or else ``error_bound`` tokens of Σ p|h − ĥ|
    min_support, support_of : prefixes that fewer requests, sessions or tenants carry merge upward
        into their deepest prefix of enough support (Theory H11)
    leading : how many vertices of the highest score to list

    Raises
    ------
    ScenarioError, TraceError

    Examples
    --------
    >>> from testbed.workload.synthetic import SyntheticSpec, synthetic_trace
    >>> found = propose(synthetic_trace(SyntheticSpec(requests=50)), budget=2e8, count=2)
    >>> [p.name for p in found.profiles], len(found.type_names)
    (['fallback', 'deep'], 4)
    """
    if not budget >= 0:
        raise ScenarioError(f"budget: {budget:g} is not a number of bytes >= 0")
    forest = PrefixForest.of(trace)
    requests = scale_requests(trace, forest, workload, engine)
    value = ForestValue.of(
        requests, prefill, memory.per_token, min_support=min_support, support_of=support_of
    )
    found = candidates(value, budget)
    fitting = [p for p in found if feasible(p, memory)]
    kept = undominated(fitting)
    chosen = choose(kept, count)
    slots = None if engine is None else engine.max_sequences
    zeros = np.zeros(len(requests))
    anchors = forest.exits(value.supported)[requests.rows]
    clusters = cluster(
        requests.input_tokens,
        np.column_stack([p.reusable for p in chosen]),
        types=None if error_bound is not None else types,
        error_bound=error_bound,
    )
    return ProfileProposal(
        trace=trace.facts.to_dict(),
        requests=len(requests),
        dropped=requests.dropped,
        budget=budget,
        full_prefill=float(residual_prefill(prefill, requests.input_tokens, zeros).mean()),
        profiles=chosen,
        concurrency=[_concurrency(p, memory, slots) for p in chosen],
        considered=len(found),
        dominated=len(fitting) - len(kept),
        infeasible=len(found) - len(fitting),
        leading=_leading(value, leading),
        paths=len(np.unique(forest.leaf[requests.rows])),
        supported_paths=len(np.unique(anchors)),
        min_support=min_support,
        support_of=support_of,
        type_names=type_names(requests, clusters),
        clusters=clusters,
    )


def profiles_into(
    scenario: Scenario,
    trace: Trace,
    *,
    budget: float,
    count: int = 6,
    types: int | None = 4,
    error_bound: float | None = None,
    min_support: int = MIN_SUPPORT,
    support_of: SupportOf = "requests",
    workload: WorkloadSpec | None = None,
) -> Derivation:
    """The scenario with request types and profiles of a trace in place of its own, and what the
    types lose.

    Radio, nodes, demand, prefill, memory, engine, policy, targets and solver stay; occupancy
    D_q is the scenario's mean seconds per generated token times the type's own output.

    Raises
    ------
    ScenarioError, TraceError
    """
    tokens = sum(q.probability * q.output_tokens for q in scenario.requests)
    seconds = sum(q.probability * q.decode_occupancy for q in scenario.requests)
    derived = derive(
        trace,
        prefill=scenario.prefill,
        memory=scenario.memory,
        radio=scenario.radio,
        budget=budget,
        profiles=count,
        types=types,
        error_bound=error_bound,
        name=scenario.name,
        engine=scenario.engine,
        workload=workload or scenario.workload,
        decode_seconds=lambda n: n * seconds / tokens,
        density=scenario.nodes.density,
        intensity=scenario.demand.intensity,
        min_support=min_support,
        support_of=support_of,
    )
    fields = ("requests", "profiles", "workload")
    made = scenario.replace(**{k: getattr(derived.scenario, k) for k in fields})
    return replace(derived, scenario=made)


def _concurrency(profile: CandidateProfile, memory: Memory, slots: int | None) -> int:
    free = memory.capacity - profile.persistent_bytes
    c = int(free / memory.per_sequence * (1 + 1e-12))
    return c if slots is None else min(c, slots)


def _leading(value: ForestValue, count: int) -> list[dict[str, Any]]:
    forest = value.requests.forest
    ends = forest.edges()
    score = np.zeros(len(forest))
    score[ends] = np.where(value.supported, value.scores(), 0.0)[ends]
    top = np.argsort(-score, kind="stable")[:count]
    return [
        {
            "block": int(forest.block_id[v]),
            "score_seconds_per_byte": float(score[v]),
            "depth_tokens": int(value.requests.depth[v]),
            "requests": int(value.support[v]),
            "share": float(value.support[v] / len(value.requests)),
            "path_bytes": float(value.requests.reusable_depth[v] * value.bytes_per_token),
            "first_use": float(forest.first_use[v]),
            "last_use": float(forest.last_use[v]),
        }
        for v in top.tolist()
        if score[v] > 0
    ]
