"""Radio: distance -> delay, its inverse, and sampling, one class for each model (Theory A7)."""

from __future__ import annotations

import numpy as np

from testbed.errors import ScenarioError
from testbed.radio.base import RadioModel
from testbed.radio.measured import Histogram, MeasuredRadio, PacketTrace
from testbed.radio.power_law import PowerLaw
from testbed.radio.sinr import Sinr, sinr_model
from testbed.scenario import HistogramRadio, PacketTraceRadio, PowerLawRadio, Radio

__all__ = [
    "Histogram",
    "MeasuredRadio",
    "PacketTrace",
    "PowerLaw",
    "RadioModel",
    "Sinr",
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


def radio_model(spec: Radio, node_density: float = 0.0) -> RadioModel:
    """The model of a scenario's ``radio`` section.

    ``node_density`` is λ_b, nodes per km²: what interferes with a ``sinr`` link.
    """
    if isinstance(spec, PowerLawRadio):
        return PowerLaw(spec.xi, spec.alpha)
    if isinstance(spec, HistogramRadio):
        return Histogram(spec.file, spec.packets)
    if isinstance(spec, PacketTraceRadio):
        return PacketTrace(spec.file, spec.payload, spec.packet)
    if spec.interference and node_density <= 0:
        raise ScenarioError("radio.interference: needs the density of the nodes that interfere")
    return sinr_model(
        bandwidth=spec.bandwidth,
        payload=spec.payload,
        exponent=spec.path_loss_exponent,
        snr=spec.snr_at_1km,
        cap=spec.spectral_cap,
        coherence=spec.coherence,
        overhead=spec.overhead,
        interferers=node_density if spec.interference else 0.0,
    )
