"""Bounds for Monte Carlo comparisons that stay honest when there are many of them.

One comparison lies outside three standard errors in 0.27 % of all runs. The largest of m does so
far more often, so that "within 3 everywhere" would fail a right model. These bounds keep the level
of the single one for the whole family: they are exceeded in at most 0.27 % of all runs.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import kstwobign, norm, t

LEVEL = float(2.0 * norm.sf(3.0))
"""Chance that a single comparison lies outside three standard errors."""


def three_sigma(comparisons: int = 1) -> float:
    """Standard errors within which all of so many comparisons lie (Bonferroni): 3 for one,
    3.6 for nine, 4.2 for a hundred."""
    return float(norm.isf(0.5 * LEVEL / comparisons))


def student_sigma(runs: int, comparisons: int = 1) -> float:
    """The same where the standard error itself comes from so few independent runs."""
    return float(t.isf(0.5 * LEVEL / comparisons, runs - 1))


def kolmogorov(samples: int, laws: int = 1) -> float:
    """Largest distance between a law and the empirical CDF of so many samples, anywhere on the
    axis, for each of ``laws`` comparisons."""
    return float(kstwobign.isf(LEVEL / laws) / np.sqrt(samples))


def within(seen, expected, error, comparisons=None, slack=0.0):
    """Assert that all values lie within :func:`three_sigma` standard errors, ``slack`` aside.

    ``comparisons`` is the size of the family if it is larger than this call's. Returns, and shows
    where it fails, the largest distance in standard errors.
    """
    seen, expected, error = np.broadcast_arrays(*map(np.asarray, (seen, expected, error)))
    excess = np.abs(seen - expected) - slack
    worst = float((excess / np.maximum(error, 1e-12)).max())
    bound = three_sigma(seen.size if comparisons is None else comparisons)
    assert (excess <= bound * error + 1e-12).all(), (
        f"off by {worst:.2f} standard errors where {bound:.2f} are allowed: "
        f"{seen.ravel()} against {expected.ravel()}"
    )
    return worst
