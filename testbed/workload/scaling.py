"""ScaledRequests: a trace's requests as the engine will see them, in whole tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numba
import numpy as np

from testbed.errors import TraceError
from testbed.scenario import EngineSpec, WorkloadSpec
from testbed.workload.forest import PrefixForest
from testbed.workload.lru import blocks_seen_before, overlap_depth
from testbed.workload.trace import Trace


@dataclass(frozen=True)
class ScaledRequests:
    """n requests kept of a trace's N, and the forest's depths in scaled tokens.

    A block of B trace tokens becomes ``round(B·scale)`` tokens, at least 1, the same wherever
    the block occurs; so does the part-full last block and what the chain leaves uncovered.

    Attributes
    ----------
    trace, forest : whole, before anything was dropped
    rows : (n,) rows of the trace that are kept, in order
    input_tokens, output_tokens : (n,) int64
    depth : (V,) int64, tokens from the prompt's start to each vertex' end
    block_size : the engine's tokens per KV block; only whole blocks can be reused
    dropped : requests left out, by reason
    """

    trace: Trace
    forest: PrefixForest
    rows: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    depth: np.ndarray
    scale: float
    block_size: int
    dropped: dict[str, int]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def own_tokens(self) -> np.ndarray:
        """(V,) tokens that each vertex adds to its parent's depth."""
        return self.depth - _at_parent(self.depth, self.forest.parent)

    @cached_property
    def reusable_depth(self) -> np.ndarray:
        """(V,) tokens that an engine can keep of each vertex' prefix: whole blocks of it."""
        return self.depth // self.block_size * self.block_size

    @cached_property
    def state_tokens(self) -> np.ndarray:
        """(V,) tokens of KV state that each vertex adds to its parent's (Theory A4).

        An engine block that ends inside a vertex belongs to that vertex' path alone, so the
        state of an ancestor-closed set is the plain sum over its vertices.
        """
        return self.reusable_depth - _at_parent(self.reusable_depth, self.forest.parent)

    @cached_property
    def longest_hit(self) -> np.ndarray:
        """(n,) tokens a request can reuse at most: engines compute the last token anew."""
        return (self.input_tokens - 1) // self.block_size * self.block_size

    def reusable(self, held: np.ndarray) -> np.ndarray:
        """(n,) h of each request against an ancestor-closed set (V,) bool (Theory A3)."""
        exits = self.forest.exits(held)[self.rows]
        depth = np.append(self.reusable_depth, 0)[exits]  # -1 finds the appended 0
        return np.minimum(depth, self.longest_hit)


def scale_requests(
    trace: Trace,
    forest: PrefixForest,
    workload: WorkloadSpec | None = None,
    engine: EngineSpec | None = None,
) -> ScaledRequests:
    """Scale lengths, take the window's first ``workload.requests``, drop what is too long.

    Requests of more than ``workload.max_tokens`` input tokens are dropped, and those whose
    input and output exceed ``engine.max_model_len``, which an engine would refuse; both are
    counted.

    Raises
    ------
    TraceError
        Nothing is left, or no request arrives in ``workload.window``.
    """
    spec = workload or WorkloadSpec()
    scale = spec.token_scale
    lengths = _scaled_lengths(
        trace.input_tokens, np.diff(trace.block_offsets), trace.block_size, scale
    )
    own = np.maximum(1, np.rint(forest.own_tokens * scale)).astype(np.int64)
    depth = _accumulate(own, forest.parent)
    if spec.output_tokens is not None:
        outputs = np.full(len(trace), spec.output_tokens, dtype=np.int64)
    else:
        outputs = np.maximum(1, np.rint(trace.output_tokens * scale)).astype(np.int64)
    rows = np.arange(len(trace))
    if spec.window is not None:
        rows = trace.within(*spec.window)
    rows = rows[: spec.requests]
    dropped: dict[str, int] = {}
    if spec.max_tokens is not None:
        keep = lengths[rows] <= spec.max_tokens
        dropped["longer than max_tokens"] = int((~keep).sum())
        rows = rows[keep]
    if engine is not None:
        keep = lengths[rows] + outputs[rows] <= engine.max_model_len
        dropped["longer than max_model_len"] = int((~keep).sum())
        rows = rows[keep]
    if not len(rows):
        raise TraceError(f"{trace.facts.name}: no request is short enough ({_said(dropped)})")
    return ScaledRequests(
        trace=trace,
        forest=forest,
        rows=rows,
        input_tokens=lengths[rows],
        output_tokens=outputs[rows],
        depth=depth,
        scale=scale,
        block_size=1 if engine is None else engine.block_size,
        dropped={k: v for k, v in dropped.items() if v},
    )


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


def scaled_part(tokens: np.ndarray, scale: float) -> np.ndarray:
    """Tokens kept of a part of a prompt; a part that is there keeps at least one."""
    kept = np.maximum(1, np.rint(np.asarray(tokens) * scale)).astype(np.int64)
    return np.where(np.asarray(tokens) > 0, kept, 0)


def _scaled_lengths(
    lengths: np.ndarray, blocks: np.ndarray, block_size: int, scale: float
) -> np.ndarray:
    covered = blocks * block_size
    whole = np.minimum(blocks, lengths // block_size) if block_size else np.zeros_like(lengths)
    part = np.where(covered > lengths, lengths - whole * block_size, 0)
    beyond = np.maximum(0, lengths - covered)
    full = scaled_part(np.array([block_size]), scale)[0]
    return whole * full + scaled_part(part, scale) + scaled_part(beyond, scale)


def _at_parent(values: np.ndarray, parent: np.ndarray) -> np.ndarray:
    return np.append(values, 0)[parent]  # parent -1 finds the appended 0


@numba.njit(cache=True)
def _accumulate(own: np.ndarray, parent: np.ndarray) -> np.ndarray:
    depth = own.copy()
    for v in range(len(own)):
        if parent[v] >= 0:
            depth[v] += depth[parent[v]]
    return depth


def _said(dropped: dict[str, Any]) -> str:
    return ", ".join(f"{v} {k}" for k, v in dropped.items()) or "none left"
