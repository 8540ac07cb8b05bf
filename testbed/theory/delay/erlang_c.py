"""Erlang-C: the wait of an M/M/c queue (Theory B5-B7), the paper's baseline."""

from __future__ import annotations

import math

import numba
import numpy as np

from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, without_argument


@numba.njit(cache=True)
def _inverse_blocking(servers: int, offered: float) -> float:
    """1/B of Erlang's loss formula: Σ_k c!/(c − k)!·a^−k, a sum of positive terms.

    The sum never cancels, so its relative error stays near rounding for any c and a. Terms rise
    while c − k > a and then fall faster than geometrically; what is left out is below rounding.
    Beyond 10³⁰⁰ nobody waits at all and the sum stops at infinity.
    """
    term = 1.0
    total = 1.0
    for k in range(servers):
        left = servers - k
        term *= left / offered
        total += term
        if total > 1e300:
            return np.inf
        if left < offered and term < 1e-18 * total:
            break
    return total


@numba.njit(cache=True)
def erlang_c(servers: int, offered: float) -> float:
    """Probability of waiting C(c, a) in a stable M/M/c queue (Theory B5).

    ``servers`` is c, ``offered`` is a = λ/μ in [0, c); 1 at and above c.

    >>> round(erlang_c(1, 0.25), 12), round(erlang_c(2, 1.0), 12)
    (0.25, 0.333333333333)
    """
    if offered >= servers:
        return 1.0
    if offered <= 0.0:
        return 0.0
    rho = offered / servers
    return 1.0 / (rho + (servers - offered) / servers * _inverse_blocking(servers, offered))


@numba.njit(cache=True)
def mean_wait(servers: int, offered: float, mean_service: float) -> float:
    """W̄ = C/(cμ − λ), seconds (Theory B6); infinite at a ≥ c."""
    if offered >= servers:
        return np.inf
    return erlang_c(servers, offered) * mean_service / (servers - offered)


@numba.njit(cache=True)
def scaled_wait(servers: int, utilisation: float) -> tuple[float, float]:
    """W̄·μ = C/(c − a) and its derivative by ρ = a/c, for ρ < 1 (Theory B6).

    The derivative uses d(1/B)/da = −(c/a − 1)/B − 1.
    """
    if utilisation <= 0.0:
        # One server waits from the first request on: W̄ μ = ρ/(1 − ρ).
        return 0.0, 1.0 if servers == 1 else 0.0
    a = utilisation * servers
    free = 1.0 - utilisation
    inverse = _inverse_blocking(servers, a)
    if inverse == np.inf:
        return 0.0, 0.0
    below = utilisation + free * inverse
    waiting = 1.0 / below
    slope_of_inverse = servers * (-inverse * free / utilisation - 1.0)
    slope_of_below = 1.0 - inverse + free * slope_of_inverse
    value = waiting / (servers * free)
    return value, value * (1.0 / free - slope_of_below / below)


class ExponentialWait(ExcessDelay):
    """0 with probability 1 − C, else exponential with rate θ; the same for every type.

    P(W ≤ w) = 1 − C·exp(−θ w), w ≥ 0 (Theory B7 with θ = cμ − λ).
    """

    def __init__(self, probability: float, rate: float, types: int) -> None:
        self.wait_probability = probability
        self.rate = rate
        self.mean = np.full(types, probability / rate if probability > 0 else 0.0)

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        w = np.asarray(seconds, dtype=float)
        inside = 1.0 - self.wait_probability * np.exp(-self.rate * np.maximum(w, 0.0))
        return np.where(w < 0, 0.0, inside)

    def decay(self, q: int) -> float:
        return self.rate

    def exponential(self) -> tuple[np.ndarray, np.ndarray]:
        types = self.mean.size
        return np.full(types, self.wait_probability), np.full(types, self.rate)

    def quantile(self, q: int, probability: float) -> float:
        if not 0 <= probability < 1:
            raise ValueError(f"probability {probability} is not in [0, 1)")
        if probability <= 1.0 - self.wait_probability:
            return 0.0
        return math.log(self.wait_probability / (1.0 - probability)) / self.rate


class ErlangC(DelayModel):
    """M/M/c: Poisson arrivals, exponential service at the mix's mean, c servers (Theory B)."""

    name = "erlang_c"

    def excess(self, load: TierLoad) -> ExponentialWait:
        probability = erlang_c(load.concurrency, load.offered_load)
        if probability == 0:
            return ExponentialWait(0.0, 0.0, load.weights.size)
        rate = (load.concurrency - load.offered_load) / load.mean_service
        return ExponentialWait(probability, rate, load.weights.size)

    def mean(self, load: TierLoad) -> np.ndarray:
        wait = mean_wait(load.concurrency, load.offered_load, load.mean_service)
        return np.full(load.weights.size, wait)


without_argument("erlang_c", ErlangC)
