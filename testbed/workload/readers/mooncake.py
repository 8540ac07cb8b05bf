"""Mooncake JSONL (kvcache-ai/Mooncake, FAST '25): 512-token blocks, milliseconds.

Each line: ``{"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}``. An id
stands for a block and everything before it; the last block may be part full.
"""

from __future__ import annotations

from testbed.workload.builder import TraceBuilder
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.json_rows import json_rows, missing
from testbed.workload.source import Source
from testbed.workload.trace import Trace

BLOCK_SIZE = 512
FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def matches(head: Head) -> bool:
    return all(f in head.fields for f in FIELDS) and "chat_id" not in head.fields


def read(source: Source, options: ReadOptions) -> Trace:
    builder = TraceBuilder(
        source.name,
        "mooncake",
        block_size=options.block_size or BLOCK_SIZE,
        skip_bad=options.skip_bad,
        ticks_per_second=1000,
        sha256=source.sha256,
    )
    for number, row in json_rows(source, builder, exact="hash_ids"):
        if (absent := missing(row, *FIELDS)) is not None:
            builder.bad(number, f"no field {absent!r}")
            continue
        if not isinstance(row["hash_ids"], list):
            builder.bad(number, "hash_ids is not a list")
            continue
        builder.add(
            number,
            arrival=row["timestamp"],
            input_tokens=row["input_length"],
            output_tokens=row["output_length"],
            ids=row["hash_ids"],
        )
    return builder.finish()


READER = Reader("mooncake", "Mooncake JSONL, 512-token blocks, milliseconds", matches, read)
