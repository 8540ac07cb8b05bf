"""Latency: the law of the TTFT at an operating point (Theory E).

A request served at tier s, at radio delay d, after a wait W takes d + g(L − h | h) + W. In the
cost variable of the geometry d = y − K_sq, so with the deadline

    y*_sq(τ) = τ + K_sq − g(L_q − h_sq)

coverage is P(τ) = Σ_q p_q Σ_s ∫ v_s' e^−v F_W,sq(y* − y) dy (Theory E2). F_W jumps at 0: the
quadrature ends a panel at every y*.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import brentq

from testbed.theory.delay.base import DelayModel, ExcessDelay
from testbed.theory.geometry import cost_nodes, coverage_kernel, moments_kernel, radio_area
from testbed.theory.operating_point import OperatingPoint
from testbed.theory.system import System


@dataclass(frozen=True)
class Latency:
    """TTFT and reuse at one operating point; the laws of waits are those of ``model``."""

    system: System
    point: OperatingPoint
    model: DelayModel

    @cached_property
    def laws(self) -> tuple[ExcessDelay | None, ...]:
        """One law per profile; None where ρ ≥ 1 and the wait never ends (Theory D3)."""
        return tuple(
            self.model.excess(load) if rho < 1 else None
            for load, rho in zip(self.point.loads, self.point.utilisation, strict=True)
        )

    @cached_property
    def _exponential(self) -> tuple[np.ndarray, np.ndarray] | None:
        """(C, θ), each (Q, S), when every law is 0 or exponential."""
        waiting = np.ones(self.system.shape)
        rate = np.zeros(self.system.shape)
        for s, law in enumerate(self.laws):
            if law is None:
                continue
            pair = law.exponential()
            if pair is None:
                return None
            waiting[:, s], rate[:, s] = pair
        return waiting, rate

    @cached_property
    def _space(self) -> tuple[np.ndarray, float, float]:
        """(π λ_s ξ_s^(−2/α), 2/α, ξ): what the geometry's kernels need."""
        return radio_area(self.system)

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A_sq, A_sq·E[radio delay] and A_sq·E[distance], each (Q, S)."""
        return moments_kernel(self.point.costs, *self._space)

    def deadline(self, seconds: float) -> np.ndarray:
        """y*_sq(τ), the largest cost at which a request that need not wait meets τ, (Q, S), s."""
        return np.ascontiguousarray(seconds + self.point.costs - self.system.residual)

    def coverage(self, seconds: float) -> float:
        """P(TTFT ≤ τ) (Theory E2); 0 where the load-aware scenario has no stable point."""
        if self.lost:
            return 0.0
        if self._exponential is None:
            return self._general_coverage(seconds)
        area, power, _ = self._space
        joint = coverage_kernel(
            self.point.costs, area, power, self.deadline(seconds), *self._exponential
        )
        return float(self.system.probability @ joint.sum(axis=1))

    def _general_coverage(self, seconds: float) -> float:
        area, power, _ = self._space
        deadline = self.deadline(seconds)
        total = 0.0
        for q, p in enumerate(self.system.probability):
            rates = np.array([0.0 if law is None else law.decay(q) for law in self.laws])
            start, beyond, slope, weight = cost_nodes(
                self.point.costs[q], area, power, deadline[q], rates
            )
            for s, law in enumerate(self.laws):
                left = (deadline[q, s] - start) - beyond
                inside = (left >= 0) & (slope[:, s] > 0)
                if law is not None and inside.any():
                    mass = slope[inside, s] * weight[inside]
                    total += float(p) * float(mass @ law.cdf(q, left[inside]))
        return total

    def upper_bound(self, seconds: float) -> float:
        """Coverage without queues: F_W = 1 at the same association (Theory E3)."""
        area, power, _ = self._space
        none = np.zeros(self.system.shape)
        joint = coverage_kernel(self.point.costs, area, power, self.deadline(seconds), none, none)
        return float(self.system.probability @ joint.sum(axis=1))

    @property
    def details(self) -> dict[str, Any]:
        """Figures that only an extension has, plain values for the outcome (Theory H)."""
        return {}

    @property
    def lost(self) -> bool:
        """No stable operating point under a policy that looks for one: nothing is served."""
        return self.point.lost

    @cached_property
    def mean(self) -> float:
        """E[TTFT], s; infinite where a tier with traffic has no finite wait (Theory E3, D3)."""
        if not self.point.feasible:
            return np.inf
        association, radio, _ = self._moments
        used = association > 0
        wait = np.where(used, self.point.wait, 0.0)
        each = radio + association * (self.system.residual + wait)
        return float(self.system.probability @ each.sum(axis=1))

    def quantile(self, probability: float) -> float:
        """T_ζ = inf{τ : P(τ) ≥ ζ}, s; infinite where P never reaches ζ (Theory E3)."""
        if self.lost or self._reachable < probability:
            return np.inf
        system = self.system
        near = system.radio.delay(np.array(1.0 / np.sqrt(np.pi * system.node_density)))
        low = 0.0
        high = float(system.residual.max()) + float(near)
        while self.coverage(high) < probability:
            if high > 1e300:
                return np.inf
            low, high = high, 2.0 * high
        root = brentq(lambda t: self.coverage(t) - probability, low, high, xtol=1e-13 * high)
        return float(root)

    @cached_property
    def _reachable(self) -> float:
        """lim P(τ): the share of requests whose wait ends."""
        served = np.array([law is not None for law in self.laws])
        return float(self.system.probability @ self.point.association[:, served].sum(axis=1))

    @cached_property
    def mean_distance(self) -> float:
        """R̄ = Σ_q p_q Σ_s A_sq R̄_sq, km (Theory C4)."""
        return float(self.system.probability @ self._moments[2].sum(axis=1))

    @cached_property
    def reusable_tokens(self) -> float:
        """Σ p A h, tokens (Theory E4)."""
        each = (self.point.association * self.system.reusable).sum(axis=1)
        return float(self.system.probability @ each)

    @cached_property
    def offloading_ratio(self) -> float:
        """η_off = Σ p A ΔG / Σ p g(L), by computation (Theory E4)."""
        system = self.system
        saved = system.probability @ (self.point.association * system.saving).sum(axis=1)
        # Engines that differ take different times for the whole prompt: that of who serves it.
        each = self.point.association
        total = each.sum(axis=1, keepdims=True)
        share = np.divide(each, total, out=np.full_like(each, 1 / each.shape[1]), where=total > 0)
        whole = system.probability @ (share * (system.residual + system.saving)).sum(axis=1)
        return float(saved / whole)

    def curve(self, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
        """(seconds, P(TTFT ≤ seconds)) on a grid for plots, from 0 to past the last 0.2 %."""
        reach = self._reachable
        if self.lost or reach <= 0:
            end = 2.0 * float(self.system.residual.max())
        else:
            end = self.quantile(0.998 * reach)
        seconds = np.linspace(0.0, end, points)
        return seconds, np.array([self.coverage(t) for t in seconds])
