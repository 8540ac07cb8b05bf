"""Spatial: Monte Carlo of the typical request and its tiers, without a boundary (Theory F4).

Each request draws the distance to the nearest node of every profile; the policy picks. Under
fixed advertised waits the choice does not depend on time, so every tier is one exact queue fed
by the requests that chose it, on a clock that makes one node's share of them Poisson at the rate
of Theory B1. That holds for any fractions: no node count has to be rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from testbed.radio import RadioModel
from testbed.routing.policies import Policy
from testbed.seeds import WARM_UP, generator
from testbed.simulation.queue import Station
from testbed.simulation.service import ServiceLaw
from testbed.simulation.system import System
from testbed.simulation.tally import Served, Tally

CHUNK = 65_536


@dataclass(frozen=True)
class Draws:
    """Randomness of consecutive requests (n,), the same under every policy.

    Attributes
    ----------
    time : arrival on the clock on which requests come at rate 1
    kind : request type
    distance : (n, S) km to the nearest node of each profile
    work : unit-mean service requirement
    """

    time: np.ndarray
    kind: np.ndarray
    distance: np.ndarray
    work: np.ndarray


def draws(
    system: System, law: ServiceLaw, count: int, seed: int, *names: str, start: float = 0.0
) -> Iterator[Draws]:
    """Chunks of ``count`` requests, each stream under its own name."""
    arrivals, kinds, distances, works = (
        generator(seed, *names, n) for n in ("arrivals", "types", "distances", "service")
    )
    cumulative = np.cumsum(system.probability)
    for first in range(0, count, CHUNK):
        n = min(CHUNK, count - first)
        time = start + np.cumsum(arrivals.standard_exponential(n))
        start = float(time[-1])
        kind = np.searchsorted(cumulative, kinds.random(n) * cumulative[-1], side="right")
        exponential = distances.standard_exponential((n, len(system.density)))
        with np.errstate(divide="ignore"):
            distance = np.sqrt(exponential / (np.pi * system.density))
        yield Draws(time, np.minimum(kind, len(cumulative) - 1), distance, law.work(works, n))


def associate(
    drawn: Draws, radio: RadioModel, policy: Policy, prefill: np.ndarray, wait: np.ndarray
) -> np.ndarray:
    """The profile that each request takes under fixed waits (Theory C1), shape (n,)."""
    there = np.isfinite(drawn.distance)
    cost = radio.delay(np.where(there, drawn.distance, 0.0))
    cost = cost + policy.fixed_cost(prefill, wait)[drawn.kind]
    return np.argmin(np.where(there, cost, np.inf), axis=1)


def simulate_tiers(
    system: System,
    radio: RadioModel,
    policy: Policy,
    wait: np.ndarray,
    law: ServiceLaw,
    tally: Tally,
    *,
    warm_up: int,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Serve ``tally.requests`` requests at one node of every tier, with ``wait`` (S,) advertised.

    The law of the waits is exact. Radio delay does not move a request's turn in the queue: a
    Poisson stream displaced by independent delays is the same Poisson stream.
    """
    stations = [Station(int(c)) for c in system.concurrency]
    seconds = system.density / system.intensity  # per request of the clock, at a tier's node
    mean = RunningMean(system)
    radio_rng = {True: generator(seed, WARM_UP, "radio"), False: generator(seed, "radio")}
    start, index = 0.0, 0
    for warm in (True, False):
        names = (WARM_UP,) if warm else ()
        count = warm_up if warm else tally.requests
        for drawn in draws(system, law, count, seed, *names, start=start):
            start = float(drawn.time[-1])
            n = len(drawn.time)
            chosen = associate(drawn, radio, policy, system.prefill, wait)
            distance = drawn.distance[np.arange(n), chosen]
            own = system.occupancy[drawn.kind, chosen]
            delay, occupancy = np.empty(n), np.empty(n)
            for s, station in enumerate(stations):
                mine = np.flatnonzero(chosen == s)
                if len(mine) == 0:
                    continue
                occupancy[mine] = drawn.work[mine] * (
                    mean.update(s, own[mine]) if law.by_tier else own[mine]
                )
                delay[mine] = station.serve(drawn.time[mine] * seconds[s], occupancy[mine])
            prefill = system.prefill[drawn.kind, chosen]
            ttft = radio.sample(distance, radio_rng[warm]) + prefill + delay
            if not warm:
                full = system.full_prefill[drawn.kind, chosen]
                tally.add(
                    Served(
                        index=np.arange(index, index + n),
                        kind=drawn.kind,
                        profile=chosen,
                        ttft=ttft,
                        wait=delay,
                        occupancy=occupancy,
                        distance=distance,
                        reused=system.reusable[drawn.kind, chosen],
                        saved=full - prefill,
                        full=full,
                    )
                )
                index += n
                if progress is not None:
                    progress(n)
    tally.expose(tally.requests * seconds)


class RunningMean:
    """Mean occupancy of the requests that each tier has seen, 1/μ_s of Theory B3 as it forms."""

    def __init__(self, system: System) -> None:
        self.total = np.zeros(len(system.density))
        self.count = np.zeros(len(system.density))

    def update(self, tier: int, occupancy: np.ndarray) -> np.ndarray:
        """The mean after each further request, shape (n,)."""
        total = self.total[tier] + np.cumsum(occupancy)
        count = self.count[tier] + np.arange(1, len(occupancy) + 1)
        self.total[tier], self.count[tier] = total[-1], count[-1]
        return total / count
