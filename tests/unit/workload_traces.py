"""Small traces with known prefixes that several workload tests use."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st

from testbed.workload.builder import TraceBuilder
from testbed.workload.trace import Trace

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"


def published(name: str) -> Path:
    """A published trace beside the repository; the test is skipped where it is not there."""
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"the published trace {name} is not at {TRACES}")
    return path


def trace_of(
    texts: list[list[int]],
    *,
    size: int = 4,
    short: list[int] | None = None,
    arrival: list[float] | None = None,
    outputs: list[int] | None = None,
    types: list[str] | None = None,
) -> Trace:
    """A trace whose request i is the blocks of content ``texts[i]``.

    Equal contents after equal prefixes are one block; ``short[i]`` tokens are missing from the
    last block, which is then the request's own.
    """
    builder = TraceBuilder("made", "made", block_size=size)
    number: dict[tuple[object, ...], int] = {}
    for i, text in enumerate(texts):
        missing = short[i] if short else 0
        keys: list[tuple[object, ...]] = [tuple(text[: k + 1]) for k in range(len(text))]
        if missing:
            keys[-1] = (*keys[-1], "short", missing)
        builder.add(
            i + 1,
            arrival=float(i) if arrival is None else arrival[i],
            input_tokens=size * len(text) - missing,
            output_tokens=outputs[i] if outputs else 1 + i % 5,
            ids=[number.setdefault(k, len(number)) for k in keys],
            type=types[i] if types else None,
        )
    return builder.finish()


def texts(most: int = 12) -> st.SearchStrategy[list[list[int]]]:
    """Block contents of several prompts, from few symbols so that they share much."""
    return st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=most)


def short_for(prompts: list[list[int]], size: int = 4) -> list[int]:
    """Missing tokens of each last block, a fixed function of the prompt."""
    return [(sum(t) + 2 * len(t)) % size for t in prompts]


def prefix_tokens(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common prefix of two token sequences."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
