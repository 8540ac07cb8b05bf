"""CellLoad: every node gets the requests of its own cell, not those of the mean cell (Theory H8).

A node's arrivals are λ_req times its load area, the area from which requests come to it, each
point counting with the probability of the types that choose it there. Its mean gives Theory B1. Its
second moment is exact too: two points x and y belong to one node of tier s if no better node lies
in the union of their exclusion discs,

    E[V_s²] = ∫∫ Σ_qq' p_q p_q' exp(−Σ_t λ_t·|B(x, ϱ_st(|x|)) ∪ B(y, ϱ_st(|y|))|) dx dy,

and a gamma law with that mean and variance stands for V_s. For a single tier it is the cell of the
Poisson–Voronoi mosaic, whose CV² is 0.280 (Gilbert 1962), close to the shape 7/2 that Ferenc and
Néda fitted. A tier that few requests come to from afar has more even cells, one that competes with
many nearer nodes more uneven ones.

A request lands in a cell with probability proportional to its area, so that the node that serves
it is busier than the mean node, by 29 % in a single tier. Coverage is mixed over cells,

    P(W ≤ w) = E[ V·F_W(w | λ_req·V) ]/E[V],

where a node with ρ ≥ 1 never clears and covers nothing: the mean-load model is optimistic, most of
all in the tail. Under a load-aware policy whose nodes advertise their *own* wait a crowded node
sheds load: :func:`own_waits` finds the wait at which x times the arrivals that a node of that wait
attracts, all others at their tiers' means, cause it.

Left out: a request in a large cell is also farther from its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import roots_genlaguerre

from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad
from testbed.theory.extensions.discs import union_area
from testbed.theory.extensions.radio_law import serving_nodes
from testbed.theory.geometry import associate, association_kernel, radio_area
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint
from testbed.theory.system import System

VORONOI_SHAPE = 3.5
"""Gamma shape of the area of a typical Poisson–Voronoi cell in the plane, approximately."""
POINTS = 24
_RADII = 10
_ANGLES = 24
_EVEN = 1e3
"""Gamma shape beyond which all cells are alike."""
_ENDLESS = 1e9
_ROUNDING = 1e-12
_SPARSE = 1e-7
"""Density, relative to a tier's, of the one node whose wait differs: it disturbs nobody."""


@dataclass(frozen=True)
class CellLaw:
    """Quadrature of the typical node's cell: areas x in units of the mean, weights summing to 1.

    A request lands in a cell with probability ``weight·area``.
    """

    area: np.ndarray
    weight: np.ndarray

    @classmethod
    def gamma(cls, shape: float = VORONOI_SHAPE, points: int = POINTS) -> CellLaw:
        """The gamma law of mean 1 (Gauss–Laguerre, exact for polynomials in x).

        >>> law = CellLaw.gamma()
        >>> round(float(law.weight @ law.area), 6), round(float(law.weight @ law.area**2), 6)
        (1.0, 1.285714)
        """
        if not shape > 0:
            raise ValueError(f"shape {shape:g} is not positive")
        if shape > _EVEN:
            return cls(np.ones(1), np.ones(1))
        x, weight = roots_genlaguerre(points, shape - 1.0)
        return cls(x / shape, weight / weight.sum())


class MixedDelay(ExcessDelay):
    """A mixture of laws; a part whose wait never ends has none and adds nothing."""

    def __init__(self, laws: Sequence[ExcessDelay | None], weight: np.ndarray, types: int) -> None:
        self._parts = [(law, float(w)) for law, w in zip(laws, weight, strict=True) if law]
        self.served = sum(w for _, w in self._parts)
        """Probability of a wait that ends."""
        self.lost = 1.0 - self.served if self.served < 1.0 - _ROUNDING else 0.0
        self.wait_probability = self.lost + sum(w * law.wait_probability for law, w in self._parts)
        finite = sum((w * law.mean for law, w in self._parts), np.zeros(types))
        self.mean = finite if self.lost == 0 else np.full(types, np.inf)

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        seconds = np.asarray(seconds, dtype=float)
        parts = (w * law.cdf(q, seconds) for law, w in self._parts)
        return sum(parts, np.zeros_like(seconds))

    def decay(self, q: int) -> float:
        return max((law.decay(q) for law, _ in self._parts), default=0.0)


