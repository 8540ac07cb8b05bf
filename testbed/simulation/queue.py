"""Queue: one FCFS station of c servers, exact, by the Kiefer-Wolfowitz recursion (Theory B).

The state is the vector of times at which servers become free. A customer starts at the earliest
of them or on arrival, whichever is later; nothing else has to be remembered, so any arrival and
service law is simulated at the cost of one ordered insertion a customer.
"""

from __future__ import annotations

import numba
import numpy as np

_INSERTION_LIMIT = 48
"""Servers up to which shifting a sorted vector beats a heap."""


class Station:
    """An FCFS station of ``servers`` servers, empty at first; time goes on between calls.

    >>> station = Station(1)
    >>> station.serve(np.array([0.0, 1.0, 2.0]), np.array([3.0, 1.0, 1.0]))
    array([0., 2., 2.])
    """

    def __init__(self, servers: int) -> None:
        if servers < 1:
            raise ValueError(f"servers: {servers} is not at least 1")
        self.free = np.zeros(servers)
        self._last = -np.inf

    def serve(self, arrival: np.ndarray, service: np.ndarray) -> np.ndarray:
        """Waits, seconds, of customers (N,) in order of arrival with these service times.

        Raises
        ------
        ValueError
            Arrivals that run back in time, or a negative service time.
        """
        arrival = np.ascontiguousarray(arrival, dtype=np.float64)
        service = np.ascontiguousarray(service, dtype=np.float64)
        if arrival.shape != service.shape or arrival.ndim != 1:
            raise ValueError(f"arrival {arrival.shape} and service {service.shape} differ")
        if len(arrival) == 0:
            return np.empty(0)
        if arrival[0] < self._last or (np.diff(arrival) < 0).any():
            raise ValueError("arrival: time runs back")
        if not (service >= 0).all():
            raise ValueError("service: a time is negative")
        self._last = arrival[-1]
        wait = np.empty(len(arrival))
        _serve(self.free, arrival, service, wait)
        return wait


def waits(arrival: np.ndarray, service: np.ndarray, servers: int) -> np.ndarray:
    """Waits of a G/G/c queue that starts empty, shape (N,), seconds."""
    return Station(servers).serve(arrival, service)


def mmc_waits(
    arrival_rate: float, service_rate: float, servers: int, customers: int, rng: np.random.Generator
) -> np.ndarray:
    """Waits of an M/M/c queue that starts empty, shape (customers,), seconds.

    ``arrival_rate`` and ``service_rate`` are λ and μ per second; the law is Theory B7 once the
    start is forgotten.
    """
    if arrival_rate <= 0 or service_rate <= 0 or servers < 1 or customers < 1:
        raise ValueError(
            f"rates {arrival_rate}, {service_rate}, servers {servers} and customers {customers} "
            "must be positive"
        )
    wait = np.empty(customers)
    _mmc(np.zeros(servers), arrival_rate, service_rate, wait, rng)
    return wait


@numba.njit(cache=True, inline="always")
def enter(free: np.ndarray, now: float, service: float) -> float:
    """Admit one customer at ``now``; returns its wait and updates ``free``.

    ``free`` is sorted up to 48 servers and a binary heap beyond; all zeros are both.
    """
    c = free.shape[0]
    wait = free[0] - now
    if wait < 0.0:
        wait = 0.0
    done = now + wait + service
    i = 0
    if c <= _INSERTION_LIMIT:
        while i + 1 < c and free[i + 1] < done:
            free[i] = free[i + 1]
            i += 1
    else:
        while True:
            child = 2 * i + 1
            if child >= c:
                break
            if child + 1 < c and free[child + 1] < free[child]:
                child += 1
            if free[child] >= done:
                break
            free[i] = free[child]
            i = child
    free[i] = done
    return wait


@numba.njit(cache=True)
def _serve(free: np.ndarray, arrival: np.ndarray, service: np.ndarray, wait: np.ndarray) -> None:
    for k in range(arrival.shape[0]):
        wait[k] = enter(free, arrival[k], service[k])


@numba.njit(cache=True)
def _mmc(
    free: np.ndarray,
    arrival_rate: float,
    service_rate: float,
    wait: np.ndarray,
    rng: np.random.Generator,
) -> None:
    now = 0.0
    gap, length = 1.0 / arrival_rate, 1.0 / service_rate
    for k in range(wait.shape[0]):
        now += gap * rng.standard_exponential()
        wait[k] = enter(free, now, length * rng.standard_exponential())
