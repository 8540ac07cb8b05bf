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
    """Numbered JSON objects; a line that is none, or names a field twice, goes to
    ``builder.bad``.

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
        if (twice := _stands_twice(line, row)) is not None:
            builder.bad(number, f"the field {twice!r} stands twice")
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


def _stands_twice(line: bytes, row: dict[str, Any]) -> str | None:
    """A name that stands twice in one object: parsers keep the last of them without a word."""
    inner = (key for part in row.values() if isinstance(part, dict) for key in part)
    if all(line.count(b'"%b"' % key.encode()) < 2 for key in (*row, *inner)):
        return None  # no quoted name is repeated

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            raise _TwiceError(next(n for n in names if names.count(n) > 1))
        return found

    try:
        json.loads(line, object_pairs_hook=once)
    except _TwiceError as error:
        return str(error)
    except (ValueError, RecursionError):
        pass  # what this parser cannot read the other one has read
    return None


class _TwiceError(Exception):
    """The name that stands twice."""


def missing(row: dict[str, Any], *names: str) -> str | None:
    """The first of ``names`` that the row lacks."""
    return next((n for n in names if n not in row), None)
