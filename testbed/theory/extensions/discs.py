"""Discs: areas of two overlapping discs, which void probabilities of two points need."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def overlap_area(first: ArrayLike, second: ArrayLike, apart: ArrayLike) -> np.ndarray:
    """Area common to two discs of radii ``first`` and ``second`` whose centres are ``apart``.

    Shapes broadcast; one unit of length throughout. Exact, and stable where one disc holds or
    only touches the other.
    """
    r = np.minimum(first, second).astype(float)
    big = np.maximum(first, second).astype(float)
    d = np.asarray(apart, dtype=float)
    r, big, d = np.broadcast_arrays(r, big, d)
    inside = d <= big - r
    beside = d >= big + r
    cut = ~(inside | beside) & (r > 0)
    area = np.where(inside, np.pi * r**2, 0.0)
    r, big, d = r[cut], big[cut], d[cut]
    # Half angles of the two circular segments at the chord through the intersections.
    small_angle = np.arccos(np.clip((d**2 + r**2 - big**2) / (2.0 * d * r), -1.0, 1.0))
    big_angle = np.arccos(np.clip((d**2 + big**2 - r**2) / (2.0 * d * big), -1.0, 1.0))
    area[cut] = r**2 * (small_angle - 0.5 * np.sin(2.0 * small_angle)) + big**2 * (
        big_angle - 0.5 * np.sin(2.0 * big_angle)
    )
    return area


def union_area(first: ArrayLike, second: ArrayLike, apart: ArrayLike) -> np.ndarray:
    """Area of the union of two discs; shapes broadcast.

    >>> round(float(union_area(1.0, 1.0, 2.0)) / np.pi, 6)
    2.0
    """
    first, second = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    return np.pi * (first**2 + second**2) - overlap_area(first, second, apart)
