"""RadioModel: what every radio model answers."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class RadioModel(ABC):
    """Radio delay of a request, seconds, as a function of distance, kilometres."""

    @abstractmethod
    def delay(self, distance: np.ndarray) -> np.ndarray:
        """Mean delay at each distance; nondecreasing; any shape."""

    @abstractmethod
    def distance(self, delay: np.ndarray) -> np.ndarray:
        """Largest distance with at most this mean delay; 0 for a negative delay."""

    def quantile(self, distance: np.ndarray, probability: np.ndarray) -> np.ndarray:
        """Delay that a request at this distance stays below with this probability.

        Shapes broadcast; a deterministic model gives its mean at every probability.
        """
        return np.broadcast_arrays(self.delay(distance), probability)[0]

    def sample(self, distance: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One realised delay per distance, by inversion of :meth:`quantile`."""
        return self.quantile(distance, rng.random(np.shape(distance)))
