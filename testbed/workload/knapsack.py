"""Tree knapsack: the ancestor-closed set of most value within a budget (Theory F1)."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numba
import numpy as np

EXACT_CELLS = 10_000_000
"""Largest vertices × budget that is solved exactly; eight bytes a cell while it runs."""


@dataclass(frozen=True)
class Packing:
    """An ancestor-closed set.

    ``upper_bound`` is proven: no ancestor-closed set within the budget is worth more. It equals
    ``value`` where the solution is exact.
    """

    held: np.ndarray
    value: float
    cost: int
    upper_bound: float
    exact: bool


def pack(
    parent: np.ndarray,
    value: np.ndarray,
    cost: np.ndarray,
    budget: int,
    *,
    exact_cells: int = EXACT_CELLS,
) -> Packing:
    """Solve exactly where vertices × budget is small, else within a proven bound.

    Parameters
    ----------
    parent : (V,) int32, -1 for a root, below its children's numbers
    value : (V,) worth of each vertex, any sign
    cost : (V,) int64 >= 0
    budget : same unit as ``cost``
    """
    limit = int(min(budget, cost.sum()))
    if len(parent) * (limit + 1) <= exact_cells:
        return pack_exactly(parent, value, cost, budget)
    return pack_by_price(parent, value, cost, budget)


def pack_exactly(parent: np.ndarray, value: np.ndarray, cost: np.ndarray, budget: int) -> Packing:
    """Dynamic programme over the vertices in depth-first order, O(V·budget).

    At each vertex either it is taken and the walk goes on below it, or its whole subtree is
    passed over.
    """
    limit = int(max(0, min(budget, cost.sum())))
    held = _left_right(
        np.ascontiguousarray(parent, dtype=np.int32),
        np.ascontiguousarray(value, dtype=np.float64),
        np.ascontiguousarray(cost, dtype=np.int64),
        limit,
    )
    total = float(value[held].sum())
    return Packing(held, total, int(cost[held].sum()), total, True)


def pack_by_price(parent: np.ndarray, value: np.ndarray, cost: np.ndarray, budget: int) -> Packing:
    """Lagrangian relaxation: a price on the budget, bisected, then a greedy fill.

    For any price λ >= 0, λ·budget + max over closed sets of Σ(value − λ·cost) bounds every
    feasible set from above (weak duality); the best closed set at a price is one pass over the
    tree.
    """
    parent = np.ascontiguousarray(parent, dtype=np.int32)
    value = np.ascontiguousarray(value, dtype=np.float64)
    cost = np.ascontiguousarray(cost, dtype=np.int64)
    best, bound = _best_at_price(parent, value, cost, 0.0)
    if cost[best].sum() > budget:
        best = np.zeros(len(parent), dtype=bool)
        low, high = 0.0, float(value[value > 0].sum())  # at this price nothing is worth its cost
        for _ in range(100):
            price = 0.5 * (low + high)
            held, gain = _best_at_price(parent, value, cost, price)
            bound = min(bound, price * budget + gain)
            if cost[held].sum() <= budget:
                best, high = held, price
            else:
                low = price
    best = _expand(parent, value, cost, budget, best)
    total = float(value[best].sum())
    spent = int(cost[best].sum())
    return Packing(best, total, spent, max(float(bound), total), bool(bound <= total))


def pack_greedily(
    parent: np.ndarray, value: np.ndarray, cost: np.ndarray, budget: int
) -> np.ndarray:
    """Greedy expansion: again and again the path from the held set down to some vertex that is
    worth most per unit of cost, while it fits. Returns the held set, (V,) bool."""
    return _expand(
        np.ascontiguousarray(parent, dtype=np.int32),
        np.ascontiguousarray(value, dtype=np.float64),
        np.ascontiguousarray(cost, dtype=np.int64),
        int(budget),
        np.zeros(len(parent), dtype=bool),
    )


@numba.njit(cache=True)
def _best_at_price(
    parent: np.ndarray, value: np.ndarray, cost: np.ndarray, price: float
) -> tuple[np.ndarray, float]:
    gain = value - price * cost
    total = 0.0
    for v in range(len(parent) - 1, -1, -1):
        if gain[v] > 0:
            if parent[v] >= 0:
                gain[parent[v]] += gain[v]
            else:
                total += gain[v]
    held = np.zeros(len(parent), dtype=np.bool_)
    for v in range(len(parent)):
        held[v] = gain[v] > 0 and (parent[v] < 0 or held[parent[v]])
    return held, total


@numba.njit(cache=True)
def _depth_first(parent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vertices in depth-first order and, by position, the position after their subtree."""
    n = len(parent)
    size = np.ones(n, dtype=np.int64)
    for v in range(n - 1, -1, -1):
        if parent[v] >= 0:
            size[parent[v]] += size[v]
    position = np.zeros(n, dtype=np.int64)
    free = np.zeros(n, dtype=np.int64)  # next free position below each vertex
    top = 0
    for v in range(n):
        if parent[v] < 0:
            position[v] = top
            top += size[v]
        else:
            position[v] = free[parent[v]]
            free[parent[v]] += size[v]
        free[v] = position[v] + 1
    order = np.empty(n, dtype=np.int64)
    after = np.empty(n, dtype=np.int64)
    for v in range(n):
        order[position[v]] = v
        after[position[v]] = position[v] + size[v]
    return order, after


