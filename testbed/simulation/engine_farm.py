"""Farm: many engine models side by side, driven together through slices of time.

An engine's next step depends on nothing outside it but the requests it is sent. What a router
knows of nodes changes only when they advertise, so between two advertisements every request can
be routed before any engine moves, and then every engine can run through the slice on its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numba
import numpy as np

from testbed.errors import EngineError
from testbed.simulation.engine_model import EngineConfig, new_engine
from testbed.simulation.engine_model_kernel import advance
from testbed.simulation.engine_model_pool import Pool
from testbed.simulation.engine_model_state import (
    ARRIVAL,
    CACHED_TOKENS,
    DONE,
    FINISHED,
    FIRST,
    INPUT,
    NOBODY,
    OUTPUT,
    REUSABLE,
    SCHEDULED,
    STUCK,
    Engine,
    Requests,
    enqueue,
)
from testbed.simulation.network_events import observe
from testbed.step_time import OperatorStepTime, StepTime

# Columns of ``Farm.memo`` (what a request brought with it) and of what is collected.
M_PLACE, M_KIND, M_INTENDED, M_DISTANCE, M_TOLD = range(5)
MEMO = 5
(
    C_PLACE,
    C_KIND,
    C_NODE,
    C_TTFT,
    C_WAIT,
    C_OCCUPANCY,
    C_DISTANCE,
    C_CACHED,
    C_SAVED,
    C_FULL,
) = range(10)
COLLECTED = 10

NOISE = 1e-9
"""Seconds below which an excess delay is rounding, not waiting."""


class Farm(NamedTuple):
    """N engines with up to C requests each; see ``engine_model_state`` for the engines' arrays."""

    state: np.ndarray
    clock: np.ndarray
    step_time: np.ndarray  # packed, of one kind of engine after the other
    step_start: np.ndarray  # (kinds + 1,) where each begins
    kind: np.ndarray  # (N,)
    slots: np.ndarray
    lists: np.ndarray
    rows: np.ndarray
    links: np.ndarray
    content: np.ndarray
    table: np.ndarray
    counts: np.ndarray
    times: np.ndarray  # (N, C, 5)
    facts: np.ndarray  # (N, C, 8)
    memo: np.ndarray  # (N, C, 5)
    spare: np.ndarray  # (N, C) free rows
    left: np.ndarray  # (N,) how many of them
    kept: np.ndarray  # (N, 3) damped waits, as ``network_state.Telemetry``


class Arriving(NamedTuple):
    """Requests that reach their nodes, (n,), in order of time there."""

    time: np.ndarray
    node: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    reusable: np.ndarray
    memo: np.ndarray  # (n, 5)


