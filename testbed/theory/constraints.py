"""PlacementSet: the placements that are allowed, and exact projection onto them (Theory F2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog, nnls

from testbed.errors import ScenarioError
from testbed.routing.admission import fallback_profile
from testbed.scenario import Scenario


@dataclass(frozen=True)
class PlacementSet:
    """{π : Σπ = 1, π ≥ least, upper·π ≤ bound}.

    Attributes
    ----------
    least : (S,) lower bounds, at least 0
    upper, bound : (K, S) and (K,), linear upper bounds
    """

    least: np.ndarray
    upper: np.ndarray
    bound: np.ndarray

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        *,
        memory_budget: float | None = None,
        fallback: str | None = None,
        least_fallback: float = 0.0,
        deep: tuple[str, ...] = (),
        most_deep: float = 1.0,
    ) -> PlacementSet:
        """The constraints of Theory F2 for a scenario's profiles.

        Parameters
        ----------
        memory_budget : B̄, mean persistent bytes per node; None: each node's own memory only
        fallback, least_fallback : π_0 ≥ π_min; the fallback is the profile that pins least
            unless it is named
        deep, most_deep : Σ π ≤ π_max over the profiles named deep

        Raises
        ------
        ScenarioError
            An unknown profile, a bound outside [0, 1], or constraints that exclude each other.
        """
        names = [s.name for s in scenario.profiles]
        bytes_ = np.array([s.persistent_bytes for s in scenario.profiles])
        for value, field in ((least_fallback, "least_fallback"), (most_deep, "most_deep")):
            if not 0 <= value <= 1:
                raise ScenarioError(f"{field}: {value:g} is not in [0, 1]")
        if memory_budget is not None and not memory_budget >= 0:
            raise ScenarioError(f"memory_budget: {memory_budget:g} is not a number of bytes >= 0")
        if fallback is None:
            fallback = fallback_profile(scenario)
        for name in (fallback, *deep):
            if name not in names:
                raise ScenarioError(f"placement: {name!r} is not a profile of the scenario")
        least = np.zeros(len(names))
        least[names.index(fallback)] = least_fallback
        upper, bound = [], []
        if memory_budget is not None:
            upper.append(bytes_)
            bound.append(memory_budget)
        if deep:
            upper.append(np.array([float(name in deep) for name in names]))
            bound.append(most_deep)
        result = cls(
            least, np.array(upper).reshape(len(upper), len(names)), np.array(bound, dtype=float)
        )
        result.check()
        return result

    def check(self) -> None:
        """Raise :class:`ScenarioError` if no placement satisfies all constraints."""
        size = len(self.least)
        trial = linprog(
            np.zeros(size),
            A_ub=self.upper if len(self.upper) else None,
            b_ub=self.bound if len(self.upper) else None,
            A_eq=np.ones((1, size)),
            b_eq=[1.0],
            bounds=[(low, 1.0) for low in self.least],
        )
        if not trial.success:
            raise ScenarioError("placement: the constraints exclude each other")

    def contains(self, fraction: np.ndarray, tolerance: float = 1e-9) -> bool:
        """π, (S,), satisfies every constraint to ``tolerance`` of its own scale."""
        if abs(fraction.sum() - 1.0) > tolerance or (fraction < self.least - tolerance).any():
            return False
        scale = np.maximum(np.abs(self.upper).max(axis=1, initial=0.0), 1e-300)
        return bool((self.upper @ fraction - self.bound <= tolerance * scale).all())

    def project(self, point: np.ndarray) -> np.ndarray:
        """The nearest allowed placement, min ‖y − z‖², (S,) (Theory F2).

        Exact: with Σy = 1 eliminated it is a least-distance problem with linear inequalities,
        which is the non-negative least-squares problem of its dual (Lawson and Hanson, *Solving
        Least Squares Problems*, ch. 23), solved by a finite active-set method.
        """
        size = len(self.least)
        z = np.asarray(point, dtype=float)
        centre = z + (1.0 - z.sum()) / size
        if size == 1:
            return np.ones(1)
        # y = centre + basis·x with basis orthonormal and orthogonal to the ones: ‖y − z‖² is
        # ‖x‖² plus a constant.
        basis = _plane_basis(size)
        rows = [np.eye(size)]
        least = [self.least - centre]
        if len(self.upper):
            # A row's own mean only shifts its bound on the plane; its scale drops out.
            scale = np.linalg.norm(self.upper - self.upper.mean(axis=1, keepdims=True), axis=1)
            scale = np.where(scale > 0, scale, 1.0)
            rows.append(-self.upper / scale[:, None])
            least.append((self.upper @ centre - self.bound) / scale)
        g = np.vstack(rows) @ basis
        h = np.concatenate(least)
        if (h <= 0).all():
            return centre
        dual, _ = nnls(np.vstack([g.T, h]), np.append(np.zeros(size - 1), 1.0))
        residual = np.append(g.T @ dual, h @ dual - 1.0)
        y = centre + basis @ (-residual[:-1] / residual[-1])
        return self._clean(y)

    def _clean(self, y: np.ndarray) -> np.ndarray:
        """Rounding below the bounds removed; the sum restored on the free entries."""
        y = np.where(y < self.least + 1e-14, self.least, y)
        free = y > self.least
        if free.any():
            y[free] += (1.0 - y.sum()) / free.sum()
        return y


_BASES: dict[int, np.ndarray] = {}


def _plane_basis(size: int) -> np.ndarray:
    """Orthonormal basis (S, S − 1) of the vectors whose entries sum to 0."""
    if size not in _BASES:
        q, _ = np.linalg.qr(np.column_stack([np.ones(size), np.eye(size)[:, 1:]]))
        _BASES[size] = q[:, 1:]
    return _BASES[size]
