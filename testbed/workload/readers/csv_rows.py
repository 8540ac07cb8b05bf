"""Rows of a CSV file by column name, numbers read strictly."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator

from testbed.errors import TraceError
from testbed.workload.builder import BadRow, TraceBuilder
from testbed.workload.source import Source

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


def header(source: Source, *required: str) -> dict[str, int]:
    """Column positions by name from the first line.

    Raises
    ------
    TraceError
        A required column is missing, or a name stands twice.
    """
    first = next(source.lines(), (1, b""))
    names = _cells(first[1]) or []
    if len(set(names)) != len(names):
        raise TraceError(f"{source.name}:{first[0]}: a column name stands twice")
    where = {name: i for i, name in enumerate(names)}
    for name in required:
        if name not in where:
            raise TraceError(f"{source.name}:{first[0]}: no column {name!r}")
    return where


def csv_rows(
    source: Source, builder: TraceBuilder, columns: int
) -> Iterator[tuple[int, list[str]]]:
    """Numbered rows of ``columns`` cells after the header; others go to ``builder.bad``."""
    lines = source.lines()
    next(lines, None)
    for number, line in lines:
        cells = _cells(line)
        if cells is None:
            builder.bad(number, "not a line of CSV in UTF-8")
        elif len(cells) != columns:
            builder.bad(number, f"{len(cells)} cells, but the header has {columns}")
        else:
            yield number, cells


def _cells(line: bytes) -> list[str] | None:
    try:
        rows = list(csv.reader([line.decode("utf-8")], strict=True))
    except (UnicodeDecodeError, csv.Error):
        return None
    return [c.strip() for c in rows[0]] if rows else None


def whole(text: str, what: str) -> int:
    """A whole number; raises :class:`BadRow` for anything else."""
    digits = text[1:] if text.startswith("-") else text
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise BadRow(f"the {what} {text[:40]!r} is not a whole number")
    return int(text)


def number(text: str, what: str) -> int | float:
    """A number, whole where it is written so; raises :class:`BadRow`."""
    try:
        return whole(text, what)
    except BadRow:
        pass
    if _NUMBER.fullmatch(text) is None:
        raise BadRow(f"the {what} {text[:40]!r} is not a number")
    return float(text)
