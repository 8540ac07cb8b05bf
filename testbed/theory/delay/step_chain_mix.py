"""MixedStepChain: the step chain between mixes and loads that it has been solved for (Theory H2).

Inside a fixed point the mix of a tier changes with every iteration, and each new mix would be a
new chain. Here chains are solved on a grid over the simplex of mixes, each at a few utilisations,
and what lies between is interpolated, continuously and monotone in the arrival rate. The time that
a request costs, 1/capacity, is linear in the mix. Mean delays at one utilisation are those around,
weighted by the share of the work that each brings: where prefills queue for one server, a delay
is ρ/(1 − ρ)·E[S²]/2E[S], both moments linear in the mix. The law is the mixture of the laws around
it, by the same weights, stretched so that it has that mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, register
from testbed.theory.delay.step_chain import NODES, StepChain, scv_of
from testbed.theory.delay.step_chain_stationary import Stationary

PARTS = 4
"""Cells along an edge of the simplex of mixes."""
POINTS = 512
"""Times at which a law is tabulated, closer together the shorter."""


class MixedStepChain(DelayModel):
    """The step chain, interpolated; keeps every chain and every law that it has solved."""

    name = "step_chain_mix"
    uses_step_time = True

    def __init__(self, output_scv: float = 0.0, parts: int = PARTS) -> None:
        self._chain = StepChain(output_scv)
        self._parts = parts
        self._laws: dict[int, LawTable] = {}

    def _corners(self, load: TierLoad) -> list[tuple[float, TierLoad]]:
        corners, shares = surrounding(load.weights, self._parts)
        return [
            (share, replace(load, weights=w))
            for share, w in zip(shares, corners, strict=True)
            if share > 0
        ]

    def _weighted(self, load: TierLoad) -> list[tuple[float, TierLoad]]:
        """Corners by their share of the work."""
        corners = self._corners(load)
        work = np.array([share / self._chain.curve(at).chain.capacity for share, at in corners])
        return [(float(w), at) for w, (_, at) in zip(work / work.sum(), corners, strict=True)]

    def utilisation(self, load: TierLoad) -> float:
        """λ over capacity; the time that a request costs is linear in the mix."""
        return sum(share * self._chain.utilisation(at) for share, at in self._corners(load))

    def mean(self, load: TierLoad) -> np.ndarray:
        if load.arrival_rate <= 0:
            return np.zeros(load.weights.size)
        rho = self.utilisation(load)
        return np.sum(
            [w * self._chain.curve(at).mean(rho) for w, at in self._weighted(load)], axis=0
        )

    def excess(self, load: TierLoad) -> ExcessDelay:
        if load.arrival_rate <= 0:
            return self._chain.excess(load)
        beside = list(neighbours(self.utilisation(load)))
        parts = []
        for share, at in self._weighted(load):
            curve = self._chain.curve(at)
            parts += [(share * w, self._table(curve.node(i))) for i, w in beside if i > 0]
        return MixedLaw(parts, self.mean(load))

    def _table(self, found: Stationary) -> LawTable:
        # Kept with its chain, so that the identity stays its own.
        if id(found) not in self._laws:
            self._laws[id(found)] = LawTable(found)
        return self._laws[id(found)]


class LawTable:
    """The law of the excess delay of one chain at one load; types are tabulated when asked for."""

    def __init__(self, found: Stationary) -> None:
        self._law = found.excess
        self._found = found
        self.wait_probability = self._law.wait_probability
        self.mean = self._law.mean
        self._values: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        if q not in self._values:
            at = self._law.end[q] * np.linspace(0.0, 1.0, POINTS) ** 2
            self._values[q] = at, self._law.cdf(q, at)
        return np.interp(seconds, *self._values[q], left=0.0)

    def decay(self, q: int) -> float:
        return self._law.decay(q)


@dataclass
class MixedLaw(ExcessDelay):
    """Laws with weights, stretched in time to a mean (Q,); what is missing to 1 is no delay."""

    parts: Sequence[tuple[float, LawTable]]
    mean: np.ndarray

    def __post_init__(self) -> None:
        self.wait_probability = sum(w * law.wait_probability for w, law in self.parts)
        mixed = np.sum([w * law.mean for w, law in self.parts], axis=0)
        self._factor = self.mean / mixed

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        at = np.asarray(seconds, dtype=float) / self._factor[q]
        undelayed = 1.0 - sum(w for w, _ in self.parts)
        inside = undelayed + sum(w * law.cdf(q, at) for w, law in self.parts)
        return np.where(at < 0, 0.0, inside)

    def decay(self, q: int) -> float:
        return max(law.decay(q) for _, law in self.parts) / float(self._factor[q])


def neighbours(rho: float) -> Iterator[tuple[int, float]]:
    """Nodes of utilisation on both sides, and their shares; the last one alone beyond it.

    >>> [(i, round(w, 3)) for i, w in neighbours(0.25)]
    [(2, 0.5), (3, 0.5)]
    """
    i = int(np.searchsorted(NODES, rho, side="right")) - 1
    if i >= len(NODES) - 1:
        yield len(NODES) - 1, 1.0
        return
    above = (rho - NODES[i]) / (NODES[i + 1] - NODES[i])
    yield i, 1.0 - above
    if above > 0:
        yield i + 1, above


def surrounding(weights: np.ndarray, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Grid mixes (Q, Q) around a mix, and their shares (Q,) in it, on Freudenthal's triangulation.

    >>> corners, shares = surrounding(np.array([0.5, 0.375, 0.125]), 4)
    >>> bool(np.allclose(shares @ corners, [0.5, 0.375, 0.125]))
    True
    """
    at = np.clip(parts * np.cumsum(weights)[:-1], 0.0, parts)
    # The far end belongs to the last cell: one further would lie outside the simplex.
    base = np.minimum(np.floor(at), parts - 1.0)
    rest = at - base
    # Equal remainders: the later coordinate moves first, so that a corner stays in order.
    order = sorted(range(len(rest)), key=lambda k: (-rest[k], -k))
    points = [base]
    for k in order:
        points.append(points[-1].copy())
        points[-1][k] += 1.0
    sorted_rest = np.concatenate([[1.0], rest[order], [0.0]])
    ends = np.array([np.concatenate([[0.0], p, [parts]]) for p in points])
    return np.diff(ends, axis=1) / parts, -np.diff(sorted_rest)


register(
    "step_chain_mix",
    lambda argument: MixedStepChain(scv_of(argument, "step_chain_mix")),
    variant=True,
)
