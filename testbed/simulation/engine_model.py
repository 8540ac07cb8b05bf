"""Engine model: one engine of continuous batching, step by step in virtual time.

The scheduler is vLLM's V1 (or one in the manner of SGLang), the step time a calibration's. Three
ways in: :func:`simulate_engine` for a whole list of requests; :class:`EngineState` for whoever
drives an engine step by step, in virtual or wall-clock time; and the compiled functions of
``engine_model_kernel`` for a simulation that is compiled itself.

>>> from testbed.step_time import StepTime
>>> step_time = StepTime(c_pre=0.004, a=4e-5, c_dec=0.0025, e=1e-4)
>>> trace = simulate_engine(EngineConfig(), step_time, [0.0], [500], [3])
>>> trace.first_token.tolist(), trace.finished.tolist()
([0.024], [0.0292])
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from testbed.errors import EngineError
from testbed.simulation import engine_model_state as kernel
from testbed.simulation.engine_model_kernel import (
    LOG_COLUMNS,
    advance_arrays,
    arrays,
    form_arrays,
)
from testbed.simulation.engine_model_pool import (
    FREE,
    REFERENCES,
    counted_pool,
    find,
    new_pool,
    release,
    remember,
    scattered,
    take,
    touch,
)
from testbed.simulation.engine_model_state import Engine, Requests
from testbed.step_time import OperatorStepTime, StepTime
from testbed.workload.blocks import first_seen

SCHEDULERS = ("vllm", "sglang")

_NO_LOG = np.empty((0, len(LOG_COLUMNS)))


class EngineConfig(BaseModel):
    """What an engine is allowed to do in a step, and with its memory."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    scheduler: Literal["vllm", "sglang"] = "vllm"
    token_budget: int = Field(default=2048, ge=1, description="most tokens in a step")
    max_sequences: int = Field(default=256, ge=1, description="most running sequences")
    block_size: int = Field(default=16, ge=1, description="tokens per KV block")
    num_blocks: int | None = Field(
        default=None,
        ge=2,
        description="KV pool, blocks, one of which is vLLM's null block; absent: no limit",
    )
    prefix_caching: bool = True
    async_scheduling: bool = Field(
        default=False, description="form a step while the one before it runs"
    )
    max_model_len: int = Field(default=8192, ge=2, description="prompt and outputs, tokens")
    pinned_blocks: int = Field(
        default=0,
        ge=0,
        description="blocks held by pinned prefixes that requests use through reusable_tokens",
    )
    reserved_outputs: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="sglang: share of the outputs that running requests may still generate that "
        "admission reserves; 1 when lengths are known (ignore_eos)",
    )
    wake_seconds: float = Field(
        default=0.0, ge=0, description="s more until the first step after idling"
    )
    drain_seconds: float = Field(
        default=0.0, ge=0, description="s that the engine stays busy after its last request"
    )

    @model_validator(mode="after")
    def _fits(self) -> EngineConfig:
        if self.num_blocks is not None and self.usable_blocks < 1:
            raise ValueError(
                f"pinned_blocks: {self.pinned_blocks} of {self.num_blocks} blocks leave none"
            )
        return self

    @property
    def usable_blocks(self) -> int:
        """Blocks for requests: the pool without the null block and what is pinned."""
        return 0 if self.num_blocks is None else self.num_blocks - 1 - self.pinned_blocks


@dataclass(frozen=True)
class EngineTrace:
    """What happened to each of N requests, in their order; times in seconds.

    A request that could never fit is ``rejected``: its times are NaN.
    """

    arrival: np.ndarray
    queued: np.ndarray
    scheduled: np.ndarray
    first_token: np.ndarray
    finished: np.ndarray
    cached_tokens: np.ndarray
    preemptions: np.ndarray
    rejected: np.ndarray
    steps: int
    log: dict[str, np.ndarray] | None = field(default=None, repr=False)

    @property
    def ttft(self) -> np.ndarray:
        """Time to first token from arrival, (N,), s."""
        return self.first_token - self.arrival


