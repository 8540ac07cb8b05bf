"""SGLang in device time: its own scheduler and radix cache, a worker that computes nothing.

SGLang's scheduler makes its worker in one method (``init_tp_model_worker``) and waits for a step
in one place (the result's ``copy_done``): these are replaced and nothing else. No weights are
loaded and no KV buffer is allocated; the allocator of pages, the radix tree, admission, chunking,
retraction and the overlap of scheduling with a step are SGLang's. A step takes
:func:`testbed.step_time.step_seconds` of the device's calibration, as in vLLM's device time and in
the simulator. A token is a placeholder: generated text means nothing.

A record that was measured with another engine lends its step times, its pool and its limits:
kernels are the device's, the order of steps is SGLang's.
"""

from __future__ import annotations

import base64
import json
import os
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVCache, ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_device, get_schedule

from cluster.devices import DeviceProfile
from cluster.engines.device_time_batch import PLACEHOLDER
from cluster.engines.device_time_clock import (
    DeviceClock,
    Ledger,
    Step,
    end_with_owner,
    prepare_engine,
)
from cluster.engines.sglang_scheduler import PinningEngine, PinningScheduler, register
from testbed.step_time import step_seconds

OPTIONS_VARIABLE = "TESTBED_DEVICE_TIME"
"""The worker's options as JSON: step time, time scale, ledger."""


# -- a worker without arithmetic --


class _Nothing(torch.nn.Module):
    """A model without parameters, for what asks a model about itself."""

    def forward(self, input_ids: Any, positions: Any, forward_batch: Any) -> Any:
        raise RuntimeError("device time computes nothing")


class _Unallocated(KVCache):
    """KV memory that exists by its size alone."""

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, layers: int) -> None:
        super().__init__(size, page_size, dtype, layers, "cpu", enable_memory_saver=False)

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        raise RuntimeError("device time holds no keys")

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        raise RuntimeError("device time holds no values")

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        raise RuntimeError("device time holds no keys and values")

    def set_kv_buffer(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("device time stores no keys and values")

    def get_kv_size_bytes(self) -> tuple[int, int]:
        return 0, 0


class _Runner(ModelRunner):
    """What the scheduler asks of a model runner: pools and sizes."""

    canary_manager = None
    prefill_aware_swa = False
    preloaded_weights_bytes = 0

    def initialize(self) -> None:
        self.init_memory_saver_adapter()
        self.sampler = None
        self.model = _Nothing()
        self.dtype = self.kv_cache_dtype = self.model_config.dtype
        self.sliding_window_size = None
        self.weight_load_mem_usage = 0.0

    def account_preloaded_weights(self, preloaded_weights_bytes: int) -> None:
        pass

    def alloc_memory_pool(self, memory_pool_config: Any = None, **_: Any) -> None:
        schedule, page = get_schedule(), self.page_size
        size = schedule.max_total_tokens // page * page
        self.max_total_num_tokens = size
        self.max_running_requests = min(schedule.max_running_requests, size // 2)
        self.req_to_token_pool = ReqToTokenPool(
            size=self.max_running_requests,
            max_context_len=self.model_config.context_len,
            device="cpu",
            enable_memory_saver=False,
        )
        self.token_to_kv_pool = _Unallocated(
            size, page, self.dtype, self.model_config.num_hidden_layers
        )
        common = {"dtype": self.dtype, "device": "cpu", "kvcache": self.token_to_kv_pool}
        self.token_to_kv_pool_allocator = (
            TokenToKVPoolAllocator(size, need_sort=False, **common)
            if page == 1
            else PagedTokenToKVPoolAllocator(size, page, need_sort=False, **common)
        )
        self.init_ngram_embedding_manager()

    @property
    def logical_max_total_num_tokens(self) -> int:
        return self.max_total_num_tokens

    def init_attention_backends(self) -> None:
        self.attn_backend = None

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        self.decode_cuda_graph_runner = None


class DeviceTimeWorker(TpModelWorker):
    """Hands back a placeholder for each request of a batch, at once."""

    def _init_model_runner(self) -> None:
        self._model_runner = _Runner(
            model_config=self.model_config,
            mem_fraction_static=get_schedule().mem_fraction_static,
            gpu_id=self.gpu_id,
            nccl_port=self.nccl_port,
            server_args=self.server_args,
        )

    def get_pad_input_ids_func(self) -> None:
        return None

    def forward_batch_generation(
        self, batch: ScheduleBatch | None, *_: Any, **__: Any
    ) -> GenerationBatchResult:
        assert batch is not None
        return GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None),
            next_token_ids=torch.full((len(batch.reqs),), PLACEHOLDER, dtype=torch.long),
        )


