"""KV block pool of an engine model: reference counts, free queue, prefix cache. All Numba.

A block is free when nothing refers to it; free blocks stand in one queue and are taken from its
front. A freed block that holds known content joins the back, so that content is forgotten in
least-recently-used order; one without content joins the front. Within a sequence blocks are freed
from its end, so that a prefix outlives what hangs on it. Block 0 is the queue's sentinel and
stands for vLLM's null block, which no sequence may use.

Content is a non-negative integer that stands for a block's tokens *and all before them*. Content
below −1 is private to one slot (see :func:`private_key`) and never enters the hash table.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

PREVIOUS, NEXT, REFERENCES, TWIN = range(4)
"""Columns of ``links``: free queue, reference count, next block of equal content."""

FREE, CACHED, EVICTIONS, DIRECT, USABLE, COUNTED = range(6)
"""Entries of ``counts``: blocks in the free queue, blocks with shared content, evictions; whether
the table has a place for every content there can be; all blocks; and whether blocks are merely
counted."""

NO_CONTENT = -1


class Pool(NamedTuple):
    """Arrays of one pool of B usable blocks, numbered 1 to B.

    The compiled functions take the arrays one by one: a tuple's members are counted references
    to Numba, and counting them costs more than the work.
    """

    links: np.ndarray  # (B + 1, 4) int32
    content: np.ndarray  # (B + 1,) int64
    table: np.ndarray  # (H,) int32, blocks by content, open addressing; H a power of two
    counts: np.ndarray  # (6,) int64


def counted_pool(blocks: int) -> Pool:
    """A pool of ``blocks`` usable blocks that are counted and not told apart: enough where
    nothing is ever found in the cache, at a fraction of the memory and time."""
    pool = new_pool(0)
    pool.counts[[FREE, USABLE]] = blocks
    pool.counts[COUNTED] = 1
    return pool


def new_pool(blocks: int, contents: int = 0) -> Pool:
    """A pool of ``blocks`` usable blocks, all free and without content, in order of number.

    Its table has a place for each of ``contents`` numbers from 0 on; without them, places for
    four times the blocks, so that :func:`scattered` contents rarely meet.
    """
    capacity = 4
    while capacity < max(4 * blocks, contents):
        capacity *= 2
    links = np.empty((blocks + 1, 4), dtype=np.int32)
    ids = np.arange(blocks + 1, dtype=np.int32)
    links[:, PREVIOUS] = np.roll(ids, 1)
    links[:, NEXT] = np.roll(ids, -1)
    links[:, REFERENCES] = 0
    links[:, TWIN] = 0
    return Pool(
        links=links,
        content=np.full(blocks + 1, NO_CONTENT, dtype=np.int64),
        table=np.zeros(capacity, dtype=np.int32),
        counts=np.array([blocks, 0, 0, contents > 0, blocks, 0], dtype=np.int64),
    )


def scattered(contents: np.ndarray) -> np.ndarray:
    """Contents as non-negative numbers whose low bits are as good as random: SplitMix64's
    finaliser, a bijection, less the top bit."""
    x = contents.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(0x7FFFFFFFFFFFFFFF)).astype(np.int64)


@numba.njit(cache=True)
def find(content: np.ndarray, table: np.ndarray, key: int) -> np.int64:
    """First block that holds ``key``, 0 if none does."""
    mask = table.size - 1
    at = key & mask
    while True:
        block = np.int64(table[at])
        if block == 0 or content[block] == key:
            return block
        at = (at + 1) & mask


@numba.njit(cache=True)
def remember(
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    rows: np.ndarray,
    slot: int,
    contents: np.ndarray,
    shift: int,
    start: int,
    stop: int,
) -> None:
    """Give block ``rows[slot, i]`` the shared content ``contents[shift + i]``, i from ``start``
    to ``stop``. A second block of equal content stands behind the first."""
    mask = table.size - 1
    for index in range(start, stop):
        block = np.int64(rows[slot, index])
        key = contents[shift + index]
        at = key & mask
        while True:
            seen = np.int64(table[at])
            if seen == 0:
                table[at] = block
                break
            if content[seen] == key:
                while links[seen, TWIN] != 0:
                    seen = np.int64(links[seen, TWIN])
                links[seen, TWIN] = block
                break
            at = (at + 1) & mask
        content[block] = key
        links[block, TWIN] = 0
    counts[CACHED] += max(stop - start, 0)


@numba.njit(cache=True)
def forget(
    links: np.ndarray, content: np.ndarray, table: np.ndarray, counts: np.ndarray, block: int
) -> None:
    """Take the content of ``block`` away."""
    key = content[block]
    content[block] = NO_CONTENT
    if key < 0:
        return
    counts[CACHED] -= 1
    counts[EVICTIONS] += 1
    mask = table.size - 1
    at = key & mask
    twin = links[block, TWIN]
    links[block, TWIN] = 0
    while True:
        seen = np.int64(table[at])
        if seen == block:
            break
        if content[seen] == key:
            while links[seen, TWIN] != block:
                seen = np.int64(links[seen, TWIN])
            links[seen, TWIN] = twin
            return
        at = (at + 1) & mask
    if twin != 0:
        table[at] = twin
        return
    if counts[DIRECT] != 0:
        table[at] = 0
        return
    # Close the gap so that probing never needs tombstones.
    hole = at
    while True:
        at = (at + 1) & mask
        moved = np.int64(table[at])
        if moved == 0:
            break
        home = content[moved] & mask
        if ((at - home) & mask) >= ((at - hole) & mask):
            table[hole] = moved
            hole = at
    table[hole] = 0


@numba.njit(cache=True)
def take(
    links: np.ndarray,
    content: np.ndarray,
    table: np.ndarray,
    counts: np.ndarray,
    rows: np.ndarray,
    slot: int,
    start: int,
    stop: int,
) -> None:
    """Blocks from the front of the free queue into ``rows[slot, start:stop]``, each with one
    reference, their content forgotten."""
    if counts[COUNTED] != 0:
        counts[FREE] -= stop - start
        return
    block = np.int64(links[0, NEXT])
    for index in range(start, stop):
        if content[block] != NO_CONTENT:
            forget(links, content, table, counts, block)
        links[block, REFERENCES] = 1
        rows[slot, index] = block
        block = np.int64(links[block, NEXT])
    links[0, NEXT] = block
    links[block, PREVIOUS] = 0
    counts[FREE] -= stop - start


@numba.njit(cache=True)
def touch(links: np.ndarray, counts: np.ndarray, block: int) -> None:
    """One more reference to a block that holds content; out of the free queue if it was there."""
    if links[block, REFERENCES] == 0:
        before = links[block, PREVIOUS]
        after = links[block, NEXT]
        links[before, NEXT] = after
        links[after, PREVIOUS] = before
        counts[FREE] -= 1
    links[block, REFERENCES] += 1


@numba.njit(cache=True)
def release(
    links: np.ndarray, counts: np.ndarray, rows: np.ndarray, slot: int, count: int, known: int
) -> None:
    """Drop one reference to each of ``rows[slot, :count]``, from the end.

    Blocks below ``known`` have content and join the back of the free queue; the others join its
    front, the last of the sequence first.
    """
    if counts[COUNTED] != 0:
        counts[FREE] += count
        return
    front = np.int64(0)
    for i in range(count - 1, -1, -1):
        block = np.int64(rows[slot, i])
        links[block, REFERENCES] -= 1
        if links[block, REFERENCES] > 0:
            continue
        counts[FREE] += 1
        if i < known:
            last = links[0, PREVIOUS]
            links[last, NEXT] = block
            links[block, PREVIOUS] = last
            links[block, NEXT] = 0
            links[0, PREVIOUS] = block
        else:
            after = links[front, NEXT]
            links[front, NEXT] = block
            links[block, PREVIOUS] = front
            links[block, NEXT] = after
            links[after, PREVIOUS] = block
            front = block


@numba.njit(cache=True)
def private_key(slot: int, index: int) -> int:
    """Content known to the sequence in ``slot`` alone, for its block ``index``."""
    return -2 - ((slot << 32) | index)
