"""Measured radio: delays of real links, the same at every distance."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from testbed.errors import ScenarioError
from testbed.radio.base import RadioModel

_MILLISECOND = 1e-3


class MeasuredRadio(RadioModel):
    """A delay law with a piecewise linear CDF: ``cdf[i]`` of the delays are below ``seconds[i]``.

    The largest of ``draws`` independent delays is what a request takes.
    """

    def __init__(self, seconds: np.ndarray, cdf: np.ndarray, draws: int = 1) -> None:
        self.seconds = np.asarray(seconds, dtype=float)
        self.cdf = np.asarray(cdf, dtype=float)
        self.draws = draws
        n = float(draws)
        mass = np.diff(self.cdf)
        slope = np.divide(np.diff(self.seconds), mass, out=np.zeros_like(mass), where=mass > 0)
        # ∫ x dF^n over each linear piece x(F) = x_i + slope·(F − F_i).
        powers = np.diff(self.cdf**n)
        moments = np.diff(self.cdf ** (n + 1)) * n / (n + 1)
        level = self.seconds[:-1] - slope * self.cdf[:-1]
        self.mean = float(np.where(mass > 0, level * powers + slope * moments, 0.0).sum())

    def delay(self, distance: np.ndarray) -> np.ndarray:
        return np.full(np.shape(distance), self.mean)

    def distance(self, delay: np.ndarray) -> np.ndarray:
        return np.where(np.asarray(delay, dtype=float) >= self.mean, np.inf, 0.0)

    def quantile(self, distance: np.ndarray, probability: np.ndarray) -> np.ndarray:
        level = np.asarray(probability, dtype=float) ** (1 / self.draws)
        return np.broadcast_arrays(np.interp(level, self.cdf, self.seconds), distance)[0]


class Histogram(MeasuredRadio):
    """One-way packet delay from a histogram file (milliseconds), uniform inside a bin.

    A request of several packets, sent back to back, has arrived with its slowest packet.
    """

    def __init__(self, path: str | Path, packets: int = 1) -> None:
        rows = [_row(path, number, text) for number, text in _lines(path)]
        if len(rows) < 2:
            raise ScenarioError(f"{path}: {len(rows)} bins are not a histogram")
        edges, weights = np.array(rows).T
        if (np.diff(edges) <= 0).any():
            line = int(np.flatnonzero(np.diff(edges) <= 0)[0]) + 2
            raise ScenarioError(f"{path}: bin {line} does not lie above the bin before it")
        if not weights.sum() > 0:
            raise ScenarioError(f"{path}: every count is 0")
        # The file gives lower bounds; the last bin is taken to be as wide as the one before.
        edges = np.append(edges, 2 * edges[-1] - edges[-2])
        cdf = np.concatenate([[0.0], np.cumsum(weights) / weights.sum()])
        super().__init__(edges * _MILLISECOND, cdf, packets)


class PacketTrace(MeasuredRadio):
    """Time for a payload to cross a link whose packet opportunities were recorded (Mahimahi).

    A request starts at a moment drawn uniformly from the recording, which repeats at its end, and
    takes every opportunity from then on until its last packet has crossed. Its delay is then a
    mixture of uniform laws, one for each gap between opportunities, and so its CDF is exact.
    """

    def __init__(self, path: str | Path, payload: float, packet: int = 1500) -> None:
        times = []
        for number, text in _lines(path):
            if not text.isdigit():
                raise ScenarioError(f"{path}:{number}: {text!r} is not a number of milliseconds")
            times.append(int(text))
            if len(times) > 1 and times[-1] < times[-2]:
                raise ScenarioError(f"{path}:{number}: time runs back")
        if not times or times[-1] == 0:
            raise ScenarioError(f"{path}: no packet opportunity in it")
        opportunity = np.array(times, dtype=float)
        period = opportunity[-1]
        n = len(opportunity)
        last = np.arange(n) + math.ceil(payload / packet) - 1
        crossed = opportunity[last % n] + (last // n) * period
        before = np.concatenate([[opportunity[-1] - period], opportunity[:-1]])
        low, high = crossed - opportunity, crossed - before
        super().__init__(*_uniform_mixture(low, high, (high - low) / period))


def _uniform_mixture(
    low: np.ndarray, high: np.ndarray, weight: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(seconds, cdf) of a mixture of uniform laws on [low, high] milliseconds."""
    used = weight > 0
    low, high, weight = low[used], high[used], weight[used]
    density = weight / (high - low)
    at = np.concatenate([low, high])
    change = np.concatenate([density, -density])
    points, group = np.unique(at, return_inverse=True)
    slope = np.cumsum(np.bincount(group, change))[:-1]
    cdf = np.concatenate([[0.0], np.cumsum(np.maximum(slope, 0.0) * np.diff(points))])
    return points * _MILLISECOND, cdf / cdf[-1]


def _lines(path: str | Path) -> list[tuple[int, str]]:
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"radio.file: {path}: {reason}") from None
    return [(i, s) for i, line in enumerate(text.splitlines(), 1) if (s := line.strip())]


def _row(path: str | Path, number: int, text: str) -> tuple[float, float]:
    parts = text.replace(",", " ").split()
    try:
        bound, weight = (float(p) for p in parts)
    except ValueError:
        raise ScenarioError(f"{path}:{number}: {text!r} is not `milliseconds count`") from None
    if not (0 <= bound < math.inf and 0 <= weight < math.inf):
        raise ScenarioError(f"{path}:{number}: {text!r} has a negative or infinite number")
    return bound, weight
