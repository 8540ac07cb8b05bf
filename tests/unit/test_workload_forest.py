"""Prefix forest and LRU stack distances against brute force, and the published values."""

from __future__ import annotations

import csv
import io
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import TraceError
from testbed.workload.forest import PrefixForest
from testbed.workload.lru import block_tokens, blocks_seen_before, hit_curve, stack_distances
from testbed.workload.radix import RadixEdges
from testbed.workload.statistics import statistics
from testbed.workload.trace import Labels, Trace, read_trace
from tests.unit.workload_traces import published, short_for, texts, trace_of

few = settings(max_examples=60, deadline=None)


def lru_hits(trace: Trace, capacity: int) -> tuple[int, int]:
    """Blocks and tokens found by a cache that is simulated block by block."""
    cache: OrderedDict[int, None] = OrderedDict()  # least recently used first
    blocks = tokens = 0
    own = block_tokens(trace)
    for i in range(len(trace)):
        chain = trace.chain(i).tolist()
        start = int(trace.block_offsets[i])
        found = 0
        for k, block in enumerate(chain):
            if block not in cache:
                break
            found += 1
            tokens += int(own[start + k])
        blocks += found
        assert not any(b in cache for b in chain[found:])  # only prefixes are ever cached
        for block in reversed(chain):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > capacity:
            cache.popitem(last=False)
    return blocks, tokens


@few
@given(texts())
def test_vertices_are_the_distinct_prefixes(prompts: list[list[int]]) -> None:
    trace = trace_of(prompts)
    forest = PrefixForest.of(trace)
    prefixes = [tuple(t[: k + 1]) for t in prompts for k in range(len(t))]
    assert len(forest) == len(set(prefixes))
    assert len(forest.roots) == len({p for p in prefixes if len(p) == 1})
    for i, text in enumerate(prompts):
        path = forest.path[forest.offsets[i] : forest.offsets[i + 1]]
        assert forest.chain(int(forest.leaf[i])).tolist() == path.tolist()
        for k, v in enumerate(path):
            carriers = [j for j, t in enumerate(prompts) if t[: k + 1] == text[: k + 1]]
            assert forest.count[v] == len(carriers)
            assert forest.level[v] == k + 1
            assert forest.depth[v] == 4 * (k + 1)
            assert (forest.first_use[v], forest.last_use[v]) == (min(carriers), max(carriers))
            offsets, intervals = forest.reuse_intervals(trace.arrival)
            mine = intervals[offsets[v] : offsets[v + 1]]
            assert np.array_equal(mine, np.diff(carriers))


@few
@given(texts())
def test_parents_come_first_and_counts_fall_along_every_path(prompts: list[list[int]]) -> None:
    forest = PrefixForest.of(trace_of(prompts))
    below = np.flatnonzero(forest.parent >= 0)
    above = forest.parent[below]
    assert (above < below).all()
    assert (forest.count[below] <= forest.count[above]).all()
    # Requests that end at a vertex and those of its children make up its own.
    ends = np.bincount(forest.leaf, minlength=len(forest))
    passed_on = np.bincount(above, weights=forest.count[below], minlength=len(forest))
    assert np.array_equal(ends + passed_on, forest.count)


@few
@given(texts())
def test_radix_edges_end_where_paths_branch_or_end(prompts: list[list[int]]) -> None:
    forest = PrefixForest.of(trace_of(prompts))
    ends = set(forest.edges().tolist())
    for v in range(len(forest)):
        onward = forest.count[np.flatnonzero(forest.parent == v)]
        assert (v in ends) == (not (len(onward) == 1 and onward[0] == forest.count[v]))


@few
@given(texts())
def test_radix_edges_are_the_forest_without_its_chains(prompts: list[list[int]]) -> None:
    trace = trace_of(prompts, short=short_for(prompts))
    forest = PrefixForest.of(trace)
    edges = RadixEdges.of(forest)
    assert edges.blocks.sum() == len(forest) and edges.tokens.sum() == forest.own_tokens.sum()
    assert (edges.above < np.arange(len(edges))).all()
    for e in range(len(edges)):
        way = forest.chain(int(edges.end[e]))
        mine = way[-int(edges.blocks[e]) :]
        # One count for the whole edge, and above it the end of the edge above.
        assert (forest.count[mine] == forest.count[mine[-1]]).all()
        rest = way[: -int(edges.blocks[e])]
        above = int(edges.above[e])
        assert (rest[-1] == edges.end[above]) if above >= 0 else len(rest) == 0
        assert edges.tokens[e] == forest.own_tokens[mine].sum()
    rows = list(csv.DictReader(io.StringIO(edges.to_csv(trace.arrival, 2.0))))
    assert [int(r["requests"]) for r in rows] == forest.count[edges.end].tolist()
    assert sum(float(r["state_bytes"]) for r in rows) == 2 * forest.own_tokens.sum()
    for r in rows:
        assert (r["reuse_median_s"] == "") == (int(r["requests"]) == 1)


@few
@given(texts())
def test_what_all_requests_carry_is_the_trunk_and_founds_no_family(
    prompts: list[list[int]],
) -> None:
    forest = PrefixForest.of(trace_of([[7, 7, *t] for t in prompts]))
    assert forest.common[:2].tolist() == [0, 1]
    assert (forest.family[forest.common] == -1).all()
    trunk = set(forest.common.tolist())
    for v in set(range(len(forest))) - trunk:
        top = int(forest.family[v])
        assert top in forest.chain(v) and int(forest.parent[top]) in trunk


