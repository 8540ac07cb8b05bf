"""DelayModel: from the whole load of a tier's node to the law of its excess delay.

The *excess delay* is the engine's TTFT beyond the unloaded residual prefill (Theory E1's W_s).
For an M/M/c queue it is the wait before service, the same for every type; an engine that runs
prefills in series through one token budget delays types differently, so the law is per type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.optimize import brentq

from testbed.errors import ScenarioError
from testbed.step_time import AnyStepTime


@dataclass(frozen=True)
class TierLoad:
    """What one node of a tier has to do (Theory B1-B4). Arrays have the axis of types, (Q,).

    Attributes
    ----------
    arrival_rate : λ^q_s, requests/s at the node
    weights : w_q|s, the share of each type in the arrivals; sums to 1
    residual_prefill : g(L − h | h), s
    new_tokens, cached_tokens : n = L − h to compute, h cached before them
    occupancy : S_sq = residual prefill + decode occupancy, s
    output_tokens : mean tokens generated
    concurrency : c_s, sequences at once
    profile, types : names of the tier and of the request types, for models made per tier
    step_time, token_budget : of the node's engine, where it has been calibrated
    lookahead : the engine forms a step while the one before it runs
    """

    arrival_rate: float
    weights: np.ndarray
    residual_prefill: np.ndarray
    new_tokens: np.ndarray
    cached_tokens: np.ndarray
    occupancy: np.ndarray
    output_tokens: np.ndarray
    concurrency: int
    profile: str = ""
    types: tuple[str, ...] = ()
    step_time: AnyStepTime | None = None
    token_budget: int | None = None
    lookahead: bool = False

    @cached_property
    def mean_service(self) -> float:
        """1/μ_s = Σ_q w_q|s S_sq, s (Theory B3)."""
        return float(self.weights @ self.occupancy)

    @property
    def service_rate(self) -> float:
        """μ_s, requests/s per server; infinite where occupancy is 0."""
        return 1.0 / self.mean_service if self.mean_service > 0 else np.inf

    @property
    def offered_load(self) -> float:
        """a = λ/μ, mean busy servers that the arrivals ask for."""
        return self.arrival_rate * self.mean_service

    @property
    def utilisation(self) -> float:
        """ρ_s = λ/(c μ) (Theory B4); 1 or more is unstable."""
        return self.offered_load / self.concurrency

    def scaled(self, factor: float) -> TierLoad:
        """The same mix at ``factor`` times the arrival rate."""
        return replace(self, arrival_rate=self.arrival_rate * factor)


class ExcessDelay(ABC):
    """Law of the excess delay at one node, for each request type."""

    wait_probability: float
    """Probability that a request of the mix has an excess delay above 0."""

    mean: np.ndarray
    """(Q,) seconds."""

    @abstractmethod
    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        """P(excess delay of type q ≤ seconds), any shape; 0 below 0."""

    @abstractmethod
    def decay(self, q: int) -> float:
        """Fastest rate, 1/s, at which the CDF changes: the resolution that quadrature needs."""

    def exponential(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(C, θ), each (Q,), if the CDF is 1 − C·exp(−θ w) for w ≥ 0; else None."""
        return None

    def quantile(self, q: int, probability: float) -> float:
        """Least w with P(excess delay ≤ w) ≥ probability, seconds; 0 inside the atom at 0."""
        if not 0 <= probability < 1:
            raise ValueError(f"probability {probability} is not in [0, 1)")

        def missing(w: float) -> float:
            return float(self.cdf(q, np.asarray(w))) - probability

        if missing(0.0) >= 0:
            return 0.0
        high = max(float(self.mean[q]), 1e-12)
        while missing(high) < 0:
            high *= 2.0
        return float(brentq(missing, 0.0, high, xtol=1e-14 * high, rtol=1e-12))


class DelayModel(ABC):
    """A rule that turns a node's load into the law of its excess delay."""

    name: str

    uses_step_time: bool = False
    """The model needs the engine's calibrated step time (:attr:`TierLoad.step_time`)."""

    def utilisation(self, load: TierLoad) -> float:
        """Load over capacity as the model sees it; the model is stable below 1.

        Proportional to the arrival rate where the mix stays the same.
        """
        return load.utilisation

    @abstractmethod
    def excess(self, load: TierLoad) -> ExcessDelay:
        """The law for a stable load (:meth:`utilisation` below 1)."""

    def caveat(self, load: TierLoad) -> str | None:
        """One line on where this load lies outside what the model was made for, or None."""
        del load
        return None

    def mean(self, load: TierLoad) -> np.ndarray:
        """Mean excess delay, (Q,) seconds, without the rest of the law where that is cheaper."""
        return self.excess(load).mean


DELAY_MODELS: dict[str, Callable[[str | None], DelayModel]] = {}
"""Name -> factory; the factory takes the text after ``name:`` or None."""


_VARIANTS: set[str] = set()


def register(
    name: str, factory: Callable[[str | None], DelayModel], *, variant: bool = False
) -> None:
    """Add a delay model; a name already taken is refused.

    ``variant`` : another model's law tabulated or interpolated, which no comparison counts twice.
    """
    if name in DELAY_MODELS:
        raise ScenarioError(f"delay_model: {name!r} is registered already")
    DELAY_MODELS[name] = factory
    if variant:
        _VARIANTS.add(name)


def independent_models() -> list[str]:
    """Names of the models that stand on their own, variants left out."""
    return [name for name in DELAY_MODELS if name not in _VARIANTS]


def get_delay_model(name: str) -> DelayModel:
    """The model called ``name``, or ``name:argument`` where it takes one (a table's path)."""
    key, _, argument = name.partition(":")
    try:
        factory = DELAY_MODELS[key]
    except KeyError:
        known = ", ".join(sorted(DELAY_MODELS))
        raise ScenarioError(f"delay_model: {key!r} is not one of {known}") from None
    return factory(argument or None)


def without_argument(name: str, model: Callable[[], DelayModel]) -> None:
    """Register a model that takes no argument, and say so when it is given one."""

    def factory(argument: str | None) -> DelayModel:
        if argument is not None:
            raise ScenarioError(f"delay_model: {name!r} takes no argument (got {argument!r})")
        return model()

    register(name, factory)
