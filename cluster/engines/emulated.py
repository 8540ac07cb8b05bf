"""Emulated engine: a real-time engine without a model, paced by a step time.

The scheduler and the paged KV cache are those of the engine model
(:mod:`testbed.simulation.engine_model`); the arithmetic of a step is a wait until the instant at
which it would have ended. Its clock is ``emulated``: requests, queueing, cache and events are real
and happen in wall-clock time, durations of steps are a formula's. A thread of its own keeps the
deadlines, which are absolute: a late wake-up delays one delivery, never the steps that follow.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from cluster.devices import engine_on_device, load_device
from cluster.engines.base import (
    Engine,
    EngineFacts,
    EngineLoad,
    Generation,
    model_config,
    model_directory,
    nominal_bytes_per_token,
)
from cluster.engines.step_log import STEP_COLUMNS
from testbed import __version__
from testbed.errors import CalibrationError, EngineError
from testbed.scenario import first_problem
from testbed.simulation.engine_model import EngineConfig, EngineState, StepEvents
from testbed.step_time import AnyStepTime, OperatorStepTime, StepTime

DEFAULT_STEP_TIME = StepTime(
    c_pre=4.0e-3,
    p=1.0e-3,
    c_both=5.0e-4,
    a=4.0e-5,
    b=3.0e-8,
    d=6.0e-8,
    c_dec=2.7e-3,
    e=1.0e-4,
    f=2.5e-7,
)
"""Used where no calibration is given. Invented for tests: round numbers of the size that a tiny
model shows on one CPU core, measured on nothing."""

SPIN = 1.5e-4
"""s before a deadline at which the pacing thread stops sleeping and watches the clock."""
BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}


@dataclass
class _Live:
    """A request under way: what its caller waits for."""

    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[None]
    queued: float
    scheduled: float = 0.0
    engine_first_token: float = 0.0
    cached_tokens: int = 0
    times: list[float] = field(default_factory=list)


class EmulatedEngine(Engine):
    """An engine whose steps take as long as a calibration says, and compute nothing.

    The step time is that of ``spec.calibration`` (its ``step_time``), or of ``spec.device`` with
    all that a device decides (:func:`cluster.devices.engine_on_device`), else
    :data:`DEFAULT_STEP_TIME`. ``spec.time_scale`` wall seconds pass per second of the formula.
    Generated token ids are arbitrary.
    """

    name = "emulated"
    can_limit_step = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._state: EngineState | None = None
        self._config: EngineConfig | None = None
        self._limit: int | None = None
        self._step_time: StepTime | OperatorStepTime = DEFAULT_STEP_TIME
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._failure: str | None = None
        self._live: dict[int, _Live] = {}
        self._pins: dict[str, np.ndarray] = {}
        self._pinned_contents: set[int] = set()
        self._vocabulary = 0
        self._queries = self._hits = self._preemptions = 0
        self._step: StepEvents | None = None
        self._late: list[float] = []
        self._log: Any = None

    # -- life --

    async def start(self) -> EngineFacts:
        if self._thread is not None:
            raise EngineError("the engine is running already")
        if self.spec.device is not None and self.spec.calibration is not None:
            raise EngineError("engine.calibration and engine.device: one or the other")
        calibration = _read_calibration(self.spec.calibration)
        source = self.spec.calibration or "default step time, invented for tests"
        asynchronous = False
        paced: dict[str, Any] = {}
        if self.spec.device is not None:
            profile = load_device(self.spec.device)
            self.spec = engine_on_device(self.spec)
            self._step_time, source = profile.step_time, profile.device.name
            asynchronous = profile.async_scheduling
            paced["device"] = profile.facts()
        else:
            self._step_time = _step_time(calibration, self.spec.calibration)
        kappa, self._vocabulary = self._model(calibration)
        blocks = self.spec.num_blocks or self._pool(calibration)
        self._config = EngineConfig(
            token_budget=max(self.spec.token_budget, self.spec.max_sequences),
            max_sequences=self.spec.max_sequences,
            block_size=self.spec.block_size,
            num_blocks=blocks,
            async_scheduling=asynchronous,
            max_model_len=self.spec.max_model_len,
        )
        await asyncio.to_thread(self._compile)
        self._state = EngineState(self._config, self._step_time)
        if self.placement.step_log:
            try:
                self._log = open(self.placement.step_log, "ab", buffering=0)  # noqa: SIM115
            except OSError as error:
                raise EngineError(f"{self.placement.step_log}: {error.strerror}") from None
        self._stopping = False
        self._failure = None
        self._thread = threading.Thread(target=self._pace, name="emulated engine", daemon=True)
        self._thread.start()
        return EngineFacts(
            name=self.name,
            version=__version__,
            model=self.spec.model,
            dtype=self.spec.dtype,
            device=source,
            num_blocks=blocks,
            block_size=self.spec.block_size,
            bytes_per_token=kappa,
            vocabulary=self._vocabulary,
            max_model_len=self.spec.max_model_len,
            max_sequences=self.spec.max_sequences,
            token_budget=self._config.token_budget,
            clock="emulated",
            extra={
                **paced,
                "step_time": self._step_time.model_dump(mode="json")
                if isinstance(self._step_time, StepTime)
                else self._step_time.kind,
                "time_scale": self.spec.time_scale,
                "prefix_caching": True,
                "async_scheduling": asynchronous,
                "usable_blocks": blocks - 1,
            },
        )

    def _model(self, calibration: dict[str, Any]) -> tuple[float, int]:
        """κ and vocabulary: the calibration's where it has them, else the model's."""
        memory = calibration.get("memory", {})
        measured = memory.get("kappa_measured") or {}
        kappa = measured.get("value") or memory.get("kappa_nominal")
        vocabulary = calibration.get("model", {}).get("vocabulary")
        if kappa and vocabulary:
            return float(kappa), int(vocabulary)
        config = model_config(model_directory(self.spec.model))
        nominal = nominal_bytes_per_token(config, BYTES_PER_VALUE[self.spec.dtype])
        return float(kappa or nominal), int(vocabulary or config["vocab_size"])

    def _pool(self, calibration: dict[str, Any]) -> int:
        """Blocks: the calibrated pool in blocks of this size, else room for every sequence."""
        pool = calibration.get("memory", {}).get("pool_bytes")
        if pool:
            kappa, _ = self._model(calibration)
            return max(2, int(pool // (kappa * self.spec.block_size)) + 1)
        per_sequence = -(-self.spec.max_model_len // self.spec.block_size)
        return self.spec.max_sequences * per_sequence + 1

    def _compile(self) -> None:
        """Compile the engine model before the first request has to wait for it."""
        assert self._config is not None
        state = EngineState(self._config, self._step_time)
        size = self._config.block_size
        state.pin("warm-up", [1])
        state.submit(
            0.0, input_tokens=min(2 * size, 8), output_tokens=2, block_hashes=np.array([1, 2])
        )
        now = 0.0
        while (events := state.step(now)) is not None:
            now = events.end
        state.unpin("warm-up")

    async def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(thread.join)
        self._fail("the engine was stopped")
        if self._log is not None:
            self._log.close()
            self._log = None

    # -- requests --

    async def generate(
        self, request_id: str, tokens: Sequence[int], output_tokens: int
    ) -> Generation:
        received = time.perf_counter()
        self.check_fits(len(tokens), output_tokens)
        ids = np.asarray(tokens, dtype=np.int64)
        contents = _contents(ids, self.spec.block_size)
        if self.spec.reuse == "pinned":
            known = [int(c) in self._pinned_contents for c in contents]
            contents = contents[: known.index(False) if False in known else len(known)]
        live = self._submit(len(ids), output_tokens, contents)
        await live.done
        draw = np.random.default_rng(int(ids[-1]) + len(ids))
        return Generation(
            received=received,
            first_token=live.times[0],
            finished=live.times[-1],
            queued=live.queued,
            scheduled=live.scheduled,
            engine_first_token=live.engine_first_token,
            cached_tokens=live.cached_tokens,
            token_ids=tuple(draw.integers(0, self._vocabulary, output_tokens).tolist()),
            token_times=tuple(live.times),
        )

    def _submit(self, length: int, output_tokens: int, contents: np.ndarray) -> _Live:
        loop = asyncio.get_running_loop()
        with self._wake:
            state = self._running()
            queued = time.perf_counter()
            number = state.submit(
                queued / self.spec.time_scale,
                input_tokens=length,
                output_tokens=output_tokens,
                block_hashes=contents,
            )
            live = _Live(loop=loop, done=loop.create_future(), queued=queued)
            self._live[number] = live
            self._queries += length
            self._wake.notify()
        return live

    def _running(self) -> EngineState:
        if self._failure is not None:
            raise EngineError(self._failure)
        if self._state is None or self._thread is None:
            raise EngineError("the engine is not running")
        return self._state

    # -- pinned prefixes --

    async def pin(self, name: str, tokens: Sequence[int]) -> int:
        size = self.spec.block_size
        whole = len(tokens) // size * size
        if whole == 0:
            raise EngineError(
                f"pin {name!r}: {len(tokens)} tokens do not fill one block of {size} tokens"
            )
        if name in self._pins:
            raise EngineError(f"pin {name!r}: this name is pinned already")
        self.check_fits(whole, 1)
        ids = np.asarray(tokens, dtype=np.int64)[:whole]
        contents = _contents(ids, size)
        # The prefix is computed once, as any engine must, before its blocks are held.
        await self._submit(whole, 1, contents).done
        with self._wake:
            self._running().pin(name, contents)
        self._pins[name] = contents
        self._note_pinned()
        return whole

    async def unpin(self, name: str) -> None:
        if name not in self._pins:
            raise EngineError(f"unpin {name!r}: nothing is pinned under this name")
        with self._wake:
            self._running().unpin(name)
        del self._pins[name]
        self._note_pinned()

    def _note_pinned(self) -> None:
        self._pinned_contents = {int(c) for pin in self._pins.values() for c in pin}

    async def forget(self) -> None:
        with self._wake:
            self._running()
            if self._live:
                raise EngineError("the prefix cache could not be emptied: requests are running")
            assert self._config is not None
            self._state = EngineState(self._config, self._step_time)
            self._state.limit_step(self._limit)
            # A pinned block is the only one that survives, so its content needs no computing.
            for name, contents in self._pins.items():
                self._state.pin(name, contents)

    async def limit_step(self, tokens: int | None) -> None:
        with self._wake:
            state = self._running()
            assert self._config is not None
            budget = self._config.token_budget
            if tokens is not None and not 1 <= tokens <= budget:
                raise EngineError(f"limit_step: {tokens} tokens are not between 1 and {budget}")
            if self._live:
                raise EngineError("the tokens of a step cannot change: requests are running")
            self._limit = tokens
            state.limit_step(tokens)

    # -- a look at it --

    async def load(self) -> EngineLoad:
        with self._wake:
            state = self._running()
            assert self._config is not None
            # While a step is under way the state is already that of its end.
            seen: EngineState | StepEvents = self._step or state
            return EngineLoad(
                running=seen.running,
                waiting=state.waiting,
                kv_usage=seen.used_blocks / self._config.usable_blocks,
                prefix_queries=self._queries,
                prefix_hits=self._hits,
                preemptions=self._preemptions,
            )

    def lateness(self) -> np.ndarray:
        """Seconds by which the latest steps' ends were delivered late, shape (steps,)."""
        return np.array(self._late)

    # -- the pacing thread --

    def _pace(self) -> None:
        try:
            due = -np.inf
            while True:
                with self._wake:
                    while not self._live and not self._stopping:
                        self._wake.wait()
                    if self._stopping:
                        return
                    # An idle engine starts when a request comes; a busy one where its last step
                    # ended, however late this thread got there.
                    now = max(due, min(live.queued for live in self._live.values()))
                    events = self._running().step(now / self.spec.time_scale)
                    if events is None:
                        raise EngineError("requests are waiting and no step could be formed")
                    self._step = events
                    self._count(events)
                due = events.end * self.spec.time_scale
                _sleep_until(due)
                self._late.append(time.perf_counter() - due)
                if len(self._late) > 4096:
                    del self._late[:2048]
                self._write(events)
                self._deliver(events, due)
        except Exception as error:  # the callers must hear of it, whatever it is
            self._fail(f"the emulated engine failed: {error}")

    def _count(self, events: StepEvents) -> None:
        self._hits += sum(events.cached_tokens)
        for row in events.formed:
            self._preemptions += int(row[8])

    def _write(self, events: StepEvents) -> None:
        if self._log is None:
            return
        scale = self.spec.time_scale
        assert self._config is not None
        for row in events.formed:
            start, end, prefills, new, squared, crossed, decodes, context = row[:8]
            values = [
                start * scale,
                start * scale,
                end * scale,
                end * scale,
                prefills,
                new,
                squared,
                crossed,
                decodes,
                context,
                row[9],
                row[10],
                row[11] / self._config.usable_blocks,
            ]
            assert len(values) == len(STEP_COLUMNS)
            self._log.write(np.array(values, dtype=np.float64).tobytes())

    def _deliver(self, events: StepEvents, due: float) -> None:
        """Hand tokens to their callers' loops, one call a loop."""
        with self._wake:
            self._step = None
            first = dict(
                zip(
                    events.first,
                    zip(events.scheduled, events.cached_tokens, strict=True),
                    strict=True,
                )
            )
            finished = set(events.finished)
            batches: dict[asyncio.AbstractEventLoop, list[tuple[_Live, bool]]] = {}
            for number in events.tokens:
                live = self._live[number]
                if number in first:
                    scheduled, live.cached_tokens = first[number]
                    live.scheduled = scheduled * self.spec.time_scale
                    live.engine_first_token = due
                batches.setdefault(live.loop, []).append((live, number in finished))
            for number in finished:
                del self._live[number]
        for loop, batch in batches.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_receive, batch)

    def _fail(self, reason: str) -> None:
        with self._wake:
            self._failure = reason
            orphans, self._live = list(self._live.values()), {}
        for live in orphans:
            if not live.loop.is_closed():
                live.loop.call_soon_threadsafe(_refuse, live, reason)


