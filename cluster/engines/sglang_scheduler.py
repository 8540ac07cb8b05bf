"""SGLang's own scheduler and radix cache, with pins, a movable budget, stamps and a step log.

:class:`PinningEngine` starts them through the seams that SGLang offers for it. Nothing of the
scheduling itself is changed: admission, chunking, retraction and eviction are SGLang's.

Pinning
    A request whose ``sampling_params.custom_params`` carries ``PIN`` leaves a lock reference on
    its prompt's node when it finishes: eviction passes the whole path by and the budget of
    admission no longer counts it, until :meth:`PinningScheduler.testbed_unpin` gives it back.

Reuse
    With ``TESTBED_REUSE=pinned`` a request matches pinned prefixes alone, as the model's
    persistent profiles say; what else the tree still holds is recomputed.

Budget
    :meth:`PinningScheduler.testbed_limit_step` bounds the prefills of the steps that follow.

Stamps
    Tokens carry their request's perf_counter stamps as they were taken. SGLang's own are moved to
    the wall clock on the way, and a retraction overwrites the entry into the queue.

Step log
    With ``TESTBED_STEP_LOG`` naming a file, one row of float64 is appended for each step that
    computed something, in the order of :data:`STEP_COLUMNS`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req, ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult, TreeLock
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import (
    TreeCacheBuildContext,
    create_unified_radix_cache,
    register_radix_cache_backend,
    registered_radix_cache_backends,
)
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_schedule

from cluster.engines.step_log import STEP_COLUMNS, STEP_LOG_VARIABLE

CACHE_BACKEND = "testbed_pinning"
PIN = "testbed_pin"
STAMPS = "testbed_stamps"
REUSE_VARIABLE = "TESTBED_REUSE"
CORE_VARIABLE = "TESTBED_CORE"
FAILURE_VARIABLE = "TESTBED_START_FAILURE"


# -- pinning and reuse --


class PinningRadixCache(UnifiedRadixCache):
    """SGLang's radix tree, some of whose paths are locked by name."""

    def __init__(self, params: Any) -> None:
        self._pins: dict[str, tuple[RadixKey, TreeLock | None]] = {}
        self._only_pinned = os.environ.get(REUSE_VARIABLE) == "pinned"
        super().__init__(params)

    def reset(self) -> None:
        super().reset()
        # The locks went with the tree.
        self._pins.clear()

    def checkpoint(self, req: Req, *, up_to: int, **kwargs: Any) -> None:
        super().checkpoint(req, up_to=up_to, **kwargs)
        # The request still holds its own lock here: nothing can evict the path in between.
        if isinstance(req.finished_reason, FINISH_LENGTH):
            name = (req.sampling_params.custom_params or {}).get(PIN)
            if name is not None:
                self._pin(name, req)

    def _pin(self, name: str, req: Req) -> None:
        key = RadixKey(req.origin_input_ids, req.extra_key, cache_salt=req.cache_salt)
        key = key.page_aligned(self.page_size)
        match = super().match_prefix(MatchPrefixParams(key=key))
        lock = self.lock(match.last_device_node)
        previous = self._pins.pop(name, None)
        self._pins[name] = (key, lock)
        if previous is not None:
            self.unlock(previous[1])

    def unpin(self, name: str) -> None:
        """Return a pinned path to the evictable part of the pool."""
        _, lock = self._pins.pop(name)
        self.unlock(lock)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        if not self._only_pinned:
            return super().match_prefix(params)
        pinned = max(
            (
                key.match(params.key, page_size=self.page_size)
                for key, _ in self._pins.values()
                if key.extra_key == params.key.extra_key and key.cache_salt == params.key.cache_salt
            ),
            default=0,
        )
        cut = MatchPrefixParams(key=params.key[:pinned], cow_mamba=params.cow_mamba, req=params.req)
        return super().match_prefix(cut)


def _pinning_cache(context: TreeCacheBuildContext) -> UnifiedRadixCache:
    return create_unified_radix_cache(context, cache_class=PinningRadixCache)


# -- stamps, steps and load --


class _StampingStreamer(SchedulerOutputStreamer):
    """Puts a request's stamps beside each token that it sends."""

    has_additional_customized_info = True
    before_sending: Callable[[], Any]

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list]:
        # Whoever holds these tokens must see the load without the requests that they end.
        self.before_sending()
        return {STAMPS: [[_stamps(req)] for req in reqs]}


def _stamps(req: Req) -> tuple[float, float, float]:
    """(queued, scheduled, first token), kept from the first token on."""
    if not hasattr(req, STAMPS):
        times = req.time_stats
        stamps = (
            times.wait_queue_entry_time,
            times.forward_entry_time,
            times.prefill_finished_time,
        )
        setattr(req, STAMPS, stamps)
    return getattr(req, STAMPS)


class _Inquirer:
    """SGLang's load figures, whose running count leaves out requests still in prefill."""

    def __init__(self, inner: Any, running: Any) -> None:
        self._inner = inner
        self._running = running

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_loads(self) -> Any:
        load = self._inner.get_loads()
        load.num_running_reqs = self._running()
        return load


