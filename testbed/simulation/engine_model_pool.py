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

FREE, CACHED, EVICTIONS = range(3)
"""Entries of ``counts``: blocks in the free queue, blocks with shared content, evictions."""

NO_CONTENT = -1


class Pool(NamedTuple):
    """Arrays of one pool of B usable blocks, numbered 1 to B.

    The compiled functions take the arrays one by one: a tuple's members are counted references
    to Numba, and counting them costs more than the work.
    """

    links: np.ndarray  # (B + 1, 4) int32
    content: np.ndarray  # (B + 1,) int64
    keys: np.ndarray  # (H,) int64, open addressing; H a power of two
    values: np.ndarray  # (H,) int32
    counts: np.ndarray  # (3,) int64


def new_pool(blocks: int) -> Pool:
    """A pool of ``blocks`` usable blocks, all free and without content, in order of number."""
    capacity = 4
    while capacity < 2 * blocks:
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
        keys=np.full(capacity, NO_CONTENT, dtype=np.int64),
        values=np.zeros(capacity, dtype=np.int32),
        counts=np.array([blocks, 0, 0], dtype=np.int64),
    )


@numba.njit(cache=True)
def _home(key: int, mask: int) -> np.int64:
    mixed = np.uint64(key) * np.uint64(0x9E3779B97F4A7C15)
    return np.int64((mixed >> np.uint64(20)) & np.uint64(mask))


@numba.njit(cache=True)
def find(keys: np.ndarray, values: np.ndarray, key: int) -> np.int64:
    """First block that holds ``key``, 0 if none does."""
    mask = keys.size - 1
    at = _home(key, mask)
    while True:
        seen = keys[at]
        if seen == key:
            return np.int64(values[at])
        if seen == NO_CONTENT:
            return np.int64(0)
        at = (at + 1) & mask


@numba.njit(cache=True)
def remember(
    links: np.ndarray,
    content: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    counts: np.ndarray,
    block: int,
    key: int,
) -> None:
    """Give ``block`` the shared content ``key``; a second block of equal content stands behind."""
    mask = keys.size - 1
    content[block] = key
    links[block, TWIN] = 0
    counts[CACHED] += 1
    at = _home(key, mask)
    while True:
        seen = keys[at]
        if seen == NO_CONTENT:
            keys[at] = key
            values[at] = block
            return
        if seen == key:
            twin = values[at]
            while links[twin, TWIN] != 0:
                twin = links[twin, TWIN]
            links[twin, TWIN] = block
            return
        at = (at + 1) & mask


@numba.njit(cache=True)
def forget(
    links: np.ndarray,
    content: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    counts: np.ndarray,
    block: int,
) -> None:
    """Take the content of ``block`` away."""
    key = content[block]
    content[block] = NO_CONTENT
    if key < 0:
        return
    counts[CACHED] -= 1
    counts[EVICTIONS] += 1
    mask = keys.size - 1
    at = _home(key, mask)
    while keys[at] != key:
        at = (at + 1) & mask
    holder = np.int64(values[at])
    if holder != block:
        while links[holder, TWIN] != block:
            holder = np.int64(links[holder, TWIN])
        links[holder, TWIN] = links[block, TWIN]
        links[block, TWIN] = 0
        return
    twin = links[block, TWIN]
    links[block, TWIN] = 0
    if twin != 0:
        values[at] = twin
        return
    # Close the gap so that probing never needs tombstones.
    hole = at
    while True:
        at = (at + 1) & mask
        moved = keys[at]
        if moved == NO_CONTENT:
            break
        home = _home(moved, mask)
        if ((at - home) & mask) >= ((at - hole) & mask):
            keys[hole] = moved
            values[hole] = values[at]
            hole = at
    keys[hole] = NO_CONTENT


@numba.njit(cache=True)
def take(
    links: np.ndarray,
    content: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    counts: np.ndarray,
) -> np.int64:
    """The block at the front of the free queue, its content forgotten; one reference."""
    block = np.int64(links[0, NEXT])
    after = links[block, NEXT]
    links[0, NEXT] = after
    links[after, PREVIOUS] = 0
    if content[block] != NO_CONTENT:
        forget(links, content, keys, values, counts, block)
    links[block, REFERENCES] = 1
    counts[FREE] -= 1
    return block


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
