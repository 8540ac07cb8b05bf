"""Block identifiers: any label becomes a dense number, any chain a path of a forest."""

from __future__ import annotations

from array import array
from typing import Any

import numba
import numpy as np


def unsigned_ids(ids: array[int] | list[Any]) -> tuple[np.ndarray, bool]:
    """Block labels as uint64, and whether they had to be renumbered.

    Whole numbers in [0, 2⁶⁴) stay what they are. Anything else (a string, a negative or a wider
    number anywhere in the file) numbers all labels in order of appearance, so that two labels
    never meet in one number and none passes through a float.
    """
    if isinstance(ids, array):
        return np.asarray(ids, dtype=np.uint64), False
    index: dict[Any, int] = {}
    dense = [index.setdefault(label, len(index)) for label in ids]
    return np.array(dense, dtype=np.uint64), True


def chain_vertices(ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, int]:
    """Vertices of the prefix forest that the chains spell, and the number of distinct ids.

    Parameters
    ----------
    ids : (M,) uint64 block ids; chain i is ``ids[offsets[i]:offsets[i + 1]]``
    offsets : (N + 1,) int64

    Returns
    -------
    vertex : (M,) int32; equal numbers, equal prefixes. Numbered in order of appearance, so that
        a parent's number is below its children's
    labels : distinct ids; equal to the number of vertices exactly when every id has one parent
    """
    dense, labels = first_seen(np.ascontiguousarray(ids, dtype=np.uint64))
    vertex, _ = _spell(dense, np.ascontiguousarray(offsets, dtype=np.int64))
    return vertex, labels


def first_seen(values: np.ndarray) -> tuple[np.ndarray, int]:
    """Numbers (M,) int32 of ``values`` (M,) uint64 in order of appearance, and how many."""
    return _number(values, _slots(len(values)))


def _slots(count: int) -> int:
    return 1 << max(4, int(np.ceil(np.log2(max(1, count) * 1.6))))


@numba.njit(cache=True)
def mix64(x: np.uint64) -> np.uint64:
    """The finaliser of SplitMix64: a bijection of 64-bit numbers that scatters neighbours."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@numba.njit(cache=True)
def _number(values: np.ndarray, slots: int) -> tuple[np.ndarray, int]:
    mask = np.uint64(slots - 1)
    table = np.full(slots, -1, dtype=np.int32)
    where = np.empty(len(values), dtype=np.int32)  # first position of each number
    out = np.empty(len(values), dtype=np.int32)
    count = 0
    for k in range(len(values)):
        slot = mix64(values[k]) & mask
        while True:
            seen = table[slot]
            if seen < 0:
                table[slot] = count
                where[count] = k
                out[k] = count
                count += 1
                break
            if values[where[seen]] == values[k]:
                out[k] = seen
                break
            slot = (slot + np.uint64(1)) & mask
    return out, count


@numba.njit(cache=True)
def _spell_into(
    dense: np.ndarray, offsets: np.ndarray, table: np.ndarray, vertex: np.ndarray
) -> np.ndarray:
    mask = np.uint64(len(table) - 1)
    parent = np.empty(len(dense), dtype=np.int32)
    label = np.empty(len(dense), dtype=np.int32)
    count = 0
    for i in range(len(offsets) - 1):
        at = -1
        for k in range(offsets[i], offsets[i + 1]):
            key = (np.uint64(at + 1) << np.uint64(32)) | np.uint64(dense[k])
            slot = mix64(key + np.uint64(0x9E3779B97F4A7C15)) & mask
            while True:
                seen = table[slot]
                if seen < 0:
                    table[slot] = count
                    parent[count] = at
                    label[count] = dense[k]
                    at = count
                    count += 1
                    break
                if parent[seen] == at and label[seen] == dense[k]:
                    at = seen
                    break
                slot = (slot + np.uint64(1)) & mask
            vertex[k] = at
    return parent[:count].copy()


def _spell(dense: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    table = np.full(_slots(len(dense)), -1, dtype=np.int32)
    vertex = np.empty(len(dense), dtype=np.int32)
    parent = _spell_into(dense, offsets, table, vertex)
    return vertex, parent


def spell(ids: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As :func:`chain_vertices`, with each vertex's parent, (V,) int32, -1 for a root."""
    dense, _ = first_seen(np.ascontiguousarray(ids, dtype=np.uint64))
    return _spell(dense, np.ascontiguousarray(offsets, dtype=np.int64))


class TokenBlocks:
    """Numbers the blocks of token sequences; equal numbers, equal prefixes.

    Blocks are told apart by their parent and their tokens themselves, not by a hash of them, so
    that no two ever meet in one number.

    >>> blocks = TokenBlocks(2)
    >>> blocks.chain([7, 8, 9]), blocks.chain([7, 8, 1, 2])
    ([0, 1], [0, 2])
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._number: dict[tuple[int, bytes], int] = {}

    def chain(self, tokens: list[int] | array[int]) -> list[int]:
        """Block numbers of a prompt, the last block possibly part full."""
        raw = tokens if isinstance(tokens, array) else array("i", tokens)
        ids, parent = [], -1
        for start in range(0, len(raw), self.size):
            key = (parent, raw[start : start + self.size].tobytes())
            parent = self._number.setdefault(key, len(self._number))
            ids.append(parent)
        return ids
