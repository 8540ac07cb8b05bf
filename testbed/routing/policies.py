"""Policies: which parts of the predicted TTFT a router looks at (Theory C1, C7).

Every policy takes the candidate of least cost ``radio + K``, with K assembled from the parts
that it looks at. That makes one registry serve all three answers: theory integrates over the
same K that the simulator and the router add up for each candidate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.errors import ScenarioError


@dataclass(frozen=True)
class Policy:
    """Weights of the cost's parts; the radio delay always counts.

    ``nearest`` looks at neither, so that equal K leaves the nearest node of any profile:
    A_sq = π_s and the distance law of density λ_b (Theory C5, C7).
    """

    name: str
    prefill_weight: float
    wait_weight: float
    description: str

    @property
    def load_aware(self) -> bool:
        return self.wait_weight > 0

    def fixed_cost(self, prefill: np.ndarray, wait: np.ndarray) -> np.ndarray:
        """K = w_p·prefill + w_w·wait, seconds; shapes broadcast, (Q, S) and (S,) in theory.

        An infinite wait counts only where the policy looks at waits (0·inf is not a number).
        """
        cost = self.prefill_weight * np.asarray(prefill, dtype=float)
        if self.wait_weight == 0:
            return np.broadcast_arrays(cost, wait)[0].copy()
        return cost + self.wait_weight * np.asarray(wait, dtype=float)

    def choose(self, radio: np.ndarray, prefill: np.ndarray, wait: np.ndarray) -> int:
        """Index of the cheapest candidate; arrays of shape (candidates,), seconds.

        ``wait`` holds the advertised mean excess delay plus any margin ψ (Theory G1). The first
        of equal candidates wins.
        """
        return int(np.argmin(radio + self.fixed_cost(prefill, wait)))


POLICIES: dict[str, Policy] = {
    p.name: p
    for p in (
        Policy("nearest", 0.0, 0.0, "nearest node of any profile"),
        Policy("prefix_only", 1.0, 0.0, "prefix-aware, queue-unaware: W̄ = 0 in the choice"),
        Policy("load_aware", 1.0, 1.0, "least predicted TTFT: radio + residual prefill + wait"),
    )
}


def register(policy: Policy) -> None:
    """Add a policy; a name already taken is refused."""
    if policy.name in POLICIES:
        raise ScenarioError(f"policy: {policy.name!r} is registered already")
    POLICIES[policy.name] = policy


def get_policy(name: str) -> Policy:
    """The registered policy, or a :class:`ScenarioError` that lists the names."""
    try:
        return POLICIES[name]
    except KeyError:
        known = ", ".join(sorted(POLICIES))
        raise ScenarioError(f"policy: {name!r} is not one of {known}") from None
