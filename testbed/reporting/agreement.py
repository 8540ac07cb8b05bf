"""Agreement: one figure of one answer held against the same figure of the reference.

"Agrees" needs two things: the difference lies within the 95 % intervals, and these are narrow
enough for that to mean anything. Every agreement therefore carries the noise beside the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Interval = tuple[float, float]
Status = Literal["agrees", "close", "misses", "too noisy", "unbounded", "no interval"]

CLOSE_PERCENT, CLOSE_POINTS = 5.0, 0.02
"""Outside the noise but nearer than this: ``close``, not ``misses``."""
NOISY_PERCENT, NOISY_POINTS = 10.0, 0.05
"""Within a noise wider than this: ``too noisy`` to call it agreement."""


@dataclass(frozen=True)
class Reading:
    """A figure and, where the outcome has one, its 95 % interval."""

    value: float
    interval: Interval | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"value": self.value, "interval": list(self.interval) if self.interval else None}


@dataclass(frozen=True)
class Agreement:
    """How an answer's figure p stands to the reference's m.

    Attributes
    ----------
    error_percent : 100·(p − m)/m, the sign kept: negative means that the answer is too low. None
        where m = 0 and p ≠ 0, or both are infinite.
    difference : p − m in the figure's unit; None where both are infinite
    interval : 95 % interval of that difference; None where neither side has one
    noise, noise_percent : half the interval's width, in the unit and in per cent of m
    within : the interval holds 0: the difference could be noise
    paired : requests that both sides served, where noise is that of their differences
    """

    error_percent: float | None
    difference: float | None
    interval: Interval | None
    noise: float | None
    noise_percent: float | None
    within: bool | None
    status: Status
    paired: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def agree(
    answer: Reading,
    reference: Reading,
    *,
    probability: bool,
    halves: Interval | None = None,
    paired: int = 0,
) -> Agreement:
    """Hold ``answer`` (p) against ``reference`` (m).

    Where only the reference has an interval, ``within`` says whether p lies in it. Where both
    have one, their halves facing each other are added in quadrature (independent errors), unless
    ``halves`` says how far the interval of p − m reaches below and above it: they then stand for
    ``paired`` requests that both served.

    Parameters
    ----------
    probability : the figure is a probability or a fraction; then nearness and noise are judged
        in percentage points, since a percentage of a rare event's share says little.
    """
    p, m = answer.value, reference.value
    if math.isinf(p) and p == m:
        return Agreement(None, None, None, None, None, None, "no interval")
    difference = p - m
    if math.isinf(difference):
        unbounded = -100.0 if math.isinf(m) else math.inf
        return Agreement(unbounded, difference, None, None, None, False, "unbounded")
    error = _percent(difference, m)
    if reference.interval is None and answer.interval is None and halves is None:
        return Agreement(error, difference, None, None, None, None, "no interval")
    if halves is None:
        paired = 0
        answer_below, answer_above = _halves(answer)
        reference_below, reference_above = _halves(reference)
        halves = (
            math.hypot(answer_below, reference_above),
            math.hypot(answer_above, reference_below),
        )
    below, above = halves
    within = -above <= difference <= below
    noise = (below + above) / 2
    noise_percent = _percent(noise, abs(m))
    status = _status(within, error, difference, noise, noise_percent, probability)
    interval = (difference - below, difference + above)
    return Agreement(error, difference, interval, noise, noise_percent, within, status, paired)


def _status(
    within: bool,
    error: float | None,
    difference: float,
    noise: float,
    noise_percent: float | None,
    probability: bool,
) -> Status:
    if probability:
        small, noisy = abs(difference) <= CLOSE_POINTS, noise > NOISY_POINTS
    else:
        small = error is not None and abs(error) <= CLOSE_PERCENT
        noisy = noise > 0 if noise_percent is None else noise_percent > NOISY_PERCENT
    if within:
        return "too noisy" if noisy else "agrees"
    return "close" if small else "misses"


def _percent(part: float, whole: float) -> float | None:
    if whole == 0:
        return 0.0 if part == 0 else None
    return 100.0 * part / whole


def _halves(reading: Reading) -> tuple[float, float]:
    """How far the interval reaches below and above the value, never less than 0."""
    if reading.interval is None:
        return 0.0, 0.0
    ends = ((reading.interval[0], reading.value), (reading.value, reading.interval[1]))
    below, above = (0.0 if low == high else max(high - low, 0.0) for low, high in ends)
    return below, above
