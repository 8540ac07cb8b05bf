"""M/G/c: waits under measured service variability (Theory H2), by a two-moment approximation.

A request that must wait waits for the first of c servers to finish and then for those ahead of
it, which c busy servers work off like one server c times as fast (Tijms, *A First Course in
Stochastic Models*, 9.6.2):

    W | W > 0  ≈  min of c residual services  +  wait of M/G/1 with service S/c,

exact for M/M/c and for M/G/1. The delay probability is Erlang's C(c, a), which depends little on
the law of service. The law of the sum is taken as the gamma law of its mean and variance, which
is again exact for M/M/c. Service enters with its mean and SCV: a fixed time plus an exponential
one up to an SCV of 1, a balanced hyperexponential beyond.
"""

from __future__ import annotations

import numpy as np
from scipy.special import gammaincc, gammainccinv
from scipy.stats import binom

from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, register
from testbed.theory.delay.erlang_c import erlang_c
from testbed.theory.delay.service import ServiceVariability, service_variability


class GammaWait(ExcessDelay):
    """0 with probability 1 − C, else gamma(shape, scale); the same for every type."""

    def __init__(self, probability: float, shape: float, scale: float, types: int) -> None:
        self.wait_probability = probability
        self.shape = shape
        self.scale = scale
        self.mean = np.full(types, probability * shape * scale)

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        w = np.asarray(seconds, dtype=float)
        beyond = gammaincc(self.shape, np.maximum(w, 0.0) / self.scale)
        return np.where(w < 0, 0.0, 1.0 - self.wait_probability * beyond)

    def decay(self, q: int) -> float:
        return max(1.0, 1.0 / self.shape) / self.scale

    def exponential(self) -> tuple[np.ndarray, np.ndarray] | None:
        if self.shape != 1.0:
            return None
        types = self.mean.size
        return np.full(types, self.wait_probability), np.full(types, 1.0 / self.scale)

    def quantile(self, q: int, probability: float) -> float:
        if not 0 <= probability < 1:
            raise ValueError(f"probability {probability} is not in [0, 1)")
        if probability <= 1.0 - self.wait_probability:
            return 0.0
        share = (1.0 - probability) / self.wait_probability
        return float(self.scale * gammainccinv(self.shape, share))


def service_law(mean: float, scv: float, servers: int) -> tuple[float, float, float]:
    """E[S³] and the first two moments of the least of c residual services, for a mean and SCV."""
    if scv <= 1.0:
        e = mean * np.sqrt(scv)
        f = mean - e
        third = f**3 + 3 * f**2 * e + 6 * f * e**2 + 6 * e**3
        # P(residual > t) = (m − t)/m up to f, then (e/m)·exp(−(t − f)/e).
        r = e / mean
        n = servers
        after = r**n
        first = mean / (n + 1) * (1 - after * r) + after * e / n
        half = mean**2 * ((1 - after * r) / (n + 1) - (1 - after * r * r) / (n + 2))
        half += after * (f * e / n + (e / n) ** 2)
        return third, first, 2.0 * half
    p = 0.5 * (1.0 + np.sqrt((scv - 1.0) / (scv + 1.0)))
    fast, slow = 2.0 * p / mean, 2.0 * (1.0 - p) / mean
    third = 6.0 * (p / fast**3 + (1.0 - p) / slow**3)
    # The residual of each branch is as likely as the other: both carry half the mean.
    k = np.arange(servers + 1)
    rate = k * fast + (servers - k) * slow
    weight = binom.pmf(k, servers, 0.5)
    return third, float(weight @ (1.0 / rate)), float(weight @ (2.0 / rate**2))


def conditional_wait(
    servers: int, utilisation: float, mean: float, scv: float
) -> tuple[float, float]:
    """Mean, s, and variance, s², of the wait of a request that waits."""
    third, first, second = service_law(mean, scv, servers)
    residual = mean * (1.0 + scv) / (2.0 * servers)
    residual_second = third / (3.0 * mean * servers**2)
    count = utilisation / (1.0 - utilisation)
    queue_mean = count * residual
    queue_variance = count * (residual_second - residual**2)
    queue_variance += count / (1.0 - utilisation) * residual**2
    return first + queue_mean, second - first**2 + queue_variance


class MGc(DelayModel):
    """M/G/c with the service variability of the mixture (Theory H2)."""

    name = "mgc"

    def __init__(self, variability: ServiceVariability) -> None:
        self.variability = variability

    def excess(self, load: TierLoad) -> GammaWait:
        probability = erlang_c(load.concurrency, load.offered_load)
        if probability == 0:
            return GammaWait(0.0, 1.0, 1.0, load.weights.size)
        mean, scv = self.variability.moments(load)
        first, variance = conditional_wait(load.concurrency, load.utilisation, mean, scv)
        return GammaWait(probability, first**2 / variance, variance / first, load.weights.size)

    def mean(self, load: TierLoad) -> np.ndarray:
        probability = erlang_c(load.concurrency, load.offered_load)
        if probability == 0:
            return np.zeros(load.weights.size)
        mean, scv = self.variability.moments(load)
        first, _ = conditional_wait(load.concurrency, load.utilisation, mean, scv)
        return np.full(load.weights.size, probability * first)


register("mgc", lambda argument: MGc(service_variability(argument, "mgc")))
