"""Replica: one engine, its pinned profile, what it advertises and what it exports.

A replica is a Ray actor. Ray creates, watches and ends it; requests reach it over its own
connection (:mod:`cluster.wire`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil

from cluster.engines import make_engine
from cluster.engines.base import Engine, EngineFacts, Generation, Placement
from cluster.metrics import ReplicaMetrics
from cluster.wire import Server
from testbed.errors import EngineError, TestbedError
from testbed.routing.telemetry import AdvertisedWait
from testbed.scenario import EngineSpec, Prefill
from testbed.theory.prefill import prefill_time


class Replica:
    """One engine behind a connection. Created as a Ray actor by the deployment."""

    def __init__(
        self,
        spec: EngineSpec,
        placement: Placement,
        profile: str,
        prefill: Prefill,
        window: float,
        secret: str,
    ) -> None:
        self._spec = spec
        self._scale = spec.time_scale  # waits are advertised in the engine's own seconds
        self._engine: Engine = make_engine(spec, placement)
        self._profile = profile
        self._prefill = prefill
        self._waits = AdvertisedWait(window)
        self._metrics = ReplicaMetrics(profile)
        self._server = Server(self._serve, secret)
        self._pinned = 0
        self._inside = 0
        self._facts: EngineFacts | None = None
        self._progress: tuple[str, int, int] = ("", 0, 0)

    # -- life, through Ray --

    async def start(self, host: str) -> dict[str, Any]:
        """Start engine and servers; returns facts, ports and process ids."""
        try:
            self._facts = await self._engine.start()
            port = await self._server.start(host)
            metrics_port = self._metrics.serve()
        except TestbedError as error:
            await self._engine.stop()
            return {"error": str(error)}
        return {
            "facts": self._facts,
            "port": port,
            "metrics_port": metrics_port,
            "host": socket.gethostname(),
            "pids": self.processes(),
        }

    def processes(self) -> list[int]:
        """This process and everything it started."""
        here = psutil.Process(os.getpid())
        return [here.pid, *(child.pid for child in here.children(recursive=True))]

    async def pin(self, chains: Sequence[np.ndarray]) -> dict[str, Any]:
        """Pin the profile's chains; longest first, so that shared ancestors are counted once."""
        try:
            before = (await self._engine.load()).kv_usage
            for i, chain in enumerate(sorted(chains, key=len, reverse=True)):
                self._pinned += await self._engine.pin(f"{self._profile}-{i}", chain)
            usage = (await self._engine.load()).kv_usage - before
        except TestbedError as error:
            return {"error": str(error)}
        self._metrics.pinned(self._pinned)
        return {"pool_share": usage, "chains": len(chains), "tokens": self._pinned}

    async def adopt(self, profile: str, prefill: Prefill, window: float) -> None:
        """Take another scenario's name for the profile, its calibration and its window."""
        self._profile = profile
        self._prefill = prefill
        self._waits = AdvertisedWait(window)
        self._metrics.relabel(profile)

    async def forget(self) -> None:
        """Drop what is cached and not pinned. What the node advertises stays: it is no cache."""
        await self._engine.forget()

    async def measure(self, job: Callable[..., Awaitable[Any]], **options: Any) -> Any:
        """Run ``job(engine, facts, progress=…, **options)`` on this engine (calibration's way in).

        A :class:`TestbedError` comes back as ``{"error": line}``.
        """
        if self._facts is None:
            return {"error": "the engine is not running"}

        def progress(stage: str, done: int, total: int) -> None:
            self._progress = (stage, done, total)

        try:
            return await job(self._engine, self._facts, progress=progress, **options)
        except TestbedError as error:
            return {"error": str(error)}

    async def progress(self) -> tuple[str, int, int]:
        """(stage, done, total) of the job that :meth:`measure` runs."""
        return self._progress

    async def stop(self) -> None:
        await self._server.stop()
        await self._engine.stop()
        self._metrics.close()

    # -- data path --

    async def _serve(self, header: dict[str, Any], tokens: np.ndarray) -> dict[str, Any]:
        received = time.perf_counter()
        if header["do"] == "clock":
            return {"clock": time.perf_counter()}
        if header["do"] == "status":
            return await self._status()
        self._inside += 1
        try:
            served = await self._engine.generate(header["id"], tokens, header["output_tokens"])
        except EngineError as error:
            self._metrics.ended("rejected")
            return {"ending": "rejected", "reason": str(error)}
        except Exception as error:  # an engine may fail in ways that only it knows
            self._metrics.ended("failed")
            return {"ending": "failed", "reason": f"{type(error).__name__}: {error}"[:300]}
        finally:
            self._inside -= 1
        self._account(served, received, len(tokens))
        return {
            "ending": "completed",
            "received": received,
            "queued": served.queued,
            "scheduled": served.scheduled,
            "engine_first_token": served.engine_first_token,
            "first_token": served.first_token,
            "finished": served.finished,
            "cached_tokens": served.cached_tokens,
            "output_tokens": len(served.token_ids),
        }

    def _account(self, served: Generation, received: float, tokens: int) -> None:
        cached = served.cached_tokens
        ttft = (served.first_token - received) / self._scale
        wait = ttft - float(prefill_time(self._prefill, tokens - cached, cached))
        self._waits.observe(served.first_token / self._scale, wait)
        self._metrics.served(ttft, wait, cached)

    async def _status(self) -> dict[str, Any]:
        load = await self._engine.load()
        self._metrics.load(load.running, load.waiting, load.kv_usage)
        if self._inside == 0:
            self._waits.idle(time.perf_counter() / self._scale)
        return {
            "wait": self._waits.mean,
            "deviation": self._waits.deviation,
            "running": load.running,
            "waiting": load.waiting,
            "kv_usage": load.kv_usage,
            "preemptions": load.preemptions,
            "pace": None if load.pace is None else asdict(load.pace),
        }
