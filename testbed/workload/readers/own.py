"""The project's own JSON Lines: a header line, then one request a line; written and read.

Header: ``{"format": "edge-serving-trace", "version": 1, "block_size": 32}``. Request:
``{"arrival": s, "input_tokens": n, "output_tokens": n, "blocks": [...]}`` and, where known,
``session``, ``type``, ``tenant``, ``adapter``, ``turn`` and ``tokens`` (the token ids). A chain
may cover less than the prompt; the rest is the request's own text. Fields of other names are
refused, and so are token ids that differ where two chains say that they are equal.
"""

from __future__ import annotations

import gzip
from array import array
from pathlib import Path
from typing import Any

import orjson
import zstandard

from testbed.errors import TraceError
from testbed.outcome import dump_json, write_atomically
from testbed.workload.builder import BadRow, TraceBuilder, token_array
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.json_rows import json_rows, missing
from testbed.workload.source import Source
from testbed.workload.trace import Trace

FORMAT = "edge-serving-trace"
VERSION = 1
_LABELS = ("session", "type", "tenant", "adapter")
_REQUIRED = ("arrival", "input_tokens", "output_tokens")
_KNOWN = {*_REQUIRED, *_LABELS, "blocks", "turn", "tokens"}


def matches(head: Head) -> bool:
    return head.fields.get("format") == FORMAT


def read(source: Source, options: ReadOptions) -> Trace:
    try:
        header = orjson.loads(source.first_line())
    except orjson.JSONDecodeError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise TraceError(f"{source.name}:1: no {FORMAT} header")
    if header.get("version") != VERSION:
        raise TraceError(f"{source.name}:1: version {header.get('version')!r} is not {VERSION}")
    size = header.get("block_size")
    if type(size) is not int or not 0 <= size < 2**31:
        raise TraceError(f"{source.name}:1: block_size {size!r} is not a whole number >= 0")
    builder = TraceBuilder(
        source.name,
        "own",
        block_size=size,
        whole_chains=False,
        skip_bad=options.skip_bad,
        sha256=source.sha256,
    )
    if isinstance(header.get("notes"), dict):
        builder.notes.update(header["notes"])
    texts = _Texts(size)
    for number, row in json_rows(source, builder, exact="blocks", skip=1):
        if (absent := missing(row, *_REQUIRED)) is not None:
            builder.bad(number, f"no field {absent!r}")
            continue
        if not row.keys() <= _KNOWN:
            builder.bad(number, f"unknown field {min(row.keys() - _KNOWN)!r}")
            continue
        blocks, tokens = row.get("blocks", []), row.get("tokens")
        if not isinstance(blocks, list) or not isinstance(tokens, list | None):
            builder.bad(number, "blocks or tokens is not a list")
            continue
        labels = {k: row.get(k) for k in _LABELS}
        if not all(v is None or isinstance(v, str) for v in labels.values()):
            builder.bad(number, "session, type, tenant and adapter must be strings")
            continue
        try:
            if tokens is not None:
                tokens = token_array(tokens, row["input_tokens"])
                texts.check(blocks, tokens)
        except BadRow as error:
            builder.bad(number, error)
            continue
        builder.add(
            number,
            arrival=row["arrival"],
            input_tokens=row["input_tokens"],
            output_tokens=row["output_tokens"],
            ids=blocks,
            tokens=tokens,
            turn=row.get("turn", 0),
            **labels,
        )
    return builder.finish()


class _Texts:
    """What the token ids say of every block id, in a trace that records both."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._text: dict[Any, bytes] = {}

    def check(self, ids: list[Any], tokens: array[int]) -> None:
        """Raises :class:`BadRow` where an id stood for other tokens before."""
        if not set(map(type, ids)) <= {int, str}:
            return  # the builder refuses them
        for k, block in enumerate(ids):
            text = tokens[k * self.size : (k + 1) * self.size].tobytes()
            if self._text.setdefault(block, text) != text:
                raise BadRow(f"block {block!r} stood for other tokens before")


def write_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace; ``.gz`` and ``.zst`` endings compress. Whole or not at all.

    Times are written as seconds from the trace's zero; reading counts from the first request.
    """
    header: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "block_size": trace.block_size,
        "notes": {"from": trace.facts.name, **trace.facts.notes},
    }
    lines = [dump_json(header)]
    ids = trace.blocks.tolist()
    starts = trace.block_offsets.tolist()
    for i in range(len(trace)):
        row: dict[str, Any] = {
            "arrival": float(trace.arrival[i]),
            "input_tokens": int(trace.input_tokens[i]),
            "output_tokens": int(trace.output_tokens[i]),
        }
        if trace.block_size:
            row["blocks"] = ids[starts[i] : starts[i + 1]]
        for name in _LABELS:
            if (label := getattr(trace, name)[i]) is not None:
                row[name] = label
        if trace.turn[i]:
            row["turn"] = int(trace.turn[i])
        if trace.token_ids is not None:
            row["tokens"] = trace.tokens(i).tolist()
        lines.append(orjson.dumps(row))
    data = b"\n".join(lines) + b"\n"
    suffix = Path(path).suffix
    if suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    elif suffix == ".zst":
        data = zstandard.ZstdCompressor().compress(data)
    write_atomically(path, data)


READER = Reader("own", "this project's JSON Lines with a header", matches, read)
