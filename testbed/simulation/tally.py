"""Tally: figures of a simulation with their confidence, in memory that does not grow with it.

Each request is added once, to the batch that its place in the order of arrival gives. A batch
keeps sums and a histogram of TTFT on a logarithmic grid; figures and intervals come from the
batches. Up to ``EXACT_LIMIT`` requests every TTFT is kept as well, and quantiles are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from testbed.outcome import Curve
from testbed.simulation.intervals import (
    MIN_BATCHES,
    Interval,
    interval_ratio,
    interval_share,
    mser,
    quantile_levels,
)

BATCHES = 256
EXACT_LIMIT = 262_144
RELATIVE_BIN = 0.005
"""Width of a histogram bin: no quantile is further off than this share of itself."""
LEAST_SECONDS = 1e-7
MOST_SECONDS = 1e7
_WIDTH = np.log1p(RELATIVE_BIN)
_BINS = int(np.ceil(np.log(MOST_SECONDS / LEAST_SECONDS) / _WIDTH)) + 2
_CURVE_POINTS = 400
_BY_BATCH = ("count", "chosen", "covered", "exposure", "histogram")


@dataclass(frozen=True)
class Served:
    """Completed requests, arrays of shape (n,).

    Attributes
    ----------
    index : place in the order of arrival, 0 for the first measured request
    kind, profile : request type q and the profile s that served it
    ttft, wait, occupancy : seconds; the wait is the excess over the unloaded prefill
    distance : km
    reused : tokens of prefix that were not computed
    saved, full : prefill seconds saved by reuse, and without any reuse (Theory E4)
    """

    index: np.ndarray
    kind: np.ndarray
    profile: np.ndarray
    ttft: np.ndarray
    wait: np.ndarray
    occupancy: np.ndarray
    distance: np.ndarray
    reused: np.ndarray
    saved: np.ndarray
    full: np.ndarray

    def __len__(self) -> int:
        return len(self.index)

    def select(self, mask: np.ndarray) -> Served:
        return Served(**{f.name: getattr(self, f.name)[mask] for f in fields(self)})


class Tally:
    """Figures of ``requests`` requests of Q types over S profiles, coverage at each target."""

    def __init__(self, requests: int, types: int, profiles: int, targets: Sequence[float]) -> None:
        self.requests = requests
        self.targets = tuple(targets)
        b = min(BATCHES, max(2, requests // 2))
        self.batches = b
        self.count = np.zeros(b)
        self.chosen = np.zeros((b, types, profiles))
        self.covered = np.zeros((b, len(self.targets)))
        self.sums = {name: np.zeros(b) for name in ("ttft", "distance", "reused", "saved", "full")}
        self.tier = {name: np.zeros((b, profiles)) for name in ("wait", "delayed", "occupancy")}
        self.exposure = np.zeros((b, profiles))
        self.histogram = np.zeros((b, _BINS), dtype=np.int32)
        self.exact = np.full(requests, np.nan) if requests <= EXACT_LIMIT else None
        self.completed = 0
        self.rejected = 0
        self.failed = 0

    def batch_of(self, index: np.ndarray) -> np.ndarray:
        """Batch of each place in the order of arrival."""
        return np.asarray(index, dtype=np.int64) * self.batches // self.requests

    def add(self, served: Served) -> None:
        """Count completed requests."""
        if len(served) == 0:
            return
        self.completed += len(served)
        b, (_, types, profiles) = self.batch_of(served.index), self.chosen.shape
        self.count += np.bincount(b, minlength=self.batches)
        cell = (b * types + served.kind) * profiles + served.profile
        self.chosen += np.bincount(cell, minlength=self.chosen.size).reshape(self.chosen.shape)
        for name, total in self.sums.items():
            total += np.bincount(b, getattr(served, name), minlength=self.batches)
        tier = b * profiles + served.profile
        per_tier = {
            "wait": served.wait,
            "delayed": served.wait > 0,
            "occupancy": served.occupancy,
        }
        for name, values in per_tier.items():
            cells = self.tier[name]
            cells += np.bincount(tier, values, minlength=cells.size).reshape(cells.shape)
        for t, target in enumerate(self.targets):
            self.covered[:, t] += np.bincount(b, served.ttft <= target, minlength=self.batches)
        cell = b * _BINS + _bin(served.ttft)
        np.add.at(self.histogram.reshape(-1), cell, 1)
        if self.exact is not None:
            self.exact[served.index] = served.ttft

    def expose(self, seconds: np.ndarray) -> None:
        """Spread node-seconds of each tier, shape (S,), over the batches."""
        self.exposure += np.asarray(seconds, dtype=float) / self.batches

    def merge(self, others: Sequence[Tally], *, whole: bool = False) -> Tally:
        """One tally of this and other replications.

        Their batches stand side by side; or each replication is one batch (``whole``), where
        replications differ in more than their requests, so that only they are independent.
        """
        everyone = [self, *others]
        joined = Tally.__new__(Tally)
        joined.requests = sum(t.requests for t in everyone)
        joined.targets = self.targets

        def batches(rows: np.ndarray) -> np.ndarray:
            return rows.sum(axis=0, keepdims=True) if whole else rows

        for name in _BY_BATCH:
            setattr(joined, name, np.concatenate([batches(getattr(t, name)) for t in everyone]))
        for name in ("sums", "tier"):
            parts = [getattr(t, name) for t in everyone]
            merged = {k: np.concatenate([batches(p[k]) for p in parts]) for k in parts[0]}
            setattr(joined, name, merged)
        joined.batches = len(joined.count)
        kept = [t.exact for t in everyone if t.exact is not None]
        small = len(kept) == len(everyone) and joined.requests <= EXACT_LIMIT
        joined.exact = np.concatenate(kept) if small else None
        joined.completed = sum(t.completed for t in everyone)
        joined.rejected = sum(t.rejected for t in everyone)
        joined.failed = sum(t.failed for t in everyone)
        return joined

    def trim(self) -> tuple[int, bool]:
        """Leave leading batches that are warm-up still out of the figures, not of the counts.

        MSER proposes the cut. By chance it proposes one on a stationary series too, so the cut is
        made only where the mean TTFT before it differs from the rest by three standard errors.

        Returns
        -------
        (requests left out, whether the rest looks stationary)
        """
        used = np.flatnonzero(self.count > 0)
        if len(used) < 4 * MIN_BATCHES:
            return 0, True
        means = self.sums["ttft"][used] / self.count[used]
        cut, settled = mser(means)
        if cut == 0:
            return 0, True
        rest = interval_ratio(self.sums["ttft"][used[cut:]], self.count[used[cut:]])
        # The standard error of the early part scales with its length; the rest knows the noise.
        error = rest.half_width / 2 * np.sqrt(1 + (len(used) - cut) / cut)
        if abs(means[:cut].mean() - rest.estimate) <= 3 * error:
            return 0, True
        first = int(used[cut])
        dropped = int(self.count[:first].sum())
        if self.exact is not None:
            self.exact = self.exact[-(-first * self.requests // self.batches) :]
        for name in _BY_BATCH:
            setattr(self, name, getattr(self, name)[first:])
        self.sums = {k: v[first:] for k, v in self.sums.items()}
        self.tier = {k: v[first:] for k, v in self.tier.items()}
        return dropped, settled

    # -- figures --

    def mean(self, name: str) -> Interval:
        """Mean over requests of ``ttft``, ``distance`` or ``reused``; none of them is negative."""
        mean = interval_ratio(self.sums[name], self.count)
        return mean._replace(low=max(mean.low, 0.0))

    def offloading(self) -> Interval:
        """η_off, saved over full prefill time (Theory E4)."""
        return interval_ratio(self.sums["saved"], self.sums["full"])

    def coverage(self, target: int) -> Interval:
        return interval_share(self.covered[:, target], self.count)

    def association(self, kind: int, profile: int) -> Interval | None:
        """A_sq, or None where the type was not seen."""
        seen = self.chosen[:, kind].sum(axis=1)
        return interval_share(self.chosen[:, kind, profile], seen) if seen.any() else None

    def arrivals(self) -> np.ndarray:
        """Completed requests of each tier by batch, shape (B, S)."""
        return self.chosen.sum(axis=1)

    def mean_wait(self, profile: int) -> Interval | None:
        """Mean wait of a tier, seconds.

        Where nobody waited the data bound only how often one would; the upper bound then takes
        one mean occupancy for the length of such a wait, since a server is sure to come free.
        """
        arrivals = self.arrivals()[:, profile]
        if not arrivals.any():
            return None
        wait = interval_ratio(self.tier["wait"][:, profile], arrivals)
        often, length = self.wait_probability(profile), self.occupancy(profile)
        if wait.estimate == 0 and often is not None and length is not None:
            return wait._replace(low=0.0, high=often.high * length.high)
        return wait._replace(low=max(wait.low, min(wait.estimate, 0.0)))

    def wait_probability(self, profile: int) -> Interval | None:
        arrivals = self.arrivals()[:, profile]
        if not arrivals.any():
            return None
        return interval_share(self.tier["delayed"][:, profile], arrivals)

    def occupancy(self, profile: int) -> Interval | None:
        """Mean seconds that a request of this tier holds a server, 1/μ_s."""
        arrivals = self.arrivals()[:, profile]
        if not arrivals.any():
            return None
        return interval_ratio(self.tier["occupancy"][:, profile], arrivals)

    def arrival_rate(self, profile: int) -> Interval | None:
        """Requests/s per node; None where the tier has no node-seconds."""
        if not self.exposure[:, profile].any():
            return None
        return interval_ratio(self.arrivals()[:, profile], self.exposure[:, profile])

    def busy(self, profile: int) -> Interval | None:
        """Mean number of busy servers a node, offered (ρ·c)."""
        if not self.exposure[:, profile].any():
            return None
        return interval_ratio(self.tier["occupancy"][:, profile], self.exposure[:, profile])

    def quantile(self, z: float) -> Interval:
        """The z-quantile of TTFT; exact, or within ``RELATIVE_BIN`` of itself."""
        if self.exact is not None:
            ordered = np.sort(self.exact[np.isfinite(self.exact)])
            at = float(ordered[_rank(z, len(ordered))])
        else:
            total = np.cumsum(self.histogram.sum(axis=0, dtype=np.int64))
            at = _read(total, z)
        hits = self.histogram[:, : int(_bin(np.array([at]))[0]) + 1].sum(axis=1)
        low, high, error = quantile_levels(hits, self.count, z)
        if self.exact is not None:
            n = len(ordered)
            below, above = int(np.floor(low * n)) - 1, int(np.ceil(high * n))
            bounds = (
                float(ordered[below]) if below >= 0 else 0.0,
                float(ordered[above]) if above < n else np.inf,
            )
        else:
            bounds = (
                min(at, _read(total, low)) if low > 0 else 0.0,
                max(at, _read(total, high)) if high < 1 else np.inf,
            )
        return Interval(at, bounds[0], bounds[1], error.batches, error.reliable)

    def curve(self) -> Curve:
        """TTFT distribution at evenly spaced probabilities."""
        levels = np.linspace(0, 1, _CURVE_POINTS + 1)[1:]
        if self.exact is not None:
            ordered = np.sort(self.exact[np.isfinite(self.exact)])
            seconds = [float(ordered[_rank(z, len(ordered))]) for z in levels]
        else:
            total = np.cumsum(self.histogram.sum(axis=0, dtype=np.int64))
            seconds = [_read(total, z) for z in levels]
        return Curve(seconds=tuple(seconds), probability=tuple(float(z) for z in levels))


def _rank(z: float, n: int) -> int:
    return min(n - 1, max(0, int(np.ceil(z * n)) - 1))


def _bin(seconds: np.ndarray) -> np.ndarray:
    """Bin 0 holds everything below LEAST_SECONDS, the last everything beyond MOST_SECONDS."""
    with np.errstate(divide="ignore"):
        at = np.floor(np.log(seconds / LEAST_SECONDS) / _WIDTH)
    return np.clip(at, -1, _BINS - 2).astype(np.int64) + 1


def _read(cumulative: np.ndarray, z: float) -> float:
    """Quantile from cumulative bin counts, geometric interpolation inside the bin."""
    target = z * cumulative[-1]
    i = min(int(np.searchsorted(cumulative, target)), len(cumulative) - 1)
    if i == 0:
        return 0.0
    before = cumulative[i - 1]
    part = (target - before) / max(1, cumulative[i] - before)
    return float(LEAST_SECONDS * np.exp((i - 1 + min(max(part, 0.0), 1.0)) * _WIDTH))
