"""Trace: one public or private request log, whole and columnar, whatever its file format."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from testbed.errors import TraceError


@dataclass(frozen=True)
class Labels:
    """A column of names: ``names[codes[i]]``, or absent where ``codes[i] < 0``."""

    codes: np.ndarray
    names: tuple[str, ...] = ()

    def take(self, rows: np.ndarray) -> Self:
        return replace(self, codes=self.codes[rows])

    def __getitem__(self, i: int) -> str | None:
        code = int(self.codes[i])
        return None if code < 0 else self.names[code]

    @property
    def present(self) -> bool:
        return bool((self.codes >= 0).any())


@dataclass(frozen=True)
class TraceFacts:
    """Where a trace came from and what was done to it; it stands in every outcome."""

    name: str
    format: str
    sha256: str = ""
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    out_of_order: int = 0
    relabelled: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "format": self.format,
            "sha256": self.sha256,
            "rows": self.rows,
            "dropped": dict(self.dropped),
            "out_of_order": self.out_of_order,
            "relabelled": self.relabelled,
            "notes": dict(self.notes),
        }


@dataclass(frozen=True)
class Trace:
    """N requests in order of arrival.

    Attributes
    ----------
    arrival : (N,) float64, seconds from the first request, nondecreasing
    input_tokens, output_tokens : (N,) int64, at least 1
    block_size : tokens per block of the chains; 0 when the trace says nothing of prefixes
    blocks : (M,) uint64, every request's chain of block ids, one after the other. An id stands
        for a block and all blocks before it: equal ids, equal prefixes (Theory A2)
    block_offsets : (N + 1,) int64; request i's chain is ``blocks[offsets[i]:offsets[i + 1]]``.
        A chain may cover less than the prompt: the rest is the request's own text
    token_ids, token_offsets : real token ids, (T,) int32 and (N + 1,) int64, or ``None``
    time_grid : seconds; the step of the recorded times (jitter stays within it)
    session, type, tenant, adapter : :class:`Labels`
    turn : (N,) int32, the request's number in its session from 1; 0 when unknown
    facts : provenance
    """

    arrival: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    block_size: int
    blocks: np.ndarray
    block_offsets: np.ndarray
    time_grid: float
    session: Labels
    type: Labels
    tenant: Labels
    adapter: Labels
    turn: np.ndarray
    facts: TraceFacts
    token_ids: np.ndarray | None = None
    token_offsets: np.ndarray | None = None

    def __post_init__(self) -> None:
        n = len(self.arrival)
        for name in ("input_tokens", "output_tokens", "turn"):
            if len(getattr(self, name)) != n:
                raise TraceError(f"{self.facts.name}: {name} has not {n} entries")
        if len(self.block_offsets) != n + 1 or self.block_offsets[-1] != len(self.blocks):
            raise TraceError(f"{self.facts.name}: block offsets do not fit the chains")
        if n and bool((np.diff(self.arrival) < 0).any()):
            raise TraceError(f"{self.facts.name}: arrivals are not in order")

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def duration(self) -> float:
        """Seconds from the first to the last arrival."""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Requests/s: gaps over the time that they span; 0 where all arrive at once."""
        return (len(self) - 1) / self.duration if self.duration > 0 else 0.0

    def chain(self, i: int) -> np.ndarray:
        """Block ids of request i, from the root on."""
        return self.blocks[self.block_offsets[i] : self.block_offsets[i + 1]]

    def tokens(self, i: int) -> np.ndarray:
        """The recorded token ids of request i.

        Raises
        ------
        TraceError
            The trace records no token ids.
        """
        if self.token_ids is None or self.token_offsets is None:
            raise TraceError(f"{self.facts.name}: the trace records no token ids")
        return self.token_ids[self.token_offsets[i] : self.token_offsets[i + 1]]

    def take(self, rows: np.ndarray) -> Self:
        """The requests at ``rows`` (indices in increasing order), arrivals not shifted."""
        rows = np.asarray(rows, dtype=np.int64)
        blocks, offsets = ragged_take(self.blocks, self.block_offsets, rows)
        ids, id_offsets = None, None
        if self.token_ids is not None and self.token_offsets is not None:
            ids, id_offsets = ragged_take(self.token_ids, self.token_offsets, rows)
        return replace(
            self,
            arrival=self.arrival[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            blocks=blocks,
            block_offsets=offsets,
            session=self.session.take(rows),
            type=self.type.take(rows),
            tenant=self.tenant.take(rows),
            adapter=self.adapter.take(rows),
            turn=self.turn[rows],
            token_ids=ids,
            token_offsets=id_offsets,
        )

    def within(self, start: float, stop: float) -> np.ndarray:
        """Rows of the requests that arrive in [start, stop) seconds.

        Raises
        ------
        TraceError
            There are none.
        """
        first, last = np.searchsorted(self.arrival, [start, stop], side="left")
        if first >= last:
            raise TraceError(f"{self.facts.name}: no request in [{start:g}, {stop:g}) s")
        return np.arange(first, last)

    def window(self, start: float, stop: float) -> Self:
        """Requests that arrive in [start, stop) seconds, times counted from ``start``.

        Raises
        ------
        TraceError
            No request arrives in the window.
        """
        cut = self.take(self.within(start, stop))
        return replace(cut, arrival=cut.arrival - start)


def ragged_take(
    flat: np.ndarray, offsets: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a ragged array given as flat values and offsets."""
    lengths = (offsets[1:] - offsets[:-1])[rows]
    new = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    index = np.repeat(offsets[rows] - new[:-1], lengths) + np.arange(new[-1])
    return flat[index], new


def read_trace(
    path: str | Path,
    *,
    format: str | None = None,
    skip_bad: bool = False,
    block_size: int | None = None,
    tokenizer: Any = None,
) -> Trace:
    """Read a trace file of any known format, found by its content.

    Parameters
    ----------
    path : plain, gzip or zstd
    format : a reader's name, where detection is not wanted
    skip_bad : count bad rows in ``trace.facts.dropped`` in place of raising
    block_size : tokens per block, where they are not the format's own (512 in Mooncake's, 16 in
        Bailian's) or where the file records tokens or text, which are cut into blocks (16)
    tokenizer : for text, a callable or a tokenizer directory

    Raises
    ------
    TraceError
        The file cannot be read or understood; the message names file and line.

    Examples
    --------
    >>> trace = read_trace("conversation_trace.jsonl")  # doctest: +SKIP
    >>> len(trace), round(trace.rate, 1), trace.chain(0)[:2].tolist()  # doctest: +SKIP
    (12031, 3.4, [0, 1])
    """
    from testbed.workload.readers import Head, ReadOptions, readers
    from testbed.workload.source import Source

    source = Source.open(path)
    known = readers()
    options = ReadOptions(skip_bad, block_size, tokenizer)
    if format is not None:
        if format not in known:
            raise TraceError(f"{path}: format {format!r} is not one of {', '.join(known)}")
        return known[format].read(source, options)
    line = source.first_line()
    if not line:
        raise TraceError(f"{path}: the file is empty")
    if line.startswith(b"version https://git-lfs"):
        raise TraceError(f"{path}: a Git LFS pointer, not the file that it stands for")
    if line.startswith(b"[") or line == b"{":
        raise TraceError(f"{path}:1: JSON, but not one request a line (JSON Lines)")
    head = Head.of(source)
    for reader in known.values():
        if reader.matches(head):
            return reader.read(source, options)
    shown = ", ".join(list(head.fields or head.columns)[:8])
    raise TraceError(f"{path}:1: no known trace format has the fields {shown[:200]!r}")