# -- the device's time --


class _StepEnd:
    """Stands for the event that SGLang waits for before it looks at a step's tokens."""

    def __init__(self, clock: DeviceClock, step: Step) -> None:
        self._clock = clock
        self.step = step
        self._waited = False

    def synchronize(self) -> None:
        if not self._waited:
            self._waited = True
            self._clock.finish(self.step)

    def record(self, *_: Any) -> None:
        pass


class DeviceTimeScheduler(PinningScheduler):
    """SGLang's scheduler whose steps end when the device's would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = json.loads(os.environ[OPTIONS_VARIABLE])
        self._vector = np.frombuffer(base64.b64decode(options["step_time"]), dtype=np.float64)
        self._clock = DeviceClock(float(options["time_scale"]), Ledger(options["ledger"]))
        self._step_sums: list[float] = []
        step_seconds(self._vector, 1, 1.0, 1.0, 0.0, 0, 0.0)  # compiled before anybody waits
        super().__init__(*args, **kwargs)

    def init_tp_model_worker(self) -> None:
        self.tp_worker = DeviceTimeWorker(
            server_args=self.server_args, gpu_id=get_device().gpu_id, nccl_port=self.nccl_port
        )

    def testbed_device_time_host(self) -> None:
        """Called by name through ``collective_rpc``: prepare this process, its threads running."""
        end_with_owner()
        prepare_engine()

    def get_next_batch_to_run(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.ask()
        plan = super().get_next_batch_to_run(*args, **kwargs)
        if plan.batch_to_run:
            self._step_sums = self._sums(plan.batch_to_run)
        else:
            self._clock.nothing_to_do()
        return plan

    def run_batch(self, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
        p, n, squared, crossed, d, context = self._step_sums[:6]
        seconds = step_seconds(self._vector, int(p), n, squared, crossed, int(d), context)
        step = self._clock.submit(float(seconds))
        result = super().run_batch(batch, *args, **kwargs)
        result.copy_done = _StepEnd(self._clock, step)
        return result

    def process_batch_result(self, batch: ScheduleBatch, result: Any) -> None:
        super().process_batch_result(batch, result)
        self._clock.rest(self._count_running() + len(self.waiting_queue) > 0)

    def _row(self, result: Any, row: list[float]) -> list[float]:
        """The device's own step: its bounds in device seconds."""
        step = result.copy_done.step
        start, end = step.start / self._clock.scale, step.end / self._clock.scale
        return [start, start, end, end, *row[4:]]


# -- start --


def set_options(profile: DeviceProfile, time_scale: float, ledger: str) -> None:
    """Put the options into the environment, which the scheduler's process inherits."""
    os.environ[OPTIONS_VARIABLE] = json.dumps(
        {
            "step_time": base64.b64encode(profile.step_time.vector().tobytes()).decode(),
            "time_scale": time_scale,
            "ledger": ledger,
        }
    )


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler process in device time."""
    register()
    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler", DeviceTimeScheduler, HookType.REPLACE
    )
    scheduler_module.run_scheduler_process(*args, **kwargs)


class DeviceTimeEngine(PinningEngine):
    """SGLang's engine whose scheduler process is :func:`run_scheduler` of this module."""

    run_scheduler_process_func = staticmethod(run_scheduler)