@numba.njit(cache=True)
def _left_right(parent: np.ndarray, value: np.ndarray, cost: np.ndarray, limit: int) -> np.ndarray:
    n = len(parent)
    order, after = _depth_first(parent)
    # best[i] holds the most value from position i on for every budget; only the rows that a
    # later position can still jump to are needed, but keeping all makes the walk back plain.
    best = np.zeros((n + 1, limit + 1))
    for i in range(n - 1, -1, -1):
        c = cost[order[i]]
        w = value[order[i]]
        for b in range(limit + 1):
            skip = best[after[i], b]
            best[i, b] = skip
            if c <= b:
                take = w + best[i + 1, b - c]
                if take > skip:
                    best[i, b] = take
    held = np.zeros(n, dtype=np.bool_)
    i, b = 0, limit
    while i < n:
        if best[i, b] == best[after[i], b]:
            i = after[i]
        else:
            held[order[i]] = True
            b -= cost[order[i]]
            i += 1
    return held


@numba.njit(cache=True)
def _best_below(
    top: int,
    left: int,
    order: np.ndarray,
    first: int,
    last: int,
    parent: np.ndarray,
    value: np.ndarray,
    cost: np.ndarray,
    worth: np.ndarray,
    price: np.ndarray,
) -> tuple[int, float]:
    """The vertex whose path from ``top`` down is worth most per unit of cost and fits, and that
    ratio; -1 where there is none. The subtree of ``top`` is ``order[first:last]``."""
    found, ratio = -1, 0.0
    for k in range(first, last):
        v = order[k]
        worth[v], price[v] = value[v], cost[v]
        if v != top:
            worth[v] += worth[parent[v]]
            price[v] += price[parent[v]]
        if price[v] <= left and worth[v] > 0:
            mine = worth[v] / max(price[v], 1)
            if found < 0 or mine > ratio or (mine == ratio and v < found):
                found, ratio = v, mine
    return found, ratio


@numba.njit(cache=True)
def _expand(
    parent: np.ndarray, value: np.ndarray, cost: np.ndarray, budget: int, start: np.ndarray
) -> np.ndarray:
    n = len(parent)
    held = start.copy()
    left = budget - cost[held].sum()
    order, after = _depth_first(parent)
    position = np.empty(n, dtype=np.int64)
    position[order] = np.arange(n)
    worth = np.zeros(n)
    price = np.zeros(n, dtype=np.int64)
    # Subtrees that hang off the held set, by the best path into each. Taking a path changes
    # nothing but the subtree that it leads into, which falls apart into those along the path.
    heap = [(0.0, np.int64(0), np.int64(0)) for _ in range(0)]
    for root in range(n):
        if not held[root] and (parent[root] < 0 or held[parent[root]]):
            k = position[root]
            found, ratio = _best_below(
                root, left, order, k, after[k], parent, value, cost, worth, price
            )
            if found >= 0:
                heappush(heap, (-ratio, np.int64(found), np.int64(root)))
    while len(heap) > 0:
        _, v, top = heappop(heap)
        need = cost[v]
        u = v
        while u != top:
            u = parent[u]
            need += cost[u]
        k = position[top]
        if need > left:  # it fitted when it was found; look for what still does
            found, ratio = _best_below(
                top, left, order, k, after[k], parent, value, cost, worth, price
            )
            if found >= 0:
                heappush(heap, (-ratio, np.int64(found), np.int64(top)))
            continue
        left -= need
        while v >= 0 and not held[v]:
            held[v] = True
            v = parent[v]
        for j in range(k + 1, after[k]):
            u = order[j]
            if not held[u] and held[parent[u]]:
                i = position[u]
                found, ratio = _best_below(
                    u, left, order, i, after[i], parent, value, cost, worth, price
                )
                if found >= 0:
                    heappush(heap, (-ratio, np.int64(found), np.int64(u)))
    return held
