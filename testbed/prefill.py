"""Prefill time with cached context (Theory A8, H1).

One law for what a prompt costs: the workload scores prefixes with it, the theory puts it into
costs, the simulator and the router into every candidate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from testbed.scenario import Prefill
from testbed.tier_engine import TierPrefill


def prefill_time(spec: Prefill | TierPrefill, new: ArrayLike, cached: ArrayLike) -> np.ndarray:
    """g(n | h) = t₀ + a·n + b·n² + d·n·h seconds, and 0 where n = 0 (Theory A8, H1).

    Parameters
    ----------
    spec : the scenario's ``prefill`` section, or each tier's, whose shape broadcasts with ``new``
    new : n, tokens to compute; any shape
    cached : h, tokens before them that are there already; broadcasts with ``new``

    Examples
    --------
    >>> spec = Prefill(linear=2e-4, quadratic=2e-8)
    >>> round(float(prefill_time(spec, 1024, 0)), 6)
    0.225772
    """
    n = np.asarray(new, dtype=float)
    h = np.asarray(cached, dtype=float)
    seconds = spec.overhead + n * (spec.linear + spec.quadratic * n + spec.context * h)
    return np.where(n > 0, seconds, 0.0)


def residual_prefill(
    spec: Prefill | TierPrefill, tokens: ArrayLike, reusable: ArrayLike
) -> np.ndarray:
    """g(L − h | h), seconds: what a prompt of L tokens still costs after a hit of h (Theory A8).

    Shapes broadcast; in the theory ``tokens`` is (Q, 1) and ``reusable`` (Q, S).
    """
    return prefill_time(spec, np.asarray(tokens) - np.asarray(reusable), reusable)


def prefill_saving(
    spec: Prefill | TierPrefill, tokens: ArrayLike, reusable: ArrayLike
) -> np.ndarray:
    """ΔG = g(L | 0) − g(L − h | h), seconds (Theory A5, with H1)."""
    return prefill_time(spec, tokens, 0.0) - residual_prefill(spec, tokens, reusable)


def marginal_saving(
    spec: Prefill | TierPrefill, tokens: ArrayLike, reusable: ArrayLike
) -> np.ndarray:
    """−d/dh g(L − h | h), seconds per token of depth, for h < L (Theory F5, with H1).

    With h cached and n = L − h to compute it is a + 2·b·n + d·(h − n): without context it is
    g'(L − h). It can be negative where the context term outweighs the rest: then a deeper hit
    costs time.
    """
    h = np.asarray(reusable, dtype=float)
    n = np.asarray(tokens, dtype=float) - h
    return spec.linear + 2.0 * spec.quadratic * n + spec.context * (h - n)
