"""Request streams from traces: the same requests for simulation and cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.errors import ScenarioError, TraceError
from testbed.scenario import Profile, Scenario, WorkloadSpec
from testbed.workload.arrivals import trace_arrivals
from testbed.workload.forest import PrefixForest
from testbed.workload.lru import blocks_seen_before, overlap_depth
from testbed.workload.realisation import TokenRealisation
from testbed.workload.scaling import ScaledRequests, scale_requests
from testbed.workload.stream import RequestStream, typed_stream
from testbed.workload.trace import Trace, read_trace
from testbed.workload.types import nearest_type

VOCABULARY = 4096


def build_stream(
    scenario: Scenario, rate: float, count: int, seed: int, *, vocabulary: int = VOCABULARY
) -> RequestStream:
    """The scenario's requests: its trace where it names one, else its request types.

    Raises
    ------
    ScenarioError, TraceError
    """
    if scenario.workload is None or scenario.workload.trace is None:
        return typed_stream(scenario, count, rate, seed, vocabulary=vocabulary)
    trace = read_trace(scenario.workload.trace, format=scenario.workload.format)
    return trace_stream(scenario, trace, rate=rate, count=count, seed=seed, vocabulary=vocabulary)


def trace_stream(
    scenario: Scenario,
    trace: Trace,
    *,
    rate: float | None = None,
    count: int | None = None,
    duration: float | None = None,
    seed: int,
    vocabulary: int = VOCABULARY,
) -> RequestStream:
    """Requests of a trace, scaled and timed as ``scenario.workload`` says.

    A trace shorter than what is asked for is gone through again. Another pass has the same
    prefix structure but other tokens outside the pinned prefixes, so that it finds nothing in
    any cache that the pass before left there.

    Parameters
    ----------
    rate : requests/s; ``None`` for the trace's own
    count : requests; or else
    duration : seconds of arrivals at ``rate``; without either, the trace once
    seed : of arrival times and of all tokens that no profile pins

    Raises
    ------
    ScenarioError
        A profile pins a block that the trace does not have, or promises reuse without pinning.
    TraceError
        No request is left after scaling and dropping.
    """
    plan = _Plan.of(scenario, trace, rate, count, duration, seed)
    requests, forest = plan.requests, plan.requests.forest
    fixed = np.logical_or.reduce(plan.held)
    real = TokenRealisation.of(requests, vocabulary, fixed=fixed, salt=seed)

    def tokens(i: int) -> np.ndarray:
        return real.prompt(int(requests.rows[plan.index[i]]), int(plan.lap[i]))

    def pinned(s: int) -> list[np.ndarray]:
        return [real.chain(int(v)) for v in forest.deepest(plan.held[s])]

    facts = {
        "tokens": "drawn from block ids",
        "vocabulary": vocabulary,
        "accidental_prefix_tokens_at_most": real.digits - 1,
        "blocks_too_short_to_differ": real.too_short,
    }
    return plan.stream(tokens, pinned, facts)


@dataclass(frozen=True)
class _Plan:
    """Which requests come, when, and what each profile holds of them."""

    spec: WorkloadSpec
    requests: ScaledRequests
    held: list[np.ndarray]  # S of (V,) bool
    hits: np.ndarray  # (n, S) tokens
    types: np.ndarray  # (n,)
    arrival: np.ndarray  # (N,) seconds
    index: np.ndarray  # (N,) into the n kept requests
    lap: np.ndarray  # (N,) passes over the trace before this one

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        trace: Trace,
        rate: float | None,
        count: int | None,
        duration: float | None,
        seed: int,
    ) -> _Plan:
        spec = scenario.workload or WorkloadSpec()
        forest = PrefixForest.of(trace)
        requests = scale_requests(trace, forest, spec, scenario.engine)
        held = [pinned_vertices(scenario, s, forest) for s in range(len(scenario.profiles))]
        hits = np.column_stack([requests.reusable(h) for h in held])
        reusable = [[s.reusable[q.name] for s in scenario.profiles] for q in scenario.requests]
        types = nearest_type(
            requests.input_tokens,
            hits,
            np.array([q.tokens for q in scenario.requests]),
            np.array(reusable),
        )
        arrival = _timed(requests, spec, rate, count, duration, seed)
        lap, index = np.divmod(np.arange(len(arrival)), len(requests))
        return cls(spec, requests, held, hits, types, arrival, index, lap)

    def stream(
        self,
        tokens: Callable[[int], np.ndarray],
        pinned: Callable[[int], list[np.ndarray]],
        facts: dict[str, Any],
    ) -> RequestStream:
        spec, requests = self.spec, self.requests
        own = "the trace's, scaled"
        return RequestStream(
            arrival=self.arrival,
            type_index=self.types[self.index],
            input_tokens=requests.input_tokens[self.index],
            output_tokens=requests.output_tokens[self.index],
            reusable=self.hits[self.index].astype(float),
            tokens=tokens,
            pinned=pinned,
            facts={
                "workload": "trace",
                "trace": requests.trace.facts.to_dict(),
                "arrivals": spec.arrivals,
                **({"cv2": spec.cv2} if spec.arrivals == "gamma" else {}),
                "token_scale": spec.token_scale,
                "infinite_cache_hit_ratio": scale_effect(requests),
                "output_tokens": own if spec.output_tokens is None else spec.output_tokens,
                "dropped": requests.dropped,
                "passes": int(self.lap[-1]) + 1,
                "engine_block_size": requests.block_size,
                **facts,
            },
        )


def recorded_stream(
    scenario: Scenario,
    trace: Trace,
    *,
    rate: float | None = None,
    count: int | None = None,
    seed: int,
    vocabulary: int,
) -> RequestStream:
    """As :func:`trace_stream`, with the token ids that the trace itself records.

    For a model whose answers matter. A warm-up must then use another trace: recorded prompts do
    not change with the seed.

    Raises
    ------
    TraceError
        The trace records no ids, they do not fit the vocabulary, or they would have to be
        scaled or repeated.
    """
    name = trace.facts.name
    if trace.token_ids is None:
        raise TraceError(f"{name}: the trace records no token ids")
    if len(trace.token_ids) and int(trace.token_ids.max()) >= vocabulary:
        raise TraceError(
            f"{name}: token id {int(trace.token_ids.max())} is beyond a vocabulary of {vocabulary}"
        )
    plan = _Plan.of(scenario, trace, rate, count, None, seed)
    if plan.requests.scale != 1 or plan.lap[-1] > 0:
        raise TraceError(f"{name}: recorded token ids can be neither scaled nor repeated")
    forest, rows = plan.requests.forest, plan.requests.rows[plan.index]
    first_block = np.unique(forest.path, return_index=True)[1]
    first_row = np.searchsorted(forest.offsets, first_block, side="right") - 1

    def pinned(s: int) -> list[np.ndarray]:
        return [
            trace.tokens(int(first_row[v]))[: int(forest.depth[v])]
            for v in forest.deepest(plan.held[s])
        ]

    return plan.stream(lambda i: trace.tokens(int(rows[i])), pinned, {"tokens": "as recorded"})


def pinned_vertices(scenario: Scenario, s: int, forest: PrefixForest) -> np.ndarray:
    """(V,) bool: what profile s pins of a trace's forest, ancestors included (Theory A3).

    Raises
    ------
    ScenarioError
        A pinned block is not in the trace, or the profile promises reuse and pins nothing.
    """
    profile: Profile = scenario.profiles[s]
    if not profile.pinned_blocks and any(h > 0 for h in profile.reusable.values()):
        raise ScenarioError(
            f"profiles[{s}].pinned_blocks: none, although the profile promises reusable tokens; "
            "with a trace they must name blocks of it"
        )
    try:
        vertices = np.array([forest.vertex(b) for b in profile.pinned_blocks], dtype=np.int64)
    except TraceError as error:
        raise ScenarioError(f"profiles[{s}].pinned_blocks: {error}") from None
    return forest.closure(vertices)


def scale_effect(requests: ScaledRequests) -> dict[str, float]:
    """Share of prompt tokens that an infinite cache finds: in the trace as recorded, and in
    what is made of it (scaled, long requests dropped, whole engine blocks, the last token
    always computed)."""
    trace, forest = requests.trace, requests.forest
    recorded = overlap_depth(trace, forest)
    found = blocks_seen_before(forest, requests.rows)
    last = forest.offsets[requests.rows] + found - 1
    vertex = np.where(found > 0, np.append(forest.path, -1)[last], -1)
    depth = np.append(requests.reusable_depth, 0)[vertex]
    made = np.minimum(depth, requests.longest_hit)
    return {
        "trace": float(recorded.sum() / trace.input_tokens.sum()),
        "scaled": float(made.sum() / requests.input_tokens.sum()),
    }


def _timed(
    requests: ScaledRequests,
    spec: WorkloadSpec,
    rate: float | None,
    count: int | None,
    duration: float | None,
    seed: int,
) -> np.ndarray:
    """Arrival times of as many requests as are asked for, in the trace's order, again and
    again."""
    if count is not None and duration is not None:
        raise ScenarioError("demand: give either a number of requests or a duration")
    if count is not None and count < 1:
        raise ScenarioError(f"demand: {count} requests are not a stream")
    if duration is not None and not 0 < duration < np.inf:
        raise ScenarioError(f"demand: {duration:g} s is not a duration > 0")

    def arrivals(wanted: int) -> np.ndarray:
        return trace_arrivals(
            requests.trace,
            requests.rows,
            wanted,
            spec.arrivals,
            rate=rate,
            cv2=spec.cv2,
            seed=seed,
        )

    if duration is None:
        return arrivals(len(requests) if count is None else count)
    wanted = len(requests)
    while (arrival := arrivals(wanted))[-1] < duration:
        wanted *= 2
    return arrival[: max(1, int(np.searchsorted(arrival, duration)))]
