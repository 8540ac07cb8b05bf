"""A measured run in a folder, made up: an analytic GPU, its profile, and stamps of its engine."""

from __future__ import annotations

import csv
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from testbed.operator_profile import read_profile
from testbed.simulation.engine_model import EngineConfig, simulate_engine

CONFIG = {
    "num_hidden_layers": 6,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32000,
}
TOKENS = (1, 8, 64, 256, 512)
SEQUENCES = (1, 4, 16)
CHUNKS = (16, 64, 256, 512)
CONTEXTS = (16, 128, 1024)
DECODES = (1, 4, 16)


def write_profile(folder: Path, *, mixed: bool = True, skip: tuple[int, ...] = ()) -> None:
    """A profile of a device whose times are simple functions of its axes, microseconds."""
    folder.mkdir(parents=True)
    _csv(
        folder / "dense.csv",
        ("layer", "tokens", "time_us"),
        [
            (name, n, round(base + rate * n, 4))
            for name, base, rate in (
                ("embedding", 2.0, 0.01),
                ("layernorm", 2.0, 0.01),
                ("qkv_proj", 50.0, 0.3),
                ("rotary_emb", 2.0, 0.01),
                ("o_proj", 40.0, 0.2),
                ("gate_up_proj", 200.0, 1.2),
                ("act_fn", 3.0, 0.05),
                ("down_proj", 120.0, 0.6),
                ("final_layernorm", 2.0, 0.01),
            )
            for n in TOKENS
        ],
    )
    _csv(
        folder / "per_sequence.csv",
        ("layer", "sequences", "time_us"),
        [("lm_head", n, 400 + 2 * n) for n in SEQUENCES]
        + [("sampler", n, 20 + n) for n in SEQUENCES],
    )
    rows: list[tuple[float, ...]] = []
    for chunk, h in itertools.product(CHUNKS, (0, *CONTEXTS)):
        rows.append((chunk, h, 0, 0, 9 + 1e-4 * chunk * (h + 0.5 * chunk)))
    for n, context in itertools.product(DECODES, CONTEXTS):
        rows.append((0, 0, n, context, 9 + 0.01 * n * context))
    if mixed:
        for chunk, h, n, context in itertools.product(CHUNKS, (0, *CONTEXTS), DECODES, CONTEXTS):
            if n in skip:
                continue
            time = 9 + 1e-4 * chunk * (h + 0.5 * chunk) + 0.015 * n * context
            rows.append((chunk, h, n, context, time))
    _csv(
        folder / "attention.csv",
        ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"),
        rows,
    )
    (folder / "meta.yaml").write_text(
        "profiler_version: 1.0.0\nmodel: made/up\nengine_effective:\n  enforce_eager: true\n"
        "  hf_overrides:\n    num_hidden_layers: 1\n"
    )


def write_run(
    folder: Path,
    *,
    requests: int = 60,
    meta: dict[str, Any] | None = None,
    blocks: int = 120,
    model: dict[str, Any] | None = None,
) -> Path:
    """A folder as LLMServingSim's bench leaves it, with the stamps of a simulated engine.

    ``model`` replaces fields of :data:`CONFIG`.
    """
    shape = {**CONFIG, **(model or {})}
    folder.mkdir(parents=True)
    write_profile(folder / "profile")
    document: dict[str, Any] = {
        "model": "made/up",
        "vllm_version": "0.19.0",
        "engine_kwargs": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "dtype": "bfloat16"},
        "started_at": "2026-01-01T00:00:00Z",
        "kv_cache": {"num_gpu_blocks": blocks, "block_size": 16, "enable_prefix_caching": True},
        "hardware": {"device_name": "GPU of the tests", "device_total_memory_bytes": 4e9},
        "resolved_config": {
            "model_config": {"max_model_len": 2048, "hf_config": shape},
            "scheduler_config": {"async_scheduling": True},
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]},
        },
    }
    document.update(meta or {})
    (folder / "meta.json").write_text(json.dumps(document))
    rng = np.random.default_rng(5)
    arrival = np.cumsum(rng.exponential(0.02, requests))
    inputs, outputs = rng.integers(20, 300, requests), rng.integers(2, 60, requests)
    step_time = read_profile(
        folder / "profile", layers=shape["num_hidden_layers"], padding=[1, 2, 4, 8, 16]
    ).step_time
    config = EngineConfig(
        token_budget=512,
        max_sequences=16,
        num_blocks=blocks,
        async_scheduling=True,
        max_model_len=2048,
    )
    trace = simulate_engine(config, step_time, arrival, inputs, outputs, log=True)
    wall, monotonic = 1_767_225_600.5, 4000.0
    with (folder / "requests.jsonl").open("w") as file:
        for i in range(requests):
            row = {
                "request_id": f"bench-{i}",
                "input_toks": int(inputs[i]),
                "output_toks": int(outputs[i]),
                "arrival_time": wall + arrival[i],
                "queued_ts": monotonic + trace.queued[i],
                "scheduled_ts": monotonic + trace.scheduled[i],
                "first_token_ts": monotonic + trace.first_token[i],
                "last_token_ts": monotonic + trace.finished[i],
            }
            file.write(json.dumps(row) + "\n")
    assert trace.log is not None
    ticks = np.arange(0.5, trace.log["end"][-1], 0.5)
    at = np.searchsorted(trace.log["start"], ticks - 0.5, side="right") - 1
    _csv(
        folder / "timeseries.csv",
        ("t", "running", "waiting"),
        [
            (t, int(trace.log["running"][i]), int(trace.log["waiting"][i]))
            for t, i in zip(ticks, np.maximum(at, 0), strict=True)
        ],
    )
    return folder


def _csv(path: Path, header: tuple[str, ...], rows: list[Any]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
