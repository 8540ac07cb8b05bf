"""RadixEdges: the prefix forest with every chain that does not branch merged into one edge."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from testbed.workload.forest import PrefixForest


@dataclass(frozen=True)
class RadixEdges:
    """E edges in the order of their last vertices; a parent's number is below its children's.

    All requests of an edge carry all of its blocks, so that one count, one first and one last use
    and one list of reuse intervals stand for the whole edge.

    Attributes
    ----------
    end : (E,) the vertex that an edge ends with; its depth and count are the edge's
    above : (E,) the edge that it hangs off, -1 for none
    blocks, tokens : (E,) int64, of the edge alone
    """

    forest: PrefixForest
    end: np.ndarray
    above: np.ndarray
    blocks: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, forest: PrefixForest) -> RadixEdges:
        """Compress a forest; O(V).

        >>> from testbed.workload.synthetic import SyntheticSpec, synthetic_trace
        >>> forest = PrefixForest.of(synthetic_trace(SyntheticSpec(requests=50)))
        >>> edges = RadixEdges.of(forest)
        >>> bool(edges.tokens.sum() == forest.own_tokens.sum())
        True
        """
        end = forest.edges()
        number = np.full(len(forest), -1, dtype=np.int64)
        number[end] = np.arange(len(end))
        above = _edge_above(forest.parent, number)[end]
        top = np.where(above >= 0, end[above], -1)  # -1 finds the appended 0
        return cls(
            forest,
            end,
            above,
            (forest.level[end] - np.append(forest.level, 0)[top]).astype(np.int64),
            forest.depth[end] - np.append(forest.depth, 0)[top],
        )

    def __len__(self) -> int:
        return len(self.end)

    def state_bytes(self, bytes_per_token: float) -> np.ndarray:
        """(E,) bytes of KV state of each edge's own blocks (Theory A4)."""
        return self.tokens * bytes_per_token

    def to_csv(self, arrival: np.ndarray, bytes_per_token: float | None = None) -> str:
        """One line an edge: place, size, requests, uses and reuse intervals (``arrival`` (N,) s).

        ``state_bytes`` stands there where the bytes of a token are known. ``block`` is the trace's
        own id of the edge's last block, as a scenario's ``pinned_blocks`` names it.
        """
        forest = self.forest
        offsets, intervals = forest.reuse_intervals(arrival)
        out = io.StringIO()
        table = csv.writer(out, lineterminator="\n")
        head = ["edge", "above", "block", "blocks", "tokens", "depth_tokens", "requests"]
        head += ["first_use_s", "last_use_s", "reuse_median_s", "reuse_p90_s"]
        table.writerow(head + ([] if bytes_per_token is None else ["state_bytes"]))
        for e, v in enumerate(self.end.tolist()):
            gaps = intervals[offsets[v] : offsets[v + 1]]
            middle, late = np.quantile(gaps, (0.5, 0.9)) if len(gaps) else ("", "")
            row: list[Any] = [e, int(self.above[e]), int(forest.block_id[v]), int(self.blocks[e])]
            row += [int(self.tokens[e]), int(forest.depth[v]), int(forest.count[v])]
            row += [forest.first_use[v], forest.last_use[v], middle, late]
            if bytes_per_token is not None:
                row.append(int(self.tokens[e]) * bytes_per_token)
            table.writerow(row)
        return out.getvalue()


@numba.njit(cache=True)
def _edge_above(parent: np.ndarray, number: np.ndarray) -> np.ndarray:
    """Number of the nearest edge that ends above each vertex; -1 for none."""
    above = np.full(len(parent), -1, dtype=np.int64)
    for v in range(len(parent)):
        if parent[v] >= 0:
            mine = number[parent[v]]
            above[v] = mine if mine >= 0 else above[parent[v]]
    return above
