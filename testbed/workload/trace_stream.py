"""Request streams from traces: the same requests for simulation and cluster."""

from __future__ import annotations

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
    spec = scenario.workload or WorkloadSpec()
    forest = PrefixForest.of(trace)
    requests = scale_requests(trace, forest, spec, scenario.engine)
    held = [pinned_vertices(scenario, s, forest) for s in range(len(scenario.profiles))]
    hits = np.column_stack([requests.reusable(h) for h in held])
    types = nearest_type(
        requests.input_tokens,
        hits,
        np.array([q.tokens for q in scenario.requests]),
        np.array([[s.reusable[q.name] for s in scenario.profiles] for q in scenario.requests]),
    )
    index, arrival = _timed(requests, spec, rate, count, duration, seed)
    lap = np.concatenate([[0], np.cumsum(np.diff(index) < 0)])
    fixed = np.logical_or.reduce(held) if held else np.zeros(len(forest), dtype=bool)
    real = TokenRealisation.of(requests, vocabulary, fixed=fixed, salt=seed)
    deepest = [forest.deepest(h) for h in held]

    def tokens(i: int) -> np.ndarray:
        return real.prompt(int(requests.rows[index[i]]), int(lap[i]))

    def pinned(s: int) -> list[np.ndarray]:
        return [real.chain(int(v)) for v in deepest[s]]

    return RequestStream(
        arrival=arrival,
        type_index=types[index],
        input_tokens=requests.input_tokens[index],
        output_tokens=requests.output_tokens[index],
        reusable=hits[index].astype(float),
        tokens=tokens,
        pinned=pinned,
        facts=_facts(requests, spec, real, passes=int(lap[-1]) + 1),
    )


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
) -> tuple[np.ndarray, np.ndarray]:
    """Which of the kept requests come, and when."""
    if count is not None and duration is not None:
        raise ScenarioError("demand: give either a number of requests or a duration")
    n = len(requests)
    if count is None and duration is None:
        count = n
    if count is not None and count < 1:
        raise ScenarioError(f"demand: {count} requests are not a stream")

    def arrivals(wanted: int) -> tuple[np.ndarray, np.ndarray]:
        index = np.arange(wanted) % n
        return index, trace_arrivals(
            requests.trace,
            requests.rows[index],
            spec.arrivals,
            rate=rate,
            cv2=spec.cv2,
            seed=seed,
        )

    if count is not None:
        return arrivals(count)
    assert duration is not None
    if not duration > 0:
        raise ScenarioError(f"demand: {duration:g} s is not a duration > 0")
    wanted = n
    index, arrival = arrivals(wanted)
    while arrival[-1] < duration:
        wanted *= 2
        index, arrival = arrivals(wanted)
    stop = max(1, int(np.searchsorted(arrival, duration)))
    return index[:stop], arrival[:stop]


def _facts(
    requests: ScaledRequests, spec: WorkloadSpec, real: TokenRealisation, passes: int
) -> dict[str, Any]:
    return {
        "workload": "trace",
        "trace": requests.trace.facts.to_dict(),
        "arrivals": spec.arrivals,
        **({"cv2": spec.cv2} if spec.arrivals == "gamma" else {}),
        "token_scale": spec.token_scale,
        "infinite_cache_hit_ratio": scale_effect(requests),
        "output_tokens": spec.output_tokens or "the trace's, scaled",
        "dropped": requests.dropped,
        "passes": passes,
        "engine_block_size": requests.block_size,
        "vocabulary": real.vocabulary,
        "accidental_prefix_tokens_at_most": real.digits - 1,
        "blocks_too_short_to_differ": real.too_short,
    }
