"""The loop of one engine in virtual time, compiled.

At each boundary between steps the engine takes in what has arrived, forms the next step and waits
for the oldest one under way. With two steps under way (asynchronous scheduling) the next step is
formed while one runs, knowing the outputs of the step before that. While every running request
generates one token a step and nobody can join, whole stretches are taken at once: the times are
the same.

``advance``, ``form_steps`` and ``complete_step`` take an engine and its requests, for compiled
callers; those that take arrays are for callers in Python, who need not wait for the others to
be compiled.
"""

from __future__ import annotations

import numba
import numpy as np

from testbed.simulation.engine_model_sglang import form_sglang
from testbed.simulation.engine_model_state import (
    ARRIVAL,
    BLOCKED,
    DEPTH,
    DRAIN,
    ENDS,
    FORMED,
    LAST_END,
    LOGGED,
    NEVER_FITS,
    NOBODY,
    NOW,
    OLDEST,
    PAGED,
    PREEMPTED,
    PREEMPTIONS,
    PREFILLING,
    RUNNING,
    SCHEDULER,
    STUCK,
    UNDER_WAY,
    UNSEEN,
    WAITING,
    WAKE,
    Engine,
    Requests,
    complete,
    take_in,
    used_blocks,
)
from testbed.simulation.engine_model_vllm import form_vllm, serve_prefills, skip_decodes

LOG_COLUMNS = (
    "start",
    "end",
    "prefills",
    "new_tokens",
    "new_squared",
    "new_context",
    "decodes",
    "decode_context",
    "preemptions",
    "running",
    "waiting",
    "used_blocks",
)
"""One row a step; running, waiting and blocks as they stand when the step has been formed."""


def arrays(engine: Engine, requests: Requests) -> tuple[np.ndarray, ...]:
    """What the functions on arrays take first, in their order."""
    return (
        engine.state,
        engine.clock,
        engine.step_time,
        engine.slots,
        engine.lists,
        engine.rows,
        *engine.pool,
        requests.times,
        requests.facts,
        requests.contents,
    )


@numba.njit(cache=True)
def advance(engine: Engine, requests: Requests, until: float, log: np.ndarray) -> bool:
    """Run through all boundaries before ``until``; False when the log is full.

    Everything that arrives before ``until`` must have been enqueued. STUCK says when it cannot go
    on. With a log of no rows nothing is logged; with one, no steps are skipped.
    """
    pool = engine.pool
    return advance_arrays(
        engine.state,
        engine.clock,
        engine.step_time,
        engine.slots,
        engine.lists,
        engine.rows,
        pool.links,
        pool.content,
        pool.table,
        pool.counts,
        requests.times,
        requests.facts,
        requests.contents,
        until,
        log,
        np.empty(7),
    )


@numba.njit(cache=True)
def form_steps(engine: Engine, requests: Requests, log: np.ndarray) -> None:
    """Take in arrivals and form steps until as many are under way as may be."""
    pool = engine.pool
    take_in(engine.state, engine.clock[NOW], requests.times, requests.facts)
    form_arrays(
        engine.state,
        engine.clock,
        engine.step_time,
        engine.slots,
        engine.lists,
        engine.rows,
        pool.links,
        pool.content,
        pool.table,
        pool.counts,
        requests.times,
        requests.facts,
        requests.contents,
        log,
        np.empty(7),
    )


@numba.njit(cache=True)
def complete_step(engine: Engine, requests: Requests) -> None:
    """End the oldest step under way."""
    pool = engine.pool
    complete(
        engine.state,
        engine.clock,
        engine.slots,
        engine.lists,
        engine.rows,
        pool.links,
        pool.content,
        pool.table,
        pool.counts,
        requests.times,
        requests.facts,
        requests.contents,
    )