def cell_shapes(system: System, costs: np.ndarray) -> np.ndarray:
    """Gamma shapes 1/CV² of the tiers' load areas under costs K (Q, S), s; (S,).

    Infinite for a tier that serves nobody. Gauss–Legendre in both distances and the angle between
    them, good to about 10⁻³.

    Examples
    --------
    >>> cell_shapes(one_tier, costs)  # doctest: +SKIP
    array([3.571])
    """
    tiers = system.shape[1]
    association = associate(system, costs)
    shapes = np.full(tiers, np.inf)
    for s in range(tiers):
        share = float(system.probability @ association[:, s])
        if share <= 0:
            continue
        mean = share / system.density[s]
        shapes[s] = 1.0 / (_second_moment(system, costs, s) / mean**2 - 1.0)
    return shapes


def _second_moment(system: System, costs: np.ndarray, s: int) -> float:
    """E[V_s²], km⁴."""
    r, dr = serving_nodes(system, costs, s, _RADII)
    angle, turn = np.polynomial.legendre.leggauss(_ANGLES)
    angle, turn = 0.5 * np.pi * (angle + 1.0), 0.5 * np.pi * turn
    apart = np.sqrt(
        np.maximum(
            r[:, None, None] ** 2
            + r[None, :, None] ** 2
            - 2.0 * r[:, None, None] * r[None, :, None] * np.cos(angle),
            0.0,
        )
    )
    # ϱ_st(r), (Q, T, R).
    lead = costs[:, [s]] - costs
    radius = system.radio.distance(system.radio.delay(r) + lead[:, :, None])
    total = 0.0
    for q, p in enumerate(system.probability):
        for k, other in enumerate(system.probability[: q + 1]):
            void = np.zeros_like(apart)
            for t in np.flatnonzero(system.density > 0):
                union = union_area(radius[q, t][:, None, None], radius[k, t][None, :, None], apart)
                void += system.density[t] * union
            pairs = (np.exp(-void) @ turn) * np.outer(r * dr, r * dr)
            total += (1.0 if k == q else 2.0) * float(p * other) * float(pairs.sum())
    # The first point's direction is free (2π), the second lies on either side of it (2).
    return 4.0 * np.pi * total


def fixed_cells(model: DelayModel, load: TierLoad, cells: CellLaw) -> MixedDelay:
    """The wait of a request at the node whose cell it is in, the cells being as they are.

    ``load`` is that of the mean cell. This is the law under a policy that looks at no waits.
    """
    return _mixed(model, [load.scaled(float(x)) for x in cells.area], cells)


def own_waits(
    system: System,
    policy: Policy,
    model: DelayModel,
    point: OperatingPoint,
    s: int,
    cells: CellLaw,
) -> tuple[np.ndarray, list[TierLoad]]:
    """The wait of a node of tier s with area factor x when each node advertises its own.

    Its arrivals are x times those of a mean node *with the same wait*, found from the association
    of one more node of tier s, all others at ``point``.

    Returns
    -------
    Waits (N,), s, finite, and loads, one for each of ``cells.area``.
    """
    area, power, _ = radio_area(system)
    extra = np.append(area, _SPARSE * area[s])
    costs = policy.fixed_cost(system.residual, point.advertised)

    def load(level: float, x: float) -> TierLoad:
        mine = policy.fixed_cost(system.residual[:, s], np.full(system.shape[0], level))
        both = np.ascontiguousarray(np.column_stack([costs, mine]))
        share = np.zeros(system.shape)
        share[:, s] = association_kernel(both, extra, power)[:, -1] / _SPARSE
        return system.tier_load(share, s).scaled(x)

    def surplus(level: float, x: float) -> float:
        own = load(level, x)
        if model.utilisation(own) >= 1:
            return _ENDLESS
        return min(float(own.weights @ model.mean(own)), _ENDLESS) - level

    waits = []
    for x in map(float, cells.area):
        high = max(float(system.residual.max()), 1e-9)
        while surplus(high, x) > 0:
            high *= 2.0
        waits.append(
            0.0
            if surplus(0.0, x) <= 0
            else float(brentq(surplus, 0.0, high, args=(x,), xtol=1e-10 * high))
        )
    loads = [load(w, float(x)) for w, x in zip(waits, cells.area, strict=True)]
    return np.array(waits), loads