class PinningScheduler(Scheduler):
    """SGLang's scheduler, which also unpins, counts prefills as running and logs its steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        core = os.environ.get(CORE_VARIABLE)
        if core:
            os.sched_setaffinity(0, {int(core)})
        path = os.environ.get(STEP_LOG_VARIABLE)
        self._step_log = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        self._scheduled: list[float] | None = None
        self._open_steps: dict[int, list[float]] = {}
        self._current: ScheduleBatch | None = None
        try:
            super().__init__(*args, **kwargs)
        except Exception as error:
            # Otherwise SGLang signals its parent to kill itself, and nobody learns why.
            failure = os.environ.get(FAILURE_VARIABLE)
            if failure is None:
                raise
            text = next((line for line in str(error).splitlines() if line.strip()), repr(error))
            Path(failure).write_text(text)
            shared = getattr(getattr(self, "load_snapshot_writer", None), "path", None)
            if shared is not None:
                Path(shared).unlink(missing_ok=True)
            os._exit(1)

    def testbed_unpin(self, name: str) -> None:
        """Called by name through SGLang's ``collective_rpc``."""
        self.tree_cache.unpin(name)
        self.publish_load_snapshot(force=True)

    def testbed_limit_step(self, tokens: int | None) -> None:
        """Bound the prefills of the steps that follow; None: as the engine was started."""
        self.chunked_prefill_size = tokens or get_schedule().chunked_prefill_size

    def flush_cache(self, empty_cache: bool = True) -> bool:
        # On a CPU that is a garbage collection, for a second, which returns nothing to the pool.
        flushed = super().flush_cache(empty_cache=empty_cache and self.device != "cpu")
        self.publish_load_snapshot(force=True)
        return flushed

    def init_load_inquirer(self) -> None:
        super().init_load_inquirer()
        self.load_inquirer = _Inquirer(self.load_inquirer, self._count_running)

    def get_output_streamer_class(self) -> type[SchedulerOutputStreamer]:
        return _StampingStreamer

    def init_output_streamer(self) -> None:
        super().init_output_streamer()
        self.output_streamer.before_sending = partial(self.publish_load_snapshot, force=True)

    def _count_running(self) -> int:
        requests = list(self.running_batch.reqs)
        if self._current is not None:
            requests += self._current.reqs
        if self.chunked_req is not None:
            requests.append(self.chunked_req)
        return len({request.rid for request in requests if not request.finished()})

    def get_next_batch_to_run(self, *args: Any, **kwargs: Any) -> Any:
        started = time.monotonic()
        self._current = None
        plan = super().get_next_batch_to_run(*args, **kwargs)
        batch = plan.batch_to_run
        if not batch:
            return plan
        scheduled = time.monotonic()
        self.running_batch = plan.running_batch
        self._current = batch
        if batch.forward_mode.is_extend():
            # It may take long: whoever looks at the load meanwhile must see this step's queue.
            self.publish_load_snapshot(force=True)
        if self._step_log is not None:
            self._scheduled = [started, scheduled, *self._sums(batch)]
        return plan

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        result = super().run_batch(batch, *args, **kwargs)
        if self._scheduled is not None:
            self._open_steps[batch.forward_iter] = self._scheduled
            self._scheduled = None
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        row = self._open_steps.pop(batch.forward_iter, None)
        if row is None or self._step_log is None:
            super().process_batch_result(batch, result)
            return
        copied = getattr(result, "copy_done", None)
        if copied is not None:
            copied.synchronize()
        computed = time.monotonic()
        super().process_batch_result(batch, result)
        values = self._row(result, [row[0], row[1], computed, time.monotonic(), *row[2:]])
        assert len(values) == len(STEP_COLUMNS)
        self._step_log.write(np.array(values, dtype=np.float64).tobytes())

    def _row(self, result: Any, row: list[float]) -> list[float]:
        """The row as it is written; device time puts its own clock in."""
        return row

    def _sums(self, batch: ScheduleBatch) -> list[float]:
        prefills = decodes = 0
        new = squared = crossed = context = 0.0
        if batch.forward_mode.is_extend():
            for n, h in zip(batch.extend_lens, batch.prefix_lens, strict=True):
                prefills += 1
                new += n
                squared += float(n) * n
                crossed += float(n) * h
        else:
            decodes = len(batch.reqs)
            # seq_lens counts the token that this step computes.
            context = float(batch.seq_lens_cpu.sum()) - decodes
        usage = self.pool_stats_observer.get_pool_stats().get_kv_token_stats()[1]
        return [
            float(prefills),
            new,
            squared,
            crossed,
            float(decodes),
            context,
            float(self._count_running()),
            float(len(self.waiting_queue)),
            float(usage),
        ]


# -- start --


def register() -> None:
    """Tell SGLang in this process of the cache. Safe to call twice."""
    if CACHE_BACKEND not in registered_radix_cache_backends():
        register_radix_cache_backend(CACHE_BACKEND, _pinning_cache)


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process with the additions of this module."""
    register()
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler", PinningScheduler, HookType.REPLACE
    )
    scheduler_module.run_scheduler_process(*args, **kwargs)


class PinningEngine(Engine):
    """SGLang's engine whose scheduler process is :func:`run_scheduler`, without a detokenizer.

    Token ids go straight to the caller; the detokenizer's process would only import and wait.
    """

    run_scheduler_process_func = staticmethod(run_scheduler)

    @classmethod
    def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
        return [], []
