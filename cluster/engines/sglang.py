"""SGLang behind the Engine surface: its engine with prefix caching, pinning and a step log.

What its stamps and steps mean, beside vLLM's:

- ``queued`` is when the scheduler took the request in, between two steps: a request that comes
  during a step waits for its end before this stamp, as in vLLM.
- ``scheduled`` is when the first chunk of its prompt was put into a batch, at the first admission
  if it was retracted later; ``engine_first_token`` when the last chunk's result was processed.
- A step holds prefills or decodes, never both, and prefills go first: running decodes pause while
  prompts are computed. The token budget bounds the prefills of one step and no decode.
- ``EngineLoad.waiting`` counts requests that no step has begun; prefix queries and hits count
  finished requests.
- Cached tokens come in pages of ``block_size`` tokens; SGLang itself would take single tokens.
- A request is admitted when its prompt, its whole output and one page more fit beside what runs.

With ``engine.device`` the model's arithmetic is replaced by the step time of a measured device
(:mod:`cluster.engines.sglang_device_time`); everything else stays SGLang's.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import numpy as np

from cluster.devices import DeviceProfile, engine_on_device, load_device
from cluster.engines.base import Engine, EngineFacts, EngineLoad, Generation, model_directory
from cluster.engines.device_time_clock import Ledger, prepare_owner
from cluster.engines.pinned_blocks import PinnedBlocks
from cluster.engines.sglang_arguments import (
    LENGTH_MARGIN,
    bytes_per_token,
    check_length,
    server_arguments,
)
from cluster.engines.sglang_workplace import Workplace, let_sigquit_end_this_process
from cluster.engines.step_log import STEP_LOG_VARIABLE
from testbed.errors import EngineError

PLATFORM = "testbed_cpu"
MAKE = "make sglang"
FLUSH_PATIENCE = 2.0
"""s that a request may take to leave the scheduler after its last token was seen."""


class SglangEngine(Engine):
    """A real SGLang engine; its scheduler runs in a process of its own.

    On a CPU it needs the platform package of ``cluster/engines/sglang_cpu`` in its environment. A
    model directory without weights gets random ones: timings are real, text is not. SGLang ends
    the whole process, the caller's, when one of its own dies: give it an actor to itself.

    Parameters
    ----------
    arguments : dict, optional
        SGLang server arguments that replace those made from ``spec``.
    """

    name = "sglang"
    can_limit_step = True

    def __init__(self, *args: Any, arguments: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ledger: Ledger | None = None
        self._profile: DeviceProfile | None = None
        if self.spec.device is not None:
            self._profile = load_device(self.spec.device)
            self.spec = engine_on_device(self.spec)
        self._arguments = dict(arguments or {})
        self._engine: Any = None
        self._workplace: Workplace | None = None
        self._pinned: dict[str, np.ndarray] = {}
        self._blocks = PinnedBlocks(self.spec.block_size)
        self._pool = 0
        self._budget = 0
        self._controls = 0
        self._rpc = asyncio.Lock()
        self._inside: set[asyncio.Task[Any]] = set()
        self._queries = 0
        self._hits = 0
        self._preemptions = 0

    # -- life --

    async def start(self) -> EngineFacts:
        directory = model_directory(self.spec.model)
        check_length(self.spec, directory)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            import torch

            on_cpu = not torch.cuda.is_available()
            if on_cpu:
                self._prepare_cpu()
            import sglang
        except ImportError as error:
            raise EngineError(
                f"SGLang cannot be imported ({error}); run {MAKE!r} and use .venv-sglang, or on "
                "a CUDA machine: pip install '.[sglang]'"
            ) from None
        try:
            from cluster.engines import sglang_scheduler
        except ImportError as error:
            raise EngineError(
                f"SGLang {sglang.__version__} lacks an extension point that pinning needs "
                f"({error}); this testbed is written for 0.5.23: {MAKE}"
            ) from None

        sglang_scheduler.register()
        arguments = server_arguments(self.spec, directory, self.placement.seed, on_cpu)
        arguments |= self._arguments
        self._environment(sglang_scheduler)
        engine_class: Any = sglang_scheduler.PinningEngine
        if self._profile is not None:
            from cluster.engines import sglang_device_time

            arguments["disable_overlap_schedule"] = not self._profile.async_scheduling
            self._ledger = Ledger.create()
            sglang_device_time.set_options(self._profile, self.spec.time_scale, self._ledger.path)
            engine_class = sglang_device_time.DeviceTimeEngine

        let_sigquit_end_this_process()
        self._workplace = Workplace()
        failure = self._workplace.failure
        os.environ[sglang_scheduler.FAILURE_VARIABLE] = str(failure)
        try:
            with self._workplace.founding():
                self._engine = engine_class(**arguments)
        except (ValueError, RuntimeError, OSError, AssertionError) as error:
            reason = failure.read_text() if failure.exists() else str(error)
            first = next((x for x in reason.splitlines() if x.strip()), repr(error))
            await self.stop()
            raise EngineError(f"SGLang did not start: {first}") from error
        finally:
            os.environ.pop(sglang_scheduler.FAILURE_VARIABLE, None)
        shared = getattr(self._engine.tokenizer_manager.load_snapshot_reader, "path", "")
        self._workplace.note_shared_memory(shared)
        # This one would kill every child of this process, Ray's and other engines' too.
        atexit.unregister(self._engine.shutdown)
        if self._ledger is not None:
            self._ledger.unlink()
            await asyncio.to_thread(self._engine.collective_rpc, "testbed_device_time_host")
            prepare_owner()
        return self._facts(directory, arguments, sglang.__version__, on_cpu)

    def _prepare_cpu(self) -> None:
        if not any(p.name == PLATFORM for p in entry_points(group="sglang.srt.platforms")):
            raise EngineError(
                "SGLang has no platform for a CPU in this environment: the package "
                f"cluster/engines/sglang_cpu is not installed; {MAKE}"
            )
        os.environ.setdefault("SGLANG_PLATFORM", PLATFORM)
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    def _environment(self, hooks: Any) -> None:
        values = {
            STEP_LOG_VARIABLE: self.placement.step_log,
            hooks.CORE_VARIABLE: self.placement.core,
            hooks.REUSE_VARIABLE: self.spec.reuse,
        }
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = str(value)

    def _facts(
        self, directory: str, arguments: dict[str, Any], version: str, on_cpu: bool
    ) -> EngineFacts:
        import torch

        paced: dict[str, Any] = {}
        device = "cpu" if on_cpu else torch.cuda.get_device_name(0)
        if self._profile is not None:
            device = self._profile.device.name
            paced["device_time"] = {
                **self._profile.facts(),
                "time_scale": self.spec.time_scale,
                "text": "placeholders: nothing is computed",
            }
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        manager = self._engine.tokenizer_manager
        self._pool = int(info["max_total_num_tokens"])
        self._budget = int(arguments["chunked_prefill_size"])
        model = manager.model_config
        return EngineFacts(
            name=self.name,
            version=version,
            model=self.spec.model,
            dtype=str(model.dtype).removeprefix("torch."),
            device=device,
            num_blocks=self._pool // self.spec.block_size,
            block_size=self.spec.block_size,
            bytes_per_token=bytes_per_token(self.spec, directory),
            vocabulary=int(model.vocab_size),
            max_model_len=self.spec.max_model_len,
            max_sequences=self.spec.max_sequences,
            token_budget=self._budget,
            clock="wall clock" if self._profile is None else "device time",
            extra={
                **paced,
                "random_weights": arguments["load_format"] == "dummy",
                "async_scheduling": not arguments.get("disable_overlap_schedule", False),
                "chunked_prefill": True,
                "prefix_caching": True,
                "mixed_steps": False,  # a step holds prefills or decodes, prefills first
                "attention": arguments.get("attention_backend", "SGLang's choice"),
                "reuse": self.spec.reuse,
            },
        )

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            ledger.unlink()
            ledger.close()
        for task in self._inside:
            task.cancel()
        self._release()
        manager = getattr(engine, "tokenizer_manager", None)
        if manager is not None:
            # It takes the end of a process for a crash and then ends its own.
            await asyncio.to_thread(manager._subprocess_watchdog.stop)
            tasks = list(manager.asyncio_tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        workplace, self._workplace = self._workplace, None
        if workplace is not None:
            workplace.close_sockets()
            await asyncio.to_thread(workplace.clear)

    # -- serving --

    async def generate(
        self, request_id: str, tokens: Sequence[int], output_tokens: int
    ) -> Generation:
        return await self._serve(request_id, tokens, output_tokens)

    async def _serve(
        self,
        request_id: str,
        tokens: Sequence[int],
        output_tokens: int,
        custom: dict[str, Any] | None = None,
        priority: int | None = None,
    ) -> Generation:
        received = time.perf_counter()
        if self._engine is None:
            raise EngineError("the engine is not running")
        self.check_fits(len(tokens), output_tokens)
        prompt = tokens.tolist() if isinstance(tokens, np.ndarray) else [int(t) for t in tokens]
        self._check_pool(prompt, output_tokens)
        sampling: dict[str, Any] = {
            "max_new_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        if custom:
            sampling["custom_params"] = custom
        stream = asyncio.ensure_future(self._stream(request_id, prompt, sampling, priority))
        self._inside.add(stream)
        try:
            ids, times, stamps, meta = await stream
        except asyncio.CancelledError:
            if self._engine is None:
                raise EngineError(f"request {request_id}: the engine was stopped") from None
            self._engine.tokenizer_manager.abort_request(request_id)
            raise
        except ValueError as error:
            raise EngineError(f"request {request_id}: {error}") from None
        finally:
            self._inside.discard(stream)
        if len(ids) != output_tokens:
            raise EngineError(
                f"request {request_id} ended after {len(ids)} of {output_tokens} tokens"
            )
        queued, scheduled, first = (x or None for x in stamps)
        self._queries += len(prompt)
        self._hits += int(meta["cached_tokens"])
        self._preemptions += int(meta["num_retractions"])
        return Generation(
            received=received,
            first_token=times[0],
            finished=times[-1],
            queued=queued,
            scheduled=scheduled,
            engine_first_token=first,
            cached_tokens=int(meta["cached_tokens"]),
            token_ids=tuple(ids),
            token_times=tuple(times),
            preemptions=int(meta["num_retractions"]),
        )

    async def _stream(
        self, request_id: str, prompt: list[int], sampling: dict[str, Any], priority: int | None
    ) -> tuple[list[int], list[float], list[float], dict[str, Any]]:
        ids: list[int] = []
        times: list[float] = []
        stamps: list[list[float]] = []
        meta: dict[str, Any] = {}
        stream = await self._engine.async_generate(
            input_ids=prompt,
            sampling_params=sampling,
            rid=request_id,
            stream=True,
            priority=priority,
        )
        async for output in stream:
            now = time.perf_counter()
            ids.extend(output["output_ids"])
            times.extend([now] * len(output["output_ids"]))
            meta = output["meta_info"]
            stamps = stamps or meta["testbed_stamps"]
        return ids, times, stamps[0], meta

    def _check_pool(self, tokens: list[int], output_tokens: int) -> None:
        """Refuse what SGLang would cut short or let wait for ever beside the pinned prefixes."""
        page = self.spec.block_size
        whole = -(-len(tokens) // page) * page + output_tokens + max(page + 1, LENGTH_MARGIN)
        pinned = self._blocks.count * page
        missing = len(tokens) + output_tokens + page + 1 - (self._pool - pinned)
        if missing > 0:
            missing -= self._blocks.covered(tokens)
        if whole > self._pool or missing > 0:
            raise EngineError(
                f"a request of {len(tokens)} + {output_tokens} tokens does not fit in the KV pool "
                f"of {self._pool} tokens, {pinned} of them pinned (engine.num_blocks)"
            )

    # -- pins --

    async def pin(self, name: str, tokens: Sequence[int]) -> int:
        size = self.spec.block_size
        whole = len(tokens) // size * size
        if whole == 0:
            raise EngineError(
                f"pin {name!r}: {len(tokens)} tokens do not fill one block of {size} tokens"
            )
        if name in self._pinned:
            raise EngineError(f"pin {name!r}: this name is pinned already")
        try:
            await self._pin(name, np.asarray(tokens[:whole]))
        except EngineError as error:
            raise EngineError(f"pin {name!r}: {error}") from None
        return whole

    async def _pin(self, name: str, tokens: np.ndarray) -> None:
        self._controls += 1
        await self._serve(f"pin-{name}-{self._controls}", tokens, 1, {"testbed_pin": name})
        self._pinned[name] = tokens
        self._blocks.add(name, tokens)

    def _release(self) -> dict[str, np.ndarray]:
        """Nothing counts as pinned any more; returns what did."""
        pinned, self._pinned = self._pinned, {}
        self._blocks = PinnedBlocks(self.spec.block_size)
        return pinned

    async def unpin(self, name: str) -> None:
        if self._engine is None:
            raise EngineError("the engine is not running")
        if name not in self._pinned:
            raise EngineError(f"unpin {name!r}: nothing is pinned under this name")
        async with self._rpc:
            await asyncio.to_thread(self._engine.collective_rpc, "testbed_unpin", name=name)
        del self._pinned[name]
        self._blocks.remove(name)

    async def forget(self) -> None:
        if self._engine is None:
            raise EngineError("the engine is not running")
        deadline = time.perf_counter() + FLUSH_PATIENCE
        while not (await self._engine.tokenizer_manager.flush_cache()).success:
            if time.perf_counter() > deadline:
                raise EngineError("the prefix cache could not be emptied: requests are running")
            await asyncio.sleep(0.005)
        for name, tokens in self._release().items():
            await self._pin(name, tokens)
        if self._ledger is not None:
            self._ledger.restart()

    async def limit_step(self, tokens: int | None) -> None:
        if self._engine is None:
            raise EngineError("the engine is not running")
        # SGLang cuts a prompt between two pages, so that a step holds one page at least.
        if tokens is not None and not self.spec.block_size <= tokens <= self._budget:
            raise EngineError(
                f"limit_step: {tokens} tokens are not between {self.spec.block_size} and "
                f"{self._budget}"
            )
        if self._inside:
            raise EngineError("the tokens of a step cannot change: requests are running")
        async with self._rpc:
            await asyncio.to_thread(
                self._engine.collective_rpc, "testbed_limit_step", tokens=tokens
            )

    async def load(self) -> EngineLoad:
        if self._engine is None:
            raise EngineError("the engine is not running")
        loads = await self._engine.tokenizer_manager.get_loads()
        if not loads:
            raise EngineError("SGLang has not published its load yet")
        now = loads[0]
        return EngineLoad(
            running=now.num_running_reqs,
            waiting=now.num_waiting_reqs,
            kv_usage=now.num_used_tokens / max(now.max_total_num_tokens, 1),
            prefix_queries=self._queries,
            prefix_hits=self._hits,
            preemptions=self._preemptions,
            pace=None if self._ledger is None else self._ledger.read(),
        )
