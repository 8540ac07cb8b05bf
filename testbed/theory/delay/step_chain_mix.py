"""MixedStepChain: the step chain between mixes that it has been solved for (Theory H2).

Inside a fixed point the mix of a tier changes with every iteration, and each new mix would be a
new chain. Here chains are solved on a grid over the simplex of mixes, each over its arrival rate,
and what lies between is interpolated: capacity and mean delays are piecewise linear in the mix,
continuous, and monotone in the arrival rate. The law at the point that is found is that of its own
chain.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, register
from testbed.theory.delay.step_chain import StepChain, scv_of

PARTS = 4
"""Cells along an edge of the simplex of mixes."""


class MixedStepChain(DelayModel):
    """The step chain with interpolated means; keeps every chain that it has solved."""

    name = "step_chain_mix"
    uses_step_time = True

    def __init__(self, output_scv: float = 0.0, parts: int = PARTS) -> None:
        self._chain = StepChain(output_scv)
        self._parts = parts

    def _corners(self, load: TierLoad) -> list[tuple[float, TierLoad]]:
        corners, shares = surrounding(load.weights, self._parts)
        return [
            (share, replace(load, weights=w))
            for share, w in zip(shares, corners, strict=True)
            if share > 0
        ]

    def utilisation(self, load: TierLoad) -> float:
        """λ over capacity; the time that a request costs is linear in the mix."""
        return sum(share * self._chain.utilisation(at) for share, at in self._corners(load))

    def mean(self, load: TierLoad) -> np.ndarray:
        if load.arrival_rate <= 0:
            return np.zeros(load.weights.size)
        rho = self.utilisation(load)
        return np.sum(
            [share * self._chain.curve(at).mean(rho) for share, at in self._corners(load)], axis=0
        )

    def excess(self, load: TierLoad) -> ExcessDelay:
        return self._chain.excess(load)


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
