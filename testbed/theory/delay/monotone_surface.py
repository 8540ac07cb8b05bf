"""MonotoneSurface: smooth functions of a node's load that rise or fall by construction.

A surface is a tensor product of B-splines over delay, load and slots and of Bernstein polynomials
over the mix of request types. Both are positive and sum to 1, so that a surface is monotone along
an axis where its coefficients are, and smooth everywhere: its derivatives are exact.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from math import factorial
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy.interpolate import BSpline


class Axis(BaseModel):
    """B-splines over [knots[0], knots[-1]]; beyond its ends an axis stays at them.

    >>> axis = Axis(knots=(0.0, 1.0, 2.0), degree=2)
    >>> axis.count, float(axis.basis(np.array(0.7)).sum())
    (4, 1.0)
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    knots: tuple[float, ...] = Field(min_length=1, description="rising; one knot: a constant")
    degree: int = Field(ge=0, le=5)

    @model_validator(mode="after")
    def _rises(self) -> Self:
        if any(b <= a for a, b in itertools.pairwise(self.knots)):
            raise ValueError("knots: not rising")
        if (len(self.knots) == 1) != (self.degree == 0):
            raise ValueError("degree: 0 with one knot, above 0 with several")
        return self

    @property
    def count(self) -> int:
        """Functions of the basis."""
        return max(len(self.knots) - 1, 1) + self.degree

    @cached_property
    def places(self) -> np.ndarray:
        """(count,) Greville's abscissae: where each function's coefficient acts."""
        if self.degree == 0:
            return np.array(self.knots)
        full = self._spline.t[1:-1]
        return np.lib.stride_tricks.sliding_window_view(full, self.degree).mean(axis=1)

    @cached_property
    def _spline(self) -> BSpline:
        inner = np.array(self.knots)
        ends = self.degree
        full = np.concatenate([np.repeat(inner[0], ends), inner, np.repeat(inner[-1], ends)])
        return BSpline(full, np.eye(self.count), self.degree)

    @cached_property
    def _derivative(self) -> BSpline:
        return self._spline.derivative()

    def basis(self, x: np.ndarray) -> np.ndarray:
        """(…, count) values at x."""
        if self.degree == 0:
            return np.ones((*np.shape(x), 1))
        return np.asarray(self._spline(np.clip(x, self.knots[0], self.knots[-1])))

    def combined(self, coefficients: np.ndarray, x: np.ndarray) -> np.ndarray:
        """Σ coefficients·basis at x, of a degree above 0."""
        spline = BSpline.construct_fast(self._spline.t, coefficients, self.degree)
        return np.asarray(spline(np.clip(x, self.knots[0], self.knots[-1])))

    def slope(self, x: np.ndarray) -> np.ndarray:
        """(…, count) derivatives at x; 0 beyond the ends."""
        if self.degree == 0:
            return np.zeros((*np.shape(x), 1))
        inside = (x >= self.knots[0]) & (x <= self.knots[-1])
        values = self._derivative(np.clip(x, self.knots[0], self.knots[-1]))
        return np.asarray(np.where(inside[..., None], values, 0.0))


class MixBasis:
    """Bernstein polynomials over the simplex of mixes of ``types`` request types.

    >>> MixBasis(2, 2).values(np.array([0.5, 0.5])).tolist()
    [0.25, 0.5, 0.25]
    """

    def __init__(self, types: int, degree: int) -> None:
        whole = itertools.product(range(degree + 1), repeat=types)
        self.powers = np.array([a for a in whole if sum(a) == degree])
        self._factor = np.array(
            [factorial(degree) / np.prod([factorial(k) for k in a]) for a in self.powers]
        )

    @property
    def count(self) -> int:
        return len(self.powers)

    def values(self, weights: np.ndarray) -> np.ndarray:
        """(M,) at a mix (Q,); 0⁰ is 1."""
        return np.asarray(self._factor * np.prod(weights**self.powers, axis=1))

    def slopes(self, weights: np.ndarray) -> np.ndarray:
        """(M, Q): derivatives by each share, the others held."""
        out = np.empty(self.powers.shape)
        for q in range(self.powers.shape[1]):
            lower = self.powers.copy()
            lower[:, q] = np.maximum(lower[:, q] - 1, 0)
            out[:, q] = self._factor * self.powers[:, q] * np.prod(weights**lower, axis=1)
        return out
