"""Request types: thousands of paths become a few (Theory A2), the loss stated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.errors import ScenarioError
from testbed.seeds import generator

_RESTARTS = 8
"""Starts of k-means; fewer for more clusters than 16, which take longer and differ less."""


@dataclass(frozen=True)
class TypeClusters:
    """Q clusters of n requests.

    Attributes
    ----------
    type_index : (n,) cluster of each request
    probability : (Q,) share of the requests, p_q
    tokens : (Q,) mean input tokens, L_q
    reusable : (Q, S) mean h_sq
    loss : (S,) Σ p|h − ĥ| of each profile, tokens: mean distance of a request's own reuse from
        its type's
    length_loss : Σ p|L − L̂|, tokens
    """

    type_index: np.ndarray
    probability: np.ndarray
    tokens: np.ndarray
    reusable: np.ndarray
    loss: np.ndarray
    length_loss: float

    def __len__(self) -> int:
        return len(self.probability)


def nearest_type(
    lengths: np.ndarray, hits: np.ndarray, tokens: np.ndarray, reusable: np.ndarray
) -> np.ndarray:
    """The type of each request: least Euclidean distance of (L, h_1 … h_S), tokens.

    A token of error in the length counts as much as one in a reusable prefix: both are one
    token of residual prefill. The rule needs nothing but a scenario's own numbers, so that a
    scenario read from a file assigns its requests as when it was made. The first of equals wins.

    Parameters
    ----------
    lengths : (n,);  hits : (n, S);  tokens : (Q,);  reusable : (Q, S)
    """
    points = np.column_stack([lengths, hits]).astype(float)
    centres = np.column_stack([tokens, reusable]).astype(float)
    return _nearest(points, centres)


def cluster(
    lengths: np.ndarray,
    hits: np.ndarray,
    *,
    types: int | None = None,
    error_bound: float | None = None,
    seed: int = 0,
) -> TypeClusters:
    """Cluster requests by length and reusable prefixes: k-means to a fixed point of
    :func:`nearest_type`, best of several starts.

    Requests with the same path share every h, so clusters follow shared paths; what tells two
    paths apart is exactly what some profile holds of them.

    Parameters
    ----------
    lengths : (n,) L_i, tokens
    hits : (n, S) h_i against each profile, tokens
    types : number of clusters, at most; fewer come out where fewer distinct requests exist
    error_bound : in place of ``types``: clusters whose loss Σ p|h − ĥ| is at most this many tokens
        for every profile, as few as doubling and halving their number finds (k-means does not
        lose less with every cluster more, so that fewer may do)

    Raises
    ------
    ScenarioError
        Not exactly one of ``types`` and ``error_bound`` is given, or it is out of range.
    """
    if (types is None) == (error_bound is None):
        raise ScenarioError("types: give either a number of types or an error bound")
    if types is not None and types < 1:
        raise ScenarioError(f"types: {types} is not a number of types >= 1")
    if error_bound is not None and not error_bound >= 0:
        raise ScenarioError(f"error_bound: {error_bound} is not a number of tokens >= 0")
    points, inverse, weight = np.unique(
        np.column_stack([lengths, hits]).astype(float),
        axis=0,
        return_inverse=True,
        return_counts=True,
    )
    inverse = inverse.ravel()
    if types is not None:
        return _clusters(lengths, hits, _k_means(points, weight, types, seed)[inverse])
    assert error_bound is not None

    def within(k: int) -> TypeClusters | None:
        label = np.arange(k) if k == len(points) else _k_means(points, weight, k, seed)
        found = _clusters(lengths, hits, label[inverse])
        return found if found.loss.max(initial=0.0) <= error_bound else None

    failed, k = 0, 1
    while (best := within(k)) is None:  # as many clusters as points lose nothing
        failed, k = k, min(2 * k, len(points))
    while k - failed > 1:
        middle = (failed + k) // 2
        if (found := within(middle)) is None:
            failed = middle
        else:
            best, k = found, middle
    return best


def _clusters(lengths: np.ndarray, hits: np.ndarray, labels: np.ndarray) -> TypeClusters:
    """Clusters in order of length, empty ones left out, with exact means and losses."""
    used, labels = np.unique(labels, return_inverse=True)
    count = np.bincount(labels, minlength=len(used))
    tokens = np.bincount(labels, weights=lengths) / count
    order = np.argsort(tokens, kind="stable")
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    labels = rank[labels]
    count, tokens = count[order], tokens[order]
    reusable = np.column_stack(
        [np.bincount(labels, weights=h, minlength=len(count)) / count for h in hits.T]
        or [np.zeros((len(count), 0))]
    )
    reusable = np.minimum(reusable, tokens[:, None])
    return TypeClusters(
        type_index=labels,
        probability=count / count.sum(),
        tokens=tokens,
        reusable=reusable,
        loss=np.abs(hits - reusable[labels]).mean(axis=0),
        length_loss=float(np.abs(lengths - tokens[labels]).mean()),
    )


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    best = np.full(len(points), np.inf)
    label = np.zeros(len(points), dtype=np.int64)
    for q, centre in enumerate(centres):
        distance = ((points - centre) ** 2).sum(axis=1)
        closer = distance < best
        best[closer], label[closer] = distance[closer], q
    return label


def _k_means(points: np.ndarray, weight: np.ndarray, k: int, seed: int) -> np.ndarray:
    """Labels of weighted points (P, D): k-means++ starts, Lloyd steps to a fixed point."""
    k = min(k, len(points))
    best, least = np.zeros(len(points), dtype=np.int64), np.inf
    for start in range(max(1, min(_RESTARTS, 16 * _RESTARTS // k)) if k > 1 else 1):
        centres = _spread(points, weight, k, generator(seed, "types", start))
        label = _nearest(points, centres)
        for _ in range(1000):
            centres = _means(points, weight, label, centres)
            new = _nearest(points, centres)
            if (new == label).all():
                break
            label = new
        inertia = float((weight * ((points - centres[label]) ** 2).sum(axis=1)).sum())
        if inertia < least:
            best, least = label, inertia
    return best


def _spread(points: np.ndarray, weight: np.ndarray, k: int, rng: np.random.Generator) -> np.ndarray:
    chosen = [int(rng.choice(len(points), p=weight / weight.sum()))]
    distance = ((points - points[chosen[0]]) ** 2).sum(axis=1)
    while len(chosen) < k:
        mass = weight * distance
        chosen.append(int(rng.choice(len(points), p=mass / mass.sum())))
        distance = np.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
    return points[chosen].copy()


def _means(
    points: np.ndarray, weight: np.ndarray, label: np.ndarray, centres: np.ndarray
) -> np.ndarray:
    mass = np.bincount(label, weights=weight, minlength=len(centres))
    sums = np.column_stack(
        [np.bincount(label, weights=weight * x, minlength=len(centres)) for x in points.T]
    )
    out = centres.copy()
    out[mass > 0] = sums[mass > 0] / mass[mass > 0, None]
    return out
