"""Fitting a learned map: simulated laws at scattered loads become one profile's surfaces.

Every simulated law gives points of logit P(excess > t), weighted by their own standard error and
by :data:`FLOOR`, what the form of the surface is allowed to miss. Coefficients are held smooth,
as if what they bend by (:func:`bends`) had a standard deviation of :data:`BEND`; the order that
makes the surfaces monotone is a constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import block_diag, csr_matrix, diags, eye, kron, vstack

from testbed.theory.delay.learned_map_file import Surface
from testbed.theory.delay.monotone_fit import differences, ordered_least_squares
from testbed.theory.delay.monotone_surface import Axis, MixBasis

FLOOR = 0.02
BEND = 1.0
LEVELS = 40
"""Points of one law."""
LEAST_COUNT = 20
"""Samples beyond a point, at least."""
BATCHES = 20

_DELAY_SPANS, _LOAD_SPANS, _DEMAND_SPANS = 13, 4, 3
_RIDGE = 1e-3


@dataclass(frozen=True)
class SimulatedLaw:
    """Excess delays at one load.

    Attributes
    ----------
    rate, mix, slots : requests/s, share of each type (Q,), sequences at once
    capacity : requests/s that the node completes with everybody waiting
    delays : one array of excess delays a type, s, in order of arrival
    """

    rate: float
    mix: np.ndarray
    slots: int
    capacity: float
    delays: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class LawPoints:
    """Points of one type's law: delays (N,), s, logit P(excess > t) and its standard error."""

    seconds: np.ndarray
    logit: np.ndarray
    error: np.ndarray

    @classmethod
    def of(cls, delays: np.ndarray) -> LawPoints:
        """Points evenly spaced in the logit, from the share that is delayed at all down to
        :data:`LEAST_COUNT` samples."""
        n = delays.size
        start = float((delays > 0).mean())
        least, most = LEAST_COUNT / n, min(start, 1.0 - LEAST_COUNT / n)
        if most <= least:
            empty = np.empty(0)
            return cls(empty, empty, empty)
        levels = 1.0 / (1.0 + np.exp(-np.linspace(_logit(most), _logit(least), LEVELS)))
        seconds = np.unique(np.quantile(delays, 1.0 - levels, method="inverted_cdf"))
        batches = np.array(
            [
                [(part > t).mean() for t in seconds]
                for part in np.array_split(delays, BATCHES)
            ]
        )  # fmt: skip
        share = batches.mean(axis=0)
        error = batches.std(axis=0, ddof=1) / np.sqrt(BATCHES)
        error = np.maximum(error, np.sqrt(share * (1.0 - share) / n))
        told = (share >= least) & (share <= 1.0 - least)
        share, error = share[told], error[told]
        return cls(seconds[told], _logit(share), error / (share * (1.0 - share)))


def _logit(p: np.ndarray | float) -> np.ndarray:
    return np.asarray(np.log(p) - np.log1p(-np.asarray(p)))


def slots_axis(least: int, most: int) -> Axis:
    """An axis of log₂ slots, a knot about every doubling."""
    low, high = float(np.log2(least)), float(np.log2(most))
    if least == most:
        return Axis(knots=(low,), degree=0)
    spans = max(1, round(high - low))
    knots = np.linspace(low, high, spans + 1).tolist()
    return Axis(knots=tuple(knots), degree=1 if most == least + 1 else 2)


def mix_degree(types: int) -> int:
    """Degree of the Bernstein polynomials over the mix."""
    return 2 if types > 1 else 0


def fit_seconds(laws: Sequence[SimulatedLaw], slots: Axis, mix: MixBasis) -> np.ndarray:
    """Coefficients (K, M) of 1/C, s, which no more slots make longer."""
    shape = (slots.count, mix.count)
    rows = np.array(
        [np.outer(slots.basis(np.log2(x.slots)), mix.values(x.mix)).ravel() for x in laws]
    )
    seconds = np.array([1.0 / x.capacity for x in laws])
    rows /= seconds[:, None]
    index = np.arange(rows.shape[1]).reshape(shape)
    last = csr_matrix(np.eye(rows.shape[1])[index[-1]])
    order = vstack([-differences(shape, 0), last]).tocsr()
    normal = rows.T @ rows + _RIDGE * np.eye(rows.shape[1])
    typical = float(seconds.mean())
    start = typical * (1.0 + np.arange(shape[0], 0, -1.0)[:, None] * np.ones(shape[1])) / shape[0]
    found = ordered_least_squares(normal, rows.T @ np.ones(len(laws)), order, start.ravel())
    return found.reshape(shape)


@dataclass(frozen=True)
class Fitted:
    """A surface, and how it meets its points: misfit, the points' own noise, their number."""

    surface: Surface
    misfit: float
    noise: float
    points: int


