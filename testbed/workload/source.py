"""Source: the bytes of a trace file as numbered lines, whatever wraps them."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import zstandard

from testbed.errors import TraceError

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One trace file in memory, decompressed; ``sha256`` is of the file as it lies on disk."""

    path: Path
    name: str
    sha256: str
    data: bytes

    @classmethod
    def open(cls, path: str | Path) -> Source:
        """Read a file, through gzip or zstd where its first bytes say so.

        Raises
        ------
        TraceError
            The file cannot be read, or its compression is broken.
        """
        path = Path(path)
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise TraceError(f"{path}: {error.strerror or error}") from None
        digest = hashlib.sha256(raw).hexdigest()
        try:
            data = _decompressed(raw)
        except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
            raise TraceError(f"{path}: broken compression: {error}") from None
        if data.startswith(_UTF16):
            try:
                data = data.decode("utf-16").encode()
            except UnicodeDecodeError:
                raise TraceError(f"{path}: not UTF-16 text, as its first bytes say") from None
        return cls(path, str(path), digest, data.removeprefix(_BOM))

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Numbered lines from 1, without their ends; blank lines are passed over."""
        for number, line in enumerate(io.BytesIO(self.data), 1):
            text = line.strip()
            if text:
                yield number, text

    def first_line(self) -> bytes:
        """The first line that is not blank; empty for an empty file."""
        return next((text for _, text in self.lines()), b"")


def _decompressed(raw: bytes) -> bytes:
    if raw.startswith(_GZIP):
        return gzip.decompress(raw)
    return _frames(raw) if raw.startswith(_ZSTD) else raw


def _frames(raw: bytes) -> bytes:
    """Every zstd frame, whole: the library's own reader of many frames ends in silence where a
    file was cut off."""
    parts, frame = [], None
    for start in range(0, len(raw), _CHUNK):
        chunk = raw[start : start + _CHUNK]
        while chunk:
            if frame is None:
                frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
            parts.append(frame.decompress(chunk))
            chunk = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError("the file ends inside a zstd frame")
    return b"".join(parts)