def test_turns_of_one_conversation_grow_one_path() -> None:
    forest = PrefixForest.of(trace_of([[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]))
    assert len(forest) == 4 and forest.children.tolist() == [1, 1, 1, 0]
    assert forest.count.tolist() == [4, 3, 2, 1]


@few
@given(texts(), st.integers(1, 20))
def test_stack_distances_give_every_lru_cache(prompts: list[list[int]], capacity: int) -> None:
    trace = trace_of(prompts, short=short_for(prompts))
    forest = PrefixForest.of(trace)
    blocks, tokens = lru_hits(trace, capacity)
    by_blocks, by_tokens = hit_curve(trace, forest).at(capacity)
    assert by_blocks * len(trace.blocks) == pytest.approx(blocks)
    assert by_tokens * trace.input_tokens.sum() == pytest.approx(tokens)


@few
@given(texts())
def test_an_infinite_cache_finds_all_that_was_seen(prompts: list[list[int]]) -> None:
    trace = trace_of(prompts, short=short_for(prompts))
    forest = PrefixForest.of(trace)
    seen: set[int] = set()
    for i, found in enumerate(blocks_seen_before(forest)):
        chain = trace.chain(i).tolist()
        expected = next((k for k, b in enumerate(chain) if b not in seen), len(chain))
        assert found == expected
        seen.update(chain)
    curve = hit_curve(trace, forest)
    assert curve.blocks[-1] == pytest.approx(1 - len(forest) / len(forest.path))
    assert (np.diff(curve.blocks) >= 0).all() and (np.diff(curve.tokens) >= -1e-15).all()
    assert ((stack_distances(forest) == 0).sum()) == len(forest)


@few
@given(texts(), st.data())
def test_a_closure_holds_its_ancestors_and_its_tips_span_it(
    prompts: list[list[int]], data: st.DataObject
) -> None:
    forest = PrefixForest.of(trace_of(prompts))
    some = data.draw(st.lists(st.integers(0, len(forest) - 1), max_size=4))
    held = forest.closure(np.array(some, dtype=int))
    for v in np.flatnonzero(held):
        assert forest.parent[v] < 0 or held[forest.parent[v]]
    tips = forest.deepest(held)
    assert np.array_equal(forest.closure(tips), held)
    assert set(tips.tolist()) <= set(some)
    for i, exit_ in enumerate(forest.exits(held)):
        path = forest.path[forest.offsets[i] : forest.offsets[i + 1]]
        inside = [int(v) for v in path if held[v]]
        assert exit_ == (inside[-1] if inside else -1)


def test_rare_paths_merge_upward() -> None:
    forest = PrefixForest.of(trace_of([[1, 2, 3], [1, 2, 4], [1, 5, 6], [9]]))
    anchors = forest.exits(forest.supported(2))
    assert [forest.level[a] if a >= 0 else 0 for a in anchors] == [2, 2, 1, 0]
    assert forest.count[anchors[anchors >= 0]].min() >= 2


@few
@given(texts(), st.integers(0, 10**6))
def test_support_counts_sessions_once_each(prompts: list[list[int]], seed: int) -> None:
    forest = PrefixForest.of(trace_of(prompts))
    codes = np.random.default_rng(seed).integers(-1, 3, len(prompts)).astype(np.int32)
    found = forest.carriers(Labels(codes, ("a", "b", "c")))
    for v in range(len(forest)):
        rows = [i for i in range(len(prompts)) if v in forest.chain(int(forest.leaf[i]))]
        named = {int(codes[i]) for i in rows if codes[i] >= 0}
        assert found[v] == len(named) + sum(codes[i] < 0 for i in rows)
    inner = np.flatnonzero(forest.parent >= 0)
    assert (found[inner] <= found[forest.parent[inner]]).all()
    assert (found <= forest.count).all()


def test_an_unknown_block_is_named() -> None:
    forest = PrefixForest.of(trace_of([[1, 2]]))
    with pytest.raises(TraceError, match="block 77 is not in the trace"):
        forest.vertex(77)


@pytest.mark.parametrize(
    ("name", "requests", "blocks", "hits", "roots", "cv2"),
    [
        ("conversation", 12_031, 182_790, 0.3664, 1, 9.2),
        ("synthetic", 3_993, 43_924, 0.6396, 2_211, 1.02),
    ],
)
def test_published_mooncake_traces(
    name: str, requests: int, blocks: int, hits: float, roots: int, cv2: float
) -> None:
    trace = read_trace(published(f"mooncake/{name}_trace.jsonl"))
    found = statistics(trace)
    prefixes = found.prefixes
    assert prefixes is not None
    assert found.requests == requests
    assert (prefixes.unique_blocks, prefixes.roots) == (blocks, roots)
    assert prefixes.hit_ratio_blocks == pytest.approx(hits, abs=5e-5)
    assert found.arrivals.cv2 == pytest.approx(cv2, rel=0.005)
    assert not trace.facts.relabelled and not trace.facts.dropped


def test_published_trace_against_brute_force_lru() -> None:
    trace = read_trace(published("mooncake/synthetic_trace.jsonl"))
    head = trace.take(np.arange(400))
    forest = PrefixForest.of(head)
    curve = hit_curve(head, forest)
    for capacity in (50, 500, 3000, len(forest)):
        blocks, tokens = lru_hits(head, capacity)
        assert curve.at(capacity)[0] * len(head.blocks) == pytest.approx(blocks)
        assert curve.at(capacity)[1] * head.input_tokens.sum() == pytest.approx(tokens)
