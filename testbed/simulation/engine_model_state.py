"""State of one engine in virtual time and the life of a request in it, compiled.

A request waits in a list, is admitted to a slot, computes its known tokens (a prompt; after a
preemption its outputs too), generates one token a step, and leaves. What a step contains is for
the schedulers (``engine_model_vllm``, ``engine_model_sglang``) to say.

The compiled functions take arrays one by one, in the order state, clock, slots, lists, rows, pool
(links, content, table, counts), times, facts, contents, as many as they need: a tuple's
members are counted references to Numba, and counting them would cost more than the work.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from testbed.simulation.engine_model_pool import (
    COUNTED,
    FREE,
    NO_CONTENT,
    REFERENCES,
    USABLE,
    Pool,
    find,
    private_key,
    release,
    remember,
)

(
    BUDGET,
    MAX_SEQUENCES,
    BLOCK_SIZE,
    PAGED,
    CACHING,
    DEPTH,
    SCHEDULER,
    RUNNING,
    PREEMPTED,
    HEAD,
    TAIL,
    UNSEEN,
    WAITING,
    WAITING_TOKENS,
    SPARES,
    UNDER_WAY,
    OLDEST,
    PREFILLING,
    BLOCKED,
    STEPS,
    PREEMPTIONS,
    FINISHED,
    LOGGED,
    STUCK,
    FORMED,
) = range(25)
"""Entries of ``Engine.state``: limits, then what changes.

HEAD, TAIL first and last waiting request, UNSEEN the first that has not arrived yet; WAITING how
many have arrived and WAITING_TOKENS what they and the preempted will compute; UNDER_WAY steps
formed and not ended, OLDEST the batch of the first; PREFILLING running sequences that do not
decode yet; BLOCKED the first waiting one cannot be admitted until something leaves; FINISHED head
of the list of finished requests that nobody has collected; STUCK why it cannot go on;
FORMED what this boundary allows has been formed.
"""
STATE_SIZE = 32

NOW, LAST_END, WAKE, DRAIN, RESERVED, ENDS = range(6)
"""Entries of ``Engine.clock``, s: this boundary; end of the newest step; two constants; the share
of outputs that SGLang's admission reserves; from ENDS on the end of the step in each batch."""
CLOCK_SIZE = 8

(
    REQUEST,
    PROMPT_END,
    TOTAL,
    KNOWN,
    COMPUTED,
    FLYING,
    BLOCKS,
    HASHED,
    RESIDENT,
    HASH_START,
    HASH_COUNT,
    STATUS,
) = range(12)
"""Columns of ``Engine.slots``, tokens unless said.

REQUEST its number; PROMPT_END tokens to compute before it decodes; TOTAL prompt and outputs;
KNOWN prompt and outputs seen; COMPUTED tokens whose state is or will be in the pool; FLYING
outputs under way; BLOCKS it refers to; HASHED blocks with content, from its first token on;
RESIDENT blocks of a pinned prefix that it uses without taking any; HASH_START, HASH_COUNT its
contents; STATUS.
"""
SLOT_FIELDS = 12

IDLE, LIVE, EVICTED = range(3)
"""Values of STATUS."""

ORDER, STACK, SPARE, BATCH = range(4)
"""Rows of ``Engine.lists``: running slots in order of admission; preempted ones, the next to
resume last; slots that nobody has; and, from BATCH on, two rows of slots that get a token from a
step, with their number in the last column."""
LIST_ROWS = 5

ARRIVAL, QUEUED, SCHEDULED, FIRST, DONE = range(5)
"""Columns of ``Requests.times``, s."""

INPUT, OUTPUT, START, COUNT, REUSABLE, CACHED_TOKENS, TIMES_PREEMPTED, FOLLOWING = range(8)
"""Columns of ``Requests.facts``."""

NOBODY = -1

NEVER_FITS, UNTOLD = 1, 2
"""Values of STUCK: a request can never be admitted; a preempted one may find its blocks again and
the pool merely counts them."""


class Engine(NamedTuple):
    """Arrays of one engine with up to S sequences."""

    state: np.ndarray  # (STATE_SIZE,) int64
    clock: np.ndarray  # (CLOCK_SIZE,) float64
    step_time: np.ndarray  # packed, see testbed.step_time
    slots: np.ndarray  # (S, SLOT_FIELDS) int64
    lists: np.ndarray  # (LIST_ROWS, S + 1) int64
    rows: np.ndarray  # (S, blocks per sequence) int32
    pool: Pool


class Requests(NamedTuple):
    """Arrays of R requests and the contents of their blocks."""

    times: np.ndarray  # (R, 5) float64
    facts: np.ndarray  # (R, 8) int64
    contents: np.ndarray  # (C,) int64


# --- Waiting ----------------------------------------------------------------------------------


