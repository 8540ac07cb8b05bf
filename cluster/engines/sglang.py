"""SGLang behind the Engine surface: its engine with prefix caching, pinning and a step log."""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import psutil

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
from cluster.engines.step_log import STEP_LOG_VARIABLE
from testbed.errors import EngineError

BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}
PLATFORM = "testbed_cpu"
MAKE = "make sglang"
CPU_POOL_BYTES = 2**30
"""KV pool on a CPU where the scenario names none: SGLang would take most of the memory."""

LENGTH_MARGIN = 8
"""SGLang keeps a few positions of its context to itself; they are added, never used."""


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

    def __init__(self, *args: Any, arguments: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._arguments = dict(arguments or {})
        self._engine: Any = None
        self._processes: list[Any] = []
        self._pinned: dict[str, list[int]] = {}
        self._folder: str | None = None
        self._pool = 0
        self._controls = 0
        self._rpc = asyncio.Lock()
        self._queries = 0
        self._hits = 0
        self._preemptions = 0

    # -- life --

    async def start(self) -> EngineFacts:
        directory = model_directory(self.spec.model)
        self._check_length(directory)
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
        arguments = self._server_arguments(directory, on_cpu) | self._arguments
        self._environment(sglang_scheduler)

        before = multiprocessing.active_children()
        self._folder = tempfile.mkdtemp(prefix="sglang-")
        failure = Path(self._folder) / "failure"
        os.environ[sglang_scheduler.FAILURE_VARIABLE] = str(failure)
        try:
            with _temporary_files_in(self._folder):
                self._engine = sglang_scheduler.PinningEngine(**arguments)
        except (ValueError, RuntimeError, OSError, AssertionError) as error:
            reason = failure.read_text() if failure.exists() else str(error)
            first = next((x for x in reason.splitlines() if x.strip()), repr(error))
            self._processes = _new_children(before)
            await self.stop()
            raise EngineError(f"SGLang did not start: {first}") from error
        finally:
            os.environ.pop(sglang_scheduler.FAILURE_VARIABLE, None)
        self._processes = _new_children(before)
        atexit.register(_end, self._processes)
        # This one would kill every child of this process, Ray's and other engines' too.
        atexit.unregister(self._engine.shutdown)
        return self._facts(directory, arguments, sglang.__version__, on_cpu)

    def _check_length(self, directory: str) -> None:
        if not os.path.isdir(directory):
            return
        config = model_config(directory)
        limit = config.get("max_position_embeddings")
        if limit is None or config.get("rope_scaling"):
            return
        if self.spec.max_model_len > limit:
            raise EngineError(
                f"engine.max_model_len: {self.spec.max_model_len} is more than the model's "
                f"{limit} positions"
            )
        if self.spec.max_model_len + LENGTH_MARGIN > limit:
            os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"

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

    def _server_arguments(self, directory: str, on_cpu: bool) -> dict[str, Any]:
        spec = self.spec
        arguments: dict[str, Any] = {
            "model_path": directory,
            "load_format": "dummy" if is_random_model(directory) else "auto",
            "skip_tokenizer_init": True,
            "dtype": spec.dtype,
            "page_size": spec.block_size,
            "context_length": spec.max_model_len + LENGTH_MARGIN,
            "max_running_requests": spec.max_sequences,
            "chunked_prefill_size": max(spec.token_budget, spec.block_size),
            "random_seed": self.placement.seed,
            "radix_cache_backend": "testbed_pinning",
            "incremental_streaming_output": True,
            "sleep_on_idle": True,
            "log_level": "error",
        }
        blocks = spec.num_blocks
        if on_cpu:
            arguments |= {
                "device": "cpu",
                "attention_backend": "torch_native",
                "sampling_backend": "pytorch",
                "disable_cuda_graph": True,
                "disable_overlap_schedule": True,
            }
            if blocks is None and os.path.isdir(directory):
                kappa = self._bytes_per_token(directory)
                blocks = max(2, int(CPU_POOL_BYTES / kappa / spec.block_size))
        if blocks is not None:
            pool = blocks * spec.block_size
            if pool <= spec.block_size + LENGTH_MARGIN:
                raise EngineError(
                    f"engine.num_blocks: a KV pool of {blocks} blocks of {spec.block_size} tokens "
                    f"is too small: one request alone keeps {spec.block_size + LENGTH_MARGIN}"
                )
            arguments["max_total_tokens"] = pool
        return arguments

    def _bytes_per_token(self, directory: str) -> float:
        if not os.path.isdir(directory):
            return 0.0
        return nominal_bytes_per_token(model_config(directory), BYTES_PER_VALUE[self.spec.dtype])

    def _facts(
        self, directory: str, arguments: dict[str, Any], version: str, on_cpu: bool
    ) -> EngineFacts:
        import torch

        info = self._engine._scheduler_init_result.scheduler_infos[0]
        manager = self._engine.tokenizer_manager
        self._pool = int(info["max_total_num_tokens"])
        model = manager.model_config
        return EngineFacts(
            name=self.name,
            version=version,
            model=self.spec.model,
            dtype=str(model.dtype).removeprefix("torch."),
            device="cpu" if on_cpu else torch.cuda.get_device_name(0),
            num_blocks=self._pool // self.spec.block_size,
            block_size=self.spec.block_size,
            bytes_per_token=self._bytes_per_token(directory),
            vocabulary=int(model.vocab_size),
            max_model_len=self.spec.max_model_len,
            max_sequences=self.spec.max_sequences,
            token_budget=int(arguments["chunked_prefill_size"]),
            clock="wall clock",
            extra={
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
        manager = getattr(engine, "tokenizer_manager", None)
        if manager is not None:
            # It takes the end of a process for a crash and then ends its own.
            await asyncio.to_thread(manager._subprocess_watchdog.stop)
            for task in list(manager.asyncio_tasks):
                task.cancel()
            engine.send_to_rpc.close(linger=0)
            shared = getattr(manager.load_snapshot_reader, "path", None)
            if shared is not None:
                Path(shared).unlink(missing_ok=True)
        await asyncio.to_thread(_end, self._processes)
        folder, self._folder = self._folder, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)

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
        ids: list[int] = []
        times: list[float] = []
        meta: dict[str, Any] = {}
        manager = self._engine.tokenizer_manager
        try:
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
                meta |= output["meta_info"]
        except asyncio.CancelledError:
            manager.abort_request(request_id)
            raise
        except ValueError as error:
            raise EngineError(f"request {request_id}: {error}") from None
        if len(ids) != output_tokens:
            raise EngineError(
                f"request {request_id} ended after {len(ids)} of {output_tokens} tokens"
            )
        queued, scheduled, first = (x or None for x in meta["testbed_stamps"][0])
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

    def _check_pool(self, tokens: list[int], output_tokens: int) -> None:
        """Refuse what SGLang would cut short or let wait for ever beside the pinned prefixes."""
        page = self.spec.block_size
        whole = -(-len(tokens) // page) * page + output_tokens + max(page + 1, LENGTH_MARGIN)
        reused = max((_common(tokens, p, page) for p in self._pinned.values()), default=0)
        beside = len(tokens) - reused + output_tokens + page + 1
        pinned = self._pinned_tokens()
        if whole > self._pool or beside > self._pool - pinned:
            raise EngineError(
                f"a request of {len(tokens)} + {output_tokens} tokens does not fit in the KV pool "
                f"of {self._pool} tokens, {pinned} of them pinned (engine.num_blocks)"
            )

    def _pinned_tokens(self) -> int:
        total = 0
        seen: list[list[int]] = []
        for tokens in self._pinned.values():
            shared = max((_common(tokens, s, self.spec.block_size) for s in seen), default=0)
            total += len(tokens) - shared
            seen.append(tokens)
        return total

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
            await self._pin(name, [int(t) for t in tokens[:whole]])
        except EngineError as error:
            raise EngineError(f"pin {name!r}: {error}") from None
        return whole

    async def _pin(self, name: str, tokens: list[int]) -> None:
        self._controls += 1
        await self._serve(f"pin-{name}-{self._controls}", tokens, 1, {"testbed_pin": name})
        self._pinned[name] = tokens

    async def unpin(self, name: str) -> None:
        if name not in self._pinned:
            raise EngineError(f"unpin {name!r}: nothing is pinned under this name")
        async with self._rpc:
            await asyncio.to_thread(self._engine.collective_rpc, "testbed_unpin", name=name)
        del self._pinned[name]

    async def forget(self) -> None:
        if self._engine is None:
            raise EngineError("the engine is not running")
        result = await self._engine.tokenizer_manager.flush_cache()
        if not result.success:
            raise EngineError("the prefix cache could not be emptied: requests are running")
        pinned, self._pinned = self._pinned, {}
        for name, tokens in pinned.items():
            await self._pin(name, tokens)

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
        )


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Sockets and metric files of SGLang, which it leaves behind, go to one folder."""
    previous, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = previous
        if variable is None:
            os.environ.pop("TMPDIR")
        else:
            os.environ["TMPDIR"] = variable


def _new_children(before: list[Any]) -> list[Any]:
    return [p for p in multiprocessing.active_children() if p not in before]


def _common(a: Sequence[int], b: Sequence[int], page: int) -> int:
    """Length of the common prefix in whole pages."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    length = int(different[0]) if len(different) else n
    return length // page * page


def _end(processes: list[Any]) -> None:
    """Kill processes and what they started, wait until they are gone, and empty the list."""
    family: list[psutil.Process] = []
    for process in processes:
        try:
            parent = psutil.Process(process.pid)
            family += [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            continue
    for member in family:
        try:
            member.kill()
        except psutil.NoSuchProcess:
            continue
    for process in processes:
        process.join()
    processes.clear()
    psutil.wait_procs(family, timeout=30)
