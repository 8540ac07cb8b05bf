"""Heap: the event list of a compiled simulation, earliest first."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np


class Heap(NamedTuple):
    """A binary heap of events; ``size[0]`` of them are in it.

    An event is a time, a code that says what happens to whom, and a value.
    """

    time: np.ndarray  # (C,) seconds
    code: np.ndarray  # (C,) int64
    value: np.ndarray  # (C,) float64
    size: np.ndarray  # (1,) int64


def new_heap(capacity: int) -> Heap:
    return Heap(
        np.empty(capacity),
        np.empty(capacity, dtype=np.int64),
        np.empty(capacity),
        np.zeros(1, dtype=np.int64),
    )


def grown(heap: Heap) -> Heap:
    """The same events in twice the room."""
    larger = new_heap(2 * len(heap.time))
    n = len(heap.time)
    larger.time[:n], larger.code[:n], larger.value[:n] = heap.time, heap.code, heap.value
    larger.size[0] = heap.size[0]
    return larger


@numba.njit(cache=True)
def push(heap: Heap, time: float, code: int, value: float) -> None:
    """Add an event; the caller has seen to it that there is room."""
    i = heap.size[0]
    heap.size[0] = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if heap.time[parent] <= time:
            break
        heap.time[i] = heap.time[parent]
        heap.code[i] = heap.code[parent]
        heap.value[i] = heap.value[parent]
        i = parent
    heap.time[i] = time
    heap.code[i] = code
    heap.value[i] = value


@numba.njit(cache=True)
def drop_first(heap: Heap) -> None:
    """Remove the earliest event, which stands at index 0; the heap is not empty."""
    n = heap.size[0] - 1
    heap.size[0] = n
    time, code, value = heap.time[n], heap.code[n], heap.value[n]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and heap.time[child + 1] < heap.time[child]:
            child += 1
        if heap.time[child] >= time:
            break
        heap.time[i] = heap.time[child]
        heap.code[i] = heap.code[child]
        heap.value[i] = heap.value[child]
        i = child
    heap.time[i] = time
    heap.code[i] = code
    heap.value[i] = value