def _receive(batch: list[tuple[_Live, bool]]) -> None:
    now = time.perf_counter()
    for live, ended in batch:
        live.times.append(now)
        if ended and not live.done.done():
            live.done.set_result(None)


def _refuse(live: _Live, reason: str) -> None:
    if not live.done.done():
        live.done.set_exception(EngineError(reason))


def _sleep_until(due: float) -> None:
    """Sleep, then watch the clock for the last moments: a plain sleep wakes late."""
    left = due - time.perf_counter()
    if left > SPIN:
        time.sleep(left - SPIN)
    while time.perf_counter() < due:
        pass


def _contents(ids: np.ndarray, size: int) -> np.ndarray:
    """One number for each full block and all before it, shape (blocks,) int64 ≥ 0."""
    whole = len(ids) // size
    data = ids[: whole * size].astype(np.int32).tobytes()
    digest = b""
    contents = np.empty(whole, dtype=np.int64)
    for i in range(whole):
        block = data[i * size * 4 : (i + 1) * size * 4]
        digest = hashlib.blake2b(block, digest_size=8, key=digest).digest()
        contents[i] = int.from_bytes(digest, "little") & 0x7FFFFFFFFFFFFFFF
    return contents


def _read_calibration(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: {error.msg}") from None
    if not isinstance(data, dict):
        raise CalibrationError(f"{path}: not a calibration record")
    return data


def _step_time(calibration: dict[str, Any], path: str | None) -> StepTime | OperatorStepTime:
    if path is None:
        return DEFAULT_STEP_TIME
    if calibration.get("step_time") is None:
        raise CalibrationError(f"{path}: step_time: this record has none to emulate")
    try:
        return TypeAdapter(AnyStepTime).validate_python(calibration["step_time"])
    except ValidationError as error:
        raise CalibrationError(f"{path}: step_time: {first_problem(error)}") from None
