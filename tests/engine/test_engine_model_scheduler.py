"""The engine model against vLLM's own scheduler, both in virtual time on the same requests.

vLLM's ``Scheduler`` (or ``AsyncScheduler``) is built as in an engine and asked for steps; the
model's arithmetic is replaced by the step time. Every stamp must agree.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest

from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import StepTime, step_seconds

pytestmark = pytest.mark.engine
vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

MODEL = Path(__file__).parents[2] / "cluster" / "engines" / "models" / "tiny-llama"
STEP = StepTime(
    c_pre=4e-3, p=5e-4, c_both=1e-3, a=4e-5, b=3e-8, d=6e-8, c_dec=2.5e-3, e=1e-4, f=3e-7
)
BLOCK = 16


def make_scheduler(config: EngineConfig):
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    model = ModelConfig(model=str(MODEL), skip_tokenizer_init=True, dtype="bfloat16", seed=0)
    cache = CacheConfig(
        block_size=BLOCK,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=config.prefix_caching,
    )
    cache.num_gpu_blocks = config.num_blocks
    scheduling = SchedulerConfig(
        max_num_seqs=config.max_sequences,
        max_num_batched_tokens=config.token_budget,
        max_model_len=config.max_model_len,
        enable_chunked_prefill=True,
        async_scheduling=config.async_scheduling,
        is_encoder_decoder=False,
    )
    engine = VllmConfig(model_config=model, cache_config=cache, scheduler_config=scheduling)
    kind = AsyncScheduler if config.async_scheduling else Scheduler
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return kind(
        vllm_config=engine,
        kv_cache_config=KVCacheConfig(
            num_blocks=config.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(engine),
        block_size=BLOCK,
        log_stats=True,
    )


class Replay:
    """vLLM's engine loop with a clock of our own: one step under way, or two."""

    def __init__(self, config, arrivals, prompts, outputs) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler = make_scheduler(config)
        self.depth = 2 if config.async_scheduling else 1
        self.arrivals = arrivals
        self.requests = [
            Request(
                request_id=str(i),
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=out, ignore_eos=True, detokenize=False),
                pooling_params=None,
                block_hasher=hasher,
            )
            for i, (prompt, out) in enumerate(zip(prompts, outputs, strict=True))
        ]
        count = len(prompts)
        self.scheduled = np.full(count, np.nan)
        self.first = np.full(count, np.nan)
        self.finished = np.full(count, np.nan)
        self.cached = np.full(count, -1)
        self.anew: dict[str, int] = {}
        self.steps = 0

    def run(self):
        now, last_end, admitted = 0.0, 0.0, 0
        under_way: deque = deque()
        while admitted < len(self.requests) or under_way or self.scheduler.has_requests():
            if not under_way and not self.scheduler.has_unfinished_requests():
                if admitted == len(self.requests):
                    break
                now = max(now, self.arrivals[admitted])
            while admitted < len(self.requests) and self.arrivals[admitted] <= now:
                self.scheduler.add_request(self.requests[admitted])
                admitted += 1
            while len(under_way) < self.depth:
                output = self.scheduler.schedule()
                if output.total_num_scheduled_tokens == 0:
                    break
                start = max(now, last_end) if under_way else now
                last_end = start + self._seconds(output, now)
                under_way.append((last_end, output))
                self.steps += 1
            if under_way:
                now, output = under_way.popleft()
                self._complete(output, now)
        return self

    def _seconds(self, output, now) -> float:
        prefills = decodes = 0
        new = squared = crossed = context = 0.0
        fresh = {r.req_id for r in output.scheduled_new_reqs}
        for name, n in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            before = request.num_computed_tokens - n
            if name in fresh:
                self.scheduled[int(name)] = now
                self.cached[int(name)] = before
            # A preempted request computes anew what was known of it when it resumed.
            if name in output.scheduled_cached_reqs.resumed_req_ids:
                self.anew[name] = request.num_tokens
            if before < self.anew.get(name, request.num_prompt_tokens):
                prefills += 1
                new += n
                squared += float(n) * n
                crossed += float(n) * before
            else:
                decodes += 1
                context += before
        return step_seconds(STEP.vector(), prefills, new, squared, crossed, decodes, context)

    def _complete(self, output, now) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(output.num_scheduled_tokens)
        tokens = []
        for name in names:
            request = self.scheduler.requests[name]
            end = output_computed(output, name) + output.num_scheduled_tokens[name]
            tokens.append([7 + int(name)] if end >= request.num_tokens else [])
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={n: i for i, n in enumerate(names)},
            sampled_token_ids=tokens,
        )
        before = {n: self.scheduler.requests[n].num_output_tokens for n in names}
        objects = {n: self.scheduler.requests[n] for n in names}
        self.scheduler.update_from_output(output, result)
        for name, request in objects.items():
            if before[name] == 0 and request.num_output_tokens == 1:
                self.first[int(name)] = now
            if request.is_finished():
                self.finished[int(name)] = now


def output_computed(output, name) -> int:
    for request in output.scheduled_new_reqs:
        if request.req_id == name:
            return request.num_computed_tokens
    cached = output.scheduled_cached_reqs
    return cached.num_computed_tokens[cached.req_ids.index(name)]


def workload(seed: int, count: int, rate: float, longest: int, outputs: int):
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    stems = [rng.integers(10, 4000, 40 * BLOCK).tolist() for _ in range(3)]
    prompts = []
    for _ in range(count):
        stem = stems[rng.integers(3)][: int(rng.integers(0, 12)) * BLOCK]
        own = rng.integers(10, 4000, int(rng.integers(1, longest))).tolist()
        prompts.append(stem + own)
    return arrivals, prompts, rng.integers(1, outputs, count)


def contents(prompts):
    """Numbers that stand for each prompt's full blocks and all before them."""
    numbers: dict[tuple[int, tuple[int, ...]], int] = {}
    flat, offsets = [], [0]
    for prompt in prompts:
        parent = -1
        for i in range(len(prompt) // BLOCK):
            key = (parent, tuple(prompt[i * BLOCK : (i + 1) * BLOCK]))
            parent = numbers.setdefault(key, len(numbers))
            flat.append(parent)
        offsets.append(len(flat))
    return flat, offsets


@pytest.mark.parametrize("overlapped", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("blocks", "sequences", "budget", "rate"),
    [(400, 16, 512, 30.0), (90, 16, 256, 60.0), (60, 8, 2048, 40.0)],
    ids=["roomy", "tight", "preempting"],
)
def test_every_stamp_agrees_with_vllm(overlapped, blocks, sequences, budget, rate):
    config = EngineConfig(
        token_budget=budget,
        max_sequences=sequences,
        block_size=BLOCK,
        num_blocks=blocks,
        async_scheduling=overlapped,
        max_model_len=800,
    )
    arrivals, prompts, outputs = workload(7, 120, rate, 300, 60)
    real = Replay(config, arrivals, prompts, outputs.tolist()).run()
    flat, offsets = contents(prompts)
    ours = simulate_engine(
        config,
        STEP,
        arrivals,
        [len(p) for p in prompts],
        outputs,
        block_hashes=flat,
        block_offsets=offsets,
    )
    assert ours.steps == real.steps
    np.testing.assert_allclose(ours.scheduled, real.scheduled, rtol=1e-9)
    np.testing.assert_allclose(ours.first_token, real.first, rtol=1e-9)
    np.testing.assert_allclose(ours.finished, real.finished, rtol=1e-9)
    np.testing.assert_array_equal(ours.cached_tokens, real.cached)
    if blocks == 60:
        assert ours.preemptions.sum() > 0
