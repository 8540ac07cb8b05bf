"""Request streams from traces: the same requests for simulation and cluster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from testbed.errors import ScenarioError, TraceError
from testbed.scenario import Profile, Scenario, WorkloadSpec
from testbed.workload.arrivals import recorded_rate, split_streams, trace_arrivals
from testbed.workload.forest import PrefixForest
from testbed.workload.realisation import TokenRealisation
from testbed.workload.scaling import ScaledRequests, scale_effect, scale_requests
from testbed.workload.stream import FIRST_TOKEN_ID, RequestStream, typed_stream
from testbed.workload.tokenizers import deployed_tokenizer, ordinary_tokens
from testbed.workload.trace import Trace, read_trace
from testbed.workload.types import nearest_type

VOCABULARY = 4096
_WITH_CV2 = ("gamma", "diurnal", "per_type")


def build_stream(
    scenario: Scenario, rate: float, count: int, seed: int, *, vocabulary: int = VOCABULARY
) -> RequestStream:
    """The scenario's requests: its trace where it names one, else its request types.

    Token ids that are drawn keep clear of the special ones of the engine's model, where it is a
    local directory that names them.

    Raises
    ------
    ScenarioError, TraceError
    """
    engine = scenario.engine
    first = FIRST_TOKEN_ID
    if engine is not None:
        first = ordinary_tokens(engine.model, first, vocabulary - first)
    if scenario.workload is None or scenario.workload.trace is None:
        typed = typed_stream(scenario, count, rate, seed, vocabulary=vocabulary)
        return _shifted(typed, first - FIRST_TOKEN_ID)
    spec = scenario.workload
    trace = read_trace(
        scenario.workload.trace,
        format=spec.format,
        tokenizer=spec.tokenizer or (None if engine is None else deployed_tokenizer(engine.model)),
        block_size=spec.block_size,
    )
    if spec.tokens != "recorded":
        drawn = trace_stream(
            scenario, trace, rate=rate, count=count, seed=seed, vocabulary=vocabulary
        )
        return _shifted(drawn, first - FIRST_TOKEN_ID)
    if engine is not None and engine.reuse == "any":
        raise ScenarioError(
            "workload.tokens: recorded prompts are the warm-up's as well and would find themselves "
            "in the engine's cache; they need engine.reuse: pinned"
        )
    return recorded_stream(scenario, trace, rate=rate, count=count, seed=seed)


def _shifted(stream: RequestStream, by: int) -> RequestStream:
    """The same stream, every token id moved up: what is shared stays shared."""
    if by == 0:
        return stream
    return replace(
        stream,
        tokens=lambda i: stream.tokens(i) + np.int32(by),
        pinned=lambda s: [chain + np.int32(by) for chain in stream.pinned(s)],
        facts={**stream.facts, "first_token_id": FIRST_TOKEN_ID + by},
    )


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
        arrival, index, lap = _timed(requests, types, spec, rate, count, duration, seed)
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
                **({"cv2": spec.cv2} if spec.arrivals in _WITH_CV2 else {}),
                **({} if spec.window is None else {"window": list(spec.window)}),
                "token_scale": spec.token_scale,
                "infinite_cache_hit_ratio": scale_effect(requests),
                "output_tokens": own if spec.output_tokens is None else spec.output_tokens,
                "dropped": requests.dropped,
                "passes": int(self.lap.max()) + 1,
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
    vocabulary: int | None = None,
) -> RequestStream:
    """As :func:`trace_stream`, with the token ids that the trace itself records.

    For a model whose answers matter. A warm-up must then use another trace: recorded prompts do
    not change with the seed.

    Parameters
    ----------
    vocabulary : token ids that the model has; ``None`` where it is not known

    Raises
    ------
    TraceError
        The trace records no ids, they do not fit the vocabulary, or they would have to be
        scaled or repeated.
    """
    name = trace.facts.name
    if trace.token_ids is None:
        raise TraceError(f"{name}: the trace records no token ids")
    largest = int(trace.token_ids.max(initial=0))
    if vocabulary is not None and largest >= vocabulary:
        raise TraceError(f"{name}: token id {largest} is beyond a vocabulary of {vocabulary}")
    plan = _Plan.of(scenario, trace, rate, count, None, seed)
    if plan.requests.scale != 1 or plan.lap.max() > 0:
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


def _timed(
    requests: ScaledRequests,
    types: np.ndarray,
    spec: WorkloadSpec,
    rate: float | None,
    count: int | None,
    duration: float | None,
    seed: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Arrival times (N,), which of the n requests comes, and how often it came before.

    The requests come in the trace's order, again and again; with independent streams per type,
    in that order within each type.
    """
    if count is not None and duration is not None:
        raise ScenarioError("demand: give either a number of requests or a duration")
    if count is not None and count < 1:
        raise ScenarioError(f"demand: {count} requests are not a stream")
    if duration is not None and not 0 < duration < np.inf:
        raise ScenarioError(f"demand: {duration:g} s is not a duration > 0")
    n = len(requests)

    def draw(wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if spec.arrivals != "per_type":
            arrival = trace_arrivals(
                requests.trace, requests.rows, wanted, spec, rate=rate, seed=seed
            )
            lap, index = np.divmod(np.arange(wanted), n)
            return arrival, index, lap
        own = recorded_rate(requests.trace.arrival[requests.rows]) if rate is None else rate
        share = np.bincount(types) / n
        arrival, kind = split_streams(own * share, wanted, seed, spec.cv2)
        index, lap = np.empty(wanted, dtype=np.int64), np.empty(wanted, dtype=np.int64)
        for q in np.unique(kind):
            mine, those = np.flatnonzero(kind == q), np.flatnonzero(types == q)
            lap[mine], place = np.divmod(np.arange(len(mine)), len(those))
            index[mine] = those[place]
        return arrival, index, lap

    if duration is None:
        return draw(n if count is None else count)
    wanted = n
    while (drawn := draw(wanted))[0][-1] < duration:
        wanted *= 2
    kept = max(1, int(np.searchsorted(drawn[0], duration)))
    return drawn[0][:kept], drawn[1][:kept], drawn[2][:kept]
