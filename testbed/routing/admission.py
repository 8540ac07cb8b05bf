"""Admission: which tiers take new requests (Theory G3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import Scenario


def fallback_profile(scenario: Scenario) -> str:
    """The profile that pins least and so keeps most concurrency; the first of equals."""
    deployed = [s for s in scenario.profiles if s.fraction > 0]
    return min(deployed, key=lambda s: s.persistent_bytes).name


class Admission:
    """Hysteresis of each tier: closes at ρ ≥ ``high``, reopens at ρ ≤ ``low``.

    The fallback never closes. Without ``high`` no tier ever does.

    >>> gate = Admission(high=0.9, low=0.7, fallback="uncached")
    >>> [gate.update("deep", rho) for rho in (0.8, 0.92, 0.8, 0.7)]
    [True, False, False, True]
    >>> gate.update("uncached", 1.5)
    True
    """

    def __init__(self, high: float | None, low: float | None, fallback: str) -> None:
        if low is not None and (high is None or low > high):
            raise ScenarioError("routing: admission_low is above admission_high")
        self.high = high
        self.low = high if low is None else low
        self.fallback = fallback
        self._closed: set[str] = set()

    @classmethod
    def from_scenario(cls, scenario: Scenario) -> Admission:
        spec = scenario.routing
        return cls(spec.admission_high, spec.admission_low, fallback_profile(scenario))

    def update(self, tier: str, utilisation: float) -> bool:
        """Take in a tier's utilisation; True if it is open afterwards."""
        if self.high is None or self.low is None or tier == self.fallback:
            return True
        if utilisation >= self.high:
            self._closed.add(tier)
        elif utilisation <= self.low:
            self._closed.discard(tier)
        return tier not in self._closed

    def update_all(self, utilisation: Mapping[str, float]) -> None:
        for tier, rho in utilisation.items():
            self.update(tier, rho)

    def admits(self, tier: str) -> bool:
        return tier not in self._closed

    @property
    def closed(self) -> frozenset[str]:
        return frozenset(self._closed)

    def choose(self, costs: np.ndarray, tiers: Sequence[str]) -> int | None:
        """Index of the cheapest candidate whose tier is open, or None if all are closed.

        ``costs`` (candidates,) seconds, ``tiers`` their profiles' names. The next-best candidate
        is tried where the best is closed; the first of equals wins.
        """
        for i in np.argsort(costs, kind="stable"):
            if self.admits(tiers[i]):
                return int(i)
        return None
