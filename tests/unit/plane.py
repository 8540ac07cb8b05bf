"""A torus of nodes, to simulate what the theory integrates."""

from __future__ import annotations

import numpy as np
from scipy.spatial import cKDTree


class Torus:
    """Independent Poisson processes of nodes, one a tier, on a torus of ``side`` km."""

    def __init__(self, density, side, rng):
        self.side = side
        self.points = [rng.random((rng.poisson(d * side**2), 2)) * side for d in density]
        self._trees = [cKDTree(p, boxsize=side) if len(p) else None for p in self.points]

    def nearest(self, places):
        """Distance (n, S) km to each tier's nearest node, and its number (n, S)."""
        distance = np.full((len(places), len(self.points)), np.inf)
        index = np.zeros((len(places), len(self.points)), dtype=int)
        for s, tree in enumerate(self._trees):
            if tree is not None:
                distance[:, s], index[:, s] = tree.query(places % self.side)
        return distance, index

    def users(self, count, rng):
        return rng.random((count, 2)) * self.side

    def apart(self, a, b):
        step = np.abs(a - b) % self.side
        return np.hypot(*np.minimum(step, self.side - step).T)


def choose(radio, costs, distance):
    """The cheapest tier of each request, (n,); ``costs`` (S,) s, ``distance`` (n, S) km."""
    return np.argmin(costs + radio.delay(distance), axis=1)
