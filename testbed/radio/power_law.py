"""PowerLaw: the paper's delay-equivalent radio (Theory A7)."""

from __future__ import annotations

import numpy as np

from testbed.radio.base import RadioModel


class PowerLaw(RadioModel):
    """Theory A7: ξ·r^α."""

    def __init__(self, xi: float, alpha: float) -> None:
        self.xi = xi
        self.alpha = alpha

    def delay(self, distance: np.ndarray) -> np.ndarray:
        return self.xi * np.asarray(distance, dtype=float) ** self.alpha

    def distance(self, delay: np.ndarray) -> np.ndarray:
        return (np.maximum(delay, 0.0) / self.xi) ** (1.0 / self.alpha)