def _mixed(model: DelayModel, loads: Sequence[TierLoad], cells: CellLaw) -> MixedDelay:
    """Mixed over requests: a node counts with the arrivals that it gets."""
    rates = cells.weight * np.array([own.arrival_rate for own in loads])
    weight = rates / rates.sum() if rates.sum() > 0 else cells.weight
    return MixedDelay(
        [model.excess(own) if model.utilisation(own) < 1 else None for own in loads],
        weight,
        loads[0].weights.size,
    )


@dataclass(frozen=True)
class CellLatency(Latency):
    """TTFT with the wait of a request mixed over the cells that requests are in (Theory E2, H8).

    The association between tiers and the distances stay those of the mean load. ``own``: nodes
    advertise their own waits to a policy that looks at them, not the mean of their tier.
    """

    policy: Policy
    shapes: tuple[float, ...]
    own: bool = True

    @classmethod
    def of(
        cls,
        latency: Latency,
        policy: Policy,
        shapes: Sequence[float] | None = None,
        *,
        own: bool = True,
    ) -> CellLatency:
        """From a latency of the mean-load model; ``shapes`` (S,) instead of :func:`cell_shapes`."""
        tiers = latency.system.shape[1]
        if shapes is None:
            shapes = cell_shapes(latency.system, latency.point.costs).tolist()
        if len(shapes) != tiers:
            raise ValueError(f"{len(shapes)} shapes for {tiers} profiles")
        each = tuple(map(float, shapes))
        return cls(latency.system, latency.point, latency.model, policy, each, own)

    @cached_property
    def laws(self) -> tuple[ExcessDelay | None, ...]:
        found: list[ExcessDelay | None] = []
        for s, shape in enumerate(self.shapes):
            cells = CellLaw.gamma(shape)
            load = self.point.loads[s]
            if load.arrival_rate <= 0:
                found.append(self.model.excess(load))
            elif self.own and self.policy.load_aware and not self.lost:
                _, loads = own_waits(self.system, self.policy, self.model, self.point, s, cells)
                found.append(_mixed(self.model, loads, cells))
            else:
                found.append(fixed_cells(self.model, load, cells))
        return tuple(found)

    @property
    def details(self) -> dict[str, Any]:
        law = zip(self.system.names, self.shapes, self.laws, strict=True)
        return {
            "extension": "cell_load",
            "cells": {
                name: {
                    "variation": shape**-0.5,
                    "never_served": found.lost if isinstance(found, MixedDelay) else 0.0,
                }
                for name, shape, found in law
            },
        }

    @cached_property
    def _reachable(self) -> float:
        """lim P(τ): the share of requests whose node clears its queue."""
        cleared = [law.served if isinstance(law, MixedDelay) else 1.0 for law in self.laws]
        return float(self.system.probability @ self.point.association @ np.array(cleared))

    @cached_property
    def mean(self) -> float:
        """E[TTFT], s; infinite as soon as some cell's node cannot serve it all (Theory E3)."""
        if self.lost:
            return np.inf
        association, radio, _ = self._moments
        wait = np.column_stack([law.mean for law in self.laws if law is not None])
        each = radio + association * self.system.residual
        each += np.where(association > 0, association * wait, 0.0)
        return float(self.system.probability @ each.sum(axis=1))
