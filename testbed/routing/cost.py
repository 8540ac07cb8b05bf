"""Node cost: what a router adds up for one candidate (Theory G1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from testbed.routing.policies import Policy


def margin(z: float, sigma: ArrayLike) -> np.ndarray:
    """ψ_x = z_δ·σ̂_x, s: what staleness and error of the advertised wait are worth (Theory G1).

    ``z`` is the normal quantile of the confidence wanted (1.645 for 95 %), ``sigma`` the standard
    deviation of the advertised wait as the telemetry sees it, any shape.
    """
    return z * np.asarray(sigma, dtype=float)


def node_costs(
    policy: Policy,
    radio: ArrayLike,
    prefill: ArrayLike,
    wait: ArrayLike,
    *,
    fetch: ArrayLike = 0.0,
    psi: ArrayLike = 0.0,
) -> np.ndarray:
    """T̂_xq = T_rad + T_fetch + g(L − h_x) + Ŵ_x + ψ_x as the policy sees it (Theory G1).

    Fetching a remote prefix belongs to what the prefix saves, so a policy that looks at no
    prefill looks at no fetch either; the margin belongs to the wait in the same way.

    Parameters
    ----------
    policy : which parts count
    radio, prefill, wait, fetch, psi : (candidates,), seconds; scalars broadcast

    Returns
    -------
    (candidates,) seconds; the least one is chosen

    Examples
    --------
    >>> from testbed.routing.policies import get_policy
    >>> node_costs(get_policy("load_aware"), [0.1, 0.2], [0.5, 0.1], [0.0, 0.2], psi=[0.0, 0.05])
    array([0.6 , 0.55])
    """
    work = np.asarray(prefill, dtype=float) + np.asarray(fetch, dtype=float)
    queue = np.asarray(wait, dtype=float) + np.asarray(psi, dtype=float)
    return np.asarray(radio, dtype=float) + policy.fixed_cost(work, queue)
