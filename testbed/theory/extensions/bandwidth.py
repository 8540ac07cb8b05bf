"""Bandwidth: transfers share a node's radio, ξ_s(n), inside the fixed point (Theory H5).

A node sends one request's prompt alone in ξ·r^α seconds. With more under way it shares its
bandwidth equally among them. That is a processor-sharing queue: under Poisson arrivals, whatever
the law of the sizes, a transfer of size x takes x/(1 − ϱ) on average, ϱ = λ^q·E[ξ R^α] being the
radio's utilisation, and n = ϱ/(1 − ϱ) transfers are under way. So

    ξ_s(n) = ξ·(1 + n_s) = ξ/(1 − ϱ_s),

and the departures that reach the compute queue are Poisson again. Association depends on the ξ_s
and the waits, the ϱ_s and the waits on the association: one fixed point over both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.radio import PowerLaw
from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel
from testbed.theory.extensions.fixed_point import MOST_BUSY, operating_point, shared_links
from testbed.theory.geometry import association_kernel, moments_kernel
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint
from testbed.theory.system import System


@dataclass(frozen=True)
class SharedRadio:
    """The operating point of nodes whose radio is shared.

    Attributes
    ----------
    point : waits and association (Theory D); feasible when every node's compute and radio can
        carry what they get
    radio_utilisation : (S,) ϱ_s, share of the time that a node's radio is busy
    transfers : (S,) n_s, mean number of transfers under way at a node
    """

    point: OperatingPoint
    radio_utilisation: np.ndarray

    @property
    def transfers(self) -> np.ndarray:
        return self.radio_utilisation / (1.0 - self.radio_utilisation)


@dataclass(frozen=True)
class _Space:
    """Geometry of a power law with a ξ of its own for every tier."""

    system: System
    xi: float
    alpha: float

    @classmethod
    def of(cls, system: System) -> _Space:
        if not isinstance(system.radio, PowerLaw):
            raise ScenarioError("radio.model: bandwidth sharing needs power_law")
        return cls(system, system.radio.xi, system.radio.alpha)

    def area(self, utilisation: np.ndarray) -> np.ndarray:
        """π λ_s ξ_s^(−2/α), (S,)."""
        power = 2.0 / self.alpha
        return np.pi * self.system.density * (self.xi / (1.0 - utilisation)) ** -power

    def associate(self, costs: np.ndarray, utilisation: np.ndarray) -> np.ndarray:
        return association_kernel(
            np.ascontiguousarray(costs), self.area(utilisation), 2.0 / self.alpha
        )

    def moments(
        self, costs: np.ndarray, utilisation: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A_sq, A_sq·E[delay] with sharing, A_sq·E[r], each (Q, S)."""
        association, delay, distance = moments_kernel(
            np.ascontiguousarray(costs), self.area(utilisation), 2.0 / self.alpha, self.xi
        )
        return association, delay, distance * (1.0 - utilisation) ** (1.0 / self.alpha)

    def demand(self, costs: np.ndarray, utilisation: np.ndarray) -> np.ndarray:
        """λ^q_s·E[ξ R^α], the radio's utilisation that the association brings, (S,)."""
        system = self.system
        _, delay, _ = self.moments(costs, utilisation)
        alone = (1.0 - utilisation) * (system.probability @ delay)
        return np.divide(
            system.intensity * alone,
            system.density,
            out=np.zeros(system.shape[1]),
            where=system.density > 0,
        )


def solve(
    system: System,
    policy: Policy,
    model: DelayModel,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 100,
) -> SharedRadio:
    """The joint fixed point of association, waits and radio load (Theory D1, H5).

    ``nearest`` looks at neither prefill nor waits but knows how slow a shared radio is.

    Raises
    ------
    ScenarioError
        The radio model is not a power law.
    """
    space = _Space.of(system)
    tiers = system.shape[1]

    def settle(rho: np.ndarray, start: OperatingPoint | None) -> OperatingPoint:
        return operating_point(
            system,
            policy,
            model,
            lambda wait: space.associate(policy.fixed_cost(system.residual, wait), rho),
            tolerance=tolerance,
            max_iterations=max_iterations,
            start=start,
        )

    last: OperatingPoint | None = None

    def demand(rho: np.ndarray) -> np.ndarray:
        nonlocal last
        last = settle(rho, last if last is not None and last.feasible else None)
        return space.demand(last.costs, rho)

    if policy.load_aware and system.capacity_margin < 0:
        # No routing can serve it, however fast the radio: its own load decides nothing.
        asked, settled = demand(np.zeros(tiers)), True
        rho = np.minimum(asked, MOST_BUSY)
    else:
        rho, settled = shared_links(demand, tiers, tolerance=tolerance)
        asked = demand(rho)
    point = settle(rho, last)
    reasons = [] if point.reason is None else [point.reason]
    reasons += [
        f"the radio of {system.names[s]} is asked for {asked[s]:.4g} of its time"
        for s in range(tiers)
        if rho[s] >= MOST_BUSY
    ]
    feasible = point.feasible and bool((rho < MOST_BUSY).all())
    return SharedRadio(
        point=replace(
            point,
            converged=point.converged and settled,
            feasible=feasible,
            reason="; ".join(reasons) or None,
            lost=policy.load_aware and not feasible,
        ),
        radio_utilisation=rho,
    )


@dataclass(frozen=True)
class SharedLatency(Latency):
    """TTFT with each transfer at its mean duration given its size, ξ_s r^α (Theory E, H5)."""

    radio_utilisation: np.ndarray

    @classmethod
    def of(cls, system: System, shared: SharedRadio, model: DelayModel) -> SharedLatency:
        return cls(system, shared.point, model, shared.radio_utilisation)

    @cached_property
    def _space(self) -> tuple[np.ndarray, float, float]:
        space = _Space.of(self.system)
        return space.area(self.radio_utilisation), 2.0 / space.alpha, space.xi

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _Space.of(self.system).moments(self.point.costs, self.radio_utilisation)

    @property
    def details(self) -> dict[str, Any]:
        busy = self.radio_utilisation
        rows = zip(self.system.names, busy, busy / (1.0 - busy), strict=True)
        return {
            "extension": "bandwidth",
            "radio": {
                name: {"utilisation": float(rho), "transfers": float(n)} for name, rho, n in rows
            },
        }
