"""A replica's end of the wire without an engine: a fixed service time, ended when told."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from cluster.wire import Link, Server

UNLUCKY = 999_983
"""Output tokens at which the fake says that it failed."""


class FakeReplica:
    """Serves on loopback from a thread; ``die_after`` requests the connection ends."""

    def __init__(self, service: float = 0.002, die_after: int | None = None) -> None:
        self.service = service
        self.die_after = die_after
        self.seen: list[int] = []
        self._loop = asyncio.new_event_loop()
        self._server = Server(self._serve, "secret")
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(
            self._server.start("127.0.0.1"), self._loop
        ).result(10)
        self.link = Link("127.0.0.1", self.port, "secret")

    def node(self, number: int, profile: int) -> Any:
        """As :class:`cluster.deployment.Node`, for router and replay."""
        return SimpleNamespace(
            id=number,
            profile=profile,
            link=self.link,
            alive=True,
            clock_offset=0.0,
            facts=SimpleNamespace(max_sequences=8, clock="emulated"),
        )

    async def _serve(self, header: dict[str, Any], tokens: np.ndarray) -> dict[str, Any]:
        if header["do"] == "clock":
            return {"clock": time.perf_counter()}
        if header["do"] == "status":
            return {"wait": 0.0, "deviation": 0.0, "running": 0}
        received = time.perf_counter()
        self.seen.append(len(tokens))
        if self.die_after is not None and len(self.seen) > self.die_after:
            # Abruptly, with everything outstanding unanswered.
            for task in asyncio.all_tasks(self._loop):
                if task is not asyncio.current_task():
                    task.cancel()
            raise ConnectionError("died")
        await asyncio.sleep(self.service)
        if header["output_tokens"] == UNLUCKY:
            return {"ending": "failed", "reason": "unlucky"}
        first = time.perf_counter()
        return {
            "ending": "completed",
            "received": received,
            "queued": received,
            "scheduled": received,
            "engine_first_token": first,
            "first_token": first,
            "finished": first,
            "cached_tokens": 0,
            "output_tokens": header["output_tokens"],
        }

    def close(self) -> None:
        self.link.close()
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
