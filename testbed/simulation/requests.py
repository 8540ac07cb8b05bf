"""Requests: what a network is sent, in chunks, from request types or from a trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from testbed.scenario import Scenario
from testbed.seeds import generator
from testbed.simulation.service import ServiceLaw
from testbed.simulation.system import System
from testbed.theory.prefill import prefill_time
from testbed.tier_engine import tier_decode, tier_prefill
from testbed.workload.stream import RequestStream
from testbed.workload.trace_stream import build_stream

CHUNK = 65_536


@dataclass(frozen=True)
class Costs:
    """What a request of each row costs at each profile: (rows, S) s and tokens; tokens (rows,)."""

    prefill: np.ndarray
    reuse: np.ndarray
    full: np.ndarray
    decode: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of_types(cls, scenario: Scenario, system: System) -> Costs:
        """One row per request type."""
        decode = system.occupancy - system.prefill
        tokens = np.array([q.tokens for q in scenario.requests])
        return cls(system.prefill, system.reusable, system.full_prefill, decode, tokens)

    @classmethod
    def of_stream(cls, scenario: Scenario, stream: RequestStream) -> Costs:
        """One row per request: its own length and reuse, and its type's decode occupancy in
        proportion to its output tokens."""
        tokens = stream.input_tokens.astype(float)
        reuse = np.minimum(stream.reusable, tokens[:, None])
        g, decode = tier_prefill(scenario), tier_decode(scenario)
        outputs = np.array([q.output_tokens for q in scenario.requests])
        kind = stream.type_index
        return cls(
            prefill=prefill_time(g, tokens[:, None] - reuse, reuse),
            reuse=reuse,
            full=prefill_time(g, tokens[:, None], 0.0),
            decode=decode[kind] * (stream.output_tokens / outputs[kind])[:, None],
            tokens=tokens,
        )

    def joined(self, after: Costs) -> Costs:
        """These rows and then those."""
        return Costs(
            *(np.concatenate([getattr(self, f), getattr(after, f)]) for f in Costs.__annotations__)
        )


@dataclass(frozen=True)
class Arrivals:
    """Requests (n,) in order of time, s; ``row`` points into :class:`Costs`."""

    time: np.ndarray
    kind: np.ndarray
    row: np.ndarray
    work: np.ndarray
    output_tokens: np.ndarray


def typed_arrivals(
    scenario: Scenario,
    system: System,
    law: ServiceLaw,
    rate: float,
    count: int,
    seed: int,
    *names: str,
    start: float,
) -> Iterator[Arrivals]:
    """``count`` requests as a Poisson stream of ``rate``/s marked by p_q, chunk by chunk.

    Output lengths are geometric with the type's mean, as in
    :func:`testbed.workload.stream.typed_stream`.
    """
    times, kinds, works, outputs = (
        generator(seed, *names, n) for n in ("arrivals", "types", "service", "outputs")
    )
    stop = 1 / np.array([max(1.0, q.output_tokens) for q in scenario.requests])
    cumulative = np.cumsum(system.probability)
    for first in range(0, count, CHUNK):
        n = min(CHUNK, count - first)
        time = start + np.cumsum(times.standard_exponential(n)) / rate
        start = float(time[-1])
        kind = np.searchsorted(cumulative, kinds.random(n) * cumulative[-1], side="right")
        kind = np.minimum(kind, len(cumulative) - 1)
        yield Arrivals(time, kind, kind, law.work(works, n), outputs.geometric(stop[kind]))


def stream_arrivals(
    stream: RequestStream, law: ServiceLaw, seed: int, *, offset: int, start: float
) -> Iterator[Arrivals]:
    """The requests of a stream from time ``start``; their rows begin at ``offset``."""
    works = generator(seed, "service")
    for first in range(0, len(stream), CHUNK):
        part = slice(first, min(first + CHUNK, len(stream)))
        n = part.stop - part.start
        yield Arrivals(
            start + stream.arrival[part],
            stream.type_index[part],
            offset + np.arange(part.start, part.stop),
            law.work(works, n),
            stream.output_tokens[part],
        )


def poisson_types(scenario: Scenario) -> bool:
    """Whether requests are the scenario's types as one Poisson stream: no trace, and no arrivals
    of another kind asked for."""
    spec = scenario.workload
    return spec is None or (spec.trace is None and spec.arrivals == "poisson")


def trace_of(scenario: Scenario, rate: float, count: int, seed: int) -> RequestStream | None:
    """The scenario's trace, or its types where they do not come as one Poisson stream, as a
    stream of requests; None where types do."""
    if poisson_types(scenario):
        return None
    return build_stream(scenario, rate=rate, count=count, seed=seed)