@numba.njit(cache=True)
def form_arrays(
    state: np.ndarray,
    clock: np.ndarray,
    step_time: np.ndarray,
    slots: np.ndarray,
    lists: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    times: np.ndarray,
    facts: np.ndarray,
    contents: np.ndarray,
    log: np.ndarray,
    sums: np.ndarray,
) -> None:
    while state[UNDER_WAY] < state[DEPTH]:
        preemptions = state[PREEMPTIONS]
        start = clock[NOW] if state[UNDER_WAY] == 0 else max(clock[NOW], clock[LAST_END])
        if state[SCHEDULER] == 0:
            formed = form_vllm(
                state,
                clock,
                step_time,
                slots,
                lists,
                rows,
                links,
                content,
                table,
                counts,
                times,
                facts,
                contents,
                sums,
            )
        else:
            formed = form_sglang(
                state,
                clock,
                step_time,
                slots,
                lists,
                rows,
                links,
                content,
                table,
                counts,
                times,
                facts,
                contents,
                sums,
            )
        if not formed:
            if state[UNDER_WAY] == 0 and state[PREEMPTIONS] != preemptions:
                continue  # the only one running gave way to itself
            return
        if log.shape[0] > 0:
            at = state[LOGGED]
            log[at, 0] = start
            log[at, 1] = clock[LAST_END]
            for column in range(7):
                log[at, 2 + column] = sums[column]
            log[at, 9] = state[RUNNING]
            log[at, 10] = state[WAITING] + state[PREEMPTED]
            log[at, 11] = used_blocks(counts)
            state[LOGGED] = at + 1


@numba.njit(cache=True)
def advance_arrays(
    state: np.ndarray,
    clock: np.ndarray,
    step_time: np.ndarray,
    slots: np.ndarray,
    lists: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    times: np.ndarray,
    facts: np.ndarray,
    contents: np.ndarray,
    until: float,
    log: np.ndarray,
    sums: np.ndarray,
) -> bool:
    logging = log.shape[0] > 0
    while True:
        if logging and state[LOGGED] + 2 > log.shape[0]:
            return False
        live = state[RUNNING] + state[PREEMPTED] + state[WAITING]
        if state[FORMED] != 0 and state[UNDER_WAY] == 0 and live == 0:
            if state[UNSEEN] == NOBODY:
                return True
            arrival = times[state[UNSEEN], ARRIVAL]
            if arrival >= until:
                return True
            clock[NOW] = max(clock[NOW] + clock[DRAIN], arrival) + clock[WAKE]
            state[FORMED] = 0
        elif (
            not logging
            and state[FORMED] == 0
            and state[PREFILLING] == 0
            and state[RUNNING] > 0
            and (state[WAITING] + state[PREEMPTED] == 0 or state[BLOCKED] != 0)
            and state[UNDER_WAY] == state[DEPTH] - 1
        ):
            skip_decodes(
                state,
                clock,
                step_time,
                slots,
                lists,
                rows,
                links,
                content,
                table,
                counts,
                times,
                contents,
                until,
            )
        if state[FORMED] == 0:
            if clock[NOW] >= until:
                return True
            take_in(state, clock[NOW], times, facts)
            if (
                not logging
                and state[PAGED] == 0
                and state[DEPTH] == 1
                and state[SCHEDULER] == 0
                and state[RUNNING] == 0
                and state[WAITING] > 0
            ):
                serve_prefills(state, clock, step_time, times, facts, until)
            form_arrays(
                state,
                clock,
                step_time,
                slots,
                lists,
                rows,
                links,
                content,
                table,
                counts,
                times,
                facts,
                contents,
                log,
                sums,
            )
            state[FORMED] = 1
            if state[STUCK] != 0:
                return True
        if state[UNDER_WAY] == 0:
            if state[RUNNING] + state[PREEMPTED] + state[WAITING] > 0:
                state[STUCK] = NEVER_FITS
                return True
            continue
        if clock[ENDS + state[OLDEST]] >= until:
            return True
        complete(
            state,
            clock,
            slots,
            lists,
            rows,
            links,
            content,
            table,
            counts,
            times,
            facts,
            contents,
        )
