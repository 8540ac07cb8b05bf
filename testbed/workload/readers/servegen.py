"""ServeGen CSV (alibaba/ServeGen, ``save_requests_to_csv``): seconds and lengths, no prefixes.

``request_id,timestamp,input_tokens,output_tokens`` with further columns for other modalities,
which are not read.
"""

from __future__ import annotations

from testbed.workload.builder import BadRow, TraceBuilder
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.csv_rows import csv_rows, header, number, whole
from testbed.workload.source import Source
from testbed.workload.trace import Trace

COLUMNS = ("timestamp", "input_tokens", "output_tokens")


def matches(head: Head) -> bool:
    return set(COLUMNS) <= set(head.columns)


def read(source: Source, options: ReadOptions) -> Trace:
    where = header(source, *COLUMNS)
    builder = TraceBuilder(
        source.name,
        "servegen",
        block_size=0,
        skip_bad=options.skip_bad,
        sha256=source.sha256,
    )
    unread = sorted(set(where) - {*COLUMNS, "request_id", "client_id"})
    if unread:
        builder.notes["columns_not_read"] = unread
    at, asked, answered = (where[c] for c in COLUMNS)
    for line, cells in csv_rows(source, builder, len(where)):
        try:
            arrival = number(cells[at], "time")
            lengths = whole(cells[asked], "input_tokens"), whole(cells[answered], "output_tokens")
        except BadRow as error:
            builder.bad(line, error)
            continue
        builder.add(
            line,
            arrival=arrival,
            input_tokens=lengths[0],
            output_tokens=lengths[1],
            tenant=(cells[where["client_id"]] or None) if "client_id" in where else None,
        )
    return builder.finish()


READER = Reader("servegen", "ServeGen CSV, seconds, no prefixes", matches, read)
