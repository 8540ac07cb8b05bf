"""TraceLab session CSV (uw-syfi/TraceLab, csv_export): rounds of agent sessions, milliseconds.

``id`` or ``session_id``, ``round_idx``, ``prefix_len``, ``input_len``, ``output_len`` and, where
known, ``arrival_time`` (ms, of the session) and ``tool_wait_after_ms``. A round's prompt is
``prefix_len`` tokens kept of its session's context (earlier prompts and outputs) and
``input_len`` new ones; a smaller prefix than before is a compaction and branches the path.
Without ``round_idx`` every row is a request of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from testbed.workload.builder import BadRow, TraceBuilder
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.csv_rows import csv_rows, header, number, whole
from testbed.workload.source import Source
from testbed.workload.trace import Trace

BLOCK_SIZE = 16
LENGTHS = ("input_len", "output_len")


@dataclass(frozen=True)
class _Round:
    line: int
    index: int
    prefix: int
    new: int
    output: int
    arrival: float
    wait: float


@dataclass
class _Session:
    """The session's context as whole blocks, and how far its clock has come."""

    context: list[int] = field(default_factory=list)
    context_tokens: int = 0
    waited: float = 0.0


def matches(head: Head) -> bool:
    named = {"id", "session_id"} & set(head.columns)
    timed = {"arrival_time", "round_idx"} & set(head.columns)
    return bool(named and timed) and set(LENGTHS) <= set(head.columns)


def read(source: Source, options: ReadOptions) -> Trace:
    where = header(source, *LENGTHS)
    rounds = "round_idx" in where
    size = options.block_size or BLOCK_SIZE
    builder = TraceBuilder(
        source.name,
        "tracelab",
        block_size=size if rounds else 0,
        skip_bad=options.skip_bad,
        ticks_per_second=1000,
        sha256=source.sha256,
    )
    key = where.get("session_id", where.get("id"))
    sessions: dict[str, list[_Round]] = {}
    for line, cells in csv_rows(source, builder, len(where)):
        try:
            if key is None:
                raise BadRow("no column 'id' or 'session_id'")
            sessions.setdefault(cells[key], []).append(_round(line, cells, where))
        except BadRow as error:
            builder.bad(line, error)
    fresh = count()
    outside = 0
    for name, found in sessions.items():
        state = _Session()
        last = -1
        for at in sorted(found, key=lambda r: (r.index, r.line)) if rounds else found:
            if rounds and at.index == last:
                builder.bad(at.line, f"round {at.index} stands twice in session {name!r}")
                continue
            last = at.index
            kept = min(at.prefix, state.context_tokens)
            outside += at.prefix - kept
            tokens = at.prefix + at.new
            ids = None
            if rounds:
                shared = state.context[: kept // size]
                ids = shared + [next(fresh) for _ in range(-(-tokens // size) - len(shared))]
            builder.add(
                at.line,
                arrival=at.arrival + state.waited,
                input_tokens=tokens,
                output_tokens=at.output,
                ids=ids,
                session=name if rounds else None,
                turn=at.index + 1 if rounds else 0,
            )
            if ids is not None:
                whole_blocks = ids[: tokens // size]
                longer = (tokens + at.output) // size - len(whole_blocks)
                state.context = whole_blocks + [next(fresh) for _ in range(longer)]
                state.context_tokens = tokens + at.output
            state.waited += at.wait
    if "arrival_time" not in where:
        builder.notes["arrivals"] = "none recorded"
    if rounds:
        builder.notes["round_times"] = "session arrival plus tool waits; serving time not counted"
        if outside:
            builder.notes["prefix_tokens_from_outside_the_session"] = outside
    return builder.finish()


def _round(line: int, cells: list[str], where: dict[str, int]) -> _Round:
    def length(name: str, default: int | None = None) -> int:
        if name not in where and default is not None:
            return default
        value = whole(cells[where[name]], name)
        if not 0 <= value < 2**30:
            raise BadRow(f"{name} {value} is not in [0, 2^30)")
        return value

    def milliseconds(name: str) -> float:
        value = float(number(cells[where[name]], name)) if name in where else 0.0
        if not 0 <= value < 1e15:
            raise BadRow(f"{name} {value:g} is not a number of milliseconds >= 0")
        return value

    new, output = length("input_len"), length("output_len")
    if new < 1 or output < 1:
        raise BadRow("input_len and output_len must be at least 1")
    return _Round(
        line,
        length("round_idx", 0),
        length("prefix_len", 0),
        new,
        output,
        milliseconds("arrival_time"),
        milliseconds("tool_wait_after_ms"),
    )


READER = Reader("tracelab", "TraceLab session CSV with rounds, milliseconds", matches, read)