def new_farm(
    configs: list[EngineConfig],
    assigned: np.ndarray,
    step_time: StepTime | OperatorStepTime | Sequence[StepTime | OperatorStepTime],
    room: int = 64,
) -> Farm:
    """Idle engines, node n by ``configs[assigned[n]]`` and, where several, that step time."""
    steps = step_time if isinstance(step_time, Sequence) else [step_time] * len(configs)
    kinds = []
    for config, step in zip(configs, steps, strict=True):
        blocks = -(-config.max_model_len // config.block_size)
        kinds.append(new_engine(config, step, blocks))
    engines = [kinds[s] for s in assigned]

    def stacked(arrays: list[np.ndarray]) -> np.ndarray:
        shape = np.max([a.shape for a in arrays], axis=0)
        out = np.zeros((len(arrays), *shape), dtype=arrays[0].dtype)
        for place, array in zip(out, arrays, strict=True):
            place[tuple(slice(n) for n in array.shape)] = array
        return out

    # A hash table is addressed by its size, so that all pools take the largest one's.
    largest = max((e.pool.table for e in kinds), key=len)
    count = len(engines)
    return Farm(
        state=stacked([e.state for e in engines]),
        clock=stacked([e.clock for e in engines]),
        step_time=np.concatenate([k.step_time for k in kinds]),
        step_start=np.cumsum([0, *(len(k.step_time) for k in kinds)]),
        kind=np.asarray(assigned, dtype=np.int64),
        slots=stacked([e.slots for e in engines]),
        lists=stacked([e.lists for e in engines]),
        rows=stacked([e.rows for e in engines]),
        links=stacked([e.pool.links for e in engines]),
        content=stacked([e.pool.content for e in engines]),
        table=np.zeros((count, len(largest)), dtype=largest.dtype),
        counts=stacked([e.pool.counts for e in engines]),
        times=np.full((count, room, 5), np.nan),
        facts=np.zeros((count, room, 8), dtype=np.int64),
        memo=np.zeros((count, room, MEMO)),
        spare=np.tile(np.arange(room, dtype=np.int64)[::-1], (count, 1)),
        left=np.full(count, room, dtype=np.int64),
        kept=np.tile([0.0, 0.0, -1.0], (count, 1)),
    )


def with_more_room(farm: Farm) -> Farm:
    """The same engines with room for twice the requests."""
    count, size = farm.spare.shape

    def wider(array: np.ndarray, fill: float) -> np.ndarray:
        more = np.full((count, size, *array.shape[2:]), fill, dtype=array.dtype)
        return np.concatenate([array, more], axis=1)

    spare = wider(farm.spare, 0)
    fresh = np.arange(size, 2 * size, dtype=np.int64)[::-1]
    for n in range(count):
        spare[n, farm.left[n] : farm.left[n] + size] = fresh
    return farm._replace(
        times=wider(farm.times, np.nan),
        facts=wider(farm.facts, 0),
        memo=wider(farm.memo, 0.0),
        spare=spare,
        left=farm.left + size,
    )


def check(farm: Farm) -> None:
    """Raise :class:`EngineError` where an engine can go no further."""
    if farm.state[:, STUCK].any():
        raise EngineError("a request waits that the pool of its node can never hold")


@numba.njit(cache=True)
def admit(farm: Farm, arriving: Arriving) -> bool:
    """Hand arriving requests to their engines; False, with nothing done, where one has no room."""
    need = np.zeros(farm.left.shape[0], dtype=np.int64)
    for k in range(arriving.time.shape[0]):
        need[arriving.node[k]] += 1
    for n in range(need.shape[0]):
        if need[n] > farm.left[n]:
            return False
    for k in range(arriving.time.shape[0]):
        n = arriving.node[k]
        farm.left[n] -= 1
        row = farm.spare[n, farm.left[n]]
        for c in range(5):
            farm.times[n, row, c] = math.nan
        farm.times[n, row, ARRIVAL] = arriving.time[k]
        for c in range(8):
            farm.facts[n, row, c] = 0
        farm.facts[n, row, INPUT] = arriving.input_tokens[k]
        farm.facts[n, row, OUTPUT] = arriving.output_tokens[k]
        farm.facts[n, row, REUSABLE] = arriving.reusable[k]
        for c in range(MEMO):
            farm.memo[n, row, c] = arriving.memo[k, c]
        enqueue(farm.state[n], farm.facts[n], row)
    return True


@numba.njit(cache=True)
def serve(
    farm: Farm,
    first: int,
    until: float,
    window: float,
    prefill: np.ndarray,
    log: np.ndarray,
    nothing: np.ndarray,
    out: np.ndarray,
) -> tuple[int, int]:
    """Run the engines from ``first`` on through all steps that end before ``until``.

    ``prefill`` (kinds, 4) are the coefficients of g(n | h); completed requests go to ``out``.

    Returns
    -------
    (engines done, requests collected); fewer engines than there are: ``out`` is full
    """
    collected = 0
    room = farm.spare.shape[1]
    seen_at, seen = np.empty(room), np.empty(room)
    for n in range(first, farm.left.shape[0]):
        if farm.left[n] == room:
            continue
        if collected + room > out.shape[0]:
            return n, collected
        kind = farm.kind[n]
        engine = Engine(
            farm.state[n],
            farm.clock[n],
            farm.step_time[farm.step_start[kind] : farm.step_start[kind + 1]],
            farm.slots[n],
            farm.lists[n],
            farm.rows[n],
            Pool(farm.links[n], farm.content[n], farm.table[n], farm.counts[n]),
        )
        advance(engine, Requests(farm.times[n], farm.facts[n], nothing), until, log)
        news = 0
        for row in range(room):
            first_token = farm.times[n, row, FIRST]
            if math.isnan(farm.times[n, row, ARRIVAL]) or math.isnan(first_token):
                continue
            tokens, cached = farm.facts[n, row, INPUT], farm.facts[n, row, CACHED_TOKENS]
            unloaded = _prefill(prefill[kind], tokens - cached, cached)
            wait = first_token - farm.times[n, row, ARRIVAL] - unloaded
            if abs(wait) < NOISE:
                wait = 0.0
            if farm.memo[n, row, M_TOLD] == 0:
                farm.memo[n, row, M_TOLD] = 1
                at = news
                while at > 0 and seen_at[at - 1] > first_token:
                    seen_at[at], seen[at] = seen_at[at - 1], seen[at - 1]
                    at -= 1
                seen_at[at], seen[at] = first_token, wait
                news += 1
            if not math.isnan(farm.times[n, row, DONE]):
                if farm.memo[n, row, M_PLACE] >= 0:
                    full = _prefill(prefill[kind], tokens, 0)
                    out[collected, C_PLACE] = farm.memo[n, row, M_PLACE]
                    out[collected, C_KIND] = farm.memo[n, row, M_KIND]
                    out[collected, C_NODE] = n
                    out[collected, C_TTFT] = first_token - farm.memo[n, row, M_INTENDED]
                    out[collected, C_WAIT] = wait
                    held = farm.times[n, row, DONE] - farm.times[n, row, SCHEDULED]
                    out[collected, C_OCCUPANCY] = held
                    out[collected, C_DISTANCE] = farm.memo[n, row, M_DISTANCE]
                    out[collected, C_CACHED] = cached
                    out[collected, C_SAVED] = full - unloaded
                    out[collected, C_FULL] = full
                    collected += 1
                farm.times[n, row, ARRIVAL] = math.nan
                farm.spare[n, farm.left[n]] = row
                farm.left[n] += 1
        # Whoever is done was found above; the engine's own list of them would grow stale.
        farm.state[n, FINISHED] = NOBODY
        for k in range(news):
            observe(farm.kept, n, seen_at[k], seen[k], window)
    return farm.left.shape[0], collected


@numba.njit(cache=True)
def advertise(farm: Farm, now: float, window: float, sent: np.ndarray) -> None:
    """What every engine tells the router, (N, 2) mean and deviation; an empty one has no queue."""
    for n in range(farm.left.shape[0]):
        if farm.left[n] == farm.spare.shape[1]:
            observe(farm.kept, n, now, 0.0, window)
        mean = farm.kept[n, 0]
        sent[n, 0] = mean
        sent[n, 1] = math.sqrt(max(0.0, farm.kept[n, 1] - mean * mean))


@numba.njit(cache=True)
def _prefill(k: np.ndarray, new: int, cached: int) -> float:
    """g(n | h) = t₀ + a·n + b·n² + d·n·h, as ``testbed.theory.prefill`` (Theory A8, H1)."""
    if new <= 0:
        return 0.0
    return float(k[0] + new * (k[1] + k[2] * new + k[3] * cached))
