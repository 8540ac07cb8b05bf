"""Paired: two answers to the same requests, held against each other request by request.

Where a simulation and a run serve the same arrivals, most of what moves one moves the other too.
The noise of their difference is then that of the differences, not of both sides together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from testbed.outcome import Outcome, Series
from testbed.reporting.quantities import COVERAGE, LATENCY, Quantity
from testbed.simulation.intervals import LEVEL, interval_mean

RESAMPLES = 400
BLOCKS = 20
"""Blocks of consecutive requests that are drawn together, since neighbours share queues."""
LEAST_BEYOND = 5
"""Requests that must lie beyond a quantile before its difference is given an interval."""


@dataclass(frozen=True)
class Paired:
    """TTFT of the requests that both answers completed, in order of arrival, (N,) s each."""

    answer: np.ndarray
    reference: np.ndarray

    @classmethod
    def of(cls, answer: Outcome, reference: Outcome) -> Paired | None:
        """Both answers' figures of each request; None where they did not serve the same ones."""
        a, r = answer.series, reference.series
        if a is None or r is None or a.stream != r.stream:
            return None
        first = max(a.first, r.first)
        last = min(a.first + len(a.ttft), r.first + len(r.ttft))
        one, two = (_part(s, first, last) for s in (a, r))
        both = np.isfinite(one) & np.isfinite(two)
        if both.sum() < 2 * BLOCKS:
            return None
        return cls(one[both], two[both])

    def __len__(self) -> int:
        return len(self.answer)

    def halves(self, quantity: Quantity) -> tuple[float, float] | None:
        """How far the 95 % interval of answer − reference reaches below and above the difference.

        None for a figure that is no figure of TTFT, and for a quantile that the sample does not
        hold.
        """
        if quantity.path == "ttft.mean":
            return self._mean(self.answer - self.reference)
        if quantity.part == COVERAGE:
            target = float(quantity.names[0])
            hits = [(x <= target).astype(float) for x in (self.answer, self.reference)]
            if (hits[0] == hits[1]).all():
                # None of N was seen to differ: at 95 % no more than 3/N do.
                return 3.0 / len(self), 3.0 / len(self)
            return self._mean(hits[0] - hits[1])
        if quantity.part == LATENCY:
            return self._quantile(float(quantity.names[0]))
        return None

    def _mean(self, differences: np.ndarray) -> tuple[float, float]:
        found = interval_mean(differences)
        return found.estimate - found.low, found.high - found.estimate

    def _quantile(self, z: float) -> tuple[float, float] | None:
        n = len(self)
        if n * min(z, 1 - z) < LEAST_BEYOND:
            return None
        drawn = self._resamples
        at = min(n - 1, math.ceil(z * n) - 1)
        ends = [np.partition(x[drawn], at, axis=1)[:, at] for x in (self.answer, self.reference)]
        moved = ends[0] - ends[1]
        said = np.partition(self.answer, at)[at] - np.partition(self.reference, at)[at]
        low, high = np.quantile(moved, [0.5 - LEVEL / 2, 0.5 + LEVEL / 2])
        # Percentile interval: a quantile's law is skewed, and reflecting it would cross the sample.
        return max(float(said - low), 0.0), max(float(high - said), 0.0)

    @cached_property
    def _resamples(self) -> np.ndarray:
        """Requests of each resample by circular blocks, (RESAMPLES, N); the same in every call."""
        n = len(self)
        size = max(1, n // BLOCKS)
        starts = np.random.default_rng(n).integers(n, size=(RESAMPLES, -(-n // size)))
        places = (starts[:, :, None] + np.arange(size)).reshape(RESAMPLES, -1)[:, :n]
        return (places % n).astype(np.int32)


def _part(series: Series, first: int, last: int) -> np.ndarray:
    values = series.ttft[first - series.first : max(last, first) - series.first]
    return np.array([math.nan if x is None else x for x in values], dtype=float)
