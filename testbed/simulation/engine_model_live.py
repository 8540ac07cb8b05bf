"""EngineState: one engine that somebody drives step by step, in virtual or wall-clock time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from testbed.errors import EngineError
from testbed.simulation import engine_model_state as kernel
from testbed.simulation.engine_model_config import EngineConfig, never_fits, new_engine
from testbed.simulation.engine_model_kernel import LOG_COLUMNS, arrays, form_arrays
from testbed.simulation.engine_model_pool import (
    FREE,
    REFERENCES,
    find,
    release,
    remember,
    scattered,
    take,
    touch,
)
from testbed.simulation.engine_model_state import Requests
from testbed.step_time import OperatorStepTime, StepTime


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
        if never_fits(self.config, facts)[0]:
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

    def limit_step(self, tokens: int | None) -> None:
        """Let the steps that follow hold at most so many tokens; None: the configured budget."""
        budget = self.config.token_budget
        self._engine.state[kernel.BUDGET] = budget if tokens is None else min(tokens, budget)

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
