"""RequestStream: the requests of one experiment, the same for simulation and cluster."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import Scenario, WorkloadSpec
from testbed.seeds import generator
from testbed.workload.arrivals import typed_arrivals


@dataclass(frozen=True)
class RequestStream:
    """N requests in order of arrival, S profiles, Q request types.

    Attributes
    ----------
    arrival : (N,) seconds from the start, nondecreasing
    type_index : (N,) index into ``scenario.requests``
    input_tokens, output_tokens : (N,) tokens, at least 1
    reusable : (N, S) tokens of the prompt that profile s holds (Theory A3, per request)
    tokens : ``tokens(i)`` gives request i's token ids, int32; deterministic
    pinned : ``pinned(s)`` gives the token chains that a replica of profile s must pin
    facts : what the outcome must say of the workload (trace, hash, scale, dropped, arrivals)
    """

    arrival: np.ndarray
    type_index: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    reusable: np.ndarray
    tokens: Callable[[int], np.ndarray]
    pinned: Callable[[int], list[np.ndarray]]
    facts: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrival)

    def fingerprint(self, seed: int) -> str:
        """Equal for the same requests at the same microseconds with all else drawn by ``seed``."""
        digest = hashlib.sha256(f"{seed}".encode())
        micros = np.rint(1e6 * self.arrival)
        for column in (micros, self.type_index, self.input_tokens, self.output_tokens):
            digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return digest.hexdigest()[:32]


FIRST_TOKEN_ID = 256
"""Token ids below this are left to special tokens of common vocabularies."""


_ARRIVALS_SAID = {
    "poisson": "request types as Poisson streams",
    "gamma": "request types as one stream with gamma gaps",
    "diurnal": "request types as one stream of varying rate",
    "per_type": "request types as independent streams with gamma gaps",
}


def typed_stream(
    scenario: Scenario, count: int, rate: float, seed: int, *, vocabulary: int = 4096
) -> RequestStream:
    """Request types as a stream of ``rate`` requests/s marked by p_q: Poisson, or what
    ``workload.arrivals`` says.

    A type of family f starts with that family's chain for max_s h_sq tokens and goes on with
    tokens of its own, so that profile s shares exactly its first h_sq tokens (Theory A2-A3).
    Lengths are the types' own, rounded to whole tokens. Output lengths are geometric with the
    type's mean (1 for a mean of 1), the discrete form of the exponential occupancy of Theory B.

    Raises
    ------
    ScenarioError
        ``count`` or ``rate`` is not positive, or ``workload.arrivals`` needs a trace.
    """
    if count < 1 or rate <= 0:
        raise ScenarioError(f"demand: {count} requests at {rate:g} requests/s is not a stream")
    spec = scenario.workload or WorkloadSpec()
    probability = np.array([q.probability for q in scenario.requests])
    arrival, type_index = typed_arrivals(spec, probability, rate, count, seed)
    lengths = np.array([max(1, round(q.tokens)) for q in scenario.requests])
    means = np.array([max(1.0, q.output_tokens) for q in scenario.requests])
    output = generator(seed, "outputs").geometric(1.0 / means[type_index])
    hits = np.array([[s.reusable[q.name] for s in scenario.profiles] for q in scenario.requests])
    hits = np.floor(hits)
    depth = hits.max(axis=1).astype(int)
    families = [q.prefix_family for q in scenario.requests]

    def chain(family: str, length: int) -> np.ndarray:
        draw = generator(0, "prefix", family)
        return draw.integers(FIRST_TOKEN_ID, vocabulary, length, dtype=np.int32)

    longest = {f: max(d for d, g in zip(depth, families, strict=True) if g == f) for f in families}
    chains = {f: chain(f, int(longest[f])) for f in families}

    def tokens(i: int) -> np.ndarray:
        q = int(type_index[i])
        own = generator(seed, "suffix", i).integers(
            FIRST_TOKEN_ID, vocabulary, lengths[q] - depth[q], dtype=np.int32
        )
        return np.concatenate([chains[families[q]][: depth[q]], own])

    def pinned(s: int) -> list[np.ndarray]:
        need: dict[str, int] = {}
        for q, family in enumerate(families):
            need[family] = max(need.get(family, 0), int(hits[q, s]))
        return [chains[f][:n] for f, n in need.items() if n > 0]

    return RequestStream(
        arrival=arrival,
        type_index=type_index,
        input_tokens=lengths[type_index],
        output_tokens=output,
        reusable=hits[type_index],
        tokens=tokens,
        pinned=pinned,
        facts={
            "workload": _ARRIVALS_SAID[spec.arrivals],
            **({} if spec.arrivals == "poisson" else {"cv2": spec.cv2}),
            "vocabulary": vocabulary,
        },
    )
