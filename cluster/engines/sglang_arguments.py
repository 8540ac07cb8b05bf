"""SGLang's server arguments from an :class:`EngineSpec`, for a CPU or a CUDA device."""

from __future__ import annotations

import os
from typing import Any

from cluster.engines.base import is_random_model, model_config, nominal_bytes_per_token
from testbed.errors import EngineError
from testbed.scenario import EngineSpec

BYTES_PER_VALUE = {"bfloat16": 2, "float16": 2, "float32": 4, "auto": 2}
CPU_POOL_BYTES = 2**30
"""KV pool on a CPU where the scenario names none: SGLang would take most of the memory."""

LENGTH_MARGIN = 8
"""SGLang keeps a few positions of its context to itself; they are added, never used."""


def server_arguments(spec: EngineSpec, directory: str, seed: int, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of SGLang's engine.

    Raises
    ------
    EngineError
        The pool is too small for any request.
    """
    arguments: dict[str, Any] = {
        "model_path": directory,
        "load_format": "dummy" if is_random_model(directory) else "auto",
        "skip_tokenizer_init": True,
        "dtype": spec.dtype,
        "page_size": spec.block_size,
        "context_length": spec.max_model_len + LENGTH_MARGIN,
        "max_running_requests": spec.max_sequences,
        "chunked_prefill_size": max(spec.token_budget, spec.block_size),
        "random_seed": seed,
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
            kappa = bytes_per_token(spec, directory)
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


def bytes_per_token(spec: EngineSpec, directory: str) -> float:
    """Nominal κ, bytes (Theory A4); 0 for a model that is not a directory here."""
    if not os.path.isdir(directory):
        return 0.0
    return nominal_bytes_per_token(model_config(directory), BYTES_PER_VALUE[spec.dtype])


def check_length(spec: EngineSpec, directory: str) -> None:
    """Refuse a context that the model has no positions for; raises :class:`EngineError`."""
    if not os.path.isdir(directory):
        return
    config = model_config(directory)
    limit = config.get("max_position_embeddings")
    if limit is None or config.get("rope_scaling"):
        return
    if spec.max_model_len > limit:
        raise EngineError(
            f"engine.max_model_len: {spec.max_model_len} is more than the model's {limit} positions"
        )
    if spec.max_model_len + LENGTH_MARGIN > limit:
        os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
