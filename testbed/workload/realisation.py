"""TokenRealisation: trace blocks become token ids, the same in every process and version."""

from __future__ import annotations

from dataclasses import dataclass

import numba
import numpy as np

from testbed.errors import ScenarioError
from testbed.workload.blocks import mix64
from testbed.workload.scaling import ScaledRequests, scaled_part
from testbed.workload.stream import FIRST_TOKEN_ID


@dataclass(frozen=True)
class TokenRealisation:
    """Token ids of a trace's prompts.

    Token j of a block is a hash of the block's id and j, never below :data:`FIRST_TOKEN_ID`.
    Only the first few tokens of a block are special: they spell the block's number among all
    continuations of its parent (sibling blocks and the private ends of prompts), in as few
    digits as the vocabulary needs. So two prompts that part in the trace part within those
    digits, for certain: at once where a vertex has no more continuations than the vocabulary has
    tokens, after ``digits − 1`` tokens at most otherwise.

    Attributes
    ----------
    fixed : (V,) bool; these vertices' tokens do not depend on ``salt``
    salt : changes the tokens of all other vertices, so that another seed (a warm-up, another
        pass over the trace) shares no more with this one than what is ``fixed``
    """

    requests: ScaledRequests
    vocabulary: int
    fixed: np.ndarray
    salt: int
    rank: np.ndarray
    continuations: np.ndarray
    end_rank: np.ndarray

    @classmethod
    def of(
        cls, requests: ScaledRequests, vocabulary: int, *, fixed: np.ndarray, salt: int = 0
    ) -> TokenRealisation:
        """Raises :class:`ScenarioError` where the vocabulary leaves fewer than two tokens."""
        if vocabulary < FIRST_TOKEN_ID + 2:
            raise ScenarioError(
                f"vocabulary: {vocabulary} leaves no tokens above the first {FIRST_TOKEN_ID}"
            )
        forest = requests.forest
        covered = np.diff(forest.offsets) * forest.block_size
        open_end = requests.trace.input_tokens > covered
        rank, end_rank, count = _ranks(forest.parent, forest.leaf, open_end)
        return cls(requests, vocabulary, fixed, salt, rank, count, end_rank)

    @property
    def usable(self) -> int:
        """Token ids that may occur."""
        return self.vocabulary - FIRST_TOKEN_ID

    @property
    def digits(self) -> int:
        """Most tokens that it takes to tell two continuations of one vertex apart."""
        return _digits(int(self.continuations.max(initial=1)), self.usable)

    @property
    def too_short(self) -> int:
        """Blocks and ends of prompts of fewer tokens than tell them apart from all siblings."""
        r, forest = self.requests, self.requests.forest
        powers = self.usable ** np.arange(1, self.digits + 1, dtype=np.float64)
        needed = 1 + np.searchsorted(powers, self.continuations)
        blocks = r.own_tokens < needed[forest.parent]
        beyond = r.trace.input_tokens - np.diff(forest.offsets) * forest.block_size
        ends = (beyond > 0) & (scaled_part(beyond, r.scale) < needed[forest.leaf])
        return int(blocks.sum() + ends[r.rows].sum())

    def vertex_tokens(self, vertex: int, length: int, lap: int = 0) -> np.ndarray:
        """Token ids of one vertex' own block, (length,) int32."""
        parent = int(self.requests.forest.parent[vertex])
        key = int(self.requests.forest.block_id[vertex])
        salt = 0 if self.fixed[vertex] else _salted(self.salt, lap)
        return self._draw(key, salt, int(self.rank[vertex]), parent, length)

    def prompt(self, row: int, lap: int = 0) -> np.ndarray:
        """Token ids of the request at a row of the trace, int32, on a given pass over it."""
        r = self.requests
        trace, forest, size = r.trace, r.forest, r.forest.block_size
        left = int(trace.input_tokens[row])
        vertices = forest.path[forest.offsets[row] : forest.offsets[row + 1]]
        parts = []
        for v in vertices.tolist():
            length = int(scaled_part(np.array([min(size, left)]), r.scale)[0])
            parts.append(self.vertex_tokens(v, length, lap))
            left -= size
        if left > 0:
            length = int(scaled_part(np.array([left]), r.scale)[0])
            leaf = int(forest.leaf[row])
            salt = _salted(self.salt, lap)
            parts.append(self._draw(~row % 2**64, salt, int(self.end_rank[row]), leaf, length))
        return np.concatenate(parts)

    def chain(self, vertex: int) -> np.ndarray:
        """Token ids from the root to a vertex' end, int32."""
        own = self.requests.own_tokens
        vertices = self.requests.forest.chain(vertex).tolist()
        return np.concatenate([self.vertex_tokens(v, int(own[v])) for v in vertices])

    def _draw(self, key: int, salt: int, rank: int, parent: int, length: int) -> np.ndarray:
        siblings = int(self.continuations[parent])  # -1 finds the roots' count at the end
        digits = _digits(siblings, self.usable)
        shift = _mixed(parent + 2, 0) % self.usable  # one for all continuations of a vertex
        return _tokens(np.uint64(_mixed(key, salt)), rank, digits, shift, self.usable, length)


def _salted(salt: int, lap: int) -> int:
    return _mixed(salt + 1, lap + 1)


def _mixed(a: int, b: int) -> int:
    return int(_mix_pair(np.uint64(a % 2**64), np.uint64(b % 2**64)))


@numba.njit(cache=True)
def _mix_pair(a: np.uint64, b: np.uint64) -> np.uint64:
    return mix64(mix64(a + np.uint64(0x9E3779B97F4A7C15)) ^ (b * np.uint64(0xD1342543DE82EF95)))


def _digits(count: int, base: int) -> int:
    digits = 1
    while base**digits < count:
        digits += 1
    return digits


@numba.njit(cache=True)
def _tokens(
    stream: np.uint64, rank: int, digits: int, shift: int, usable: int, length: int
) -> np.ndarray:
    out = np.empty(length, dtype=np.int32)
    half = np.uint64(32)
    for j in range(length):
        if j < digits:
            out[j] = FIRST_TOKEN_ID + (rank + shift) % usable
            rank //= usable
        else:
            drawn = mix64(stream + np.uint64(j + 1) * np.uint64(0x9E3779B97F4A7C15))
            out[j] = FIRST_TOKEN_ID + np.int64(((drawn >> half) * np.uint64(usable)) >> half)
    return out


@numba.njit(cache=True)
def _ranks(
    parent: np.ndarray, leaf: np.ndarray, open_end: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    v = len(parent)
    count = np.zeros(v + 1, dtype=np.int64)  # the last entry counts continuations of nothing
    rank = np.empty(v, dtype=np.int64)
    for u in range(v):
        at = parent[u] if parent[u] >= 0 else v
        rank[u] = count[at]
        count[at] += 1
    end_rank = np.full(len(leaf), -1, dtype=np.int64)
    for i in range(len(leaf)):
        if open_end[i]:
            at = leaf[i] if leaf[i] >= 0 else v
            end_rank[i] = count[at]
            count[at] += 1
    return rank, end_rank, count