@numba.njit(cache=True)
def enqueue(state: np.ndarray, facts: np.ndarray, request: int) -> None:
    """Add a request behind all others; arrivals come in order."""
    facts[request, FOLLOWING] = NOBODY
    if state[TAIL] == NOBODY:
        state[HEAD] = request
    else:
        facts[state[TAIL], FOLLOWING] = request
    state[TAIL] = request
    if state[UNSEEN] == NOBODY:
        state[UNSEEN] = request


@numba.njit(cache=True)
def take_in(state: np.ndarray, now: float, times: np.ndarray, facts: np.ndarray) -> None:
    """See what has arrived by this boundary."""
    request = state[UNSEEN]
    while request != NOBODY and times[request, ARRIVAL] <= now:
        times[request, QUEUED] = now
        state[WAITING] += 1
        state[WAITING_TOKENS] += facts[request, INPUT]
        request = facts[request, FOLLOWING]
    state[UNSEEN] = request


@numba.njit(cache=True)
def prepare(
    state: np.ndarray, slots: np.ndarray, slot: int, facts: np.ndarray, request: int
) -> None:
    """Fill a spare slot with a waiting request, still waiting."""
    slots[slot, REQUEST] = request
    slots[slot, TOTAL] = facts[request, INPUT] + facts[request, OUTPUT]
    slots[slot, KNOWN] = facts[request, INPUT]
    slots[slot, COMPUTED] = 0
    slots[slot, FLYING] = 0
    slots[slot, BLOCKS] = 0
    slots[slot, HASHED] = 0
    slots[slot, STATUS] = IDLE
    slots[slot, HASH_START] = facts[request, START]
    slots[slot, HASH_COUNT] = facts[request, COUNT] if state[CACHING] != 0 else 0
    resident = min(facts[request, REUSABLE], facts[request, INPUT] - 1)
    slots[slot, RESIDENT] = resident // state[BLOCK_SIZE]


@numba.njit(cache=True)
def admit(
    state: np.ndarray,
    now: float,
    slots: np.ndarray,
    lists: np.ndarray,
    times: np.ndarray,
    facts: np.ndarray,
    slot: int,
    cached: int,
) -> None:
    """A slot starts running; ``cached`` of its tokens need no computing.

    A preempted one must be the last of the stack, another the last spare slot; whoever calls has
    taken its request out of the waiting list.
    """
    request = slots[slot, REQUEST]
    state[WAITING_TOKENS] -= slots[slot, KNOWN]
    if slots[slot, STATUS] == EVICTED:
        state[PREEMPTED] -= 1
    else:
        state[SPARES] -= 1
        state[WAITING] -= 1
        times[request, SCHEDULED] = now
        facts[request, CACHED_TOKENS] = cached
    slots[slot, STATUS] = LIVE
    slots[slot, PROMPT_END] = slots[slot, KNOWN]
    slots[slot, COMPUTED] = cached
    lists[ORDER, state[RUNNING]] = slot
    state[RUNNING] += 1
    state[PREFILLING] += 1


# --- Blocks -----------------------------------------------------------------------------------


@numba.njit(cache=True)
def used_blocks(counts: np.ndarray) -> int:
    """Blocks that something refers to."""
    return counts[USABLE] - counts[FREE]


@numba.njit(cache=True)
def hits(
    state: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    contents: np.ndarray,
    slot: int,
) -> tuple[int, int]:
    """Full blocks already there for a slot's known tokens but the last, and how many of those
    stand in the free queue; they go into the slot's row."""
    resident = slots[slot, RESIDENT]
    most = (slots[slot, KNOWN] - 1) // state[BLOCK_SIZE]
    shared = slots[slot, HASH_COUNT]
    start = slots[slot, HASH_START]
    index = resident
    standing = 0
    while index < most:
        block = np.int64(0)
        if index < shared:
            block = find(content, table, contents[start + index])
        elif index - resident < slots[slot, BLOCKS]:
            # A block from before its preemption, if nobody has taken it since.
            kept = np.int64(rows[slot, index - resident])
            if content[kept] == private_key(slot, index):
                block = kept
        if block == 0:
            break
        rows[slot, index - resident] = block
        if links[block, REFERENCES] == 0:
            standing += 1
        index += 1
    return index - resident, standing


@numba.njit(cache=True)
def note_contents(
    state: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    contents: np.ndarray,
    slot: int,
) -> None:
    """Give the blocks that are full by now their shared content.

    A block whose last token is an output under way is not full: nobody knows it yet.
    """
    computed = max(
        slots[slot, COMPUTED] - slots[slot, FLYING],
        min(slots[slot, COMPUTED], slots[slot, PROMPT_END]),
    )
    full = min(computed, slots[slot, KNOWN]) // state[BLOCK_SIZE]
    if full <= slots[slot, HASHED]:
        return
    resident = slots[slot, RESIDENT]
    start = slots[slot, HASH_START]
    remember(
        links,
        content,
        table,
        counts,
        rows,
        slot,
        contents,
        start + resident,
        max(slots[slot, HASHED] - resident, 0),
        min(full, slots[slot, HASH_COUNT]) - resident,
    )
    slots[slot, HASHED] = full


