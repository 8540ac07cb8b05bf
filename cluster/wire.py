"""Wire: the data path between router and replica, one TCP connection each.

Ray starts, watches and stops the replicas; requests do not go through it, since an actor call
alone costs milliseconds on a small machine. A frame is two little-endian uint32 lengths, a JSON
header and a body of int32 token ids. Nothing is unpickled. A connection starts with the
deployment's secret; a peer without it is dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from testbed.errors import ClusterError

_LENGTHS = struct.Struct("<II")
MAX_FRAME_BYTES = 64 * 2**20
SECRET_VARIABLE = "TESTBED_SECRET"


class ReplicaLost(ClusterError):
    """The replica's connection ended while requests were out."""


def pack(header: dict[str, Any], body: bytes = b"") -> bytes:
    """One frame."""
    text = orjson.dumps(header)
    return _LENGTHS.pack(len(text), len(body)) + text + body


async def read_frame(reader: asyncio.StreamReader) -> tuple[dict[str, Any], np.ndarray]:
    """The next frame's header and token ids (int32); IncompleteReadError at the end."""
    head, body = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
    if head + body > MAX_FRAME_BYTES:
        raise ClusterError(f"a frame of {head + body} bytes is over the limit")
    header = orjson.loads(await reader.readexactly(head))
    return header, np.frombuffer(await reader.readexactly(body), dtype=np.int32)


class Link:
    """The router's end of one replica's connection.

    ``submit`` sends from the calling thread; ``on_reply`` is called in the link's reader thread
    with the reply's header, or with a :class:`ReplicaLost` when the connection ends.
    """

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._pending: dict[int, Callable[[dict[str, Any] | ReplicaLost], None]] = {}
        self._next = 0
        self._lock = threading.Lock()
        self._lost: ReplicaLost | None = None
        try:
            self._socket = socket.create_connection((host, port), timeout=10)
        except OSError as error:
            raise ReplicaLost(f"replica at {host}:{port}: {error.strerror or error}") from None
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(pack({"secret": secret}))
        self._reader = threading.Thread(target=self._read, name="link-reader", daemon=True)
        self._reader.start()

    def submit(
        self,
        header: dict[str, Any],
        tokens: np.ndarray,
        on_reply: Callable[[dict[str, Any] | ReplicaLost], None],
    ) -> None:
        body = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        with self._lock:
            if self._lost is not None:
                raise self._lost
            self._next += 1
            call = self._next
            self._pending[call] = on_reply
            try:
                self._socket.sendall(pack({**header, "call": call}, body))
            except OSError as error:
                del self._pending[call]
                raise ReplicaLost(f"replica: {error.strerror or error}") from None

    def ask(self, header: dict[str, Any], timeout: float = 30.0) -> dict[str, Any]:
        """Send and wait for the reply."""
        done = threading.Event()
        box: list[dict[str, Any] | ReplicaLost] = []

        def keep(reply: dict[str, Any] | ReplicaLost) -> None:
            box.append(reply)
            done.set()

        self.submit(header, np.empty(0, dtype=np.int32), keep)
        if not done.wait(timeout):
            raise ReplicaLost(f"replica: no answer to {header.get('do')!r} in {timeout:g} s")
        if isinstance(box[0], ReplicaLost):
            raise box[0]
        return box[0]

    def clock_offset(self, rounds: int = 30) -> tuple[float, float]:
        """(replica clock − ours, half the best round trip), seconds: the error's bound."""
        best = (0.0, float("inf"))
        for _ in range(rounds):
            before = time.perf_counter()
            theirs = float(self.ask({"do": "clock"})["clock"])
            after = time.perf_counter()
            half = (after - before) / 2
            if half < best[1]:
                best = (theirs - (before + after) / 2, half)
        return best

    def _read(self) -> None:
        try:
            while True:
                head, body = _LENGTHS.unpack(self._exactly(_LENGTHS.size))
                header = orjson.loads(self._exactly(head))
                self._exactly(body)
                with self._lock:
                    reply = self._pending.pop(header["call"])
                reply(header)
        except OSError as error:
            reason = error.strerror or str(error)
        with self._lock:
            self._lost = ReplicaLost(f"replica: connection ended ({reason})")
            pending, self._pending = self._pending, {}
        for reply in pending.values():
            reply(self._lost)

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise ConnectionError("closed by the replica")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        with suppress(OSError):  # the peer may have closed first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=5)


class Server:
    """The replica's end: ``serve(header, tokens)`` answers each frame with a header."""

    def __init__(self, serve: Callable[[dict[str, Any], np.ndarray], Any], secret: str) -> None:
        self._serve = serve
        self._secret = secret
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str) -> int:
        """Bind a free port of ``host`` and return it."""
        self._server = await asyncio.start_server(self._connected, host, 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            hello, _ = await read_frame(reader)
            if not hmac.compare_digest(str(hello.get("secret", "")), self._secret):
                return
            while True:
                header, tokens = await read_frame(reader)
                task = asyncio.create_task(self._answer(header, tokens, writer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        except (asyncio.IncompleteReadError, ConnectionError, orjson.JSONDecodeError):
            pass  # the router left, or never was one
        finally:
            writer.close()

    async def _answer(
        self, header: dict[str, Any], tokens: np.ndarray, writer: asyncio.StreamWriter
    ) -> None:
        reply = await self._serve(header, tokens)
        if not writer.is_closing():
            writer.write(pack({**reply, "call": header["call"]}))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
