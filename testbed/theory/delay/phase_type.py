"""M/PH/c: exact waits for phase-type service, by the matrix-analytic method (Theory H2).

Service is a phase-type law with the mean and SCV of the node's mixture. While all c servers are
busy the state is how many of them are in each phase, and the number waiting goes up and down one
at a time: a quasi-birth-death process with blocks λI, D₀ − λI and D₁. Its stationary law is
π_{c+j} = π_c R^j with R the least solution of λI + R(D₀ − λI) + R²D₁ = 0 (Latouche and
Ramaswami's logarithmic reduction).

By the distributional form of Little's law the number waiting is the number of arrivals in a wait,
E[z^Q] = E[e^(−λ(1−z)W)], which gives the law of the wait without the states of the queue:

    P(W > w) = π_c (−T)⁻¹ e^(Tw) d,   T = D₀ + λG,   d = −D₀ 1,

with G the first-passage matrix of one level down, R = λ(λI − D₀ − λG)⁻¹.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import comb

import numpy as np
from scipy.interpolate import CubicHermiteSpline
from scipy.linalg import expm, lu_factor, lu_solve

from testbed.errors import ScenarioError
from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, register
from testbed.theory.delay.service import ServiceVariability, service_variability

MOST_STATES = 500
"""Phase states with all servers busy that are still solved: cost grows with their cube."""


def phase_type(mean: float, scv: float) -> tuple[np.ndarray, np.ndarray]:
    """Initial law (n,) and generator (n, n), 1/s, of a phase-type law with this mean and SCV.

    An SCV in [1/k, 1/(k − 1)) is a mixture of k − 1 and k stages of one rate, 1 the exponential,
    above 1 the balanced hyperexponential (Tijms, appendix B).
    """
    if scv > 1.0:
        p = 0.5 * (1.0 + np.sqrt((scv - 1.0) / (scv + 1.0)))
        rates = np.array([2.0 * p, 2.0 * (1.0 - p)]) / mean
        return np.array([p, 1.0 - p]), -np.diag(rates)
    k = max(int(np.ceil(1.0 / scv - 1e-12)), 1)
    if k == 1:
        return np.ones(1), np.array([[-1.0 / mean]])
    p = (k * scv - np.sqrt(k * (1.0 + scv) - k**2 * scv)) / (1.0 + scv)
    rate = (k - p) / mean
    generator = -rate * np.eye(k) + rate * np.eye(k, k=1)
    start = np.zeros(k)
    start[0], start[1] = 1.0 - p, p  # k stages, or the last k − 1 of them
    return start, generator


def _occupations(servers: int, phases: int) -> tuple[np.ndarray, dict[tuple[int, ...], int]]:
    """All ways to have ``servers`` busy servers in ``phases`` phases, (N, phases), and ranks."""

    def spread(left: int, kinds: int) -> list[tuple[int, ...]]:
        if kinds == 1:
            return [(left,)]
        return [(n, *rest) for n in range(left, -1, -1) for rest in spread(left - n, kinds - 1)]

    states = spread(servers, phases)
    return np.array(states), {state: i for i, state in enumerate(states)}


@dataclass(frozen=True)
class _Moves:
    """Transitions of one level: from state, to state, busy servers, and the phases involved."""

    source: np.ndarray
    target: np.ndarray
    busy: np.ndarray
    phase: np.ndarray
    to_phase: np.ndarray

    @classmethod
    def of(cls, rows: list[tuple[int, int, int, int, int]]) -> _Moves:
        return cls(*np.array(rows, dtype=int).reshape(-1, 5).T)

    def matrix(self, shape: tuple[int, int], rate: np.ndarray) -> np.ndarray:
        result = np.zeros(shape)
        np.add.at(result, (self.source, self.target), self.busy * rate)
        return result


@lru_cache(maxsize=32)
def _structure(servers: int, phases: int) -> list[tuple[int, int, _Moves, _Moves, _Moves]]:
    """Levels 1..c: states here and one level below, and moves inside, down and up to here."""
    levels = []
    for n in range(1, servers + 1):
        states, rank = _occupations(n, phases)
        below, rank_below = _occupations(n - 1, phases)
        inside, down, up = [], [], []
        for i, state in enumerate(states):
            for a in np.flatnonzero(state):
                busy = int(state[a])
                inside.append((i, i, busy, a, a))
                less = state.copy()
                less[a] -= 1
                down.append((i, rank_below[tuple(less)], busy, a, a))
                for b in range(phases):
                    if b != a:
                        moved = less.copy()
                        moved[b] += 1
                        inside.append((i, rank[tuple(moved)], busy, a, b))
        for i, state in enumerate(below):
            for b in range(phases):
                more = state.copy()
                more[b] += 1
                up.append((i, rank[tuple(more)], 1, b, b))
        levels.append((len(states), len(below), _Moves.of(inside), _Moves.of(down), _Moves.of(up)))
    return levels


def _levels(
    servers: int, start: np.ndarray, generator: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Blocks of levels 1..c, 1/s: moves within the level with its diagonal, departures to the
    level below, and the probabilities of where an arrival from there ends."""
    exits = -generator.sum(axis=1)
    blocks = []
    for here, under, inside, down, up in _structure(servers, len(start)):
        blocks.append(
            (
                inside.matrix((here, here), generator[inside.phase, inside.to_phase]),
                down.matrix((here, under), exits[down.phase]),
                up.matrix((under, here), start[up.phase]),
            )
        )
    return blocks


