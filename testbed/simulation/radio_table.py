"""RadioTable: a radio model in a form that compiled code can evaluate."""

from __future__ import annotations

import math
from typing import NamedTuple

import numba
import numpy as np

from testbed.radio import MeasuredRadio, PowerLaw, RadioModel

_DISTANCES = 512
_LEVELS = 1025
POWER_LAW, BY_LEVEL, BY_DISTANCE = range(3)


class RadioTable(NamedTuple):
    """A power law exactly; a delay law without distance by its quantile function, exactly; any
    other model tabulated over log distance and level, linear in between."""

    kind: int
    xi: float
    alpha: float
    log_distance: np.ndarray  # (D,) log km, evenly spaced
    mean: np.ndarray  # (D,) s
    level: np.ndarray  # (U,)
    quantile: np.ndarray  # (D, U) s
    power: float  # exponent put on a uniform level


def tabulate(model: RadioModel, longest: float) -> RadioTable:
    """Table of ``model`` up to ``longest`` kilometres."""
    none = np.zeros(1)
    if isinstance(model, PowerLaw):
        return RadioTable(POWER_LAW, model.xi, model.alpha, none, none, none, np.zeros((1, 1)), 1.0)
    if isinstance(model, MeasuredRadio):
        return RadioTable(
            BY_LEVEL,
            0.0,
            0.0,
            none,
            np.array([model.mean]),
            model.cdf,
            model.seconds[None, :],
            1.0 / model.draws,
        )
    distance = np.geomspace(longest * 1e-5, longest, _DISTANCES)
    # Levels stop short of 0 and 1, where a fading link's delay may be infinite.
    level = (np.arange(_LEVELS) + 0.5) / _LEVELS
    return RadioTable(
        BY_DISTANCE,
        0.0,
        0.0,
        np.log(distance),
        np.ascontiguousarray(model.delay(distance)),
        level,
        np.ascontiguousarray(model.quantile(distance[:, None], level[None, :])),
        1.0,
    )


@numba.njit(cache=True)
def mean_delay(table: RadioTable, distance: float) -> float:
    """What a router expects, seconds."""
    if table.kind == POWER_LAW:
        return table.xi * distance**table.alpha
    if table.kind == BY_LEVEL:
        return table.mean[0]
    at, part = _place(table.log_distance, distance)
    return table.mean[at] * (1 - part) + table.mean[at + 1] * part


@numba.njit(cache=True)
def drawn_delay(table: RadioTable, distance: float, chance: float) -> float:
    """What a request experiences, seconds; ``chance`` is uniform on [0, 1)."""
    if table.kind == POWER_LAW:
        return table.xi * distance**table.alpha
    chance = chance**table.power
    high = int(np.searchsorted(table.level, chance))
    high = min(max(high, 1), table.level.shape[0] - 1)
    low = high - 1
    span = table.level[high] - table.level[low]
    share = (chance - table.level[low]) / span if span > 0 else 0.0
    share = min(max(share, 0.0), 1.0)
    if table.kind == BY_LEVEL:
        q = table.quantile[0]
        return q[low] * (1 - share) + q[high] * share
    at, part = _place(table.log_distance, distance)
    near, far = table.quantile[at], table.quantile[at + 1]
    return (near[low] * (1 - share) + near[high] * share) * (1 - part) + (
        far[low] * (1 - share) + far[high] * share
    ) * part


@numba.njit(cache=True)
def _place(log_distance: np.ndarray, distance: float) -> tuple[int, float]:
    n = log_distance.shape[0]
    step = (log_distance[n - 1] - log_distance[0]) / (n - 1)
    x = (math.log(distance) - log_distance[0]) / step if distance > 0 else 0.0
    x = min(max(x, 0.0), n - 1.0)
    at = min(int(x), n - 2)
    return at, x - at
