"""Users: where on the plane each request is sent from, at its time (Theory A1, H10).

Without a number of users every request comes from a new place: the limit of many users with few
requests each, in which successive requests are independent. Users that stay send from wherever
they are at the time. On the torus both motions leave a uniform crowd uniform.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from testbed.scenario import Users
from testbed.seeds import generator


class Crowd:
    """The senders of one simulation on a torus ``size`` (2,) km.

    Clusters and homes depend on the seed alone; ``names`` distinguish streams of requests.
    """

    def __init__(self, spec: Users, size: np.ndarray, seed: int, *names: str) -> None:
        self.spec = spec
        self.size = np.asarray(size, dtype=float)
        self._rng = generator(seed, *names, "positions")
        scene = generator(seed, "users")
        self._parents = np.empty((0, 2))
        if spec.pattern == "clustered":
            mean = spec.cluster_density * float(self.size.prod())
            self._parents = scene.random((max(1, int(scene.poisson(mean))), 2)) * self.size
        count = spec.count or 0
        self._place = np.empty((count, 2))
        _scatter(self._place, self._parents, spec.cluster_spread, self.size, scene)
        # Velocity components, km/s: a planar Gaussian's mean speed is σ·√(π/2).
        self._deviation = spec.speed * math.sqrt(2 / math.pi)
        if spec.mobility == "gauss_markov":
            self._course = scene.normal(0.0, self._deviation, (count, 2))
        else:
            self._course = self._place.copy()
        self._since = np.zeros(count)

    def positions(self, time: np.ndarray) -> np.ndarray:
        """Places (n, 2), km, from which requests at these times are sent; time goes on."""
        out = np.empty((len(time), 2))
        if self.spec.count is None:
            _scatter(out, self._parents, self.spec.cluster_spread, self.size, self._rng)
            return out
        who = self._rng.integers(0, self.spec.count, len(time))
        if self.spec.mobility == "random_waypoint":
            _walk(
                out,
                time,
                who,
                self._place,
                self._course,
                self._since,
                self.spec.speed,
                self._parents,
                self.spec.cluster_spread,
                self.size,
                self._rng,
            )
        elif self.spec.mobility == "gauss_markov":
            _drift(
                out,
                time,
                who,
                self._place,
                self._course,
                self._since,
                self._deviation,
                self.spec.memory,
                self.size,
                self._rng,
            )
        else:
            out[:] = self._place[who]
        return out


@numba.njit(cache=True)
def _scatter(
    out: np.ndarray,
    parents: np.ndarray,
    spread: float,
    size: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Uniform points, or points about random parents where there are any (Thomas)."""
    for i in range(out.shape[0]):
        if parents.shape[0] == 0:
            for a in range(2):
                out[i, a] = rng.random() * size[a]
        else:
            p = int(rng.random() * parents.shape[0])
            for a in range(2):
                out[i, a] = (parents[p, a] + spread * rng.standard_normal()) % size[a]


@numba.njit(cache=True)
def _walk(
    out: np.ndarray,
    time: np.ndarray,
    who: np.ndarray,
    place: np.ndarray,
    goal: np.ndarray,
    since: np.ndarray,
    speed: float,
    parents: np.ndarray,
    spread: float,
    size: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Random waypoint: straight over the torus to the next goal, without a pause, and on."""
    step = np.empty(2)
    for k in range(time.shape[0]):
        u = who[k]
        left = (time[k] - since[u]) * speed
        since[u] = time[k]
        while True:
            length = 0.0
            for a in range(2):
                step[a] = goal[u, a] - place[u, a]
                step[a] -= size[a] * np.round(step[a] / size[a])
                length += step[a] * step[a]
            length = math.sqrt(length)
            if length > left:
                break
            left -= length
            place[u] = goal[u]
            _scatter(goal[u : u + 1], parents, spread, size, rng)
        for a in range(2):
            place[u, a] = (place[u, a] + step[a] * left / length) % size[a]
            out[k, a] = place[u, a]


@numba.njit(cache=True)
def _drift(
    out: np.ndarray,
    time: np.ndarray,
    who: np.ndarray,
    place: np.ndarray,
    velocity: np.ndarray,
    since: np.ndarray,
    deviation: float,
    memory: float,
    size: np.ndarray,
    rng: np.random.Generator,
) -> None:
    """Gauss-Markov: velocity is an Ornstein-Uhlenbeck process; place and velocity are drawn from
    their exact joint law over the gap since the user's last request."""
    for k in range(time.shape[0]):
        u = who[k]
        gap = (time[k] - since[u]) / memory
        since[u] = time[k]
        fade = math.exp(-gap)
        vv = max(0.0, -math.expm1(-2 * gap))
        xv = memory * math.expm1(-gap) ** 2
        xx = memory * memory * max(0.0, 2 * gap - 3 + 4 * fade - fade * fade)
        for a in range(2):
            first, second = rng.standard_normal(), rng.standard_normal()
            along = xv / math.sqrt(vv) if vv > 0 else 0.0
            across = math.sqrt(max(0.0, xx - along * along))
            moved = velocity[u, a] * memory * (1 - fade)
            moved += deviation * (along * first + across * second)
            velocity[u, a] = velocity[u, a] * fade + deviation * math.sqrt(vv) * first
            place[u, a] = (place[u, a] + moved) % size[a]
            out[k, a] = place[u, a]
