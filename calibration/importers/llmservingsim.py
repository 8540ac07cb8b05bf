"""LLMServingSim: a GPU's operator profile, and the run that was measured beside it."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from calibration.importers import plain
from calibration.importers.facts import (
    chunked_prefill,
    decode_models,
    fitted,
    model_facts,
    prefill_grid,
    source_file,
)
from calibration.record import (
    Calibration,
    DeviceFacts,
    EngineFacts,
    Estimate,
    MemoryRecord,
    Source,
)
from testbed.environment import environment
from testbed.errors import CalibrationError
from testbed.measured_run import MeasuredRun, read_run
from testbed.model_facts import known_architecture
from testbed.operator_profile import OperatorProfile, read_profile

LICENCE = "MIT"
LONGEST = 16384
FIRST_REQUESTS = 5


def import_llmservingsim(
    path: str | Path,
    *,
    model: str | None = None,
    tensor_parallel: int | None = None,
    device: str | None = None,
) -> Calibration:
    """A record from a run folder (``meta.json``, ``profile/``) or from a bare profile folder.

    From the profile: step time, g(n | h), decode seconds. From ``meta.json``: engine, pool, κ.
    The stamps in ``requests.jsonl`` enter none of them; the mean tokens of its requests give
    m_run, and the first few stand beside their prediction in ``extra``.

    Raises
    ------
    CalibrationError
        A file is missing or malformed, or the model's shape is not known.
    """
    path = Path(path)
    if (path / "meta.json").exists():
        run = read_run(path)
        engine = run.engine
        profile = read_profile(
            path / "profile",
            layers=engine.architecture.layers,
            tensor_parallel=tensor_parallel or engine.tensor_parallel,
            padding=engine.padding,
        )
        return _from_run(path, run, profile, device)
    return _from_profile(path, model, tensor_parallel or 1, device)


def _from_run(
    path: Path, run: MeasuredRun, profile: OperatorProfile, device: str | None
) -> Calibration:
    engine = run.engine
    block_bytes = engine.kappa * engine.block_size
    size = engine.block_size
    # The state of a request at its end, in whole blocks; its last token is never stored.
    tokens = np.ceil((run.input_tokens + run.output_tokens - 1) / size) * size * engine.kappa
    usable = (engine.num_blocks - 1) * size
    points = prefill_grid(
        profile.step_time, engine.token_budget, min(LONGEST, usable, engine.max_model_len)
    )
    return Calibration(
        measured_at=_time(profile.meta.get("profiled_at")),
        source=Source(
            kind="imported",
            tool="llmservingsim",
            tool_version=_text(profile.meta.get("profiler_version")),
            files=tuple(source_file(p, LICENCE) for p in (*profile.files, path / "meta.json")),
            notes=(
                *run.notes,
                *profile.notes,
                "m_run: mean bytes of the run's requests at their end, nothing shared",
            ),
        ),
        engine=EngineFacts(
            name="vllm",
            version=engine.version or None,
            dtype=engine.precision,
            tensor_parallel=engine.tensor_parallel,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            token_budget=engine.token_budget,
            max_sequences=engine.max_sequences,
            max_model_len=engine.max_model_len,
            prefix_caching=engine.prefix_caching,
            async_scheduling=engine.async_scheduling,
            arguments=plain(run.meta.get("engine_kwargs") or {}),
        ),
        model=model_facts(engine.model, engine.architecture, engine.precision),
        device=DeviceFacts(
            kind="gpu",
            name=device or engine.device,
            count=engine.tensor_parallel,
            memory_bytes=engine.device_memory,
            details=plain(run.meta.get("hardware") or {}),
        ),
        prefill=fitted(points),
        prefill_points=points,
        step_time=profile.step_time,
        memory=MemoryRecord(
            pool_bytes=(engine.num_blocks - 1) * block_bytes,
            kappa_nominal=engine.kappa,
            block_size=engine.block_size,
            num_blocks=engine.num_blocks,
            source="meta.json, less vLLM's null block",
        ),
        m_run=Estimate(
            value=float(tokens.mean()),
            standard_error=float(tokens.std(ddof=1) / np.sqrt(len(tokens)))
            if len(tokens) > 1
            else None,
            samples=len(tokens),
        ),
        decode=decode_models(profile.step_time, engine.max_sequences, pool_tokens=usable),
        environment=environment(),
        extra={"first_requests": _first_requests(run, profile)},
    )


def _first_requests(run: MeasuredRun, profile: OperatorProfile) -> list[dict[str, Any]]:
    """Predicted unloaded time to first token of the run's first requests beside the measured one,
    which contains whatever waited before it: a check, used for nothing."""
    rows = []
    for i in range(min(FIRST_REQUESTS, len(run.arrival))):
        measured = float(run.first_token[i] - run.queued[i])
        rows.append(
            {
                "request": run.names[i],
                "input_tokens": int(run.input_tokens[i]),
                "unloaded_ttft": chunked_prefill(
                    profile.step_time, int(run.input_tokens[i]), 0, run.engine.token_budget
                ),
                "measured_ttft": measured if np.isfinite(measured) else None,
            }
        )
    return rows


def _from_profile(
    path: Path, model: str | None, tensor_parallel: int, device: str | None
) -> Calibration:
    meta = read_profile(path, layers=1, tensor_parallel=tensor_parallel).meta
    name = model or str(meta.get("model") or "")
    architecture = known_architecture(name)
    if architecture is None:
        raise CalibrationError(
            f"{path}: the shape of model {name!r} is not known; import the run's folder with a "
            "config.json, or name a known model"
        )
    profile = read_profile(path, layers=architecture.layers, tensor_parallel=tensor_parallel)
    effective = meta.get("engine_effective") or {}
    budget = int(effective.get("max_num_batched_tokens") or 2048)
    sequences = int(effective.get("max_num_seqs") or 256)
    points = prefill_grid(profile.step_time, budget, LONGEST)
    return Calibration(
        measured_at=_time(meta.get("profiled_at")),
        source=Source(
            kind="imported",
            tool="llmservingsim",
            tool_version=_text(meta.get("profiler_version")),
            files=tuple(source_file(p, LICENCE) for p in profile.files),
            notes=(*profile.notes, "no run beside the profile: the KV pool is not known"),
        ),
        engine=EngineFacts(
            name="vllm",
            version=_text(meta.get("vllm_version")),
            dtype="bfloat16" if str(meta.get("variant", "")).startswith("bf16") else None,
            tensor_parallel=tensor_parallel,
            block_size=effective.get("block_size"),
            token_budget=budget,
            max_sequences=sequences,
        ),
        model=model_facts(name, architecture, "bfloat16"),
        device=DeviceFacts(
            kind="gpu", name=device or str(meta.get("gpu") or "unknown GPU"), count=tensor_parallel
        ),
        prefill=fitted(points),
        prefill_points=points,
        step_time=profile.step_time,
        memory=MemoryRecord(
            kappa_nominal=architecture.kappa(2.0), block_size=effective.get("block_size")
        ),
        decode=decode_models(profile.step_time, sequences),
        environment=environment(),
    )


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _time(value: Any) -> datetime | None:
    if isinstance(value, datetime):
        return value
    try:
        return datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return None