@dataclass(frozen=True)
class StepEvents:
    """What one step brings about at its end. Requests by the number ``submit`` gave."""

    start: float
    end: float
    tokens: tuple[int, ...]
    first: tuple[int, ...]
    finished: tuple[int, ...]
    running: int
    waiting: int
    used_blocks: int
    scheduled: tuple[float, ...] = ()
    """When each of ``first`` was first scheduled."""
    cached_tokens: tuple[int, ...] = ()
    """Tokens that each of ``first`` found in the cache."""
    formed: tuple[tuple[float, ...], ...] = ()
    """Steps formed in this call, in the columns of ``LOG_COLUMNS``."""


def new_engine(
    config: EngineConfig,
    step_time: StepTime | OperatorStepTime,
    blocks_per_sequence: int,
    contents: int = 0,
    counted: bool | None = None,
) -> Engine:
    """An idle engine at time 0, for the compiled functions of ``engine_model_kernel``.

    ``contents`` is how many numbers from 0 on stand for contents, 0 when they are ``scattered``.
    Blocks are merely ``counted`` by default where there is no prefix cache.
    """
    if counted is None:
        counted = not config.prefix_caching
    state = np.zeros(kernel.STATE_SIZE, dtype=np.int64)
    state[kernel.BUDGET] = config.token_budget
    state[kernel.MAX_SEQUENCES] = config.max_sequences
    state[kernel.BLOCK_SIZE] = config.block_size
    state[kernel.PAGED] = config.num_blocks is not None
    state[kernel.CACHING] = config.prefix_caching and config.num_blocks is not None
    state[kernel.DEPTH] = 2 if config.async_scheduling else 1
    state[kernel.SCHEDULER] = SCHEDULERS.index(config.scheduler)
    state[[kernel.HEAD, kernel.TAIL, kernel.UNSEEN, kernel.FINISHED]] = kernel.NOBODY
    state[kernel.FORMED] = 1
    clock = np.zeros(kernel.CLOCK_SIZE)
    clock[kernel.WAKE] = config.wake_seconds
    clock[kernel.DRAIN] = config.drain_seconds
    clock[kernel.RESERVED] = config.reserved_outputs
    # SGLang may admit others before those that it retracted, which keep their slots.
    size = config.max_sequences * (2 if config.scheduler == "sglang" else 1)
    lists = np.zeros((kernel.LIST_ROWS, size + 1), dtype=np.int64)
    lists[kernel.SPARE, :size] = np.arange(size)[::-1]
    state[kernel.SPARES] = size
    return Engine(
        state=state,
        clock=clock,
        step_time=step_time.packed,
        slots=np.zeros((size, kernel.SLOT_FIELDS), dtype=np.int64),
        lists=lists,
        rows=np.empty((size, 1 if counted else max(blocks_per_sequence, 1)), dtype=np.int32),
        pool=counted_pool(config.usable_blocks)
        if counted
        else new_pool(config.usable_blocks, contents),
    )


