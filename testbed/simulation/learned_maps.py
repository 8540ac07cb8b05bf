"""Learned maps: a node simulated at scattered loads, mixes and slots, and surfaces fitted to it.

The engine model serves Poisson arrivals on one node of each profile; every cell is a load of its
own, with its own seed, so that the surfaces average the noise of neighbours. Cells that no fit saw
are simulated longer and kept beside the surfaces as their held-out error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

import numpy as np
from scipy.stats import qmc

import testbed
from testbed.environment import code_version
from testbed.errors import ScenarioError
from testbed.scenario import EngineSpec, Scenario
from testbed.seeds import generator
from testbed.simulation.engine_network import engine_config
from testbed.simulation.learned_map_node import Node
from testbed.step_time import AnyStepTime
from testbed.theory.delay.learned_map import LearnedLaw
from testbed.theory.delay.learned_map_file import (
    PROBABILITIES,
    Fit,
    HeldOut,
    LearnedEngine,
    LearnedMapFile,
    LearnedProfile,
    fingerprint,
)
from testbed.theory.delay.learned_map_fit import (
    BATCHES,
    SimulatedLaw,
    fit_seconds,
    fit_surface,
    mix_degree,
    slots_axis,
)
from testbed.theory.delay.learned_map_point import locate
from testbed.theory.delay.monotone_surface import MixBasis
from testbed.theory.system import System

LOADS = (0.02, 0.95)
"""Least and largest share of a node's capacity that is simulated."""
LEAST_SHARE = 0.005
"""Share that a type gets at least in a simulated mix, so that its law is known at all."""
HELD_OUT_LOADS = (0.3, 0.6, 0.8, 0.9)
HELD_OUT_FACTOR = 4
"""Requests of a held-out cell over those of a fitted one."""

_LEAST_REQUESTS = 5_000
_LEAST_CELLS = 16
_EDGES = 0.125
"""Share of the cells at the largest load, and at the least: surfaces end there."""


