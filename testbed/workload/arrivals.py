"""Arrivals: recorded, jittered, or drawn anew; times in seconds from the start."""

from __future__ import annotations

import numpy as np

from testbed.errors import ScenarioError
from testbed.seeds import generator
from testbed.workload.trace import Trace

ARRIVALS = ("verbatim", "jitter", "poisson", "gamma")


def poisson_arrivals(rate: float, count: int, seed: int) -> np.ndarray:
    """(count,) times of a Poisson process of ``rate`` per second: CV² 1."""
    return gamma_arrivals(rate, count, 1.0, seed)


def gamma_arrivals(rate: float, count: int, cv2: float, seed: int) -> np.ndarray:
    """(count,) times of a renewal process with gamma gaps of mean 1/rate and the given CV²."""
    _positive(rate=rate, cv2=cv2)
    draw = generator(seed, "arrivals")
    if cv2 == 1.0:
        gaps = draw.exponential(1.0 / rate, count)
    else:
        gaps = draw.gamma(1.0 / cv2, cv2 / rate, count)
    return np.cumsum(gaps)


def piecewise_poisson(edges: np.ndarray, rates: np.ndarray, seed: int) -> np.ndarray:
    """Times of a Poisson process whose rate is constant between edges (a day's course).

    Parameters
    ----------
    edges : (K + 1,) increasing seconds
    rates : (K,) requests/s between edges, >= 0

    Raises
    ------
    ScenarioError
        Edges do not increase or a rate is negative.
    """
    edges, rates = np.asarray(edges, dtype=float), np.asarray(rates, dtype=float)
    if len(edges) != len(rates) + 1 or bool((np.diff(edges) <= 0).any()):
        raise ScenarioError(f"rates: {len(rates)} rates need {len(rates) + 1} increasing edges")
    if not (np.isfinite(rates) & (rates >= 0)).all():
        raise ScenarioError("rates: a rate is not a number of requests/s >= 0")
    draw = generator(seed, "arrivals")
    counts = draw.poisson(rates * np.diff(edges))
    start, width = np.repeat(edges[:-1], counts), np.repeat(np.diff(edges), counts)
    return np.sort(start + width * draw.random(len(start)))


def jittered(arrival: np.ndarray, grid: float, seed: int) -> np.ndarray:
    """Recorded times moved forward, each by an independent uniform part of the time grid.

    A request never passes the next recorded time: it moves by less than the grid step and less
    than the gap to the next distinct time, so the order of recorded times stays.
    """
    distinct, which = np.unique(arrival, return_inverse=True)
    room = np.append(np.minimum(np.diff(distinct), grid), grid)
    return np.sort(arrival + room[which] * generator(seed, "jitter").random(len(arrival)))


def split_streams(rates: np.ndarray, duration: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Independent Poisson streams, one per request type, merged in order of time.

    Each type has a generator of its own: what one draws does not move the others.

    Parameters
    ----------
    rates : (Q,) requests/s of each type
    duration : seconds

    Returns
    -------
    arrival : (N,) seconds;  type_index : (N,)
    """
    times, types = [], []
    for q, rate in enumerate(np.asarray(rates, dtype=float)):
        draw = generator(seed, "arrivals", q)
        at = duration * draw.random(draw.poisson(rate * duration))
        times.append(at)
        types.append(np.full(len(at), q))
    arrival = np.concatenate(times)
    order = np.argsort(arrival, kind="stable")
    return arrival[order], np.concatenate(types)[order]


def trace_arrivals(
    trace: Trace,
    rows: np.ndarray,
    count: int,
    mode: str,
    *,
    rate: float | None,
    cv2: float,
    seed: int,
) -> np.ndarray:
    """Arrival times of ``count`` requests that go over the rows of a trace again and again.

    ``verbatim`` and ``jitter`` keep the recorded times, stretched to ``rate``; another pass
    begins one mean gap after the end of the one before. ``poisson`` and ``gamma`` draw times of
    ``rate`` and keep the order of requests, hence the distance between reuses in requests.

    Parameters
    ----------
    rows : (n,) rows of ``trace`` in increasing order
    rate : requests/s; ``None`` for the trace's own

    Raises
    ------
    ScenarioError
        The mode is unknown, or the recorded times have no rate and one is needed.
    """
    if mode not in ARRIVALS:
        raise ScenarioError(f"workload.arrivals: {mode!r} is not one of {', '.join(ARRIVALS)}")
    if rate is not None:
        _positive(rate=rate)
    if mode in ("poisson", "gamma"):
        own = recorded_rate(trace.arrival[rows]) if rate is None else rate
        return gamma_arrivals(own, count, cv2 if mode == "gamma" else 1.0, seed)
    whole = trace.arrival if mode == "verbatim" else jittered(trace.arrival, trace.time_grid, seed)
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