def simulate_engine(
    config: EngineConfig,
    step_time: StepTime | OperatorStepTime,
    arrivals: npt.ArrayLike,
    input_tokens: npt.ArrayLike,
    output_tokens: npt.ArrayLike,
    *,
    block_hashes: npt.ArrayLike | None = None,
    block_offsets: npt.ArrayLike | None = None,
    reusable_tokens: npt.ArrayLike | None = None,
    log: bool = False,
) -> EngineTrace:
    """Serve N requests on one engine, from empty to empty.

    Parameters
    ----------
    arrivals
        (N,) seconds, not decreasing.
    input_tokens, output_tokens
        (N,) tokens, at least 1 each.
    block_hashes, block_offsets
        Contents of full blocks: those of request i are ``block_hashes[offsets[i]:offsets[i + 1]]``
        from its first block on, prompt and outputs; equal numbers are equal tokens after equal
        tokens. What they do not reach is like nothing else.
    reusable_tokens
        (N,) tokens of each prompt in a pinned prefix, which takes none of the request's blocks.
        Whole blocks count, and an engine computes at least the last token.
    log
        Keep one row a step (then no steps are taken together).

    Raises
    ------
    EngineError
        Arrays of different lengths, time that runs back, or a request without tokens.
    """
    arrival = np.ascontiguousarray(arrivals, dtype=np.float64)
    count = len(arrival)
    facts = np.zeros((count, 8), dtype=np.int64)
    facts[:, kernel.INPUT] = _tokens("input_tokens", input_tokens, count, 1)
    facts[:, kernel.OUTPUT] = _tokens("output_tokens", output_tokens, count, 1)
    if reusable_tokens is not None:
        facts[:, kernel.REUSABLE] = _tokens("reusable_tokens", reusable_tokens, count, 0)
    if (np.diff(arrival) < 0).any() or not np.isfinite(arrival).all():
        raise EngineError("arrivals: time runs back or is not a number")
    contents, known = np.zeros(0, dtype=np.int64), 0
    if block_hashes is not None:
        if block_offsets is None:
            raise EngineError("block_offsets: needed with block_hashes")
        contents, known = _contents(block_hashes)
        offsets = np.asarray(block_offsets, dtype=np.int64)
        if len(offsets) != count + 1 or (np.diff(offsets) < 0).any() or offsets[-1] > len(contents):
            raise EngineError(f"block_offsets: not {count + 1} positions in block_hashes")
        facts[:, kernel.START] = offsets[:-1]
        facts[:, kernel.COUNT] = _shared(contents, offsets, known)

    times = np.full((count, 5), np.nan)
    times[:, kernel.ARRIVAL] = arrival
    total = facts[:, kernel.INPUT] + facts[:, kernel.OUTPUT]
    rejected = _never_fits(config, facts)
    keep = np.flatnonzero(~rejected)
    requests = Requests(times=times, facts=facts, contents=contents)
    longest = -(-int(total[keep].max(initial=1)) // config.block_size)
    facts[keep[:-1], kernel.FOLLOWING] = keep[1:]
    if len(keep):
        facts[keep[-1], kernel.FOLLOWING] = kernel.NOBODY

    # Where nothing is shared only a preempted request can find blocks again: they are told apart
    # once there is one.
    counted = not config.prefix_caching or not facts[:, kernel.COUNT].any()
    engine, rows = _serve_all(
        config, new_engine(config, step_time, longest, known, counted), requests, keep, log
    )
    if engine.state[kernel.STUCK] == kernel.UNTOLD:
        facts[:, [kernel.CACHED_TOKENS, kernel.TIMES_PREEMPTED]] = 0
        facts[keep[:-1], kernel.FOLLOWING] = keep[1:]
        facts[keep[-1], kernel.FOLLOWING] = kernel.NOBODY
        engine, rows = _serve_all(
            config, new_engine(config, step_time, longest, known, False), requests, keep, log
        )
    _check(engine)
    table = None
    if log:
        table = {n: c.copy() for n, c in zip(LOG_COLUMNS, np.concatenate(rows).T, strict=True)}
    return EngineTrace(
        arrival=arrival,
        queued=times[:, kernel.QUEUED],
        scheduled=times[:, kernel.SCHEDULED],
        first_token=times[:, kernel.FIRST],
        finished=times[:, kernel.DONE],
        cached_tokens=facts[:, kernel.CACHED_TOKENS],
        preemptions=facts[:, kernel.TIMES_PREEMPTED],
        rejected=rejected,
        steps=int(engine.state[kernel.STEPS]),
        log=table,
    )


def _serve_all(
    config: EngineConfig, engine: Engine, requests: Requests, keep: np.ndarray, log: bool
) -> tuple[Engine, list[np.ndarray]]:
    """Serve the requests ``keep`` (in a list already) to the end; the engine and log rows."""
    if len(keep):
        engine.state[[kernel.HEAD, kernel.UNSEEN]] = keep[0]
        engine.state[kernel.TAIL] = keep[-1]
        engine.clock[kernel.NOW] = min(requests.times[keep[0], kernel.ARRIVAL], 0.0)
    rows: list[np.ndarray] = []
    buffer = np.empty((4096, len(LOG_COLUMNS))) if log else _NO_LOG
    sums = np.empty(7)
    while not advance_arrays(*arrays(engine, requests), math.inf, buffer, sums):
        rows.append(buffer[: engine.state[kernel.LOGGED]].copy())
        engine.state[kernel.LOGGED] = 0
    rows.append(buffer[: engine.state[kernel.LOGGED]])
    return engine, rows


class EngineState:
    """One engine that is driven step by step; memory grows with live requests only.

    >>> from testbed.step_time import StepTime
    >>> engine = EngineState(EngineConfig(), StepTime(c_pre=0.01, c_dec=0.002))
    >>> request = engine.submit(0.0, input_tokens=100, output_tokens=2)
    >>> engine.step(0.0).first == (request,), engine.step(0.01).finished == (request,)
    (True, True)
    """

    def __init__(self, config: EngineConfig, step_time: StepTime | OperatorStepTime) -> None:
        self.config = config
        self._blocks_per_sequence = -(-config.max_model_len // config.block_size)
        self._engine = new_engine(config, step_time, self._blocks_per_sequence)
        self._engine.clock[kernel.NOW] = -math.inf
        self._requests = Requests(
            times=np.full((64, 5), np.nan),
            facts=np.zeros((64, 8), dtype=np.int64),
            contents=np.zeros(0, dtype=np.int64),
        )
        self._free = list(range(63, -1, -1))
        self._contents_end = 0
        self._number = 0
        self._numbers: dict[int, int] = {}
        self._last_arrival = -math.inf
        self._pins: dict[str, np.ndarray] = {}
        self._log = np.empty((4, len(LOG_COLUMNS)))
        self._sums = np.empty(7)

    # -- requests --

    def submit(
        self,
        now: float,
        *,
        input_tokens: int,
        output_tokens: int,
        block_hashes: npt.ArrayLike | None = None,
        reusable_tokens: int = 0,
    ) -> int:
        """A request arrives; the number by which events name it.

        Raises
        ------
        EngineError
            It could never fit, or arrives before one that came earlier.
        """
        if now < self._last_arrival:
            raise EngineError(f"arrival {now:g} s is before the last one, {self._last_arrival:g} s")
        if input_tokens < 1 or output_tokens < 1 or reusable_tokens < 0:
            raise EngineError(
                f"a request of {input_tokens} input, {output_tokens} output and "
                f"{reusable_tokens} reusable tokens"
            )
        facts = np.zeros((1, 8), dtype=np.int64)
        facts[0, kernel.INPUT] = input_tokens
        facts[0, kernel.OUTPUT] = output_tokens
        facts[0, kernel.REUSABLE] = reusable_tokens
        if input_tokens + output_tokens > self.config.max_model_len:
            raise EngineError(
                f"{input_tokens} input and {output_tokens} output tokens are more than "
                f"max_model_len {self.config.max_model_len}"
            )
        if _never_fits(self.config, facts)[0]:
            raise EngineError(
                f"{input_tokens} input and {output_tokens} output tokens are more than the pool of "
                f"{self.config.usable_blocks} blocks of {self.config.block_size} holds"
            )
        if not self._free:
            self._grow()
        row = self._free.pop()
        if block_hashes is not None:
            contents = scattered(np.asarray(block_hashes))
            facts[0, kernel.START] = self._store(contents)
            facts[0, kernel.COUNT] = len(contents)
        self._requests.facts[row] = facts[0]
        self._requests.times[row] = (now, math.nan, math.nan, math.nan, math.nan)
        kernel.enqueue(self._engine.state, self._requests.facts, row)
        self._last_arrival = now
        self._number += 1
        self._numbers[row] = self._number
        return self._number

    def step(self, now: float) -> StepEvents | None:
        """Take in what has arrived by ``now``, form a step, and say what its end will bring.

        The next call is due at ``end``. None when there is nothing to do.
        """
        engine = self._engine
        clock = engine.clock
        state = engine.state
        idle = state[kernel.RUNNING] + state[kernel.PREEMPTED] + state[kernel.WAITING] == 0
        if idle and state[kernel.UNSEEN] == kernel.NOBODY and state[kernel.UNDER_WAY] == 0:
            return None
        if now < clock[kernel.NOW]:
            raise EngineError(f"step at {now:g} s after one that ended at {clock[kernel.NOW]:g} s")
        clock[kernel.NOW] = now + (clock[kernel.WAKE] if idle else 0.0)
        state[kernel.LOGGED] = 0
        flat = arrays(engine, self._requests)
        kernel.take_in(state, clock[kernel.NOW], *flat[-3:-1])
        form_arrays(*flat, self._log, self._sums)
        if state[kernel.UNDER_WAY] == 0:
            if state[kernel.RUNNING] + state[kernel.PREEMPTED] + state[kernel.WAITING] > 0:
                raise EngineError("a request waits that the pool can never hold")
            return None
        ring = state[kernel.OLDEST]
        batch = engine.lists[kernel.BATCH + ring]
        batch = batch[: batch[self.config.max_sequences]]
        rows = engine.slots[batch, kernel.REQUEST].copy()
        fresh = engine.slots[batch, kernel.KNOWN] == self._requests.facts[rows, kernel.INPUT]
        running, waiting = self.running, self.waiting
        used = self.used_blocks
        kernel.complete(*flat[:2], *flat[3:])
        tokens = tuple(self._numbers[r] for r in rows.tolist())
        begun = rows[fresh]
        scheduled = tuple(self._requests.times[begun, kernel.SCHEDULED].tolist())
        cached = tuple(self._requests.facts[begun, kernel.CACHED_TOKENS].tolist())
        return StepEvents(
            start=now,
            end=float(clock[kernel.NOW]),
            tokens=tokens,
            first=tuple(n for n, f in zip(tokens, fresh.tolist(), strict=True) if f),
            finished=self._collect(),
            running=running,
            waiting=waiting,
            used_blocks=used,
            scheduled=scheduled,
            cached_tokens=cached,
            formed=tuple(map(tuple, self._log[: state[kernel.LOGGED]].tolist())),
        )

    # -- as it stands --

    @property
    def running(self) -> int:
        return int(self._engine.state[kernel.RUNNING])

    @property
    def waiting(self) -> int:
        """Requests taken in and not running, preempted ones among them."""
        state = self._engine.state
        return int(state[kernel.WAITING] + state[kernel.PREEMPTED])

    @property
    def used_blocks(self) -> int:
        """Blocks that a running request or a pin refers to."""
        return int(kernel.used_blocks(self._engine.pool.counts)) + self.config.pinned_blocks

    # -- pinned prefixes --

    def pin(self, name: str, block_hashes: npt.ArrayLike) -> None:
        """Hold blocks of these contents until :meth:`unpin`; evicts what nobody uses.

        Raises
        ------
        EngineError
            The name is taken, there is no pool, or too few blocks are free.
        """
        pool = self._engine.pool
        contents = scattered(np.asarray(block_hashes))
        if name in self._pins:
            raise EngineError(f"pin {name!r}: already pinned")
        if not self._engine.state[kernel.CACHING]:
            raise EngineError(f"pin {name!r}: the engine has no prefix cache")
        held = [find(pool.content, pool.table, key) for key in contents]
        need = sum(b == 0 or pool.links[b, REFERENCES] == 0 for b in held)
        if need > pool.counts[FREE]:
            raise EngineError(f"pin {name!r}: {need} blocks needed, {pool.counts[FREE]} are free")
        for block in held:
            if block:
                touch(pool.links, pool.counts, block)
        row = np.array([held], dtype=np.int32)
        for i in np.flatnonzero(row[0] == 0):
            take(*pool, row, 0, i, i + 1)
            remember(*pool, row, 0, contents, 0, i, i + 1)
        self._pins[name] = row

    def unpin(self, name: str) -> None:
        """Give the blocks of a pin back: they stay cached until something needs them."""
        if name not in self._pins:
            raise EngineError(f"unpin {name!r}: not pinned")
        row = self._pins.pop(name)
        pool = self._engine.pool
        release(pool.links, pool.counts, row, 0, row.shape[1], row.shape[1])

    # -- growth --

    def _grow(self) -> None:
        old = self._requests
        size = len(old.facts)
        times = np.full((2 * size, 5), np.nan)
        facts = np.zeros((2 * size, 8), dtype=np.int64)
        times[:size], facts[:size] = old.times, old.facts
        self._requests = Requests(times=times, facts=facts, contents=old.contents)
        self._free = list(range(2 * size - 1, size - 1, -1))

    def _store(self, contents: np.ndarray) -> int:
        old = self._requests
        if self._contents_end + len(contents) > len(old.contents):
            # Move what live requests still name to the front of a larger array.
            live = sorted(self._numbers, key=lambda r: int(old.facts[r, kernel.START]))
            live = [r for r in live if old.facts[r, kernel.COUNT] > 0]
            kept = sum(int(old.facts[r, kernel.COUNT]) for r in live)
            fresh = np.zeros(2 * (kept + len(contents)) + 256, dtype=np.int64)
            end = 0
            slots = self._engine.slots
            for r in live:
                start, count = (int(x) for x in old.facts[r, [kernel.START, kernel.COUNT]])
                fresh[end : end + count] = old.contents[start : start + count]
                old.facts[r, kernel.START] = end
                holds = (slots[:, kernel.REQUEST] == r) & (slots[:, kernel.STATUS] != kernel.IDLE)
                slots[holds, kernel.HASH_START] = end
                end += count
            self._requests = Requests(times=old.times, facts=old.facts, contents=fresh)
            self._contents_end = end
        start = self._contents_end
        self._requests.contents[start : start + len(contents)] = contents
        self._contents_end += len(contents)
        return start

    def _collect(self) -> tuple[int, ...]:
        state = self._engine.state
        finished = []
        row = int(state[kernel.FINISHED])
        while row != kernel.NOBODY:
            finished.append(self._numbers.pop(row))
            self._free.append(row)
            row = int(self._requests.facts[row, kernel.FOLLOWING])
        state[kernel.FINISHED] = kernel.NOBODY
        return tuple(finished[::-1])


def _never_fits(config: EngineConfig, facts: np.ndarray) -> np.ndarray:
    """Requests, (N,), that an empty pool could not hold to their end."""
    if config.num_blocks is None:
        return np.zeros(len(facts), dtype=bool)
    total = facts[:, kernel.INPUT] + facts[:, kernel.OUTPUT]
    resident = np.minimum(facts[:, kernel.REUSABLE], facts[:, kernel.INPUT] - 1)
    need = -(-total // config.block_size) - resident // config.block_size
    if config.scheduler == "sglang":
        need += 2  # its admission keeps a block aside and wants room beyond the last one
    return np.asarray(need > config.usable_blocks)


def _tokens(name: str, values: npt.ArrayLike, count: int, least: int) -> np.ndarray:
    array = np.asarray(values)
    if array.shape != (count,):
        raise EngineError(f"{name}: shape {array.shape} for {count} arrivals")
    if not np.issubdtype(array.dtype, np.integer) and (array != np.floor(array)).any():
        raise EngineError(f"{name}: not whole tokens")
    if count and array.min() < least:
        raise EngineError(f"{name}[{int(array.argmin())}]: {array.min()} is below {least}")
    return array.astype(np.int64)


def _contents(block_hashes: npt.ArrayLike) -> tuple[np.ndarray, int]:
    """Contents numbered from 0 on, in order of appearance unless that dense already, and how
    many numbers there are: the pool then looks them up directly."""
    array = np.asarray(block_hashes)
    if len(array) == 0:
        return np.zeros(0, dtype=np.int64), 0
    if array.min() >= 0 and array.max() < 4 * len(array):
        return array.astype(np.int64), int(array.max()) + 1
    numbers, count = first_seen(array.astype(np.uint64))
    return numbers.astype(np.int64), int(count)


def _shared(contents: np.ndarray, offsets: np.ndarray, known: int) -> np.ndarray:
    """Leading blocks, (N,), of each request that another block of the run equals.

    A content stands for a block and all before it, so that what follows one that is unique is
    unique too and can never be found.
    """
    counts = np.diff(offsets)
    if known == 0:
        return counts
    once = np.flatnonzero(np.bincount(contents, minlength=known)[contents] == 1)
    first = np.searchsorted(once, offsets[:-1])
    end = np.append(once, len(contents))[first]
    return np.minimum(end - offsets[:-1], counts)


def _check(engine: Engine) -> None:
    if engine.state[kernel.STUCK]:
        raise EngineError("a request waits that the pool can never hold")
