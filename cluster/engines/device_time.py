"""vLLM in device time: a worker that computes nothing and takes as long as a measured device.

vLLM loads these classes inside its engine process through ``worker_cls`` and ``scheduler_cls``.
Scheduler, prefix cache, admission, preemption and API are vLLM's own; the worker alone is
replaced. It allocates no memory, holds no weights, and returns one placeholder for each token, so
that generated text means nothing. A step takes :func:`testbed.step_time.step_seconds` of the
device's calibration, the function that the simulator uses.

How many replicas a machine holds is a matter of steps a second: one costs the host about 3 ms of a
core, a third of it after the tokens have left the engine. Two cores therefore carry some 400 steps
a second of all replicas together; ``tests/bench/bench_device_replicas.py hold`` measures it. Six
replicas of an RTX 4090 with Llama-3.1-8B at 60 % load make 170 steps a second on short chats and
60 to 140 on Mooncake's prompts at full length. A time scale of k divides both by k.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from cluster.engines.device_time_batch import Batch
from cluster.engines.device_time_clock import (
    DeviceClock,
    Ledger,
    Step,
    end_with_owner,
    install,
    installed,
    prepare_engine,
)
from cluster.engines.vllm_scheduler import Additions
from testbed.step_time import step_seconds

OPTIONS = "testbed_device_time"
"""Key of the worker's options in vLLM's ``additional_config``."""


@dataclass
class Paced(AsyncModelRunnerOutput):
    """A step's output, held back until the step ends."""

    output: ModelRunnerOutput
    clock: DeviceClock
    step: Step

    def get_output(self) -> ModelRunnerOutput:
        self.clock.finish(self.step)
        return self.output


class DeviceTimeWorker(WorkerBase):
    """Takes the time of a device and nothing else."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        options = vllm_config.additional_config[OPTIONS]  # type: ignore[index]
        self._vector = np.frombuffer(base64.b64decode(options["step_time"]), dtype=np.float64)
        self._pool_bytes = int(options["pool_bytes"])
        self._ledger = Ledger(options["ledger"])
        self._clock = install(DeviceClock(float(options["time_scale"]), self._ledger))
        self._batch = Batch()
        self._paced: Paced | None = None

    # -- start --

    def init_device(self) -> None:
        self.device = torch.device("cpu")
        step_seconds(self._vector, 1, 1.0, 1.0, 0.0, 0, 0.0)  # compiled before anybody waits

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        pass

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        heads = self.model_config.get_num_kv_heads(self.parallel_config)
        layers = self.model_config.get_num_layers(self.parallel_config)
        return {
            f"layers.{i}": FullAttentionSpec(
                block_size=self.cache_config.block_size,
                num_kv_heads=heads,
                head_size=self.model_config.get_head_size(),
                dtype=self.model_config.dtype,
            )
            for i in range(layers)
        }

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def set_kv_cache_layout(self, kv_cache_layout: str) -> None:
        self.cache_config.kv_cache_layout = kv_cache_layout

    def determine_available_memory(self) -> int:
        return self._pool_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        pass

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def device_time_host(self) -> dict[str, Any]:
        """Prepare this process, all its threads running; what the kernel granted."""
        end_with_owner()
        return prepare_engine()

    def shutdown(self) -> None:
        self._ledger.close()

    # -- steps --

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        sums, produced = self._batch.take(scheduler_output)
        if not produced:
            return EMPTY_MODEL_RUNNER_OUTPUT
        step = self._clock.submit(float(step_seconds(self._vector, *sums)))
        requests = list(scheduler_output.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=requests,
            req_id_to_index={request: i for i, request in enumerate(requests)},
            sampled_token_ids=produced,
        )
        scheduler_output.testbed_step = (step, sums)  # type: ignore[attr-defined]
        self._paced = Paced(output, self._clock, step)
        return None

    def sample_tokens(self, grammar_output: Any) -> AsyncModelRunnerOutput:
        paced, self._paced = self._paced, None
        assert paced is not None  # vLLM asks for tokens only after a step that computes some
        return paced


if TYPE_CHECKING:
    _Base = Additions
else:
    _Base = object


class _InDeviceTime(_Base):
    """Tells the clock when the engine asks, finds nothing to do, or rests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._clock = installed()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.ask()
        output = super().schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens == 0:
            self._clock.nothing_to_do()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._clock.rest(self.has_unfinished_requests())
        return outputs

    def _row(self, scheduler_output: Any, row: list[float]) -> list[float]:
        """The device's own step: its bounds in device seconds, the sums that it was timed by."""
        step, sums = scheduler_output.testbed_step
        start, end = step.start / self._clock.scale, step.end / self._clock.scale
        return [start, start, end, end, *map(float, sums), *row[10:]]


class DeviceTimeScheduler(_InDeviceTime, Additions, Scheduler):
    """For a device whose engine schedules between steps."""


class AsyncDeviceTimeScheduler(_InDeviceTime, Additions, AsyncScheduler):
    """For a device whose engine schedules while a step runs."""
