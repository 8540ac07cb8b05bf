"""Radio: distance -> delay, its inverse, and sampling, one class for each model (Theory A7)."""

from __future__ import annotations

import numpy as np

from testbed.errors import ScenarioError
from testbed.radio.base import RadioModel
from testbed.radio.measured import Histogram, MeasuredRadio, PacketTrace
from testbed.radio.power_law import PowerLaw
from testbed.scenario import HistogramRadio, PacketTraceRadio, PowerLawRadio, Radio

__all__ = [
    "Histogram",
    "MeasuredRadio",
    "PacketTrace",
    "PowerLaw",
    "RadioModel",
    "nearest_distances",
    "radio_model",
]


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
    if isinstance(spec, HistogramRadio):
        return Histogram(spec.file, spec.packets)
    if isinstance(spec, PacketTraceRadio):
        return PacketTrace(spec.file, spec.payload, spec.packet)
    raise ScenarioError(f"radio.model: {spec.model!r} is not available here")
