"""RadioLaw: association and latency under any radio model, drawn delays included (Theory H4).

The geometry of the baseline is written for ξ·r^α. Any mean delay d(r) that grows with r gives the
same structure in the cost y: v_t(y) = π λ_t ϱ(y − K_t)² nodes of tier t are cheaper than y, with
ϱ the inverse of d, and A_s = ∫ e^−v dv_s. Over a panel of costs in which the v_s grow in fixed
proportions the integral is exact, Δv_s·(e^−v − e^−v')/(v' − v); panels are as fine as the quantiles
of every tier's own nearest distance.

Policies see the mean delay; requests get a drawn one. Coverage convolves the radio model's law at
each distance with the law of the wait (Theory E2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from testbed.errors import ScenarioError
from testbed.radio import RadioModel
from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel
from testbed.theory.extensions.fixed_point import operating_point
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint
from testbed.theory.system import System

PANELS = 1200
"""Panels that each tier adds."""
LEVELS = 64
"""Levels of a drawn radio delay."""
_VOID = 37.0
_BETTER = 25.0


@dataclass(frozen=True)
class JointLaw:
    """Where requests of one type are served, panel by panel.

    Attributes
    ----------
    mass : (N, S) probability of being served by s from the panel's distances; sums to 1
    distance : (N, S) km, at the middle of the panel's distances
    """

    mass: np.ndarray
    distance: np.ndarray


def joint_law(radio: RadioModel, density: np.ndarray, costs: np.ndarray) -> JointLaw:
    """The law of (serving tier, distance) of one request type (Theory C3, C4).

    Parameters
    ----------
    density : (S,) λ_s per km²; a tier of density 0 serves nobody
    costs : (S,) K_s, s

    Raises
    ------
    ScenarioError
        The mean delay does not grow with distance, so that costs tie everywhere.
    """
    open_ = (density > 0) & np.isfinite(costs)
    if not open_.any():
        return JointLaw(np.zeros((0, len(costs))), np.zeros((0, len(costs))))
    reach = 1.0 / np.sqrt(density[open_].min())
    if not radio.delay(np.array(reach)) > radio.delay(np.array(0.0)):
        raise ScenarioError(
            "radio.model: the analytical model needs a mean delay that grows with distance"
        )
    # Fine near u = 0, where ϱ is steep, and fine in the bulk of exp(−u).
    exposure = _VOID * np.linspace(0.0, 1.0, PANELS + 1) ** 2.5
    edges = [
        costs[t] + radio.delay(np.sqrt(exposure / (np.pi * density[t])))
        for t in np.flatnonzero(open_)
    ]
    last = min(float(e[-1]) for e in edges)
    y = np.unique(np.concatenate(edges))
    y = y[y <= last]
    reach = np.where(open_, radio.distance(y[:, None] - costs), 0.0)
    v = np.pi * density * reach**2
    total = v.sum(axis=1)
    grown = np.diff(v, axis=0)
    step = np.diff(total)
    void = np.exp(-total[:-1]) * -np.expm1(-step)
    with np.errstate(divide="ignore", invalid="ignore"):
        mass = np.where(step[:, None] > 0, grown / step[:, None], 0.0) * void[:, None]
    middle = np.sqrt(0.5 * (reach[1:] ** 2 + reach[:-1] ** 2))
    used = mass.sum(axis=1) > 0
    mass = mass[used]
    return JointLaw(mass / mass.sum(), middle[used])


def serving_nodes(
    system: System, costs: np.ndarray, s: int, order: int
) -> tuple[np.ndarray, np.ndarray]:
    """Gauss–Legendre nodes (N,) and weights for the distance to a serving node of tier s, km.

    Panels of ``order`` nodes end where some other tier's exclusion disc opens, for any of the
    request types whose ``costs`` (Q, S) or (S,) are given. They stop where better nodes are there
    for every type, but for a probability of e^−25.
    """
    costs = np.atleast_2d(costs)
    present = np.flatnonzero(system.density > 0)
    lead = costs[:, [s]] - costs[:, present]
    far = np.linspace(0.0, np.sqrt(_BETTER / (np.pi * system.density[s])), 400)
    reach = system.radio.distance(system.radio.delay(far)[:, None, None] + lead)
    better = np.pi * (system.density[present] * reach**2).sum(axis=2).min(axis=1)
    last = far[min(int((better < _BETTER).sum()), len(far) - 1)]
    opens = system.radio.distance(np.maximum(-lead, 0.0).ravel() + system.radio.delay(np.zeros(1)))
    inside = np.unique(np.concatenate([[0.0, last], opens[(opens > 0) & (opens < last)]]))
    # No panel is longer than a quarter of the whole, so that smooth stretches are resolved too.
    edges = np.unique(np.concatenate([inside, np.linspace(0.0, last, 5)]))
    u, w = np.polynomial.legendre.leggauss(order)
    low, length = edges[:-1, None], np.diff(edges)[:, None]
    return (low + 0.5 * length * (u + 1.0)).ravel(), (0.5 * length * w).ravel()


def associate(system: System, costs: np.ndarray) -> np.ndarray:
    """A_sq under costs K (Q, S), s (Theory C3)."""
    return np.array(
        [joint_law(system.radio, system.density, k).mass.sum(axis=0) for k in np.asarray(costs)]
    )


def solve(
    system: System,
    policy: Policy,
    model: DelayModel,
    *,
    tolerance: float = 1e-8,
    max_iterations: int = 100,
    start: OperatingPoint | None = None,
) -> OperatingPoint:
    """The operating point of a policy (Theory D1-D3) under ``system.radio``, whatever it is."""
    return operating_point(
        system,
        policy,
        model,
        lambda wait: associate(system, policy.fixed_cost(system.residual, wait)),
        tolerance=tolerance,
        max_iterations=max_iterations,
        start=start,
    )


@dataclass(frozen=True)
class RadioLatency(Latency):
    """TTFT when the radio delay of a request is drawn from the model's law at its distance."""

    @cached_property
    def _joint(self) -> tuple[JointLaw, ...]:
        radio, density = self.system.radio, self.system.density
        return tuple(joint_law(radio, density, k) for k in self.point.costs)

    @cached_property
    def _drawn(self) -> tuple[np.ndarray, ...]:
        """Per type: radio delays at :data:`LEVELS` levels of equal mass, (N, S, U), s."""
        level = (np.arange(LEVELS) + 0.5) / LEVELS
        return tuple(
            self.system.radio.quantile(joint.distance[:, :, None], level) for joint in self._joint
        )

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        radio = self.system.radio
        rows = [
            (
                joint.mass.sum(axis=0),
                (joint.mass * radio.delay(joint.distance)).sum(axis=0),
                (joint.mass * joint.distance).sum(axis=0),
            )
            for joint in self._joint
        ]
        association, delay, distance = (np.array(part) for part in zip(*rows, strict=True))
        return association, delay, distance

    def coverage(self, seconds: float) -> float:
        """P(TTFT ≤ τ) (Theory E2), both radio delay and wait random."""
        if self.lost:
            return 0.0
        return self._covered(seconds, waits=True)

    def upper_bound(self, seconds: float) -> float:
        """Coverage without queues: F_W = 1 at the same association (Theory E3)."""
        return self._covered(seconds, waits=False)

    def _covered(self, seconds: float, *, waits: bool) -> float:
        total = 0.0
        for q, p in enumerate(self.system.probability):
            for s, law in enumerate(self.laws):
                mass = self._joint[q].mass[:, s]
                used = mass > 0
                if not used.any() or (waits and law is None):
                    continue
                left = seconds - self.system.residual[q, s] - self._drawn[q][used, s]
                met = law.cdf(q, left) if waits and law is not None else left >= 0
                total += float(p) * float(mass[used] @ met.mean(axis=1))
        return total