def learned_map(
    scenario: Scenario,
    step_time: AnyStepTime | Sequence[AnyStepTime],
    *,
    slots: tuple[int, int] | None = None,
    cells: int = 160,
    held_out: int = 16,
    requests: int = 100_000,
    seed: int = 0,
    profile: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> LearnedMapFile:
    """Fit the excess delay of every profile's node over load, mix and slots (Theory H3).

    Parameters
    ----------
    step_time : of the nodes' engine, or of each profile's
    slots : least and most sequences at once; by default from half the scenario's fewest to twice
        its most
    cells : loads simulated for each profile; ``held_out`` more that the fit does not see
    requests : simulated at each, warm-up of a tenth included; four times as many where held out
    profile : fit this one alone, to be put beside others (:func:`beside`)
    progress : called with counts of simulated requests

    Raises
    ------
    ScenarioError
        No such profile, slots out of order, or too few requests or cells.
    """
    counts = [scenario.concurrency(p) for p in scenario.profiles]
    least, most = slots if slots is not None else (max(1, min(counts) // 2), 2 * max(counts))
    if not 1 <= least <= most:
        raise ScenarioError(f"slots: {least} to {most} are not a range from 1 on")
    if requests < _LEAST_REQUESTS:
        raise ScenarioError(f"requests: {requests} are too few for a tail; {_LEAST_REQUESTS:,} do")
    if cells < _LEAST_CELLS:
        raise ScenarioError(f"cells: {cells} are too few for a surface; {_LEAST_CELLS} or more")
    names = [p.name for p in scenario.profiles]
    if profile is not None and profile not in names:
        raise ScenarioError(f"profile: {profile!r} is not one of {', '.join(names)}")
    system = System.from_scenario(scenario, step_time)
    fitted = []
    for s in range(len(names)) if profile is None else [names.index(profile)]:
        node = Node.of(scenario, system, s, seed, progress)
        fitted.append(_profile(node, (least, most), cells, held_out, requests))
    engine = scenario.engine or EngineSpec()
    return LearnedMapFile(
        scenario=scenario.name,
        seed=seed,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        software=f"testbed {testbed.__version__}, code {code_version()}",
        engine=LearnedEngine(
            scheduler=engine_config(scenario, 0).scheduler,
            token_budget=engine.token_budget,
            block_size=engine.block_size,
        ),
        profiles=tuple(fitted),
    )


def beside(before: LearnedMapFile, found: LearnedMapFile) -> LearnedMapFile:
    """What was found, and of an earlier file the profiles that were not fitted anew.

    Raises
    ------
    ScenarioError
        The earlier file is of another scenario, engine or seed.
    """
    for field in ("scenario", "engine", "seed"):
        if getattr(before, field) != getattr(found, field):
            raise ScenarioError(f"{field}: the profiles fitted before are of another {field}")
    new = {p.profile for p in found.profiles}
    kept = tuple(p for p in before.profiles if p.profile not in new)
    return found.model_copy(update={"profiles": (*kept, *found.profiles)})


def _profile(
    node: Node, slots: tuple[int, int], cells: int, held_out: int, requests: int
) -> LearnedProfile:
    types = len(node.tokens)
    mix, axis = MixBasis(types, mix_degree(types)), slots_axis(*slots)
    laws = [
        node.simulate(f"cell {i}", weights, count, load, requests)
        for i, (load, count, weights) in enumerate(_design(node, mix, slots, cells))
    ]
    seconds = fit_seconds(laws, axis, mix)
    fitted = fit_surface(laws, node.alone, seconds, axis, mix, LOADS)
    by_map = np.array(
        [axis.basis(np.log2(x.slots)) @ seconds @ mix.values(x.mix) * x.capacity for x in laws]
    )
    profile = LearnedProfile(
        profile=node.profile,
        types=node.load.types,
        new_tokens=tuple(node.load.new_tokens.tolist()),
        cached_tokens=tuple(node.load.cached_tokens.tolist()),
        output_tokens=tuple(node.load.output_tokens.tolist()),
        prefill_seconds=tuple(node.alone.tolist()),
        step_time=fingerprint(node.step_time),
        lookahead=node.load.lookahead,
        least_load=LOADS[0],
        most_load=LOADS[1],
        least_slots=slots[0],
        most_slots=slots[1],
        least_share=LEAST_SHARE if types > 1 else 1.0,
        mix_degree=mix_degree(types),
        slots_axis=axis,
        seconds=tuple(seconds.ravel().tolist()),
        surface=fitted.surface,
        fit=Fit(
            cells=cells,
            requests=requests,
            points=fitted.points,
            misfit=fitted.misfit,
            noise=fitted.noise,
            capacity_misfit=float(np.sqrt(np.mean((by_map - 1.0) ** 2))),
        ),
    )
    tested = (
        _held_out(profile, node.simulate(f"held out {i}", w, c, load, HELD_OUT_FACTOR * requests))
        for i, (load, c, w) in enumerate(_unseen(node, slots, held_out))
    )
    return profile.model_copy(update={"held_out": tuple(tested)})


def _design(
    node: Node, mix: MixBasis, slots: tuple[int, int], cells: int
) -> Iterator[tuple[float, int, np.ndarray]]:
    """Loads, slots and mixes of the fitted cells.

    Loads are even in their logit, some at its ends. Half of the mixes are points of the lattice of
    the mix's polynomials, its corners among them; the rest are anywhere. Which are which is drawn
    like all else: a rule by the cell's number would go along with a digit of the sequence, so that
    a corner would be seen with some slots alone, and mixes anywhere with some loads alone.
    """
    low, high = (float(np.log(x / (1.0 - x))) for x in LOADS)
    lattice = mix.powers / max(mix.powers.sum(axis=1)[0], 1)
    for (u, edge, corner), count, weights in _spread(node, slots, cells, "cells", 3):
        if edge < _EDGES:
            load = LOADS[0]
        elif edge < 2 * _EDGES:
            load = LOADS[1]
        else:
            load = 1.0 / (1.0 + np.exp(-(low + u * (high - low))))
        place = int(2 * len(lattice) * corner)
        yield load, count, _inside(lattice[place]) if place < len(lattice) else weights


def _unseen(
    node: Node, slots: tuple[int, int], cells: int
) -> Iterator[tuple[float, int, np.ndarray]]:
    """Loads, slots and mixes of the held-out cells."""
    for (u,), count, weights in _spread(node, slots, cells, "held out", 1):
        yield HELD_OUT_LOADS[int(len(HELD_OUT_LOADS) * u)], count, weights


def _spread(
    node: Node, slots: tuple[int, int], cells: int, name: str, more: int
) -> Iterator[tuple[np.ndarray, int, np.ndarray]]:
    """Points spread over (0, 1)^more, slots and mixes: Halton's sequence, scrambled at random."""
    types = len(node.tokens)
    draw = generator(node.seed, "learned map", node.profile, name)
    least, most = slots
    for point in qmc.Halton(more + types, scramble=True, seed=draw).random(cells):
        c, *cuts = point[more:]
        count = int(least * ((most + 1) / least) ** c)
        gaps = np.diff(np.concatenate([[0.0], np.sort(cuts), [1.0]]))
        yield point[:more], min(count, most), _inside(gaps)


def _inside(weights: np.ndarray) -> np.ndarray:
    """A mix moved inwards, so that every type has its least share."""
    types = len(weights)
    return np.asarray(LEAST_SHARE + (1.0 - types * LEAST_SHARE) * weights if types > 1 else weights)


def _held_out(profile: LearnedProfile, law: SimulatedLaw) -> HeldOut:
    def figures(x: np.ndarray) -> np.ndarray:
        return np.array([x.mean(), *np.quantile(x, PROBABILITIES)])

    place = locate(profile, law.rate, law.mix, float(law.slots))
    predicted = None
    if place.rho <= profile.most_load:
        found = LearnedLaw(profile, place, law.mix)
        predicted = tuple(
            (float(found.mean[q]), *(found.quantile(q, p) for p in PROBABILITIES))
            for q in range(len(profile.types))
        )
    batches = [np.array([figures(part) for part in np.array_split(x, BATCHES)]) for x in law.delays]
    return HeldOut(
        load=law.rate / law.capacity,
        rate=law.rate,
        mix=tuple(law.mix.tolist()),
        slots=law.slots,
        requests=sum(len(x) for x in law.delays),
        capacity=(law.capacity, law.rate / place.rho),
        simulated=tuple(tuple(figures(x).tolist()) for x in law.delays),
        standard_errors=tuple(
            tuple((b.std(axis=0, ddof=1) / np.sqrt(BATCHES)).tolist()) for b in batches
        ),
        predicted=predicted,
    )
