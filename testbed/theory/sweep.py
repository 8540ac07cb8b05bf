"""Sweep: one numeric field of a scenario over a range, each point warm-started from the last."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from testbed.errors import ScenarioError
from testbed.outcome import Outcome
from testbed.scenario import Scenario
from testbed.theory.operating_point import OperatingPoint
from testbed.theory.predict import assemble, locate

_SHARE = re.compile(r"^(requests|profiles)\[(\d+)\]\.(probability|fraction)$")


def parse_sweep(text: str) -> tuple[str, np.ndarray]:
    """``FIELD=from:to:count`` as the field's path and its evenly spaced values, ends included.

    >>> field, values = parse_sweep("demand.intensity=1:6:11")
    >>> field, float(values[0]), float(values[1]), len(values)
    ('demand.intensity', 1.0, 1.5, 11)
    """
    field, equals, range_ = text.partition("=")
    parts = range_.split(":")
    if not (field.strip() and equals and len(parts) == 3):
        raise ScenarioError(f"sweep: {text!r} is not FIELD=from:to:count")
    try:
        low, high, count = float(parts[0]), float(parts[1]), int(parts[2])
    except ValueError:
        raise ScenarioError(f"sweep: {range_!r} is not from:to:count in numbers") from None
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ScenarioError(f"sweep: {range_!r} is not finite")
    if count < 1 or (count == 1 and low != high):
        raise ScenarioError(f"sweep: {count} points do not span {low:g} to {high:g}")
    return field.strip(), np.linspace(low, high, count)


def with_value(scenario: Scenario, field: str, value: float) -> Scenario:
    """The scenario with one field changed.

    A request's probability or a profile's fraction is one share of a whole: the others keep their
    proportions and give or take the difference (Fig. 9 moves the long type's probability so).

    Raises
    ------
    ScenarioError
        There is no such field, or the value cannot stand there.
    """
    match = _SHARE.match(field)
    if match is None:
        return scenario.with_field(field, value)
    section, index, key = match[1], int(match[2]), match[3]
    data = scenario.to_dict()
    parts = data[section]
    if index >= len(parts) or key not in parts[index]:
        raise ScenarioError(f"{field}: no such field")
    if not 0 <= value <= 1:
        raise ScenarioError(f"{field}: {value:g} is not in [0, 1]")
    others = [p for i, p in enumerate(parts) if i != index]
    rest = math.fsum(p[key] for p in others)
    if rest == 0 and value < 1:
        raise ScenarioError(f"{field}: nothing else can take the remaining {1 - value:g}")
    for part in others:
        part[key] = part[key] / rest * (1.0 - value) if rest else 0.0
    parts[index][key] = value
    return Scenario.from_dict(data, scenario.name)


def sweep(
    scenario: Scenario,
    field: str,
    values: Sequence[float] | np.ndarray,
    *,
    delay_model: str | None = None,
    extension: str | None = None,
) -> list[Outcome]:
    """The outcome at each value of ``field``, in order; the rest as in ``predict``."""
    outcomes = []
    start: OperatingPoint | None = None
    for value in values:
        asked = with_value(scenario, field, float(value))
        name = delay_model if delay_model is not None else asked.delay_model
        latency = locate(asked, delay_model=name, extension=extension, start=start)
        # An overloaded point is no help to its neighbour: its waits are penalties.
        start = latency.point if latency.point.feasible and latency.point.converged else None
        outcomes.append(assemble(asked, name, latency))
    return outcomes
