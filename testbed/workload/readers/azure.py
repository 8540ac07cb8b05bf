"""Azure LLM inference traces 2023 and 2024 (Azure/AzurePublicDataset): times and lengths only.

``TIMESTAMP,ContextTokens,GeneratedTokens``; dates with up to nine digits of a second, with an
offset from UTC on every row (2024) or on none (2023).
"""

from __future__ import annotations

import re
from datetime import date

from testbed.workload.builder import BadRow, TraceBuilder
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.csv_rows import csv_rows, header, whole
from testbed.workload.source import Source
from testbed.workload.trace import Trace

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TIME = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?(?:([+-])(\d\d):?(\d\d)|Z)?",
    re.ASCII,
)


def matches(head: Head) -> bool:
    return set(COLUMNS) <= set(head.columns)


def read(source: Source, options: ReadOptions) -> Trace:
    where = header(source, *COLUMNS)
    builder = TraceBuilder(
        source.name,
        "azure",
        block_size=0,
        skip_bad=options.skip_bad,
        ticks_per_second=10**9,
        sha256=source.sha256,
    )
    at, context, generated = (where[c] for c in COLUMNS)
    zoned: bool | None = None
    for number, cells in csv_rows(source, builder, len(where)):
        try:
            arrival, offset = nanoseconds(cells[at]), has_offset(cells[at])
            if zoned is not None and zoned != offset:
                raise BadRow("an offset from UTC on some rows only", "bad time")
            lengths = whole(cells[context], COLUMNS[1]), whole(cells[generated], COLUMNS[2])
        except BadRow as error:
            builder.bad(number, error)
            continue
        zoned = offset
        builder.add(number, arrival=arrival, input_tokens=lengths[0], output_tokens=lengths[1])
    return builder.finish()


def nanoseconds(text: str) -> int:
    """Nanoseconds since 1970 of a written date and time; raises :class:`BadRow`.

    >>> nanoseconds("1970-01-01 00:00:01.5"), nanoseconds("1970-01-01 01:00:00+01:00")
    (1500000000, 0)
    """
    found = _TIME.fullmatch(text)
    if found is None:
        raise BadRow(f"the time {text[:40]!r} is not a date and time", "bad time")
    year, month, day, hour, minute, second = (int(g) for g in found.groups()[:6])
    try:
        days = date(year, month, day).toordinal() - date(1970, 1, 1).toordinal()
    except ValueError:
        raise BadRow(f"the time {text[:40]!r} is not a date and time", "bad time") from None
    ahead, more = int(found[9] or 0), int(found[10] or 0)
    if hour > 23 or minute > 59 or second > 60 or ahead > 23 or more > 59:
        raise BadRow(f"the time {text[:40]!r} is not a date and time", "bad time")
    total = ((days * 24 + hour) * 60 + minute) * 60 + second
    if found[8]:
        offset = (ahead * 60 + more) * 60
        total -= offset if found[8] == "+" else -offset
    return total * 10**9 + int((found[7] or "0").ljust(9, "0"))


def has_offset(text: str) -> bool:
    """Whether a date and time says how far it is from UTC."""
    found = _TIME.fullmatch(text)
    return found is not None and (found[8] is not None or text.endswith("Z"))


READER = Reader("azure", "Azure LLM inference CSV 2023 and 2024, no prefixes", matches, read)
