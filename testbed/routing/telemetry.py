"""Telemetry: the mean excess delay that a node advertises, damped as the theory's iteration is."""

from __future__ import annotations

import math


class AdvertisedWait:
    """Exponentially weighted mean and deviation of a node's waits, in time, not in requests.

    A boxcar mean of the same length shows a change half a window late, and a router that follows
    it sends everybody to one node and then to the other. This average is the continuous form of
    the damped iteration W̄ ← (1 − η)W̄ + η·Q (Theory D1) with η = 1 − exp(−Δt/window): it has no
    delay of its own, so the feedback settles.

    Parameters
    ----------
    window : time constant, seconds
    start : wait advertised before anything was seen, seconds

    Examples
    --------
    >>> wait = AdvertisedWait(window=10.0)
    >>> wait.observe(0.0, 1.0); wait.observe(10.0, 1.0)
    >>> round(wait.mean, 3)
    0.632
    """

    def __init__(self, window: float, start: float = 0.0) -> None:
        self.window = window
        self.mean = start
        self._square = start * start
        self._last: float | None = None

    def observe(self, now: float, wait: float) -> None:
        """A request's wait of ``wait`` seconds, known at time ``now``."""
        weight = self._weight(now)
        self.mean += weight * (wait - self.mean)
        self._square += weight * (wait * wait - self._square)

    def idle(self, now: float) -> None:
        """The node is empty at ``now``: whoever came would not wait."""
        self.observe(now, 0.0)

    @property
    def deviation(self) -> float:
        """Weighted standard deviation, seconds."""
        return math.sqrt(max(0.0, self._square - self.mean * self.mean))

    def _weight(self, now: float) -> float:
        # The first observation of all counts from when the average began to be kept.
        passed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now
        return -math.expm1(-passed / self.window)
