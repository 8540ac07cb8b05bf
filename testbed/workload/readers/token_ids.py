"""Token-id JSONL, as ShareGPT requests come with LLMServingSim: real ids, nanoseconds.

Each line: ``input_toks``, ``output_toks``, ``arrival_time_ns``, ``input_tok_ids`` (and the ids
of the output, which are not read). Prefixes are found in the ids themselves.
"""

from __future__ import annotations

from testbed.workload.blocks import TokenBlocks
from testbed.workload.builder import BadRow, TraceBuilder, token_array
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.json_rows import json_rows, missing
from testbed.workload.source import Source
from testbed.workload.trace import Trace

BLOCK_SIZE = 16
FIELDS = ("input_toks", "output_toks", "arrival_time_ns", "input_tok_ids")


def matches(head: Head) -> bool:
    return all(f in head.fields for f in FIELDS)


def read(source: Source, options: ReadOptions) -> Trace:
    builder = TraceBuilder(
        source.name,
        "token_ids",
        block_size=options.block_size or BLOCK_SIZE,
        skip_bad=options.skip_bad,
        ticks_per_second=10**9,
        sha256=source.sha256,
    )
    blocks = TokenBlocks(builder.block_size)
    for number, row in json_rows(source, builder):
        if (absent := missing(row, *FIELDS)) is not None:
            builder.bad(number, f"no field {absent!r}")
            continue
        try:
            tokens = token_array(row["input_tok_ids"], row["input_toks"])
        except BadRow as error:
            builder.bad(number, error)
            continue
        builder.add(
            number,
            arrival=row["arrival_time_ns"],
            input_tokens=row["input_toks"],
            output_tokens=row["output_toks"],
            ids=blocks.chain(tokens),
            tokens=tokens,
        )
    return builder.finish()


READER = Reader("token_ids", "JSONL with token ids and nanoseconds (ShareGPT)", matches, read)
