"""Traffic: the requests of a network run in time and space, warm-up first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from testbed.scenario import Scenario, SimulationSpec
from testbed.seeds import WARM_UP, generator
from testbed.simulation.network_state import Chunk
from testbed.simulation.placement import Layout
from testbed.simulation.requests import (
    Arrivals,
    Costs,
    stream_arrivals,
    trace_of,
    typed_arrivals,
)
from testbed.simulation.service import ServiceLaw
from testbed.simulation.system import System
from testbed.simulation.users import Crowd
from testbed.workload.stream import RequestStream

Place = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""Times -> (position, radius, turn), with rows for the space that is simulated only."""


class Traffic:
    """What one run sends.

    Attributes
    ----------
    costs : what its requests cost at each profile
    stream : the trace, where there is one
    rate : requests/s asked for; a trace's times are stretched to it
    first, last : when the first and last measured request were sent, s, once they have been
    """

    def __init__(
        self,
        scenario: Scenario,
        system: System,
        layout: Layout,
        costs: Costs,
        stream: RequestStream | None,
        arrivals: Callable[[bool, float], Iterator[Arrivals]],
        warm_up: int,
        seed: int,
    ) -> None:
        self.costs = costs
        self.stream = stream
        self.rate = scenario.demand.intensity * layout.area
        self.first = self.last = 0.0
        self._scenario, self._system, self._layout = scenario, system, layout
        self._arrivals, self._warm_up, self._seed = arrivals, warm_up, seed

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        system: System,
        law: ServiceLaw,
        layout: Layout,
        requests: int,
        warm_up: int,
        seed: int,
    ) -> Traffic:
        """``requests`` measured requests after ``warm_up`` others, from types or a trace."""
        rate = scenario.demand.intensity * layout.area
        stream = trace_of(scenario, rate, requests, seed)
        if stream is None:

            def typed(warm: bool, start: float) -> Iterator[Arrivals]:
                names = (WARM_UP,) if warm else ()
                count = warm_up if warm else requests
                return typed_arrivals(scenario, system, law, rate, count, seed, *names, start=start)

            costs = Costs.of_types(scenario, system)
            return cls(scenario, system, layout, costs, None, typed, warm_up, seed)

        # A warm-up replays the trace under another seed, so that it shares no suffix with the run.
        other = int(generator(seed, WARM_UP).integers(2**62))
        before = trace_of(scenario, rate, warm_up, other) if warm_up else None
        costs = Costs.of_stream(scenario, stream)
        if before is not None:
            costs = Costs.of_stream(scenario, before).joined(costs)

        def traced(warm: bool, start: float) -> Iterator[Arrivals]:
            if not warm:
                return stream_arrivals(stream, law, seed, offset=warm_up, start=start)
            if before is None:
                return iter(())
            return stream_arrivals(before, law, other, offset=0, start=start)

        return cls(scenario, system, layout, costs, stream, traced, warm_up, seed)

    def chunks(self) -> Iterator[Chunk]:
        """Warm-up and measured requests in order of time; ``place`` counts the measured ones."""
        start = 0.0
        for warm in (True, False):
            names = (WARM_UP,) if warm else ()
            locate = self._places(names)
            chance = generator(self._seed, *names, "radio")
            place = -self._warm_up if warm else 0
            for part in self._arrivals(warm, start):
                n = len(part.time)
                start = float(part.time[-1])
                if place == 0:
                    self.first = float(part.time[0])
                self.last = start
                yield Chunk(
                    np.ascontiguousarray(part.time),
                    np.arange(place, place + n),
                    part.kind.astype(np.int64),
                    part.row.astype(np.int64),
                    part.work,
                    part.output_tokens.astype(np.int64),
                    chance.random(n),
                    *locate(part.time),
                )
                place += n

    @property
    def fingerprint(self) -> str | None:
        """Of the trace's requests, as every run of the same ones has it."""
        return None if self.stream is None else self.stream.fingerprint(self._seed)

    @property
    def seconds(self) -> float:
        """Between the first and the last measured request."""
        return self.last - self.first

    def _places(self, names: tuple[str, ...]) -> Place:
        profiles = len(self._system.profiles)
        if self._layout.palm:
            distances = generator(self._seed, *names, "distances")
            turns = generator(self._seed, *names, "replicas")
            nowhere = np.empty((0, 2))

            def palm(time: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
                n = len(time)
                exponential = distances.standard_exponential((n, profiles))
                with np.errstate(divide="ignore"):
                    radius = np.sqrt(exponential / (np.pi * self._system.density))
                return nowhere, radius, turns.random((n, profiles))

            return palm
        spec = self._scenario.simulation or SimulationSpec()
        crowd = Crowd(spec.users, self._layout.plane.size, self._seed, *names)
        none = np.empty((0, profiles))
        return lambda time: (crowd.positions(time), none, none)
