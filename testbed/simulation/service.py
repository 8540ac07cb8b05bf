"""ServiceLaw: how long a request holds its server, around its mean occupancy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import SimulationSpec


@dataclass(frozen=True)
class ServiceLaw:
    """A unit-mean factor on the mean occupancy.

    ``by_tier``: the mean is the tier's (Theory B3: one exponential rate for all its requests);
    otherwise the request's own S_sq. ``sample`` holds measured factors; without it the factor is
    exponential, or 1 when ``fixed``.
    """

    name: str
    by_tier: bool = False
    fixed: bool = False
    sample: np.ndarray | None = None

    def work(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Factors of ``count`` requests."""
        if self.sample is not None:
            return self.sample[rng.integers(0, len(self.sample), count)]
        draws = rng.standard_exponential(count)
        return np.ones(count) if self.fixed else draws


def service_law(spec: SimulationSpec) -> ServiceLaw:
    """The law of a scenario's ``simulation.node_model``.

    Raises
    ------
    ScenarioError
        The service file is missing, or a line is not a positive number of seconds.
    """
    if spec.node_model == "exponential":
        return ServiceLaw("exponential", by_tier=True)
    if spec.node_model == "exponential_by_type":
        return ServiceLaw("exponential_by_type")
    if spec.node_model == "deterministic":
        return ServiceLaw("deterministic", fixed=True)
    if spec.node_model == "measured" and spec.service_file is not None:
        seconds = read_seconds(spec.service_file)
        return ServiceLaw("measured", sample=seconds / seconds.mean())
    raise ScenarioError(f"simulation.node_model: {spec.node_model!r} has no service law")


def read_seconds(path: str | Path) -> np.ndarray:
    """Positive numbers, one a line; blank lines and ``#`` comments are skipped."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"{path}: {reason}") from None
    values = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not 0 < value < float("inf"):
            raise ScenarioError(f"{path}:{number}: {text!r} is not a positive number of seconds")
        values.append(value)
    if not values:
        raise ScenarioError(f"{path}: no number of seconds in it")
    return np.array(values)
