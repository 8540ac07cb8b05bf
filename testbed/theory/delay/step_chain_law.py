"""TransformLaw: a law on [0, ∞) from its Laplace transform, by a cosine series."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from testbed.theory.delay.base import ExcessDelay

TERMS = 192
"""Terms of the series."""


class TransformLaw(ExcessDelay):
    """An atom at 0 and a density, per type.

    Fang and Oosterlee's cosine expansion of the density on [0, end], its terms damped by an
    exponential filter of order 6 so that a jump of the density does not ring. ``end`` is beyond
    the mean of those that wait by 12 of it or 10 standard deviations.
    """

    def __init__(
        self,
        atom: float,
        mean: np.ndarray,
        second: np.ndarray,
        transform: Callable[[int, np.ndarray], np.ndarray],
    ) -> None:
        self.wait_probability = 1.0 - atom
        self.mean = mean
        self._transform = transform
        waiting = max(self.wait_probability, 1e-300)
        conditional = mean / waiting
        deviation = np.sqrt(np.maximum(second / waiting - conditional**2, 0.0))
        self.end = np.maximum(12.0 * conditional, conditional + 10.0 * deviation)
        self._series: dict[int, np.ndarray] = {}

    def _coefficients(self, q: int) -> np.ndarray:
        if q not in self._series:
            k = np.arange(TERMS)
            frequency = k * np.pi / self.end[q]
            values = self._transform(q, -1j * frequency).real - (1.0 - self.wait_probability)
            series = 2.0 / self.end[q] * values * np.exp(-36.0 * (k / TERMS) ** 6)
            self._series[q] = series
        return self._series[q]

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        w = np.asarray(seconds, dtype=float)
        atom = 1.0 - self.wait_probability
        end = self.end[q]
        if end <= 0:
            return np.where(w < 0, 0.0, 1.0)
        series = self._coefficients(q)
        x = np.clip(w, 0.0, end)[..., None]
        k = np.arange(1, TERMS)
        waves = np.sin(k * np.pi / end * x) * (end / (k * np.pi))
        inside = atom + 0.5 * series[0] * x[..., 0] + waves @ series[1:]
        return np.where(w < 0, 0.0, np.clip(inside, atom, 1.0))

    def decay(self, q: int) -> float:
        return TERMS / 4.0 / float(self.end[q]) if self.end[q] > 0 else 0.0
