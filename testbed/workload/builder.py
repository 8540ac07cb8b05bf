"""TraceBuilder: rows of any format, checked one by one, become the columns of a Trace."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import TraceError
from testbed.workload.blocks import chain_vertices, unsigned_ids
from testbed.workload.trace import Labels, Trace, TraceFacts, ragged_take

MAX_TOKENS = 2**31 - 1
"""No prompt is longer; a larger length is a broken row."""

_LONGEST = 4e9
"""Seconds whose nanoseconds still fit 63 bits."""


_SAID = 300
"""Characters of a row's problem: a value of any length may be part of it."""

_LATEST = 1e11
"""Seconds, some 3,000 years: a later time was written in another unit."""


class BadRow(ValueError):
    """One row cannot be used; the message says why, the builder adds file and line.

    ``kind`` is the name under which the row is counted where bad rows are skipped.
    """

    def __init__(self, reason: str, kind: str = "malformed") -> None:
        super().__init__(reason)
        self.kind = kind


class TraceBuilder:
    """Collects rows; ``finish`` sorts them by time and gives the :class:`Trace`.

    Parameters
    ----------
    name : file, shown in errors; its last part stands in the facts
    format : reader's name
    block_size : tokens per block; 0 when the format has no prefix information
    whole_chains : every chain must cover its prompt; otherwise it may cover less
    skip_bad : count bad rows in ``facts.dropped``, by kind, in place of raising; the first of them
        stands in the notes
    ticks_per_second : of the arrival numbers that are added
    """

    def __init__(
        self,
        name: str,
        format: str,
        *,
        block_size: int,
        whole_chains: bool = True,
        skip_bad: bool = False,
        ticks_per_second: int = 1,
        sha256: str = "",
    ) -> None:
        self.name = name
        self.format = format
        self.block_size = block_size
        self.whole_chains = whole_chains
        self.skip_bad = skip_bad
        self.ticks_per_second = ticks_per_second
        self.sha256 = sha256
        self.rows = 0
        self.dropped: Counter[str] = Counter()
        self.notes: dict[str, Any] = {}
        self._arrival: array[Any] = array("q")
        self._input = array("q")
        self._output = array("q")
        self._ids: array[int] | list[Any] = array("Q")
        self._lengths = array("q")
        self._tokens: array[int] | None = None
        self._token_lengths = array("q")
        self._labels = {k: _Names() for k in ("session", "type", "tenant", "adapter")}
        self._turn = array("q")

    def __len__(self) -> int:
        return len(self._arrival)

    def bad(self, line: int, problem: BadRow | str) -> None:
        """Refuse the row at ``line``, or count it where bad rows are skipped."""
        said = str(problem)
        said = said if len(said) <= _SAID else said[: _SAID - 1] + "…"
        if not self.skip_bad:
            raise TraceError(f"{self.name}:{line}: {said}")
        self.rows += 1
        self.dropped[getattr(problem, "kind", "malformed")] += 1
        self.notes.setdefault("first_dropped", f"line {line}: {said}")

    def add(
        self,
        line: int,
        *,
        arrival: float | int,
        input_tokens: int,
        output_tokens: int,
        ids: list[Any] | None = None,
        tokens: array[int] | list[int] | None = None,
        session: str | None = None,
        type: str | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
        turn: int = 0,
    ) -> None:
        """One request. Lengths must be whole numbers of at least 1, times finite.

        ``ids`` are block ids (whole numbers or strings), ceil(input/block size) of them where
        chains are whole. ``tokens``, on every row or on none, are the prompt's token ids.
        """
        try:
            self._check(arrival, input_tokens, output_tokens, ids, turn)
            if len(self) and (tokens is None) != (self._tokens is None):
                raise BadRow("token ids on some rows only")
            given_tokens = None if tokens is None else token_array(tokens, input_tokens)
        except BadRow as error:
            return self.bad(line, error)
        ids = ids or []
        self._append_ids(ids)
        self.rows += 1
        if isinstance(arrival, float) and arrival.is_integer():
            arrival = int(arrival)  # one 1.0 must not turn a column of nanoseconds into floats
        if isinstance(arrival, float) and self._arrival.typecode == "q":
            self._arrival = array("d", self._arrival)
        self._arrival.append(arrival)
        self._input.append(input_tokens)
        self._output.append(output_tokens)
        self._lengths.append(len(ids))
        if given_tokens is not None:
            self._tokens = array("i") if self._tokens is None else self._tokens
            self._tokens.extend(given_tokens)
            self._token_lengths.append(len(given_tokens))
        given = {"session": session, "type": type, "tenant": tenant, "adapter": adapter}
        for key, value in given.items():
            self._labels[key].append(value)
        self._turn.append(turn)
        return None

    def _check(
        self, arrival: Any, input_tokens: Any, output_tokens: Any, ids: list[Any] | None, turn: Any
    ) -> None:
        if isinstance(arrival, bool) or not isinstance(arrival, int | float):
            raise BadRow(f"the time {arrival!r} is not a number", "bad time")
        latest = min(2**63, _LATEST * self.ticks_per_second)
        if not math.isfinite(arrival) or abs(arrival) >= latest:
            unit = {1: "seconds", 1000: "milliseconds"}.get(self.ticks_per_second, "nanoseconds")
            raise BadRow(f"the time {arrival!r} is out of range in {unit}", "bad time")
        for what, value in (("input", input_tokens), ("output", output_tokens)):
            if type(value) is not int:
                raise BadRow(f"the {what} length {value!r} is not a whole number", "bad length")
            if not 1 <= value <= MAX_TOKENS:
                raise BadRow(f"the {what} length {value} is not in [1, {MAX_TOKENS}]", "bad length")
        if type(turn) is not int or not 0 <= turn < 2**31:
            raise BadRow(f"the turn {turn!r} is not a whole number")
        if not ids and not (self.whole_chains and self.block_size):
            return
        ids = ids or []
        if self.block_size == 0:
            raise BadRow("block ids, although no block size is given")
        expected = -(-input_tokens // self.block_size)
        if len(ids) > expected or (self.whole_chains and len(ids) != expected):
            raise BadRow(
                f"{len(ids)} block ids do not fit {input_tokens} input tokens "
                f"in blocks of {self.block_size} ({expected} expected)",
                "block ids do not fit",
            )
        if not set(map(type, ids)) <= {int, str}:
            odd = next(x for x in ids if type(x) not in (int, str))
            raise BadRow(f"the block id {odd!r} is not a whole number or a string")

    def _append_ids(self, ids: list[Any]) -> None:
        if isinstance(self._ids, list):
            self._ids.extend(ids)
            return
        before = len(self._ids)
        try:
            self._ids.extend(ids)
        except (OverflowError, TypeError):  # negative, beyond 64 bits, or a string
            del self._ids[before:]
            self._ids = list(self._ids)
            self._ids.extend(ids)

    def finish(self) -> Trace:
        """The trace, in order of arrival, times from 0.

        Raises
        ------
        TraceError
            No row is left.
        """
        if not self._arrival:
            first = self.notes.get("first_dropped")
            why = f" ({sum(self.dropped.values())} rows dropped; {first})" if self.dropped else ""
            raise TraceError(f"{self.name}: no requests{why}")
        arrival = relative_seconds(self._arrival, self.ticks_per_second)
        out_of_order = int((np.diff(arrival) < 0).sum())
        rows = np.argsort(arrival, kind="stable")
        ids, factorised = unsigned_ids(self._ids)
        ids, offsets = ragged_take(ids, _offsets(self._lengths), rows)
        vertex, labels = chain_vertices(ids, offsets)
        relabelled = len(vertex) > 0 and int(vertex.max()) + 1 != labels
        if relabelled:  # ids that name a block's own content: let them name the whole prefix
            ids = vertex.astype(np.uint64)
        if factorised:
            self.notes["block_ids"] = "numbered in order of appearance"
        token_ids = token_offsets = None
        if self._tokens is not None:
            flat = np.asarray(self._tokens, dtype=np.int32)
            token_ids, token_offsets = ragged_take(flat, _offsets(self._token_lengths), rows)
        return Trace(
            arrival=arrival[rows],
            input_tokens=np.asarray(self._input, dtype=np.int64)[rows],
            output_tokens=np.asarray(self._output, dtype=np.int64)[rows],
            block_size=self.block_size,
            blocks=ids,
            block_offsets=offsets,
            time_grid=time_grid(arrival[rows]),
            turn=np.asarray(self._turn, dtype=np.int32)[rows],
            facts=TraceFacts(
                name=Path(self.name).name,
                format=self.format,
                sha256=self.sha256,
                rows=self.rows,
                dropped=dict(self.dropped),
                out_of_order=out_of_order,
                relabelled=relabelled,
                notes=self.notes,
            ),
            token_ids=token_ids,
            token_offsets=token_offsets,
            **{k: v.column().take(rows) for k, v in self._labels.items()},
        )


def token_array(tokens: Any, count: Any) -> array[int]:
    """A prompt's token ids as int32, checked against its length; raises :class:`BadRow`."""
    if isinstance(tokens, array):
        return tokens
    if not isinstance(tokens, list):
        raise BadRow("the token ids are not a list")
    if len(tokens) != count:
        raise BadRow(f"{len(tokens)} token ids for {count!r} input tokens")
    if not set(map(type, tokens)) <= {int}:
        raise BadRow("a token id is not a whole number")
    try:
        ids = array("i", tokens)
    except OverflowError:
        raise BadRow("a token id is beyond 31 bits") from None
    if ids and min(ids) < 0:
        raise BadRow(f"the token id {min(ids)} is negative")
    return ids


def _offsets(lengths: array[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


class _Names:
    """A column of names as it grows."""

    def __init__(self) -> None:
        self.codes = array("i")
        self.index: dict[str, int] = {}

    def append(self, name: str | None) -> None:
        code = -1 if name is None else self.index.setdefault(name, len(self.index))
        self.codes.append(code)

    def column(self) -> Labels:
        return Labels(np.asarray(self.codes, dtype=np.int32), tuple(self.index))


def relative_seconds(times: array[Any], ticks_per_second: int) -> np.ndarray:
    """Seconds from the earliest time; whole numbers are subtracted before they become floats,
    so that nanoseconds since 1970 keep every digit."""
    raw = np.asarray(times)
    if raw.dtype == np.int64:
        # Without a sign the difference of any two 64-bit numbers is exact.
        since = raw.view(np.uint64) - raw.min().view(np.uint64)
        return np.asarray(since / ticks_per_second, dtype=np.float64)
    return np.asarray((raw - raw.min()) / ticks_per_second, dtype=np.float64)


def time_grid(arrival: np.ndarray) -> float:
    """The step of recorded times, s.

    Where a recorded time is shared by two requests or more on average, times were rounded to a
    coarse step: the median gap between distinct times. Otherwise it is the resolution of the
    record: the greatest step, down to a nanosecond, of which every time is a multiple; 0 where
    there is only one time, or more than a century of them.
    """
    distinct = np.unique(arrival)
    if len(distinct) < 2 or distinct[-1] > _LONGEST:
        return 0.0
    if len(arrival) >= 2 * len(distinct):
        return float(np.median(np.diff(distinct)))
    ticks = np.rint(distinct * 1e9).astype(np.int64)
    return float(np.gcd.reduce(ticks)) / 1e9