@numba.njit(cache=True)
def free_blocks(
    state: np.ndarray,
    slots: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    contents: np.ndarray,
    slot: int,
) -> None:
    """Drop a slot's blocks."""
    known = 0
    if state[CACHING] != 0 and counts[COUNTED] == 0:
        note_contents(state, slots, rows, links, content, table, counts, contents, slot)
        known = max(slots[slot, HASHED] - slots[slot, RESIDENT], 0)
    release(links, counts, rows, slot, slots[slot, BLOCKS], known)


# --- Leaving ----------------------------------------------------------------------------------


@numba.njit(cache=True)
def preempt(
    state: np.ndarray,
    slots: np.ndarray,
    lists: np.ndarray,
    rows: np.ndarray,
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    facts: np.ndarray,
    contents: np.ndarray,
    position: int,
    kept: int,
) -> int:
    """Preempt the running slot at ``position`` of the order: it will be computed again.

    Up to ``kept`` of its first blocks keep their content until somebody takes them.
    """
    slot = lists[ORDER, position]
    state[RUNNING] -= 1
    for i in range(position, state[RUNNING]):
        lists[ORDER, i] = lists[ORDER, i + 1]
    known = 0
    if state[CACHING] != 0 and counts[COUNTED] != 0:
        state[STUCK] = UNTOLD
    elif state[CACHING] != 0:
        note_contents(state, slots, rows, links, content, table, counts, contents, slot)
        resident = slots[slot, RESIDENT]
        kept = min(kept, slots[slot, HASHED])
        for index in range(max(resident, slots[slot, HASH_COUNT]), kept):
            block = rows[slot, index - resident]
            if content[block] == NO_CONTENT:
                content[block] = private_key(slot, index)
        known = max(kept - resident, 0)
    release(links, counts, rows, slot, slots[slot, BLOCKS], known)
    if slots[slot, COMPUTED] < slots[slot, PROMPT_END]:
        state[PREFILLING] -= 1
    slots[slot, STATUS] = EVICTED
    slots[slot, COMPUTED] = 0
    slots[slot, FLYING] = 0
    lists[STACK, state[PREEMPTED]] = slot
    state[PREEMPTED] += 1
    state[PREEMPTIONS] += 1
    state[WAITING_TOKENS] += slots[slot, KNOWN]
    state[BLOCKED] = 0
    facts[slots[slot, REQUEST], TIMES_PREEMPTED] += 1
    return slot


@numba.njit(cache=True)
def complete(
    state: np.ndarray,
    clock: np.ndarray,
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
) -> None:
    """End the oldest step under way: outputs are seen, finished requests leave."""
    ring = state[OLDEST]
    now = clock[ENDS + ring]
    clock[NOW] = now
    state[FORMED] = 0
    state[UNDER_WAY] -= 1
    if state[DEPTH] == 2:
        state[OLDEST] = 1 - ring
    ended = 0
    for i in range(lists[BATCH + ring, state[MAX_SEQUENCES]]):
        slot = lists[BATCH + ring, i]
        known = slots[slot, KNOWN] + 1
        slots[slot, KNOWN] = known
        live = slots[slot, STATUS] == LIVE
        if live:
            slots[slot, FLYING] -= 1
        else:
            state[WAITING_TOKENS] += 1
        request = slots[slot, REQUEST]
        if known == facts[request, INPUT] + 1:
            times[request, FIRST] = now
        if known < slots[slot, TOTAL]:
            continue
        times[request, DONE] = now
        if live:
            ended += 1
            if state[PAGED] != 0:
                free_blocks(state, slots, rows, links, content, table, counts, contents, slot)
        else:
            # Preempted while its last output was under way.
            state[WAITING_TOKENS] -= known
            write = 0
            for read in range(state[PREEMPTED]):
                if lists[STACK, read] != slot:
                    lists[STACK, write] = lists[STACK, read]
                    write += 1
            state[PREEMPTED] = write
        slots[slot, STATUS] = IDLE
        lists[SPARE, state[SPARES]] = slot
        state[SPARES] += 1
        state[BLOCKED] = 0
        facts[request, FOLLOWING] = state[FINISHED]
        state[FINISHED] = request
    if ended > 0:
        write = 0
        for read in range(state[RUNNING]):
            slot = lists[ORDER, read]
            if slots[slot, STATUS] == LIVE:
                lists[ORDER, write] = slot
                write += 1
        state[RUNNING] = write


@numba.njit(cache=True)
def push(state: np.ndarray, clock: np.ndarray, seconds: float) -> int:
    """A formed step joins those under way; the batch it has."""
    ring = state[OLDEST] ^ state[UNDER_WAY]
    start = clock[NOW]
    if state[UNDER_WAY] > 0:
        start = max(start, clock[LAST_END])
    clock[LAST_END] = start + seconds
    clock[ENDS + ring] = start + seconds
    state[UNDER_WAY] += 1
    state[STEPS] += 1
    return ring
