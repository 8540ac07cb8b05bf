"""Rows of a JSON Lines file, whole numbers exact at any width."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

import orjson

from testbed.workload.builder import TraceBuilder
from testbed.workload.source import Source


def json_rows(
    source: Source, builder: TraceBuilder, exact: str | None = None, skip: int = 0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered JSON objects; a line that is none goes to ``builder.bad``.

    ``exact`` names a list of numbers that may be wider than 64 bits: the fast parser turns
    those into floats, so such a line is parsed again with unbounded integers. ``skip`` is the
    number of header lines.
    """
    for number, line in islice(source.lines(), skip, None):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            builder.bad(number, f"not JSON: {error.msg}")
            continue
        if not isinstance(row, dict):
            builder.bad(number, "not a JSON object")
            continue
        if exact is not None:
            values = row.get(exact)
            if isinstance(values, list) and float in set(map(type, values)):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    builder.bad(number, f"{exact}: a number that cannot be read")
                    continue
        yield number, row


def missing(row: dict[str, Any], *names: str) -> str | None:
    """The first of ``names`` that the row lacks."""
    return next((n for n in names if n not in row), None)
