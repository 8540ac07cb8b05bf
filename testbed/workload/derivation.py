"""A scenario from a trace: profiles and request types derived, everything else given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import EngineSpec, Memory, Prefill, Scenario, WorkloadSpec
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
from testbed.workload.scaling import ScaledRequests, scale_requests
from testbed.workload.trace import Trace
from testbed.workload.types import TypeClusters, cluster


@dataclass(frozen=True)
class Derivation:
    """A scenario and how it came about.

    ``clusters.loss`` states what the few types lose of the many paths, Σ p|h − ĥ| in tokens.
    """

    scenario: Scenario
    requests: ScaledRequests
    profiles: list[CandidateProfile]
    clusters: TypeClusters


def scenario_from_trace(trace: Trace, **inputs: Any) -> Scenario:
    """As :func:`derive`, the scenario alone."""
    return derive(trace, **inputs).scenario


def derive(
    trace: Trace,
    *,
    prefill: Prefill,
    memory: Memory,
    radio: Any,
    budget: float,
    profiles: int = 3,
    types: int | None = 4,
    error_bound: float | None = None,
    name: str = "trace",
    engine: EngineSpec | None = None,
    workload: WorkloadSpec | None = None,
    decode_seconds: Callable[[float], float] | None = None,
    density: float = 1.0,
    intensity: float | None = None,
    fractions: Sequence[float] | None = None,
    min_support: int = MIN_SUPPORT,
    support_of: SupportOf = "requests",
    policy: str = "load_aware",
    delay_model: str = "erlang_c",
    seed: int = 0,
) -> Derivation:
    """Build a validated scenario from a trace and what was measured of an engine.

    Parameters
    ----------
    prefill, memory : calibrated coefficients; bytes of KV state, of a sequence and of a token
    radio : a radio model or its mapping
    budget : bytes a profile may keep (at most ``memory.capacity`` less one sequence)
    profiles : number of profiles, the fallback included; fewer come out where the trace does
        not yield as many undominated ones
    types : number of request types, or else ``error_bound`` tokens of Σ p|h − ĥ|
    workload : the section that the scenario shall carry; its scale and limits apply here too
    decode_seconds : D(output tokens), s of occupancy beyond the residual prefill; 0 if absent
    intensity : requests/s per km²; the trace's own rate per node where absent
    fractions : π_s; equal parts where absent
    min_support, support_of : prefixes that fewer requests, sessions or tenants carry are left
        out (Theory H11)

    Raises
    ------
    ScenarioError
        An input is out of range.
    TraceError
        The trace records no prefixes, or nothing of it is left.
    """
    room = memory.capacity - memory.per_sequence
    if not 0 <= budget <= room:
        raise ScenarioError(
            f"budget: {budget:g} bytes is not in [0, {room:g}], the capacity less one sequence"
        )
    spec = workload or WorkloadSpec()
    requests = scale_requests(trace, PrefixForest.of(trace), spec, engine)
    value = ForestValue.of(
        requests, prefill, memory.per_token, min_support=min_support, support_of=support_of
    )
    found = [p for p in candidates(value, budget) if feasible(p, memory)]
    chosen = choose(undominated(found), profiles)
    hits = np.column_stack([p.reusable for p in chosen])
    clusters = cluster(
        requests.input_tokens,
        hits,
        types=None if error_bound is not None else types,
        error_bound=error_bound,
        seed=seed,
    )
    names = type_names(requests, clusters)
    share = _fractions(fractions, len(chosen))
    rate = intensity if intensity is not None else _own_rate(trace) * density
    scenario = Scenario.from_dict(
        {
            "name": name,
            "policy": policy,
            "delay_model": delay_model,
            "radio": _plain(radio),
            "nodes": {"density": density},
            "demand": {"intensity": rate},
            "prefill": prefill.model_dump(),
            "memory": memory.model_dump(),
            "requests": [
                {
                    "name": names[q],
                    "probability": float(clusters.probability[q]),
                    "tokens": float(clusters.tokens[q]),
                    "output_tokens": float(outputs.mean()),
                    "decode_occupancy": _mean_of(decode_seconds, outputs),
                }
                for q in range(len(clusters))
                for outputs in [requests.output_tokens[clusters.type_index == q]]
            ],
            "profiles": [
                {
                    "name": p.name,
                    "fraction": share[s],
                    "persistent_bytes": p.persistent_bytes,
                    "reusable": {
                        names[q]: float(clusters.reusable[q, s]) for q in range(len(clusters))
                    },
                    "pinned_blocks": list(p.pinned_blocks),
                }
                for s, p in enumerate(chosen)
            ],
            "workload": spec.model_dump(exclude_none=True),
            **({} if engine is None else {"engine": engine.model_dump(exclude_none=True)}),
        },
        name,
    )
    return Derivation(scenario, requests, chosen, clusters)


def feasible(profile: CandidateProfile, memory: Memory) -> bool:
    """Whether one sequence at least fits beside the profile's state (Theory A9)."""
    return memory.capacity - profile.persistent_bytes >= memory.per_sequence * (1 - 1e-12)


def _mean_of(decode_seconds: Callable[[float], float] | None, outputs: np.ndarray) -> float:
    if decode_seconds is None:
        return 0.0
    lengths, counts = np.unique(outputs, return_counts=True)
    seconds = [float(decode_seconds(float(n))) for n in lengths]
    return float(np.average(seconds, weights=counts))


def type_names(requests: ScaledRequests, clusters: TypeClusters) -> list[str]:
    """The trace's own label that most of a type's requests carry, numbered where it repeats."""
    trace = requests.trace
    labels = trace.type.codes[requests.rows]
    base = []
    for q in range(len(clusters)):
        codes = labels[clusters.type_index == q]
        codes = codes[codes >= 0]
        base.append(trace.type.names[int(np.bincount(codes).argmax())] if len(codes) else "type")
    seen: dict[str, int] = {}
    names = []
    for b in base:
        seen[b] = seen.get(b, 0) + 1
        names.append(b if base.count(b) == 1 and b != "type" else f"{b}-{seen[b]}")
    return names


def _fractions(given: Sequence[float] | None, count: int) -> list[float]:
    if given is None:
        return [1.0 / count] * count
    if len(given) != count:
        raise ScenarioError(f"fractions: {len(given)} given for {count} profiles")
    return [float(f) for f in given]


def _own_rate(trace: Trace) -> float:
    if trace.rate <= 0:
        raise ScenarioError("intensity: the trace has no rate of its own; give one")
    return trace.rate


def _plain(radio: Any) -> Any:
    return radio.model_dump() if hasattr(radio, "model_dump") else radio
