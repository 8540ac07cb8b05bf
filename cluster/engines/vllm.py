"""vLLM behind the Engine surface: AsyncLLM with prefix caching, pinning and a step log.

With ``engine.device`` the model's arithmetic is replaced by the step time of a measured device
(:mod:`cluster.engines.device_time`); everything else stays vLLM's.
"""

from __future__ import annotations

import asyncio
import base64
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.devices import DeviceProfile, engine_on_device, load_device
from cluster.engines.base import (
    Engine,
    EngineFacts,
    EngineLoad,
    Generation,
    is_random_model,
    model_config,
    model_directory,
    nominal_bytes_per_token,
)
from cluster.engines.device_time_clock import Ledger, prepare_owner
from cluster.engines.pinned_blocks import PinnedBlocks
from cluster.engines.spawn import script_hidden
from cluster.engines.step_log import STEP_LOG_VARIABLE
from testbed.errors import EngineError

BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}
CPU_BLOCK = 32
PIN, UNPIN = "testbed_pin", "testbed_unpin"  # as in vllm_scheduler, which only vLLM imports
STEP_TOKENS = "testbed_step_tokens"
REUSE_VARIABLE = "TESTBED_REUSE"


class VllmEngine(Engine):
    """A real vLLM engine; its EngineCore runs in a process of its own.

    On a CPU the engine process is bound to ``placement.core``. A model directory without weights
    gets random ones: timings are real, text is not.
    """

    name = "vllm"
    can_limit_step = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._engine: Any = None
        self._sampling: Any = None
        self._pinned: dict[str, list[int]] = {}
        self._blocks = PinnedBlocks(self.spec.block_size)
        self._usable = 0
        self._budget = 0
        self._controls = 0
        self._preemptions = 0
        self._stats: _LastStats | None = None
        self._ledger: Ledger | None = None
        self._profile: DeviceProfile | None = None
        if self.spec.device is not None:
            self._profile = load_device(self.spec.device)
            self.spec = engine_on_device(self.spec)

    async def start(self) -> EngineFacts:
        directory = model_directory(self.spec.model)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        if self.placement.step_log:
            os.environ[STEP_LOG_VARIABLE] = self.placement.step_log
        else:
            os.environ.pop(STEP_LOG_VARIABLE, None)
        os.environ[REUSE_VARIABLE] = self.spec.reuse
        try:
            from vllm import SamplingParams
            from vllm import __version__ as version
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
            from vllm.sampling_params import RequestOutputKind
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error}); install the extra that fits this machine: "
                "pip install '.[cpu]' or '.[vllm]'"
            ) from None

        on_cpu = current_platform.is_cpu()
        arguments: dict[str, Any] = {
            "model": directory,
            "load_format": "dummy" if is_random_model(directory) else "auto",
            "skip_tokenizer_init": True,
            "enable_prefix_caching": True,
            "dtype": self.spec.dtype,
            "block_size": self.spec.block_size,
            "max_model_len": self.spec.max_model_len,
            "max_num_seqs": self.spec.max_sequences,
            "max_num_batched_tokens": max(self.spec.token_budget, self.spec.max_sequences),
            "seed": self.placement.seed,
            "disable_log_stats": False,
        }
        if self._profile is not None:
            arguments |= self._device_time(directory, self._profile)
        elif self.spec.num_blocks is not None:
            arguments["num_gpu_blocks_override"] = self.spec.num_blocks
        if self._profile is None and on_cpu:
            self._prepare_cpu(directory)
            arguments["enforce_eager"] = True
            arguments["distributed_executor_backend"] = "uni"
            arguments["scheduler_cls"] = "cluster.engines.vllm_scheduler.PinningScheduler"
        elif self._profile is None:
            arguments["scheduler_cls"] = "cluster.engines.vllm_scheduler.AsyncPinningScheduler"

        def build() -> Any:
            options = AsyncEngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
            if self._profile is not None:
                # vLLM's CPU platform turns both off for the sake of arithmetic, which there is
                # none of: scheduling overlaps a step where it does on the device.
                options.scheduler_config.async_scheduling = self._profile.async_scheduling
                options.parallel_config.distributed_executor_backend = "uni"
            return AsyncLLM.from_vllm_config(options, stat_loggers=[self._stat_logger()])

        try:
            with script_hidden():
                self._engine = build()
        except (ValueError, RuntimeError, OSError) as error:
            self._drop_ledger()
            reason = next((line for line in str(error).splitlines() if line.strip()), repr(error))
            raise EngineError(f"vLLM did not start: {reason}") from error

        def sampling(output_tokens: int, extra: dict[str, Any] | None = None) -> Any:
            return SamplingParams(
                temperature=0.0,
                max_tokens=output_tokens,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
                extra_args=extra,
            )

        self._sampling = sampling
        if self._ledger is not None:
            self._ledger.unlink()
        config = self._engine.vllm_config
        blocks = int(config.cache_config.num_gpu_blocks)
        self._budget = int(config.scheduler_config.max_num_batched_tokens)
        self._usable = blocks - 1  # vLLM keeps one, the null block, to itself
        self._blocks = PinnedBlocks(int(config.cache_config.block_size))
        model = model_config(directory) if os.path.isdir(directory) else {}
        width = 2 if self.spec.dtype == "auto" else BYTES_PER_VALUE[self.spec.dtype]
        device = current_platform.get_device_name(0) if not on_cpu else "cpu"
        paced: dict[str, Any] = {}
        if self._profile is not None:
            device = self._profile.device.name
            host = await self._engine.collective_rpc("device_time_host")
            prepare_owner()
            paced["device_time"] = {
                **self._profile.facts(),
                "time_scale": self.spec.time_scale,
                "host": host[0],
                "text": "placeholders: nothing is computed",
            }
        return EngineFacts(
            name=self.name,
            version=version,
            model=self.spec.model,
            dtype=str(config.model_config.dtype).removeprefix("torch."),
            device=device,
            num_blocks=blocks,
            block_size=int(config.cache_config.block_size),
            bytes_per_token=nominal_bytes_per_token(model, width) if model else 0.0,
            vocabulary=int(config.model_config.get_vocab_size()),
            max_model_len=int(config.model_config.max_model_len),
            max_sequences=int(config.scheduler_config.max_num_seqs),
            token_budget=self._budget,
            clock="wall clock" if self._profile is None else "device time",
            extra={
                **paced,
                "random_weights": arguments["load_format"] == "dummy",
                "async_scheduling": bool(config.scheduler_config.async_scheduling),
                "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
                "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            },
        )

    def _device_time(self, directory: str, profile: DeviceProfile) -> dict[str, Any]:
        """Arguments that replace the model's arithmetic by the device's step time."""
        from cluster.engines.device_time import OPTIONS

        assert self.spec.num_blocks is not None  # written out by engine_on_device
        kappa = nominal_bytes_per_token(model_config(directory), BYTES_PER_VALUE[self.spec.dtype])
        self._ledger = Ledger.create()
        scheduler = (
            "AsyncDeviceTimeScheduler" if profile.async_scheduling else "DeviceTimeScheduler"
        )
        return {
            "worker_cls": "cluster.engines.device_time.DeviceTimeWorker",
            "scheduler_cls": f"cluster.engines.device_time.{scheduler}",
            "load_format": "dummy",
            "enforce_eager": True,
            "additional_config": {
                OPTIONS: {
                    "step_time": base64.b64encode(profile.step_time.vector().tobytes()).decode(),
                    "pool_bytes": self.spec.num_blocks * self.spec.block_size * kappa,
                    "time_scale": self.spec.time_scale,
                    "ledger": self._ledger.path,
                }
            },
        }

    def _prepare_cpu(self, directory: str) -> None:
        if self.spec.block_size % CPU_BLOCK:
            raise EngineError(
                f"engine.block_size: {self.spec.block_size}: vLLM's CPU attention takes multiples "
                f"of {CPU_BLOCK}"
            )
        if self.placement.core is not None:
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(self.placement.core)
        if self.spec.num_blocks is not None and os.path.isdir(directory):
            # vLLM reserves this much before the override applies; it must at least hold the pool.
            kappa = nominal_bytes_per_token(
                model_config(directory), BYTES_PER_VALUE[self.spec.dtype]
            )
            pool = self.spec.num_blocks * self.spec.block_size * kappa
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, -(-int(pool) // 2**30)))

    def _stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        last = _LastStats()
        self._stats = last

        class Keep(StatLoggerBase):
            def __init__(self, *_: Any, **__: Any) -> None:
                pass

            def record(
                self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any
            ) -> None:
                last.update(scheduler_stats, iteration_stats)

            def log_engine_initialized(self) -> None:
                pass

        return Keep

    async def generate(
        self, request_id: str, tokens: Sequence[int], output_tokens: int
    ) -> Generation:
        return await self._serve(request_id, tokens, output_tokens, None)

    async def _serve(
        self,
        request_id: str,
        tokens: Sequence[int],
        output_tokens: int,
        extra: dict[str, Any] | None,
    ) -> Generation:
        received = time.perf_counter()
        if self._engine is None:
            raise EngineError("the engine is not running")
        self.check_fits(len(tokens), output_tokens)
        if extra is None or PIN in extra:
            self._check_room(tokens, output_tokens)
        ids: list[int] = []
        times: list[float] = []
        cached = 0
        metrics: Any = None
        ids_in = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        # A rendered input skips tokenisation's detour through a thread.
        prompt = {"type": "token", "prompt_token_ids": ids_in}
        sampling = self._sampling(output_tokens, extra)
        async for output in self._engine.generate(prompt, sampling, request_id):
            now = time.perf_counter()
            new = output.outputs[0].token_ids
            ids.extend(new)
            times.extend([now] * len(new))
            cached = output.num_cached_tokens or cached
            metrics = output.metrics or metrics
        if len(ids) != output_tokens:
            raise EngineError(
                f"request {request_id} ended after {len(ids)} of {output_tokens} tokens"
            )
        stamp = _Stamps(metrics)
        return Generation(
            received=received,
            first_token=times[0],
            finished=times[-1],
            queued=stamp.queued,
            scheduled=stamp.scheduled,
            engine_first_token=stamp.first_token,
            cached_tokens=int(cached),
            token_ids=tuple(ids),
            token_times=tuple(times),
        )

    def _check_room(self, tokens: Sequence[int], output_tokens: int) -> None:
        needed = self._blocks.needed(tokens, output_tokens)
        if needed > self._usable - self._blocks.count:
            raise EngineError(
                f"a prompt of {len(tokens)} tokens with {output_tokens} output tokens needs "
                f"{needed} blocks of its own; {self._usable} less {self._blocks.count} pinned are "
                "not enough"
            )

    async def pin(self, name: str, tokens: Sequence[int]) -> int:
        size = self.spec.block_size
        whole = len(tokens) // size * size
        if whole == 0:
            raise EngineError(
                f"pin {name!r}: {len(tokens)} tokens do not fill one block of {size} tokens"
            )
        if name in self._pinned:
            raise EngineError(f"pin {name!r}: this name is pinned already")
        await self._pin(name, [int(t) for t in tokens[:whole]])
        return whole

    async def _pin(self, name: str, tokens: list[int]) -> None:
        self._controls += 1
        await self._serve(f"pin-{name}-{self._controls}", tokens, 1, {PIN: name})
        self._pinned[name] = tokens
        self._blocks.add(name, tokens)

    async def unpin(self, name: str) -> None:
        if name not in self._pinned:
            raise EngineError(f"unpin {name!r}: nothing is pinned under this name")
        self._controls += 1
        await self._serve(f"unpin-{name}-{self._controls}", [0], 1, {UNPIN: name})
        del self._pinned[name]
        self._blocks.remove(name)

    async def forget(self) -> None:
        pinned = dict(self._pinned)
        for name in pinned:
            await self.unpin(name)
        if not await self._engine.reset_prefix_cache():
            raise EngineError("the prefix cache could not be emptied: requests are running")
        for name, tokens in pinned.items():
            await self._pin(name, tokens)
        if self._ledger is not None:
            self._ledger.restart()

    async def limit_step(self, tokens: int | None) -> None:
        if tokens is not None and not 1 <= tokens <= self._budget:
            raise EngineError(f"limit_step: {tokens} tokens are not between 1 and {self._budget}")
        self._controls += 1
        await self._serve(f"limit-{self._controls}", [0], 1, {STEP_TOKENS: tokens or 0})

    async def load(self) -> EngineLoad:
        if self._engine is None or self._stats is None:
            raise EngineError("the engine is not running")
        await self._engine.check_health()
        load = self._stats.load()
        return load if self._ledger is None else replace(load, pace=self._ledger.read())

    def _drop_ledger(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.unlink()
            ledger.close()

    async def stop(self) -> None:
        self._drop_ledger()
        engine, self._engine = self._engine, None
        if engine is None:
            return
        if engine.output_handler is not None:
            # It would log the end of the engine process as an error.
            engine.output_handler.cancel()
        await asyncio.to_thread(engine.shutdown)


class _Stamps:
    """The engine's own stamps; 0 means that it did not give one."""

    def __init__(self, metrics: Any) -> None:
        def stamp(name: str) -> float | None:
            value = getattr(metrics, name, 0.0) if metrics is not None else 0.0
            return float(value) if value else None

        self.queued = stamp("queued_ts")
        self.scheduled = stamp("scheduled_ts")
        self.first_token = stamp("first_token_ts")


class _LastStats:
    """The newest scheduler statistics and the counters that only add up."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.kv_usage = 0.0
        self.queries = 0
        self.hits = 0
        self.preemptions = 0

    def update(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self.running = scheduler.num_running_reqs
            self.waiting = scheduler.num_waiting_reqs
            self.kv_usage = scheduler.kv_cache_usage
            self.queries += scheduler.prefix_cache_stats.queries
            self.hits += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self.preemptions += iteration.num_preempted_reqs

    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self.running,
            waiting=self.waiting,
            kv_usage=self.kv_usage,
            prefix_queries=self.queries,
            prefix_hits=self.hits,
            preemptions=self.preemptions,
        )
