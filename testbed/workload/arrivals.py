"""Arrivals: recorded, jittered, or drawn anew; times in seconds from the start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import WorkloadSpec
from testbed.seeds import generator
from testbed.workload.trace import Trace

Course = Sequence[tuple[float, float]]
"""(seconds, relative rate) of each part of a day, one after another, then from the start."""


def poisson_arrivals(rate: float, count: int, seed: int) -> np.ndarray:
    """(count,) times of a Poisson process of ``rate`` per second: CV² 1."""
    return gamma_arrivals(rate, count, 1.0, seed)


def gamma_arrivals(rate: float, count: int, cv2: float, seed: int) -> np.ndarray:
    """(count,) times of a renewal process with gamma gaps of mean 1/rate and the given CV²."""
    _positive(rate=rate, cv2=cv2)
    return np.cumsum(_gaps(generator(seed, "arrivals"), rate, count, cv2))


def _gaps(draw: np.random.Generator, rate: float, count: int, cv2: float) -> np.ndarray:
    if cv2 == 1.0:
        return draw.exponential(1.0 / rate, count)
    return draw.gamma(1.0 / cv2, cv2 / rate, count)


def diurnal_arrivals(
    rate: float, count: int, course: Course, seed: int, cv2: float = 1.0
) -> np.ndarray:
    """(count,) times whose rate follows a course of constant parts, again and again.

    A stream of unit mean rate is run through a clock that goes as fast as the course says: a
    Poisson process (``cv2`` 1) stays one, with independent counts in the parts.

    Parameters
    ----------
    rate : requests/s, the mean over the course
    course : (seconds, relative rate) of each part; only the ratios of the rates matter

    Raises
    ------
    ScenarioError
        A part has no length, a rate is negative, or none is above 0.

    >>> at = diurnal_arrivals(2.0, 100, [(10.0, 1.0), (10.0, 0.0)], seed=1)
    >>> bool((at % 20.0 < 10.0).all())
    True
    """
    parts = np.asarray(course, dtype=float)
    if parts.ndim != 2 or parts.shape[1] != 2 or not np.isfinite(parts).all():
        raise ScenarioError("course: not a list of (seconds, relative rate)")
    seconds, speed = parts.T
    if (seconds <= 0).any() or (speed < 0).any() or not speed.any():
        raise ScenarioError("course: parts need a length > 0 and rates >= 0, one of them above 0")
    edges = np.concatenate([[0.0], np.cumsum(seconds)])
    speed = speed * edges[-1] / (seconds @ speed)
    done = np.concatenate([[0.0], np.cumsum(seconds * speed)])
    laps, left = np.divmod(gamma_arrivals(rate, count, cv2, seed), done[-1])
    # The part in which so much is done; one of rate 0 does nothing and is passed over.
    part = np.searchsorted(done, left, side="right") - 1
    return laps * edges[-1] + edges[part] + (left - done[part]) / speed[part]


def jittered(arrival: np.ndarray, grid: float, seed: int) -> np.ndarray:
    """Recorded times moved forward, each by an independent uniform part of the time grid.

    A request never passes the next recorded time: it moves by less than the grid step and less
    than the gap to the next distinct time, so the order of recorded times stays.
    """
    distinct, which = np.unique(arrival, return_inverse=True)
    room = np.append(np.minimum(np.diff(distinct), grid), grid)
    return np.sort(arrival + room[which] * generator(seed, "jitter").random(len(arrival)))


def split_streams(
    rates: np.ndarray, count: int, seed: int, cv2: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """The first ``count`` arrivals of independent streams, one per request type, merged.

    Each type has a generator of its own: what one draws does not move the others. ``cv2`` is of
    the gaps of every stream; the merged stream of many types tends to a Poisson process.

    Parameters
    ----------
    rates : (Q,) requests/s of each type, >= 0, one of them above 0

    Returns
    -------
    arrival : (count,) seconds;  type_index : (count,)
    """
    rates = np.asarray(rates, dtype=float)
    if not (np.isfinite(rates) & (rates >= 0)).all() or not rates.any():
        raise ScenarioError("rates: none is above 0, or one is not a number of requests/s >= 0")
    _positive(cv2=cv2)
    times, types = [], []
    for q in np.flatnonzero(rates).tolist():
        # No stream gives more than all the arrivals.
        at = np.cumsum(_gaps(generator(seed, "arrivals", q), float(rates[q]), count, cv2))
        times.append(at)
        types.append(np.full(count, q))
    arrival = np.concatenate(times)
    order = np.argsort(arrival, kind="stable")[:count]
    return arrival[order], np.concatenate(types)[order]


def typed_arrivals(
    spec: WorkloadSpec, probability: np.ndarray, rate: float, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Arrivals and types of requests that come from no trace, each (count,).

    ``per_type``: independent streams; otherwise one stream, marked by ``probability`` (Q,).

    Raises
    ------
    ScenarioError
        ``verbatim`` or ``jitter``: there are no recorded times.
    """
    p = np.asarray(probability, dtype=float) / np.sum(probability)
    if spec.arrivals == "per_type":
        return split_streams(rate * p, count, seed, spec.cv2)
    if spec.arrivals in ("verbatim", "jitter"):
        raise ScenarioError(
            f"workload.arrivals: {spec.arrivals} needs a trace, whose recorded times it keeps"
        )
    return _drawn(spec, rate, count, seed), generator(seed, "types").choice(len(p), count, p=p)


