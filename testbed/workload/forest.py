"""PrefixForest: the radix forest of a trace (Theory A2), one vertex a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numba
import numpy as np

from testbed.errors import TraceError
from testbed.workload.blocks import spell
from testbed.workload.trace import Labels, Trace


@dataclass(frozen=True)
class PrefixForest:
    """Vertices in order of first appearance, so that a parent's number is below its children's.

    Attributes
    ----------
    block_id : (V,) uint64, the trace's own id of the vertex' block
    parent : (V,) int32, -1 for a root
    level : (V,) int32, blocks from the root, 1 for a root
    own_tokens : (V,) int64, tokens of the vertex' own block; less than the block size where the
        prompt ended inside it
    depth : (V,) int64, ℓ_v: tokens from the start of the prompt to the vertex' end
    count : (V,) int64, requests whose prompt starts with the vertex' prefix
    first_use, last_use : (V,) seconds
    path : (M,) int32, the trace's chains as vertex numbers
    offsets : (N + 1,) int64
    """

    block_size: int
    block_id: np.ndarray
    parent: np.ndarray
    level: np.ndarray
    own_tokens: np.ndarray
    depth: np.ndarray
    count: np.ndarray
    first_use: np.ndarray
    last_use: np.ndarray
    path: np.ndarray
    offsets: np.ndarray

    @classmethod
    def of(cls, trace: Trace) -> PrefixForest:
        """Build the forest; O(M) time, about 60 bytes per block and vertex.

        >>> from testbed.workload.synthetic import SyntheticSpec, synthetic_trace
        >>> forest = PrefixForest.of(synthetic_trace(SyntheticSpec(requests=50)))
        >>> bool((forest.count[forest.roots].sum() == 50) and (forest.count.min() >= 1))
        True
        """
        path, parent = spell(trace.blocks, trace.block_offsets)
        v = len(parent)
        level, own, depth, count, first, last, where = _grow(
            path,
            np.ascontiguousarray(trace.block_offsets),
            parent,
            np.ascontiguousarray(trace.input_tokens),
            np.ascontiguousarray(trace.arrival),
            trace.block_size,
        )
        block_id = trace.blocks[where] if v else np.zeros(0, dtype=np.uint64)
        return cls(
            trace.block_size, block_id, parent, level, own, depth, count, first, last, path,
            trace.block_offsets,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.parent)

    @property
    def requests(self) -> int:
        return len(self.offsets) - 1

    @cached_property
    def roots(self) -> np.ndarray:
        """Vertices without a parent."""
        return np.flatnonzero(self.parent < 0)

    @cached_property
    def children(self) -> np.ndarray:
        """(V,) number of children."""
        return np.bincount(self.parent[self.parent >= 0], minlength=len(self))

    @cached_property
    def leaf(self) -> np.ndarray:
        """(N,) last vertex of each request's chain, -1 for an empty chain."""
        last = self.offsets[1:] - 1
        empty = self.offsets[1:] == self.offsets[:-1]
        if not len(self.path):
            return np.full(self.requests, -1, dtype=np.int32)
        return np.where(empty, -1, self.path[np.where(empty, 0, last)]).astype(np.int32)

    @cached_property
    def common(self) -> np.ndarray:
        """Vertices that every request carries, from the root down: the forest's trunk."""
        shared = np.flatnonzero(self.count == self.requests)
        return shared[np.argsort(self.level[shared])]

    @cached_property
    def family(self) -> np.ndarray:
        """(V,) the highest ancestor that not every request carries; -1 on the trunk.

        Two vertices of one family share more than what all requests share.
        """
        return _families(self.parent, self.count == self.requests)

    def edges(self) -> np.ndarray:
        """Vertices at which a radix edge ends: all but those that every one of their requests
        leaves by the same child. Each edge runs from just below the edge above to its end."""
        only = np.zeros(len(self), dtype=bool)
        below = np.flatnonzero(self.parent >= 0)
        above = self.parent[below]
        only[above[self.count[below] == self.count[above]]] = True
        return np.flatnonzero(~only)

    def reuse_intervals(self, arrival: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Times between successive uses of each vertex, its lifetime distribution.

        Parameters
        ----------
        arrival : (N,) seconds

        Returns
        -------
        offsets : (V + 1,) int64;  intervals : (M − V,) seconds; those of vertex v, in order of
            time, are ``intervals[offsets[v]:offsets[v + 1]]``, one less than its requests
        """
        offsets = np.concatenate([[0], np.cumsum(np.maximum(self.count - 1, 0))])
        return offsets, _intervals(self.path, self.offsets, offsets, np.asarray(arrival))

    def state_bytes(self, bytes_per_token: float) -> np.ndarray:
        """(V,) bytes of KV state of each vertex' own block (Theory A4)."""
        return self.own_tokens * bytes_per_token

    @cached_property
    def _vertex_of(self) -> dict[int, int]:
        return {int(b): v for v, b in enumerate(self.block_id.tolist())}

    def vertex(self, block: int) -> int:
        """The vertex of a trace block id.

        Raises
        ------
        TraceError
            The trace has no such block.
        """
        try:
            return self._vertex_of[int(block)]
        except KeyError:
            raise TraceError(f"block {block} is not in the trace") from None

    def carriers(self, labels: Labels) -> np.ndarray:
        """(V,) distinct sessions, or tenants, among the requests that carry each vertex. A
        request without a label counts as one of its own."""
        codes = labels.codes.astype(np.int64)
        alone = codes < 0
        codes[alone] = codes.max(initial=0) + 1 + np.arange(alone.sum())
        return _carriers(
            self.path, self.offsets, np.argsort(codes, kind="stable"), codes, len(self)
        )

    def supported(self, requests: int) -> np.ndarray:
        """(V,) bool, ancestor-closed: vertices that at least so many requests carry.

        ``exits(supported(k))`` merges every rarer path upward into its deepest prefix of enough
        support, the one that may be advertised (Theory H11).
        """
        return self.count >= requests

    def closure(self, vertices: np.ndarray) -> np.ndarray:
        """(V,) bool: the vertices and all their ancestors (Theory A3)."""
        held = np.zeros(len(self), dtype=bool)
        held[vertices] = True
        _close(self.parent, held)
        return held

    def deepest(self, held: np.ndarray) -> np.ndarray:
        """The vertices of an ancestor-closed set (V,) bool that have no child in it."""
        inner = self.parent[np.flatnonzero(held)]
        tip = held.copy()
        tip[inner[inner >= 0]] = False
        return np.flatnonzero(tip)

    def exits(self, held: np.ndarray) -> np.ndarray:
        """(N,) the deepest vertex of each request's path in an ancestor-closed set, or -1."""
        return _exits(self.path, self.offsets, held)

    def chain(self, vertex: int) -> np.ndarray:
        """Vertices from the root to ``vertex``."""
        out = []
        while vertex >= 0:
            out.append(vertex)
            vertex = int(self.parent[vertex])
        return np.array(out[::-1], dtype=np.int32)


@numba.njit(cache=True)
def _grow(
    path: np.ndarray,
    offsets: np.ndarray,
    parent: np.ndarray,
    lengths: np.ndarray,
    arrival: np.ndarray,
    block_size: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    v = len(parent)
    level = np.zeros(v, dtype=np.int32)
    own = np.zeros(v, dtype=np.int64)
    depth = np.zeros(v, dtype=np.int64)
    count = np.zeros(v, dtype=np.int64)
    first = np.zeros(v)
    last = np.zeros(v)
    where = np.zeros(v, dtype=np.int64)
    for i in range(len(offsets) - 1):
        left = lengths[i]
        for k in range(offsets[i], offsets[i + 1]):
            u = path[k]
            if count[u] == 0:
                first[u] = arrival[i]
                where[u] = k
                level[u] = 1 if parent[u] < 0 else level[parent[u]] + 1
            own[u] = max(own[u], min(block_size, left))
            left -= block_size
            count[u] += 1
            last[u] = arrival[i]
    for u in range(v):
        depth[u] = own[u] if parent[u] < 0 else depth[parent[u]] + own[u]
    return level, own, depth, count, first, last, where


@numba.njit(cache=True)
def _carriers(
    path: np.ndarray, offsets: np.ndarray, order: np.ndarray, codes: np.ndarray, size: int
) -> np.ndarray:
    count = np.zeros(size, dtype=np.int64)
    last = np.full(size, -1, dtype=np.int64)
    for i in order:
        for k in range(offsets[i], offsets[i + 1]):
            v = path[k]
            if last[v] != codes[i]:
                last[v] = codes[i]
                count[v] += 1
    return count


@numba.njit(cache=True)
def _families(parent: np.ndarray, trunk: np.ndarray) -> np.ndarray:
    family = np.empty(len(parent), dtype=np.int32)
    for v in range(len(parent)):
        if trunk[v]:
            family[v] = -1
        elif parent[v] < 0 or family[parent[v]] < 0:
            family[v] = v
        else:
            family[v] = family[parent[v]]
    return family


@numba.njit(cache=True)
def _close(parent: np.ndarray, held: np.ndarray) -> None:
    for v in range(len(parent) - 1, -1, -1):
        if held[v] and parent[v] >= 0:
            held[parent[v]] = True


@numba.njit(cache=True)
def _exits(path: np.ndarray, offsets: np.ndarray, held: np.ndarray) -> np.ndarray:
    out = np.full(len(offsets) - 1, -1, dtype=np.int32)
    for i in range(len(offsets) - 1):
        for k in range(offsets[i], offsets[i + 1]):
            if not held[path[k]]:
                break
            out[i] = path[k]
    return out


@numba.njit(cache=True)
def _intervals(
    path: np.ndarray, offsets: np.ndarray, slots: np.ndarray, arrival: np.ndarray
) -> np.ndarray:
    out = np.empty(slots[-1])
    free = slots[:-1].copy()
    last = np.full(len(slots) - 1, -1.0)
    for i in range(len(offsets) - 1):
        for k in range(offsets[i], offsets[i + 1]):
            v = path[k]
            if last[v] >= 0:
                out[free[v]] = arrival[i] - last[v]
                free[v] += 1
            last[v] = arrival[i]
    return out


def no_prefixes(trace: Trace) -> TraceError:
    """The error of asking for the prefixes of a trace that says nothing of them."""
    return TraceError(
        f"{trace.facts.name}: this {trace.facts.format} file records no prefixes; "
        "only its arrivals and lengths can be used"
    )
