"""RadioModel: distance -> delay, its inverse, and sampling (Theory A7)."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import PowerLawRadio, Radio


class RadioModel(ABC):
    """Radio delay of a request, seconds, as a function of distance, kilometres."""

    @abstractmethod
    def delay(self, distance: np.ndarray) -> np.ndarray:
        """Mean delay at each distance; nondecreasing; any shape."""

    @abstractmethod
    def distance(self, delay: np.ndarray) -> np.ndarray:
        """Largest distance with at most this mean delay; 0 for a negative delay."""

    def sample(self, distance: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """One realised delay per distance; a deterministic model gives its mean."""
        del rng
        return self.delay(distance)


class PowerLaw(RadioModel):
    """Theory A7: ξ·r^α."""

    def __init__(self, xi: float, alpha: float) -> None:
        self.xi = xi
        self.alpha = alpha

    def delay(self, distance: np.ndarray) -> np.ndarray:
        return self.xi * np.asarray(distance, dtype=float) ** self.alpha

    def distance(self, delay: np.ndarray) -> np.ndarray:
        return (np.maximum(delay, 0.0) / self.xi) ** (1.0 / self.alpha)


def nearest_distances(densities: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Exact nearest distances R_s = sqrt(−ln U/(π λ_s)) (Theory F4), shape (count, S), km.

    A tier of density 0 has no node: its distance is infinite.
    """
    exponential = rng.exponential(1.0, (count, len(densities)))
    with np.errstate(divide="ignore"):
        return np.sqrt(exponential / (np.pi * np.asarray(densities, dtype=float)))


def radio_model(spec: Radio) -> RadioModel:
    """The model of a scenario's ``radio`` section."""
    if isinstance(spec, PowerLawRadio):
        return PowerLaw(spec.xi, spec.alpha)
    raise ScenarioError(f"radio.model: {spec.model!r} is not available here")
