"""BurstGPT CSV (HPMLL/BurstGPT): seconds, lengths, sessions in its newer files; no prefixes.

``Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type``, newer files with
``Session ID,Elapsed time`` after the first column. Failed requests have no response tokens; they
are bad rows, to be counted with ``skip_bad``.
"""

from __future__ import annotations

from collections import Counter

from testbed.workload.builder import BadRow, TraceBuilder
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.csv_rows import csv_rows, header, number, whole
from testbed.workload.source import Source
from testbed.workload.trace import Trace

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def matches(head: Head) -> bool:
    return set(COLUMNS) <= set(head.columns)


def read(source: Source, options: ReadOptions) -> Trace:
    where = header(source, *COLUMNS)
    builder = TraceBuilder(
        source.name,
        "burstgpt",
        block_size=0,
        skip_bad=options.skip_bad,
        sha256=source.sha256,
    )
    turns: Counter[str] = Counter()

    def optional(cells: list[str], name: str) -> str | None:
        return (cells[where[name]] or None) if name in where else None

    for line, cells in csv_rows(source, builder, len(where)):
        try:
            arrival = number(cells[where["Timestamp"]], "time")
            asked = whole(cells[where["Request tokens"]], "Request tokens")
            answered = whole(cells[where["Response tokens"]], "Response tokens")
            if asked >= 0 and answered == 0:
                raise BadRow("no response tokens: a failed request", "failed")
        except BadRow as error:
            builder.bad(line, error)
            continue
        session = optional(cells, "Session ID")
        if session is not None:
            turns[session] += 1
        builder.add(
            line,
            arrival=arrival,
            input_tokens=asked,
            output_tokens=answered,
            session=session,
            type=optional(cells, "Log Type"),
            adapter=optional(cells, "Model"),
            turn=turns[session] if session is not None else 0,
        )
    return builder.finish()


READER = Reader("burstgpt", "BurstGPT CSV, no prefixes", matches, read)
