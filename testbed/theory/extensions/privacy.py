"""Privacy: a prefix is advertised only if enough requests carry it (Theory H11).

A catalogue that names a rare prefix tells who sends it. With a minimum support k only prefixes that
at least k requests of the observed period carry are placed and advertised; a request then reuses
its deepest prefix of that support. Supports fall along every path of the forest, so that what a
threshold removes are the ends of paths, and its price is the prefill they would have saved.

:func:`observed_value` counts it on a trace. :func:`expected_value` says what a popularity law
implies before there is a trace: of n requests each carries vertex v with probability p_v, and v is
advertised if at least k do, a binomial tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import binom

from testbed.scenario import Prefill
from testbed.theory.prefill import prefill_saving
from testbed.workload.forest import PrefixForest
from testbed.workload.trace import Trace


@dataclass(frozen=True)
class SupportValue:
    """What is left to reuse under each minimum support, all (K,).

    Attributes
    ----------
    threshold : k, least number of requests that carry an advertised prefix
    advertised : vertices in the catalogue, or their expected number
    saved : mean prefill saved per request with unlimited memory, s
    bound : the same if every prefix were advertised, s
    """

    threshold: np.ndarray
    advertised: np.ndarray
    saved: np.ndarray
    bound: float

    @property
    def loss(self) -> np.ndarray:
        """Share of the possible saving that the threshold costs, (K,); 0 where there is none."""
        if self.bound <= 0:
            return np.zeros(len(self.saved))
        return 1.0 - self.saved / self.bound

    def to_dict(self) -> list[dict[str, float]]:
        """One mapping a threshold, plain values."""
        rows = zip(self.threshold, self.advertised, self.saved, self.loss, strict=True)
        return [
            {"support": int(k), "advertised": float(n), "saved_seconds": float(x), "loss": float(y)}
            for k, n, x, y in rows
        ]


def observed_value(trace: Trace, prefill: Prefill, thresholds: Sequence[int]) -> SupportValue:
    """Value left on a trace, each request reusing its deepest prefix of enough support.

    ``bound`` counts every prefix of the trace, also those that one request alone carries: it is
    what reuse would save if all requests came once more.

    Raises
    ------
    ValueError
        A threshold below 1.
    """
    k = _thresholds(thresholds)
    forest = PrefixForest.of(trace)
    tokens = trace.input_tokens.astype(float)

    def saved(held: np.ndarray) -> float:
        if not len(forest) or not len(tokens):
            return 0.0
        exits = forest.exits(held)
        depth = np.where(exits >= 0, forest.depth[np.maximum(exits, 0)], 0)
        return float(prefill_saving(prefill, tokens, np.minimum(depth, tokens)).mean())

    kept = [forest.supported(int(least)) for least in k]
    return SupportValue(
        threshold=k,
        advertised=np.array([int(held.sum()) for held in kept], dtype=float),
        saved=np.array([saved(held) for held in kept]),
        bound=saved(forest.supported(1)),
    )


def expected_value(
    probability: ArrayLike, gain: ArrayLike, requests: int, thresholds: Sequence[int]
) -> SupportValue:
    """Value expected in the next period, the supports having been counted in this one.

    Parameters
    ----------
    probability : (V,) p_v that a request carries vertex v; at most that of its parent
    gain : (V,) s saved by v beyond what its parent saves
    requests : n of the observed period

    Raises
    ------
    ValueError
        A probability outside [0, 1], a negative gain, or a threshold below 1.

    Examples
    --------
    >>> value = expected_value([1.0, 0.01], [0.1, 5.0], requests=100, thresholds=[1, 5])
    >>> value.loss.round(3).tolist()
    [0.122, 0.332]
    """
    k = _thresholds(thresholds)
    p, worth = np.asarray(probability, dtype=float), np.asarray(gain, dtype=float)
    if ((p < 0) | (p > 1)).any():
        raise ValueError("a probability is outside [0, 1]")
    if (worth < 0).any():
        raise ValueError("a gain is negative")
    if requests < 0:
        raise ValueError(f"{requests} requests are fewer than 0")
    shown = np.asarray(binom.sf(k[:, None] - 1, requests, p))
    return SupportValue(
        threshold=k,
        advertised=shown.sum(axis=1),
        saved=shown @ (p * worth),
        bound=float(p @ worth),
    )


def _thresholds(thresholds: Sequence[int]) -> np.ndarray:
    k = np.asarray(thresholds, dtype=np.int64)
    if k.ndim != 1 or (k < 1).any():
        raise ValueError(f"minimum supports {list(thresholds)} must be at least 1")
    return k
