"""Cache profiles: savings that add up, the knapsack against brute force, dominance, proposals."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError, TraceError
from testbed.prefill import residual_prefill
from testbed.scenario import EngineSpec, Memory, Prefill, WorkloadSpec
from testbed.workload.forest import PrefixForest
from testbed.workload.knapsack import pack, pack_by_price, pack_exactly, pack_greedily
from testbed.workload.profiles import (
    CandidateProfile,
    ForestValue,
    candidate,
    candidates,
    choose,
    undominated,
)
from testbed.workload.proposal import parse_bytes, propose
from testbed.workload.scaling import ScaledRequests, scale_requests
from testbed.workload.trace import Labels, Trace, read_trace
from tests.unit.workload_traces import published, short_for, texts, trace_of

few = settings(max_examples=60, deadline=None)
PREFILL = Prefill(overhead=4e-3, linear=4e-5, quadratic=3e-8, context=6e-8)
KAPPA = 2048.0


def scaled(trace: Trace, scale: float = 1.0, block: int = 1) -> ScaledRequests:
    return scale_requests(
        trace,
        PrefixForest.of(trace),
        WorkloadSpec(token_scale=scale),
        EngineSpec(block_size=block),
    )


def closures(parent: np.ndarray) -> list[np.ndarray]:
    """Every ancestor-closed set of a small forest."""
    sets = []
    for bits in product([False, True], repeat=len(parent)):
        held = np.array(bits, dtype=bool)
        inner = parent[np.flatnonzero(held)]
        if held[inner[inner >= 0]].all():
            sets.append(held)
    return sets


@st.composite
def forests(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    n = draw(st.integers(1, 7))
    parent = np.array([draw(st.integers(-1, v - 1)) for v in range(n)], dtype=np.int32)
    value = np.array(draw(st.lists(st.integers(-5, 20), min_size=n, max_size=n)), dtype=float)
    cost = np.array(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)), dtype=np.int64)
    return parent, value, cost, draw(st.integers(0, 25))


@few
@given(forests())
def test_the_knapsack_equals_brute_force(
    problem: tuple[np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    parent, value, cost, budget = problem
    best = max(value[h].sum() for h in closures(parent) if cost[h].sum() <= budget)
    exact = pack_exactly(parent, value, cost, budget)
    assert exact.exact and exact.value == pytest.approx(best)
    assert exact.upper_bound == exact.value
    price = pack_by_price(parent, value, cost, budget)
    assert price.value <= best + 1e-9 <= price.upper_bound + 2e-9
    greedy = pack_greedily(parent, value, cost, budget)
    for held in (exact.held, price.held, greedy):
        assert cost[held].sum() <= budget
        inner = parent[np.flatnonzero(held)]
        assert held[inner[inner >= 0]].all()
    assert value[greedy].sum() <= best + 1e-9


@few
@given(forests())
def test_greedy_takes_the_best_path_that_fits_again_and_again(
    problem: tuple[np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    parent, value, cost, left = problem
    budget = left
    held = np.zeros(len(parent), dtype=bool)
    while True:
        best: tuple[float, int] | None = None
        for v in range(len(parent)):
            path = [v]
            while parent[path[-1]] >= 0:
                path.append(int(parent[path[-1]]))
            new = [u for u in path[::-1] if not held[u]]
            worth, price = float(value[new].sum()), int(cost[new].sum())
            if new and new[-1] == v and worth > 0 and price <= left:
                ratio = worth / max(price, 1)
                if best is None or ratio > best[0]:
                    best, taken, paid = (ratio, v), new, price
        if best is None:
            break
        held[taken] = True
        left -= paid
    assert np.array_equal(pack_greedily(parent, value, cost, budget), held)


@few
@given(forests())
def test_price_and_programme_agree_where_the_forest_is_worth_less_below(
    problem: tuple[np.ndarray, np.ndarray, np.ndarray, int],
) -> None:
    parent, value, _, budget = problem
    value = np.abs(value) + 1.0
    for v in range(len(parent)):  # no vertex is worth more than its parent; equal costs
        if parent[v] >= 0:
            value[v] = min(value[v], value[parent[v]])
    cost = np.ones(len(parent), dtype=np.int64)
    greedy = pack_greedily(parent, value, cost, budget)
    top = np.sort(value)[::-1][:budget].sum()
    assert value[greedy].sum() == pytest.approx(top)
    assert pack(parent, value, cost, budget).value == pytest.approx(top)


@few
@given(texts(), st.sampled_from([1.0, 0.4, 2.0]), st.sampled_from([1, 2, 3, 8]))
def test_savings_of_vertices_add_up_for_every_closed_set(
    prompts: list[list[int]], scale: float, block: int
) -> None:
    requests = scaled(trace_of(prompts, short=short_for(prompts)), scale, block)
    forest = requests.forest
    value = ForestValue.of(requests, PREFILL, KAPPA, min_support=1)
    rng = np.random.default_rng(len(forest))
    held = forest.closure(np.flatnonzero(rng.random(len(forest)) < 0.4))
    measured = candidate(value, "some", "test", held)
    assert measured.saved_seconds == pytest.approx(value.saving[held].sum(), abs=1e-12)
    assert measured.persistent_bytes == pytest.approx(value.state_tokens[held].sum() * KAPPA)
    # Theory A4: each shared ancestor is counted once, and whole engine blocks only.
    chains = {
        tuple(forest.chain(int(v)).tolist()): int(requests.reusable_depth[v])
        for v in forest.deepest(held)
    }
    if block == 1:
        own = requests.own_tokens
        assert measured.persistent_bytes == sum(own[v] for v in np.flatnonzero(held)) * KAPPA
    assert measured.persistent_bytes <= sum(chains.values()) * KAPPA


@few
@given(texts(), st.sampled_from([1, 3, 8]))
def test_at_least_one_token_is_computed_and_hits_grow_with_the_set(
    prompts: list[list[int]], block: int
) -> None:
    requests = scaled(trace_of(prompts), block=block)
    forest = requests.forest
    everything = requests.reusable(np.ones(len(forest), dtype=bool))
    assert (everything <= requests.input_tokens - 1).all()
    assert (everything % block == 0).all()
    smaller = forest.closure(np.array([0]))
    assert (requests.reusable(smaller) <= everything).all()
    assert (requests.reusable(np.zeros(len(forest), dtype=bool)) == 0).all()


@few
@given(texts())
def test_the_score_is_theory_f1(prompts: list[list[int]]) -> None:
    requests = scaled(trace_of(prompts))
    forest = requests.forest
    value = ForestValue.of(requests, PREFILL, KAPPA)
    n = len(requests)
    for v, score in enumerate(value.scores()):
        through = [
            i for i in range(n) if v in forest.path[forest.offsets[i] : forest.offsets[i + 1]]
        ]
        lengths = requests.input_tokens[through]
        hits = np.minimum(forest.depth[v], lengths - 1)
        saved = residual_prefill(PREFILL, lengths, 0 * hits) - residual_prefill(
            PREFILL, lengths, hits
        )
        expected = len(through) / n * saved.mean() / (forest.depth[v] * KAPPA)
        assert score == pytest.approx(expected, rel=1e-9)


@few
@given(texts(), st.integers(0, 60))
def test_candidates_keep_the_budget_support_and_the_fallback(
    prompts: list[list[int]], tokens: int
) -> None:
    requests = scaled(trace_of(prompts))
    value = ForestValue.of(requests, PREFILL, KAPPA, min_support=2)
    found = candidates(value, tokens * KAPPA)
    assert found[0].name == "fallback" and found[0].persistent_bytes == 0
    for p in found:
        assert p.persistent_bytes <= tokens * KAPPA
        assert (value.support[p.held] >= 2).all()
        assert np.array_equal(requests.forest.closure(requests.forest.deepest(p.held)), p.held)
    kept = undominated(found)
    assert kept[0].name == "fallback"
    for a in kept:
        for b in kept:
            if a is not b:
                beaten = (
                    b.persistent_bytes <= a.persistent_bytes and (b.reusable >= a.reusable).all()
                )
                assert not beaten
    for dropped in set(map(id, found)) - set(map(id, kept)):
        a = next(p for p in found if id(p) == dropped)
        assert any(
            b.persistent_bytes <= a.persistent_bytes and (b.reusable >= a.reusable).all()
            for b in kept
        )


def test_what_every_request_carries_is_no_profile() -> None:
    requests = scaled(trace_of([[7, 1], [7, 2], [7, 3]]))
    value = ForestValue.of(requests, PREFILL, KAPPA)
    assert [p.name for p in candidates(value, 1e9)] == ["fallback"]
    with_family = scaled(trace_of([[7, 1], [7, 1], [7, 3]]))
    deep = candidates(ForestValue.of(with_family, PREFILL, KAPPA), 1e9)[1]
    assert deep.vertices == 2 and deep.coverage == 1.0


def test_turns_of_one_session_are_one_in_the_support_of_sessions() -> None:
    """Theory H11: a path that one person alone walks is not advertised."""
    trace = trace_of([[1, 2], [1, 2], [1, 3], [1, 3]])
    trace = replace(trace, session=Labels(np.array([0, 0, 1, 2], dtype=np.int32), ("a", "b", "c")))
    by = {
        kind: propose(trace, budget=1e12, count=3, support_of=kind)  # type: ignore[arg-type]
        for kind in ("requests", "sessions")
    }
    assert by["requests"].supported_paths == 2 and by["sessions"].supported_paths == 2
    held = {k: set(p.profiles[1].pinned_blocks) for k, p in by.items()}
    of = {text: int(trace.chain(i)[1]) for i, text in ((0, "one's"), (2, "two's"))}
    assert of["one's"] in held["requests"] and of["two's"] in held["requests"]
    assert held["sessions"] == {of["two's"]}
    assert by["sessions"].to_dict()["support_of"] == "sessions"


def test_choose_starts_with_the_fallback_and_the_deepest() -> None:
    def made(name: str, method: str, saved: float) -> CandidateProfile:
        zero = np.zeros(1, dtype=np.int64)
        return CandidateProfile(name, method, zero > 0, 0.0, zero, saved, 0.0, 0, ())

    offered = [
        made("fallback", "uncached", 0.0),
        made("shallow", "knapsack", 1.0),
        made("deep", "knapsack", 2.0),
        made("family-2", "family", 0.5),
        made("family-1", "family", 1.5),
    ]
    names = [p.name for p in choose(offered, 9)]
    assert names == ["fallback", "deep", "shallow", "family-1", "family-2"]
    assert [p.name for p in choose(offered, 2)] == ["fallback", "deep"]
    with pytest.raises(ScenarioError, match="0 is not a number of profiles"):
        choose(offered, 0)


def test_a_trace_without_prefixes_has_no_profiles() -> None:
    trace = read_trace(published("azure/AzureLLMInferenceTrace_code.csv"))
    with pytest.raises(TraceError, match="records no prefixes"):
        propose(trace, budget=1e9)


def test_proposal_of_a_published_trace() -> None:
    trace = read_trace(published("mooncake/synthetic_trace.jsonl"))
    memory = Memory(capacity=2e10, per_sequence=5e8, per_token=131072)
    found = propose(trace, budget=8e9, count=4, memory=memory)
    assert [p.name for p in found.profiles][:2] == ["fallback", "deep"]
    for p in found.profiles:
        assert p.persistent_bytes <= 8e9
        if p.upper_bound is not None:
            assert p.saved_seconds <= p.upper_bound * (1 + 1e-12)
    deep = found.profiles[1]
    assert deep.upper_bound is not None and deep.saved_seconds >= 0.99 * deep.upper_bound
    assert found.concurrency[0] == 40 and found.concurrency[1] == 24
    scores = [v["score_seconds_per_byte"] for v in found.leading]
    assert scores == sorted(scores, reverse=True) and len(scores) == 10
    said = found.to_dict()
    assert set(said["types_loss_tokens"]) == {p.name for p in found.profiles}
    assert sum(q["probability"] for q in said["types"]) == pytest.approx(1)
    few = propose(trace, budget=8e9, count=4, memory=memory, error_bound=2.0)
    assert few.clusters.loss.max() <= 2.0 < found.clusters.loss.max()


@pytest.mark.parametrize(
    ("text", "value"),
    [("8GB", 8e9), ("512 MiB", 512 * 2**20), ("2e9", 2e9), ("1.5k", 1500.0), ("7B", 7.0)],
)
def test_bytes_are_parsed(text: str, value: float) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "8 GX", "-1GB", "nan", "8iB"])
def test_other_texts_are_no_bytes(text: str) -> None:
    with pytest.raises(ScenarioError, match="not a number of bytes"):
        parse_bytes(text)
