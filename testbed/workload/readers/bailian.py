"""Qwen-Bailian JSONL (alibaba-edu/qwen-bailian-usagetraces-anon): 16-token blocks, seconds.

Each line: ``chat_id``, ``parent_chat_id`` (-1 for the first turn), ``timestamp`` s,
``input_length``, ``output_length``, ``type``, ``turn`` and ``hash_ids``, one for every started
16 tokens. A session is a chain of parents, named by its first chat; parents are looked up when
the whole file is read, so that a turn may stand before the one that it follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from testbed.workload.builder import TraceBuilder
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.json_rows import json_rows, missing
from testbed.workload.source import Source
from testbed.workload.trace import Labels, Trace

BLOCK_SIZE = 16
FIELDS = ("chat_id", "timestamp", "input_length", "output_length", "hash_ids")


def matches(head: Head) -> bool:
    return all(f in head.fields for f in FIELDS)


def read(source: Source, options: ReadOptions) -> Trace:
    builder = TraceBuilder(
        source.name,
        "bailian",
        block_size=options.block_size or BLOCK_SIZE,
        skip_bad=options.skip_bad,
        sha256=source.sha256,
    )
    parents: dict[int, int] = {}
    for number, row in json_rows(source, builder, exact="hash_ids"):
        if (problem := _problem(row)) is not None:
            builder.bad(number, problem)
            continue
        chat, parent = row["chat_id"], row.get("parent_chat_id", -1)
        if parents.setdefault(chat, parent) != parent:
            builder.bad(number, f"chat {chat} has two parents, {parents[chat]} and {parent}")
            continue
        builder.add(
            number,
            arrival=row["timestamp"],
            input_tokens=row["input_length"],
            output_tokens=row["output_length"],
            ids=row["hash_ids"],
            session=str(chat),
            type=row.get("type"),
            turn=row.get("turn", 0),
        )
    trace = builder.finish()
    first = [str(_first_chat(int(name), parents)) for name in trace.session.names]
    number_of = {name: code for code, name in enumerate(dict.fromkeys(first))}
    renamed = np.array([number_of[name] for name in first], dtype=np.int32)
    return replace(trace, session=Labels(renamed[trace.session.codes], tuple(number_of)))


def _first_chat(chat: int, parents: dict[int, int]) -> int:
    """The chat that a chain of parents starts with: the last that is known, or that a ring of
    parents comes back to. Every chat on the way then points to it."""
    way = {chat: None}
    while (parent := parents.get(chat, -1)) != -1 and parent not in way:
        chat = parent
        way[chat] = None
    for other in way:
        parents[other] = chat
    parents[chat] = -1
    return chat


def _problem(row: dict[str, Any]) -> str | None:
    if (absent := missing(row, *FIELDS)) is not None:
        return f"no field {absent!r}"
    if type(row["chat_id"]) is not int or type(row.get("parent_chat_id", -1)) is not int:
        return "chat_id or parent_chat_id is not a whole number"
    if not isinstance(row["hash_ids"], list):
        return "hash_ids is not a list"
    if not isinstance(row.get("type"), str | None):
        return "type is not a string"
    return None


READER = Reader("bailian", "Qwen-Bailian JSONL, 16-token blocks, seconds", matches, read)
