"""Agreement: one figure of one answer held against the same figure of the reference.

"Agrees" needs two things: the difference lies within the 95 % intervals, and these are narrow
enough for that to mean anything. Every agreement therefore carries the noise beside the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Interval = tuple[float, float]
Status = Literal["agrees", "close", "misses", "too noisy", "no interval"]

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
    """How an answer's figure stands to the reference's.

    ``error_percent`` is 100·(p − m)/m with the sign kept: negative means the answer is too low.
    It is None where m = 0 and p ≠ 0, or both are infinite; ``difference`` is p − m in the
    figure's own unit (None where both are infinite). ``noise`` is half the width of the interval
    of that difference, in the unit, and ``noise_percent`` the same in percent of m.
    """

    error_percent: float | None
    difference: float | None
    noise: float | None
    noise_percent: float | None
    within: bool | None
    status: Status

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def agree(answer: Reading, reference: Reading, *, probability: bool) -> Agreement:
    """Hold ``answer`` (p) against ``reference`` (m).

    Where only the reference has an interval, ``within`` says whether p lies in it. Where both
    have one, whether |p − m| is within the two half-widths facing each other, added in
    quadrature (independent errors).

    Parameters
    ----------
    probability : the figure is a probability or a fraction; then nearness and noise are judged
        in percentage points, since a percentage of a rare event's share says little.
    """
    p, m = answer.value, reference.value
    if math.isinf(p) and p == m:
        return Agreement(None, None, None, None, None, "no interval")
    difference = p - m
    error = -100.0 if math.isinf(m) else _percent(difference, m)
    if reference.interval is None and answer.interval is None:
        return Agreement(error, difference, None, None, None, "no interval")
    noise = math.hypot(_half_width(reference.interval), _half_width(answer.interval))
    if answer.interval is None and reference.interval is not None:
        within = reference.interval[0] <= p <= reference.interval[1]
    else:
        facing = math.hypot(_facing(reference, upwards=p > m), _facing(answer, upwards=p < m))
        within = abs(difference) <= facing
    noise_percent = _percent(noise, abs(m))
    return Agreement(
        error,
        difference,
        noise,
        noise_percent,
        within,
        _status(within, error, difference, noise, noise_percent, probability),
    )


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
    return None if math.isinf(whole) else 100.0 * part / whole


def _half_width(interval: Interval | None) -> float:
    if interval is None or interval[0] == interval[1]:  # an infinite interval has no width
        return 0.0
    return (interval[1] - interval[0]) / 2


def _facing(reading: Reading, *, upwards: bool) -> float:
    """The interval's half on the side where the other value lies; never below zero."""
    if reading.interval is None:
        return 0.0
    near, far = (reading.value, reading.interval[1])
    if not upwards:
        near, far = reading.interval[0], reading.value
    return 0.0 if near == far else max(far - near, 0.0)
