"""LRU stack distances: the hit ratio of a prefix cache of every size, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from testbed.workload.forest import PrefixForest
from testbed.workload.trace import Trace


@dataclass(frozen=True)
class HitCurve:
    """Share of blocks and of tokens found in an LRU cache of 1, 2, … U blocks.

    ``blocks[c - 1]`` and ``tokens[c - 1]`` belong to a cache of c blocks; the last entries are
    those of an infinite cache. Every request looks its blocks up on arrival, then holds all of
    them, the first block most recently used: so whatever is evicted has no cached continuation,
    and what is found is always a prefix.
    """

    blocks: np.ndarray
    tokens: np.ndarray

    def at(self, size: int) -> tuple[float, float]:
        """Hit ratio by blocks and by tokens of a cache of ``size`` blocks."""
        if size < 1 or not len(self.blocks):
            return 0.0, 0.0
        i = min(size, len(self.blocks)) - 1
        return float(self.blocks[i]), float(self.tokens[i])


def stack_distances(forest: PrefixForest) -> np.ndarray:
    """(M,) position of every block in the LRU stack when its request arrives, from 1; 0 where
    the block is new. An access hits in every cache of at least that many blocks."""
    return _distances(forest.path, forest.offsets, len(forest))


def hit_curve(trace: Trace, forest: PrefixForest) -> HitCurve:
    """Exact hit ratios of every cache size, O(M log M) for M blocks accessed."""
    distance = stack_distances(forest)
    own = block_tokens(trace)
    unique = len(forest)
    total = int(trace.input_tokens.sum())
    by_block = np.bincount(distance, minlength=unique + 1)[1:]
    by_token = np.bincount(distance, weights=own, minlength=unique + 1)[1:]
    return HitCurve(
        np.cumsum(by_block) / max(1, len(distance)), np.cumsum(by_token) / max(1, total)
    )


def block_tokens(trace: Trace) -> np.ndarray:
    """(M,) tokens of the prompt in each block of its chain."""
    counts = np.diff(trace.block_offsets)
    inside = np.arange(len(trace.blocks)) - np.repeat(trace.block_offsets[:-1], counts)
    left = np.repeat(trace.input_tokens, counts) - inside * trace.block_size
    return np.minimum(left, trace.block_size)


def blocks_seen_before(forest: PrefixForest, rows: np.ndarray | None = None) -> np.ndarray:
    """(n,) leading blocks of each request that an earlier one of ``rows`` carries: what an
    infinite cache finds. Without ``rows``, all requests in order."""
    rows = np.arange(forest.requests) if rows is None else np.asarray(rows, dtype=np.int64)
    return _seen_before(forest.path, forest.offsets, rows, len(forest))


def overlap_depth(trace: Trace, forest: PrefixForest) -> np.ndarray:
    """(N,) tokens of each prompt that some earlier request shares: an infinite cache's hit."""
    return np.minimum(blocks_seen_before(forest) * trace.block_size, trace.input_tokens)


@numba.njit(cache=True)
def _distances(path: np.ndarray, offsets: np.ndarray, unique: int) -> np.ndarray:
    m = len(path)
    # A Fenwick tree over access times; a mark stands at each block's last access.
    tree = np.zeros(m + 1, dtype=np.int32)
    last = np.zeros(unique, dtype=np.int64)  # time of the last access from 1; 0 for none
    distance = np.zeros(m, dtype=np.int64)
    held = 0
    now = 0
    for i in range(len(offsets) - 1):
        for k in range(offsets[i], offsets[i + 1]):
            at = last[path[k]]
            if at > 0:
                older = 0
                while at > 0:
                    older += tree[at]
                    at -= at & -at
                distance[k] = held - older + 1
        for k in range(offsets[i + 1] - 1, offsets[i] - 1, -1):
            v = path[k]
            at = last[v]
            if at > 0:
                while at <= m:
                    tree[at] -= 1
                    at += at & -at
            else:
                held += 1
            now += 1
            at = now
            while at <= m:
                tree[at] += 1
                at += at & -at
            last[v] = now
    return distance


@numba.njit(cache=True)
def _seen_before(
    path: np.ndarray, offsets: np.ndarray, rows: np.ndarray, unique: int
) -> np.ndarray:
    seen = np.zeros(unique, dtype=np.bool_)
    found = np.zeros(len(rows), dtype=np.int64)
    for j in range(len(rows)):
        first, last = offsets[rows[j]], offsets[rows[j] + 1]
        for k in range(first, last):
            if not seen[path[k]]:
                break
            found[j] += 1
        for k in range(first, last):
            seen[path[k]] = True
    return found
