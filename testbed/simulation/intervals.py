"""Intervals: warm-up detection and 95 % confidence for correlated output.

Successive requests share queues, so their delays are correlated and the textbook interval is too
narrow. Everything here rests on one quantity, the standard error of a ratio ΣY/ΣN over batches:
batches are joined until their residuals pass von Neumann's test of independence, what correlation
is left widens the interval as that of an AR(1) series, and few batches use Student's t. A mean is
a ratio with N = batch size, a proportion a mean of indicators, a quantile the inverse of a
proportion's interval. ``reliable`` is false when even the largest batches are still correlated:
the run is then too short for the interval to hold its level.

References: White, Cobb and Spratt (2000) for MSER-5; Fishman (1978) for the batch test; Willink
(2005) for the skewness adjustment, and Tafazzoli et al. (2011) for its use with batch means.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

LEVEL = 0.95
MIN_BATCHES = 10
MAX_BATCHES = 64
"""Few and long: a slow, weak correlation hides under noise when batches are short, and Student's
t pays only a few per cent for 32 batches instead of 500."""
_CORRELATED = float(stats.norm.ppf(0.8))
"""Batches are joined above this statistic: a low bar, since missed correlation costs coverage."""
_UNRELIABLE = float(stats.norm.ppf(0.99))
"""The last batches are called correlated above this one: a high bar, against false alarms."""


class Interval(NamedTuple):
    """An estimate with its confidence bounds, in the unit of the observations."""

    estimate: float
    low: float
    high: float
    batches: int
    reliable: bool

    @property
    def bounds(self) -> tuple[float, float]:
        """(low, high), as :attr:`testbed.outcome.Outcome.confidence` holds it."""
        return (self.low, self.high)

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


class _Error(NamedTuple):
    """Standard error of ΣY/ΣN with what Student's t and Willink's adjustment need."""

    ratio: float
    standard_error: float
    skewness: float
    batches: int
    reliable: bool


def mser5(x: np.ndarray) -> tuple[int, bool]:
    """Observations to drop as warm-up, and whether the rest looks stationary.

    The MSER-5 rule: over batch means of 5, the truncation d ≤ half that minimises the squared
    standard error of what is left. ``False`` when the minimum lies at the limit, the sign that
    half of the series is not enough.

    >>> mser5(np.r_[np.full(50, 9.0), np.tile([0.0, 1.0], 500)])
    (50, True)
    """
    series = np.asarray(x, dtype=float)
    count = len(series) // 5
    if count < 4:
        return 0, False
    cut, stationary = mser(series[: count * 5].reshape(count, 5).mean(axis=1))
    return cut * 5, stationary


def mser(means: np.ndarray) -> tuple[int, bool]:
    """The MSER rule on a series of batch means: batches to drop, and whether the rest settled."""
    means = np.asarray(means, dtype=float)
    count = len(means)
    left = np.arange(count, 0, -1)
    # Suffix sums about the overall mean: shifting costs nothing and keeps the digits.
    means = means - means.mean()
    first = np.cumsum(means[::-1])[::-1]
    second = np.cumsum(means[::-1] ** 2)[::-1]
    error = np.maximum(second - first**2 / left, 0.0) / left**2
    limit = count // 2
    d = int(np.argmin(error[: limit + 1]))
    return d, d < limit


def interval_mean(x: np.ndarray, level: float = LEVEL) -> Interval:
    """Mean of a stationary, possibly correlated series, in order of time.

    Raises
    ------
    ValueError
        Fewer than 2 observations, or one that is not finite.
    """
    series = _series(x)
    sums, sizes = batch(series)
    return _from_error(_ratio_error(sums, sizes), level)


def interval_ratio(sums: np.ndarray, counts: np.ndarray, level: float = LEVEL) -> Interval:
    """Σ sums / Σ counts over consecutive batches in order of time, each shape (B,).

    The count of a batch may vary (the requests of one tier, say) and may be 0.

    Raises
    ------
    ValueError
        Fewer than 2 batches, or nothing counted.
    """
    return _from_error(_ratio_error(sums, counts), level)


def interval_proportion(hits: np.ndarray, level: float = LEVEL) -> Interval:
    """Share of ``True`` in a correlated series, by Wilson's interval at the effective size."""
    sums, sizes = batch(_series(hits))
    return interval_share(sums, sizes, level)