def first_passage(rate: float, inside: np.ndarray, down: np.ndarray) -> np.ndarray:
    """G (N, N): the phase in which the queue is first one shorter, by logarithmic reduction.

    ``rate`` is λ, ``inside`` D₀ and ``down`` D₁, all (N, N), 1/s; rows of G sum to 1 in a stable
    queue.
    """
    identity = np.eye(len(inside))
    factor = lu_factor(rate * identity - inside)
    up = rate * lu_solve(factor, identity)
    low = lu_solve(factor, down)
    passage = low.copy()
    climbed = up.copy()
    for _ in range(64):
        factor = lu_factor(identity - up @ low - low @ up)
        up, low = lu_solve(factor, up @ up), lu_solve(factor, low @ low)
        passage += climbed @ low
        climbed = climbed @ up
        if climbed.sum(axis=1).max() < 1e-15:
            break
    return passage


class PhaseTypeWait(ExcessDelay):
    """P(W > w) = π_c (−T)⁻¹ e^(Tw) d, tabulated finely with its exact slope.

    ``busy`` is π_c (N,), ``generator`` T (N, N), 1/s, ``step`` the first table step, s.
    """

    def __init__(self, busy: np.ndarray, generator: np.ndarray, exits: np.ndarray, types: int,
                 step: float) -> None:  # fmt: skip
        left = np.linalg.solve(-generator.T, busy)
        self.wait_probability = min(max(float(left @ exits), 0.0), 1.0)
        self.mean = np.full(types, float(np.linalg.solve(-generator.T, left) @ exits))
        self._law = (left, generator, exits, step)
        self._table: CubicHermiteSpline | None = None

    @property
    def table(self) -> CubicHermiteSpline:
        """P(W > w) up to where it is below 10⁻¹⁵."""
        if self._table is None:
            self._table = self._tabulate()
        return self._table

    def _tabulate(self) -> CubicHermiteSpline:
        left, generator, right, step = self._law
        ahead = expm(generator * step)
        places, survival, slope = [0.0], [], []
        while True:
            survival.append(float(left @ right))
            slope.append(float(left @ generator @ right))
            if (survival[-1] < 1e-15 and len(places) > 1) or len(places) > 20000:
                return CubicHermiteSpline(places, survival, slope)
            # Steps double every 256: what is left then decays slowly.
            if len(places) % 256 == 0:
                ahead, step = ahead @ ahead, 2.0 * step
            left = left @ ahead
            places.append(places[-1] + step)

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        w = np.asarray(seconds, dtype=float)
        table = self.table
        inside = np.clip(table(np.clip(w, 0.0, table.x[-1])), 0.0, 1.0)
        return np.where(w < 0, 0.0, 1.0 - np.where(w > table.x[-1], 0.0, inside))

    def decay(self, q: int) -> float:
        return 1.0 / (64.0 * self._law[3])


