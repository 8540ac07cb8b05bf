"""EngineConfig: what a simulated engine is allowed to do in a step, and with its memory."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from testbed.simulation import engine_model_state as kernel
from testbed.simulation.engine_model_pool import counted_pool, new_pool
from testbed.simulation.engine_model_state import Engine
from testbed.step_time import OperatorStepTime, StepTime

SCHEDULERS = ("vllm", "sglang")


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


def never_fits(config: EngineConfig, facts: np.ndarray) -> np.ndarray:
    """Requests, (N,), that an empty pool could not hold to their end."""
    if config.num_blocks is None:
        return np.zeros(len(facts), dtype=bool)
    total = facts[:, kernel.INPUT] + facts[:, kernel.OUTPUT]
    resident = np.minimum(facts[:, kernel.REUSABLE], facts[:, kernel.INPUT] - 1)
    need = -(-total // config.block_size) - resident // config.block_size
    if config.scheduler == "sglang":
        need += 2  # its admission keeps a block aside and wants room beyond the last one
    return np.asarray(need > config.usable_blocks)
