"""Readers: one module a file format, each found by the content of a file's first line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import orjson

from testbed.workload.source import Source
from testbed.workload.trace import Trace

LOOKED_AT = 20
"""Lines among which detection looks for a JSON object: the first may be a broken one."""


@dataclass(frozen=True)
class Reader:
    """One format.

    Attributes
    ----------
    name : as ``--format`` gives it
    description : one line for help texts
    matches : whether a file with this head is of the format
    read : the whole file as a :class:`Trace`
    """

    name: str
    description: str
    matches: Callable[[Head], bool]
    read: Callable[[Source, ReadOptions], Trace]


@dataclass(frozen=True)
class Head:
    """What detection looks at: the first JSON object among the first lines, and the first line
    as CSV column names."""

    fields: dict[str, Any]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, source: Source) -> Head:
        columns: tuple[str, ...] = ()
        for _, line in islice(source.lines(), LOOKED_AT):
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError:
                text = line.decode("utf-8", errors="replace")
                columns = columns or tuple(c.strip().strip('"') for c in text.split(","))
                continue
            if isinstance(value, dict):
                return cls(value, columns)
        return cls({}, columns)


@dataclass(frozen=True)
class ReadOptions:
    """What a caller may say of a file beyond its path.

    Attributes
    ----------
    skip_bad : count bad rows in place of raising
    block_size : tokens per block where they are not the format's own
    tokenizer : for text, a callable of messages or text that gives token ids, or a directory
    """

    skip_bad: bool = False
    block_size: int | None = None
    tokenizer: Any = None


def readers() -> dict[str, Reader]:
    """Every reader by name, in the order in which detection asks them."""
    from testbed.workload.readers import (
        azure,
        bailian,
        burstgpt,
        chat,
        mooncake,
        own,
        servegen,
        token_ids,
        tracelab,
    )

    modules = (own, bailian, mooncake, token_ids, azure, burstgpt, tracelab, servegen, chat)
    return {m.READER.name: m.READER for m in modules}
