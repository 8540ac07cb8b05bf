"""vLLM's own scheduler with three additions: pinned prefixes, a step log, a movable budget.

vLLM loads this class inside its engine process through ``scheduler_cls``. Nothing of the
scheduling itself is changed: admission, chunking, preemption and eviction are vLLM's.

Pinning
    A request whose ``sampling_params.extra_args`` carries ``PIN`` keeps its blocks when it
    finishes: they stay referenced, so eviction cannot take them and active requests cannot use
    their space. A request that carries ``UNPIN`` gives back the blocks pinned under that name.

Reuse
    With ``TESTBED_REUSE=pinned`` a request reuses pinned blocks alone, as the model's persistent
    profiles say; what else the cache still holds is recomputed.

Budget
    A request that carries ``STEP_TOKENS`` sets the token budget of the steps that follow, at most
    the one that vLLM was started with; 0 gives that one back.

Step log
    With ``TESTBED_STEP_LOG`` naming a file, one row of float64 is appended for each step that
    computed something, in the order of :data:`STEP_COLUMNS`.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from cluster.engines.step_log import STEP_COLUMNS, STEP_LOG_VARIABLE

if TYPE_CHECKING:
    _Base = Scheduler
else:
    _Base = object

PIN = "testbed_pin"
UNPIN = "testbed_unpin"
STEP_TOKENS = "testbed_step_tokens"
REUSE_VARIABLE = "TESTBED_REUSE"


def _control(request: Request, key: str) -> Any:
    params = request.sampling_params
    arguments = params.extra_args if params is not None else None
    return arguments.get(key) if arguments else None


class Additions(_Base):
    """What the schedulers of this project have beyond vLLM's own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pinned: dict[str, Request] = {}
        self._pinned_blocks: set[int] = set()
        self._only_pinned = os.environ.get(REUSE_VARIABLE) == "pinned"
        path = os.environ.get(STEP_LOG_VARIABLE)
        self._step_log = open(path, "ab", buffering=0) if path else None  # noqa: SIM115
        self._open_steps: dict[int, list[float]] = {}
        self._own_budget: int = self.max_num_scheduled_tokens

    # -- pinning and budget --

    def add_request(self, request: Request) -> None:
        name = _control(request, UNPIN)
        if name is not None:
            kept = self._pinned.pop(name, None)
            if kept is not None:
                super()._free_request_blocks(kept)
                self._note_pinned_blocks()
        tokens = _control(request, STEP_TOKENS)
        if tokens is not None:
            self.max_num_scheduled_tokens = min(int(tokens), self._own_budget) or self._own_budget
        super().add_request(request)

    def _free_request_blocks(self, request: Request) -> None:
        name = _control(request, PIN)
        if name is None or request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            super()._free_request_blocks(request)
            return
        previous = self._pinned.pop(name, None)
        self._pinned[name] = request
        if previous is not None:
            super()._free_request_blocks(previous)
        self._note_pinned_blocks()

    def _note_pinned_blocks(self) -> None:
        self._pinned_blocks = {
            block
            for request in self._pinned.values()
            for group in self.kv_cache_manager.get_block_ids(request.request_id)
            for block in group
        }

    # -- reuse --

    def _get_local_prefix_cache_hit(self, request: Request) -> Any:
        hit = super()._get_local_prefix_cache_hit(request)
        if not self._only_pinned or hit[1] == 0:
            return hit
        blocks, tokens, boundary, diverged = hit
        kept = 0
        for block in blocks.blocks[0]:
            if block.block_id not in self._pinned_blocks:
                break
            kept += 1
        size = tokens // len(blocks.blocks[0])
        if kept * size < tokens:
            tokens = kept * size
            blocks = self.kv_cache_manager.truncate_computed_blocks(blocks, tokens)
        return blocks, tokens, boundary, diverged

    # -- step log --

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if self._step_log is None:
            return super().schedule(*args, **kwargs)
        started = time.monotonic()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens > 0:
            self._open_steps[id(output)] = [started, time.monotonic(), *self._sums(output)]
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        row = self._open_steps.pop(id(scheduler_output), None)
        if row is None or self._step_log is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        computed = time.monotonic()
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        stamped = [row[0], row[1], computed, time.monotonic(), *row[2:]]
        values = self._row(scheduler_output, stamped)
        assert len(values) == len(STEP_COLUMNS)
        self._step_log.write(np.array(values, dtype=np.float64).tobytes())
        return outputs

    def _row(self, scheduler_output: Any, row: list[float]) -> list[float]:
        """The row as it is written; device time puts its own clock in."""
        return row

    def _sums(self, output: Any) -> list[float]:
        prefills = decodes = 0
        new = squared = crossed = context = 0.0
        for request_id, n in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            # schedule() has already advanced num_computed_tokens by n.
            before = request.num_computed_tokens - n
            if before < request.num_prompt_tokens:
                prefills += 1
                new += n
                squared += float(n) * n
                crossed += float(n) * before
            else:
                decodes += 1
                context += before
        running, waiting = self.get_request_counts()
        return [
            float(prefills),
            new,
            squared,
            crossed,
            float(decodes),
            context,
            float(running),
            float(waiting),
            float(self.kv_cache_manager.usage),
        ]

    def shutdown(self) -> None:
        if self._step_log is not None:
            self._step_log.close()
            self._step_log = None
        super().shutdown()


class PinningScheduler(Additions, Scheduler):
    """Where async scheduling is off, as it is on CPU."""


class AsyncPinningScheduler(Additions, AsyncScheduler):
    """Where async scheduling is on, as on CUDA by default."""