def fit_surface(
    laws: Sequence[SimulatedLaw],
    prefill: np.ndarray,
    seconds: np.ndarray,
    slots: Axis,
    mix: MixBasis,
    loads: tuple[float, float],
) -> Fitted:
    """Surfaces of all types.

    Parameters
    ----------
    prefill : (Q,) seconds of an unloaded prefill
    seconds : (K, M) of 1/C, as :func:`fit_seconds`
    loads : least and largest share of capacity
    """
    types = len(prefill)
    points = [[LawPoints.of(d) for d in law.delays] for law in laws]
    of_slots = [slots.basis(np.log2(law.slots)) for law in laws]
    of_mix = [mix.values(law.mix) for law in laws]
    rho = np.array(
        [law.rate * (k @ seconds @ m) for law, k, m in zip(laws, of_slots, of_mix, strict=True)]
    )
    v = np.log([law.rate * float(law.mix @ prefill) for law in laws])
    pooled = np.log(np.concatenate([p.seconds[p.seconds > 0] for each in points for p in each]))
    unit = float(np.exp(np.median(pooled)))
    least, most = (float(x) for x in _logit(np.array(loads)))
    load = Axis(knots=tuple(np.linspace(least, most, _LOAD_SPANS + 1)), degree=2)
    demand = Axis(knots=tuple(np.linspace(v.min(), v.max(), _DEMAND_SPANS + 1)), degree=2)
    delay = _delay_axis(pooled - np.log(unit))

    shape = (delay.count, load.count, slots.count, mix.count)
    width, extra = int(np.prod(shape)), demand.count * mix.count
    beside = [
        np.outer(load.basis(_logit(np.clip(r, *loads))), np.outer(k, m)).ravel()
        for r, k, m in zip(rho, of_slots, of_mix, strict=True)
    ]
    shifted = [np.outer(demand.basis(x), m).ravel() for x, m in zip(v, of_mix, strict=True)]
    order = csr_matrix(
        block_diag(
            [
                vstack([-differences(shape, 0), differences(shape, 1), -differences(shape, 2)]),
                differences((demand.count, mix.count), 0),
            ]
        )
    )
    bent = block_diag([bends(delay, shape), differences((demand.count, mix.count), 0, 2)]).tocsr()
    prior = (bent.T @ bent).toarray() / BEND**2 + _RIDGE * np.eye(width + extra)
    main, shift = np.empty((types, *shape)), np.empty((types, demand.count, mix.count))
    squares, noises, count = 0.0, 0.0, 0
    for q in range(types):
        normal, right = prior.copy(), np.zeros(width + extra)
        rows_of, target_of = [], []
        for i, each in enumerate(points):
            p = each[q]
            if not p.logit.size:
                continue
            with np.errstate(divide="ignore"):
                y = np.log(p.seconds / unit)
            of_delay = delay.basis(np.clip(y, delay.knots[0], delay.knots[-1]))
            weight = 1.0 / (p.error**2 + FLOOR**2)
            inner = of_delay.T @ (of_delay * weight[:, None])
            normal[:width, :width] += np.kron(inner, np.outer(beside[i], beside[i]))
            side = np.outer((of_delay * weight[:, None]).sum(axis=0), beside[i]).ravel()
            cross = np.outer(side, shifted[i])
            normal[:width, width:] += cross
            normal[width:, :width] += cross.T
            normal[width:, width:] += weight.sum() * np.outer(shifted[i], shifted[i])
            right[:width] += np.outer(of_delay.T @ (weight * p.logit), beside[i]).ravel()
            right[width:] += float(weight @ p.logit) * shifted[i]
            rows_of.append((of_delay, i))
            target_of.append(p)
        inside = -1.0 * np.add.outer(
            np.add.outer(np.arange(shape[0]), -0.1 * np.arange(shape[1])),
            np.add.outer(0.1 * np.arange(shape[2]), np.zeros(shape[3])),
        )
        rising = np.add.outer(0.1 * np.arange(demand.count), np.zeros(mix.count))
        start = np.concatenate([inside.ravel(), rising.ravel()])
        theta = ordered_least_squares(normal, right, order, start)
        main[q], shift[q] = theta[:width].reshape(shape), theta[width:].reshape(shift.shape[1:])
        for (of_delay, i), p in zip(rows_of, target_of, strict=True):
            fitted = of_delay @ (main[q].reshape(shape[0], -1) @ beside[i])
            fitted += shifted[i] @ shift[q].ravel()
            squares += float(((fitted - p.logit) ** 2).sum())
            noises += float((p.error**2).sum())
            count += p.logit.size
    most_samples = max(d.size for law in laws for d in law.delays)
    surface = Surface(
        unit=unit,
        delay=delay,
        load=load,
        demand=demand,
        tail=float(np.log(most_samples / LEAST_COUNT)),
        shape=main.shape,
        main=tuple(np.round(main, 6).ravel().tolist()),
        shift=tuple(np.round(shift, 6).ravel().tolist()),
    )
    return Fitted(surface, np.sqrt(squares / count), np.sqrt(noises / count), count)


def bends(delay: Axis, shape: tuple[int, ...]) -> csr_matrix:
    """What coefficients of ``shape`` (delay, load, slots, mix) bend by, (rows, coefficients).

    Along the delay: how far each is off the line in t, not in ln t, between its neighbours. Far
    out a queue's delay is exponential, logit P(excess > t) → −θ t: a prior that bent it would
    lengthen every tail that few samples tell of. Along load and slots: second differences over
    1 + t/unit, as −θ t changes with load in proportion to t.
    """
    t = np.exp(delay.places)
    part = (t[1:-1] - t[:-2]) / (t[2:] - t[:-2])
    inner = np.arange(t.size - 2)
    line = csr_matrix(
        (
            np.concatenate([part - 1.0, np.ones(inner.size), -part]),
            (np.tile(inner, 3), np.concatenate([inner, inner + 1, inner + 2])),
        ),
        shape=(inner.size, t.size),
    )
    beside = shape[1:]
    return csr_matrix(
        vstack(
            [
                kron(line, eye(int(np.prod(beside)))),
                *(kron(diags(1.0 / (1.0 + t)), differences(beside, axis, 2)) for axis in range(2)),
            ]
        )
    )


def _delay_axis(y: np.ndarray) -> Axis:
    """Knots where the delays are: at quantiles of all points, no two closer than 2 %."""
    levels = np.linspace(0.0, 1.0, _DELAY_SPANS + 1)
    levels[0] = 0.002
    knots = [float(np.quantile(y, levels[0]))]
    for place in np.quantile(y, levels[1:]):
        if place > knots[-1] + 0.02:
            knots.append(float(place))
    return Axis(knots=tuple(knots), degree=3)