def interval_share(hits: np.ndarray, counts: np.ndarray, level: float = LEVEL) -> Interval:
    """Σ hits / Σ counts where hits are counted events among ``counts``, each shape (B,).

    Wilson's interval with the effective number of observations p(1 − p)/σ², at most the true
    number: it stays inside [0, 1] and does not collapse at 0 or 1.
    """
    error = _ratio_error(hits, counts)
    n = float(np.sum(counts))
    p = min(max(error.ratio, 0.0), 1.0)
    effective = _effective(p, error.standard_error, n)
    z = _critical(error.batches, level)
    centre = (p + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z * math.sqrt(p * (1 - p) / effective + z * z / (4 * effective**2))
    half /= 1 + z * z / effective
    low, high = max(0.0, min(centre - half, p)), min(1.0, max(centre + half, p))
    return Interval(p, low, high, error.batches, error.reliable)


def interval_quantile(x: np.ndarray, z: float, level: float = LEVEL) -> Interval:
    """The z-quantile of a correlated series.

    The level z is blurred by the standard error of the share below the estimate, and the blurred
    levels are read off the sample. A bound beyond the sample is infinite: the sample does not
    hold it.
    """
    series = _series(x)
    if not 0 < z < 1:
        raise ValueError(f"z: {z} is not in (0, 1)")
    ordered = np.sort(series)
    n = len(ordered)
    at = ordered[min(n - 1, max(0, math.ceil(z * n) - 1))]
    sums, sizes = batch(series <= at)
    low, high, error = quantile_levels(sums, sizes, z, level)
    below, above = math.floor(low * n) - 1, math.ceil(high * n)
    return Interval(
        float(at),
        float(ordered[below]) if below >= 0 else -math.inf,
        float(ordered[above]) if above < n else math.inf,
        error.batches,
        error.reliable,
    )


def quantile_levels(
    hits: np.ndarray, counts: np.ndarray, z: float, level: float = LEVEL
) -> tuple[float, float, _Error]:
    """Levels between which the z-quantile lies, from batch counts at or below the estimate.

    Levels may fall outside [0, 1].
    """
    error = _ratio_error(hits, counts)
    effective = _effective(z, error.standard_error, float(np.sum(counts)))
    half = _critical(error.batches, level) * math.sqrt(z * (1 - z) / effective)
    return z - half, z + half, error


def batch(series: np.ndarray, most: int = MAX_BATCHES) -> tuple[np.ndarray, np.ndarray]:
    """(sums, sizes) of consecutive batches, at most ``most``, equal in size up to one."""
    values = np.asarray(series, dtype=float)
    n = len(values)
    edges = np.linspace(0, n, min(n, most) + 1).astype(np.int64)
    return np.add.reduceat(values, edges[:-1]), np.diff(edges).astype(float)


def _ratio_error(sums: np.ndarray, counts: np.ndarray) -> _Error:
    y = np.asarray(sums, dtype=float)
    n = np.asarray(counts, dtype=float)
    if len(y) != len(n) or len(y) < 2:
        raise ValueError(f"{len(y)} batches: at least 2 are needed for an interval")
    total = n.sum()
    if not total > 0:
        raise ValueError("nothing was counted in these batches")
    ratio = float(y.sum() / total)
    while len(y) > MAX_BATCHES:
        y, n = _join(y), _join(n)
    while True:
        residual = y - ratio * n
        b = len(residual)
        statistic, phi = _correlation(residual)
        if statistic < _CORRELATED or b < 2 * MIN_BATCHES:
            break
        y, n = _join(y), _join(n)
    if len(y) >= 4 * MIN_BATCHES:
        # The test passes a little too early on the way up: one more joining halves what is left.
        y, n = _join(y), _join(n)
        residual = y - ratio * n
        b = len(residual)
        statistic, phi = _correlation(residual)
    variance = float(residual @ residual) / (b - 1)
    variance *= (1 + max(phi, 0.0)) / (1 - max(phi, 0.0))
    mean_count = total / b
    spread = float(np.sqrt(np.mean(residual**2)))
    skewness = float(np.mean(residual**3) / spread**3) if spread > 0 else 0.0
    return _Error(ratio, math.sqrt(variance / b) / mean_count, skewness, b, statistic < _UNRELIABLE)


def _join(values: np.ndarray) -> np.ndarray:
    """Sums of neighbours; of an odd number the first three go together."""
    if len(values) % 2:
        values = np.r_[values[0] + values[1], values[2:]]
    return values.reshape(-1, 2).sum(axis=1)


def _correlation(residual: np.ndarray) -> tuple[float, float]:
    """Von Neumann's statistic, normal and large for positive correlation, and that of lag 1."""
    b = len(residual)
    centred = residual - residual.mean()
    square = float(centred @ centred)
    if square <= 0 or b < 4:
        return 0.0, 0.0
    ends = (centred[0] ** 2 + centred[-1] ** 2) / (2 * square)
    phi = float(centred[:-1] @ centred[1:]) / square
    return (phi + ends) * math.sqrt((b * b - 1) / (b - 2)), min(phi, 0.9)


def _effective(p: float, standard_error: float, n: float) -> float:
    if standard_error <= 0 or not 0 < p < 1:
        return n
    return max(1.0, min(n, p * (1 - p) / standard_error**2))


def _critical(batches: int, level: float) -> float:
    return float(stats.t.ppf(0.5 + level / 2, batches - 1))


def _from_error(error: _Error, level: float) -> Interval:
    t = _critical(error.batches, level)
    beta = error.skewness / (6 * math.sqrt(error.batches))
    low = error.ratio - _willink(t, beta) * error.standard_error
    high = error.ratio - _willink(-t, beta) * error.standard_error
    return Interval(error.ratio, low, high, error.batches, error.reliable)


def _willink(zeta: float, beta: float) -> float:
    """Willink's G: the skewness-adjusted Student deviate."""
    if abs(beta) < 1e-3:
        return zeta
    return (math.cbrt(1 + 6 * beta * (zeta - beta)) - 1) / (2 * beta)


def _series(x: np.ndarray) -> np.ndarray:
    series = np.asarray(x, dtype=float).ravel()
    if len(series) < 2:
        raise ValueError(f"{len(series)} observations: at least 2 are needed for an interval")
    if not np.isfinite(series).all():
        raise ValueError("an observation is not finite")
    return series