class _NoWait(ExcessDelay):
    """Nobody waits."""

    def __init__(self, types: int) -> None:
        self.wait_probability = 0.0
        self.mean = np.zeros(types)

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        return np.where(np.asarray(seconds) < 0, 0.0, 1.0)

    def decay(self, q: int) -> float:
        return 0.0

    def exponential(self) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(self.mean.size), np.zeros(self.mean.size)


class PhaseType(DelayModel):
    """M/PH/c with the mean and SCV of the mixture, exact (Theory H2)."""

    name = "phase_type"

    def __init__(self, variability: ServiceVariability) -> None:
        self.variability = variability
        self._solved: dict[tuple[float, ...], ExcessDelay] = {}

    def excess(self, load: TierLoad) -> ExcessDelay:
        mean, scv = self.variability.moments(load)
        key = (load.arrival_rate, float(load.concurrency), mean, scv, float(load.weights.size))
        if key not in self._solved:
            if len(self._solved) > 256:
                self._solved.clear()
            self._solved[key] = self._solve(load, mean, scv)
        return self._solved[key]

    def _solve(self, load: TierLoad, mean: float, scv: float) -> ExcessDelay:
        types = load.weights.size
        if load.arrival_rate <= 0 or mean <= 0:
            return _NoWait(types)
        servers = load.concurrency
        start, generator = phase_type(mean, max(scv, 1e-9))
        states = comb(servers + len(start) - 1, len(start) - 1)
        if states > MOST_STATES:
            raise ScenarioError(
                f"delay_model: phase_type needs {states} states for {servers} servers and an SCV "
                f"of {scv:.3g} ({len(start)} phases), more than {MOST_STATES}; use mgc"
            )
        rate = load.arrival_rate
        levels = _levels(servers, start, generator)
        inside, down, up = levels[-1]
        exits = -inside.sum(axis=1)
        passage = first_passage(rate, inside, down @ up)
        busy = _all_busy(rate, levels, passage)
        if float(busy.sum()) < 1e-16:
            return _NoWait(types)
        step = 1.0 / (64.0 * float(np.max(-np.diag(inside))))
        return PhaseTypeWait(busy, inside + rate * passage, exits, types, step)


def _all_busy(
    rate: float, levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]], passage: np.ndarray
) -> np.ndarray:
    """π_c (N,): all servers busy, nobody waiting, by linear level reduction from the top."""
    inside = levels[-1][0]
    identity = np.eye(len(inside))
    matrix = rate * np.linalg.inv(rate * identity - inside - rate * passage)
    # S_n takes π_{n-1} to π_n; what lies above a level returns to it through its own S.
    local = inside - rate * identity + rate * passage
    steps = []
    for n in range(len(levels) - 1, -1, -1):
        _, down, up = levels[n]
        ratio = np.linalg.solve(-local.T, (rate * up).T).T
        steps.append(ratio)
        if n > 0:
            lower = levels[n - 1][0]
            local = lower - rate * np.eye(len(lower)) + ratio @ down
    state = np.ones(1)
    total = 1.0
    for ratio in reversed(steps):
        state = state @ ratio
        total += float(state.sum())
    total += float(state @ matrix @ np.linalg.solve(identity - matrix, np.ones(len(inside))))
    return state / total


register("phase_type", lambda argument: PhaseType(service_variability(argument, "phase_type")))