def _drawn(spec: WorkloadSpec, rate: float, count: int, seed: int) -> np.ndarray:
    if spec.course is not None:
        return diurnal_arrivals(rate, count, spec.course, seed, spec.cv2)
    return gamma_arrivals(rate, count, spec.cv2 if spec.arrivals == "gamma" else 1.0, seed)


def trace_arrivals(
    trace: Trace, rows: np.ndarray, count: int, spec: WorkloadSpec, *, rate: float | None, seed: int
) -> np.ndarray:
    """Arrival times of ``count`` requests that go over the rows of a trace again and again.

    ``verbatim`` and ``jitter`` keep the recorded times, stretched to ``rate``; another pass
    begins one mean gap after the end of the one before. ``poisson``, ``gamma`` and ``diurnal``
    draw times of ``rate`` and keep the order of requests, hence the distance between reuses in
    requests. (``per_type`` changes that order: :func:`split_streams`.)

    Parameters
    ----------
    rows : (n,) rows of ``trace`` in increasing order
    rate : requests/s; ``None`` for the trace's own

    Raises
    ------
    ScenarioError
        The recorded times have no rate and one is needed.
    """
    if rate is not None:
        _positive(rate=rate)
    if spec.arrivals not in ("verbatim", "jitter"):
        own = recorded_rate(trace.arrival[rows]) if rate is None else rate
        return _drawn(spec, own, count, seed)
    whole = trace.arrival
    if spec.arrivals == "jitter":
        whole = jittered(whole, trace.time_grid, seed)
    once = whole[rows] - whole[rows[0]]
    lap, index = np.divmod(np.arange(count), len(rows))
    arrival = once[index]
    if lap[-1] > 0:
        arrival = arrival + lap * (once[-1] + 1.0 / recorded_rate(once))
    if rate is not None and count > 1:
        arrival = arrival * (recorded_rate(arrival) / rate)
    return arrival


def recorded_rate(arrival: np.ndarray) -> float:
    """Requests/s: gaps over the time that they span.

    Raises
    ------
    ScenarioError
        All requests arrive at once.
    """
    span = float(arrival[-1] - arrival[0])
    if span <= 0:
        raise ScenarioError(
            "workload.arrivals: the requests arrive all at once, so the trace has no rate of its "
            "own; give a rate and use poisson"
        )
    return (len(arrival) - 1) / span


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (np.isfinite(value) and value > 0):
            raise ScenarioError(f"{name}: {value:g} is not a number > 0")
