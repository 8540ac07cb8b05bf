"""Sinr: Rayleigh fading and interference from a Poisson field of nodes (Theory H4).

A request's payload is sent over successive coherence blocks. In each the fading and the
interference are drawn anew, and the node that is r kilometres away delivers

    e = min(log2(1 + SINR), cap) bit/s/Hz,   SINR = H·S·r^−η / (1 + Σ_i S·H_i·r_i^−η),

with S the mean SNR at 1 km, H and H_i standard exponential, and the r_i the distances of a Poisson
process of all other nodes, all of which transmit. The complementary law of SINR is then

    P(SINR ≥ x | r) = exp(−x·r^η/S) · exp(−π·λ_b·r²·x^δ·πδ/sin(πδ)),   δ = 2/η.

One block alone would make the mean delay infinite (E[1/SINR] diverges); a transfer over blocks is a
renewal process and has a law with all moments, computed here block by block. Interferers are taken
to lie anywhere, also nearer than the serving node: cache-aware association does not exclude them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.stats import invgauss

from testbed.errors import ScenarioError
from testbed.radio.base import RadioModel

_DISTANCES = 96
_CELLS = 1024
"""Cells of the delivered payload in the block recursion."""
_PARTS = 8
"""Moments within a block at which the law is computed."""
_FIRST_PARTS = 64
"""The same within the first block, where a near node completes most transfers."""
_MOST_STEPS = 128
"""Mean number of steps of the recursion; of more blocks several are taken together."""
_MANY = 64.0
"""payload·E[e]/E[e²], the blocks that matter, beyond which no single one shows in the law."""
_TIMES = 2001
_TAIL = 1e-6
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(64)
_LEVELS = np.concatenate(
    [[0.0], np.geomspace(1e-4, 0.02, 12), np.linspace(0.02, 0.98, 193)[1:-1],
     1.0 - np.geomspace(0.02, _TAIL, 40)]
)  # fmt: skip


@dataclass(frozen=True)
class Link:
    """What one coherence block carries at a given distance.

    Attributes
    ----------
    exponent : η > 2
    snr : S, mean SNR at 1 km, linear
    density : λ_b of interfering nodes per km²; 0 without interference
    cap : bit/s/Hz of the highest modulation
    """

    exponent: float
    snr: float
    density: float
    cap: float

    def exceeds(self, distance: float, efficiency: np.ndarray) -> np.ndarray:
        """P(e ≥ efficiency | distance), any shape."""
        e = np.asarray(efficiency, dtype=float)
        x = np.exp2(np.minimum(np.maximum(e, 0.0), self.cap)) - 1.0
        delta = 2.0 / self.exponent
        spread = np.pi * delta / np.sin(np.pi * delta)
        exponent = x * distance**self.exponent / self.snr
        exponent += np.pi * self.density * distance**2 * spread * x**delta
        return np.where(e <= self.cap, np.exp(-exponent), 0.0)

    def moments(self, distance: float) -> tuple[float, float]:
        """E[e] and Var[e] of a block.

        The integrands P(e ≥ z) and 2z·P(e ≥ z) are taken over z = cap·t⁴: near 0 the law is a
        power of z that interference makes steep.
        """
        t = 0.5 * (_NODES + 1.0)
        # Panels refine towards 0, where far links have all their mass.
        edges = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, 12)])
        mean = second = 0.0
        for low, high in pairwise(edges.tolist()):
            at = low + (high - low) * t
            z = self.cap * at**4
            weight = 0.5 * (high - low) * _WEIGHTS * 4.0 * self.cap * at**3
            above = self.exceeds(distance, z)
            mean += float(weight @ above)
            second += float(weight @ (2.0 * z * above))
        return mean, second - mean**2


class Sinr(RadioModel):
    """Delay of a payload over fading, interfered blocks (Theory H4).

    Parameters
    ----------
    bandwidth : Hz for one request
    payload : bits of one request
    coherence : s of one block
    overhead : s added to every transfer
    link : what a block carries

    Attributes
    ----------
    floor : the delay at distance 0, s
    """

    def __init__(
        self, bandwidth: float, payload: float, coherence: float, overhead: float, link: Link
    ) -> None:
        self.link = link
        self.coherence = coherence
        self.overhead = overhead
        self.need = payload / (bandwidth * coherence)
        self.floor = overhead + coherence * self.need / link.cap
        distances = _grid(link)
        mean, quantiles = zip(*(self._law(float(r)) for r in distances), strict=True)
        # Rounding may undo what is true of the law, that it grows with distance: a row whose mean
        # does not exceed all before it is left out.
        means = np.array(mean)
        before = np.concatenate([[self.floor], np.maximum.accumulate(means)[:-1]])
        grows = means - self.floor > (before - self.floor) * (1.0 + 1e-9)
        self.distances, self.means = distances[grows], means[grows]
        self.quantiles = np.maximum.accumulate(np.array(quantiles)[grows], axis=0)
        self._log_quantiles = np.log(self.quantiles)
        self._log_distance = np.log(self.distances)
        self._log_extra = np.log(self.means - self.floor)

    def delay(self, distance: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore"):
            at = np.log(np.asarray(distance, dtype=float))
        return self.floor + np.exp(_line(at, self._log_distance, self._log_extra))

    def distance(self, delay: np.ndarray) -> np.ndarray:
        extra = np.asarray(delay, dtype=float) - self.floor
        with np.errstate(divide="ignore"):
            at = np.log(np.maximum(extra, 0.0))
        return np.exp(_line(at, self._log_extra, self._log_distance))

    def quantile(self, distance: np.ndarray, probability: np.ndarray) -> np.ndarray:
        distance, probability = np.broadcast_arrays(
            np.asarray(distance, dtype=float), np.asarray(probability, dtype=float)
        )
        # Beyond the table the whole law stretches as its mean does.
        inside = np.clip(distance, self.distances[0], self.distances[-1])
        row, part = _place(np.log(inside), self._log_distance)
        column, share = _place(probability, _LEVELS)
        q = self._log_quantiles
        near = q[row, column] * (1 - share) + q[row, column + 1] * share
        far = q[row + 1, column] * (1 - share) + q[row + 1, column + 1] * share
        inner = np.exp(near * (1 - part) + far * part)
        with np.errstate(invalid="ignore"):
            stretch = (self.delay(distance) - self.overhead) / (self.delay(inside) - self.overhead)
        return self.overhead + (inner - self.overhead) * np.where(distance == inside, 1.0, stretch)

    def _law(self, distance: float) -> tuple[float, np.ndarray]:
        """Mean delay and its quantiles at :data:`_LEVELS`, s."""
        mean, variance = self.link.moments(distance)
        second = variance + mean**2
        if self.need * mean / second > _MANY:
            # Many blocks, none of which matters: first passage of Brownian motion with drift.
            blocks = self.need / mean + 0.5 * variance / mean**2
            spread = self.need * variance / mean**3
            law = invgauss(spread / blocks**2, scale=blocks**3 / spread)
            # The CDF on a grid is much cheaper than its inverse.
            reach = 8.0 * np.sqrt(spread)
            times = np.linspace(max(blocks - reach, 0.0), blocks + 1.5 * reach, _TIMES)
            quantiles = np.interp(_LEVELS, law.cdf(times), times)
        else:
            blocks, times, cdf = self._renewal(distance, self.need / mean)
            quantiles = np.interp(_LEVELS, cdf, times)
        floor = self.need / self.link.cap
        return (
            self.overhead + self.coherence * max(blocks, floor),
            self.overhead + self.coherence * np.maximum(quantiles, floor),
        )

    def _renewal(self, distance: float, blocks: float) -> tuple[float, np.ndarray, np.ndarray]:
        """Mean number of blocks, and (blocks, CDF) of the transfer, block by block.

        ``v[k]`` is the probability that the payload is not complete and k cells of it are. In the
        next block it becomes complete after a part u of it if e ≥ (what is left)/u. Where very
        many blocks carry next to nothing, several are taken together.
        """
        link, need = self.link, self.need
        # Cells divide the cap, so that blocks at the cap lie on the grid.
        step = link.cap / np.ceil(link.cap * _CELLS / need) if need > link.cap else need / _CELLS
        cells = int(np.ceil(need / step - 1e-9))
        edge = step * np.arange(cells + 1)
        above = link.exceeds(distance, edge)
        middle = link.exceeds(distance, edge[:-1] + 0.5 * step)
        cell = (above[:-1] + 4.0 * middle + above[1:]) / 6.0
        # Mass is shared between the two ends of its cell, so that the mean stays exact.
        mass = np.concatenate([[1.0 - cell[0]], cell[:-1] - cell[1:]])[:cells]
        together = 1
        while blocks / together > _MOST_STEPS:
            mass = _adder(mass)(mass)
            together *= 2
        add = _adder(mass)
        v = np.zeros(cells)
        v[0] = 1.0
        if together > 1:
            alive = [1.0]
            while alive[-1] > 0.1 * _TAIL and len(alive) < 60 * _MOST_STEPS:
                v = add(v)
                alive.append(float(v.sum()))
            survival = np.array(alive)
            times = together * np.arange(len(alive), dtype=float)
            return float(np.trapezoid(survival, times)), times, 1.0 - survival

        left = need - edge[:cells]
        soonest = need / link.cap
        fraction = _fraction(link, distance, left)
        later = np.arange(1, _PARTS + 1) / _PARTS
        complete = link.exceeds(distance, left / later[:, None])
        when, cdf, expected, done, block = [soonest], [0.0], 0.0, 0.0, 0
        while 1.0 - done > 0.1 * _TAIL and block < 60 * _MOST_STEPS:
            expected += float(v @ fraction)
            if block <= soonest < block + 1:
                # The first moment of all has a probability of its own: every block at the cap.
                least = max(soonest - block, 1e-9)
                part = np.geomspace(least, 1.0, _FIRST_PARTS)
                now = link.exceeds(distance, left / part[:, None] * (1.0 - 1e-9))
            elif block > soonest:
                part, now = later, complete
            if block + 1 > soonest:
                when.extend((block + part).tolist())
                cdf.extend((done + now @ v).tolist())
            v = add(v)
            done = 1.0 - float(v.sum())
            block += 1
        return expected, np.array(when), np.maximum.accumulate(np.minimum(cdf, 1.0))


@lru_cache(maxsize=32)
def sinr_model(
    *,
    bandwidth: float,
    payload: float,
    exponent: float,
    snr: float,
    cap: float,
    coherence: float,
    overhead: float,
    interferers: float,
) -> Sinr:
    """The model of a scenario's ``sinr`` section; ``interferers`` is their density per km².

    Its tables take a second to compute and are kept.
    """
    if not interferers >= 0:
        raise ScenarioError(f"radio: a density of {interferers} interferers per km² is negative")
    return Sinr(bandwidth, payload, coherence, overhead, Link(exponent, snr, interferers, cap))


def _grid(link: Link) -> np.ndarray:
    """Distances from where blocks carry almost their cap to where they carry a millionth."""
    near, far = 1e-3, 1e3
    for _ in range(60):
        middle = np.sqrt(near * far)
        if link.exceeds(middle, np.array(link.cap)) > 0.999:
            near = middle
        else:
            far = middle
    low = near
    near, far = low, 1e6
    for _ in range(60):
        middle = np.sqrt(near * far)
        if link.moments(middle)[0] > 1e-5 * link.cap:
            near = middle
        else:
            far = middle
    return np.geomspace(low, near, _DISTANCES)


def _adder(mass: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """The convolution with a sub-probability on as many cells; what passes the end is dropped."""
    cells = len(mass)
    size = next_fast_len(2 * cells - 1, real=True)
    transform = rfft(mass, size)

    def add(v: np.ndarray) -> np.ndarray:
        return np.maximum(irfft(rfft(v, size) * transform, size)[:cells], 0.0)

    return add


def _fraction(link: Link, distance: float, left: np.ndarray) -> np.ndarray:
    """E[min(1, left/e)], the part of a block that a remainder takes, any shape.

    = P(e < x) + x·E[1/e; e ≥ x], the second by parts: ∫_x^cap P(e ≥ z)/z² dz.
    """
    t = 0.5 * (_NODES + 1.0)
    x = np.asarray(left, dtype=float)
    reach = np.maximum(np.log(link.cap / x), 0.0)
    z = x[:, None] * np.exp(reach[:, None] * t)
    weight = 0.5 * reach[:, None] * _WEIGHTS
    later = (weight * link.exceeds(distance, z) / z).sum(axis=1)
    # E[min(1, x/e)] = 1 − ∫_x^cap (x/z²)·P(e ≥ z) dz
    return 1.0 - x * later


def _line(at: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Linear interpolation of increasing y over increasing x, going on straight beyond."""
    i, _ = _place(at, x)
    finite = np.isfinite(at)
    part = np.where(finite, at, x[i]) - x[i]
    return np.where(finite, y[i] + part * (y[i + 1] - y[i]) / (x[i + 1] - x[i]), at)


def _place(at: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    i = np.clip(np.searchsorted(x, at, side="right") - 1, 0, len(x) - 2)
    return i, np.clip((at - x[i]) / (x[i + 1] - x[i]), 0.0, 1.0)
