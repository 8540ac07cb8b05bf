"""Facts that several importers turn into the record's parts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from calibration.fit import fit_prefill
from calibration.record import DecodeModel, ModelFacts, PrefillFit, PrefillPoint, SourceFile
from testbed.errors import CalibrationError
from testbed.model_facts import BYTES, Architecture
from testbed.step_time import OperatorStepTime, StepTime

DECODE_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_CONTEXT = 1024


def source_file(path: Path, licence: str | None = None) -> SourceFile:
    """A file by content."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    return SourceFile(path=str(path), sha256=hashlib.sha256(data).hexdigest(), licence=licence)


def model_facts(name: str, architecture: Architecture | None, precision: str) -> ModelFacts:
    """Shape of a model; nothing but its name when it is not known."""
    if architecture is None:
        return ModelFacts(name=name)
    return ModelFacts(
        name=name,
        layers=architecture.layers,
        hidden=architecture.hidden,
        heads=architecture.heads,
        kv_heads=architecture.kv_heads,
        head_dim=architecture.head_dim,
        intermediate=architecture.intermediate,
        vocabulary=architecture.vocabulary,
        parameters=architecture.parameters,
        weight_bytes=float(architecture.parameters * BYTES.get(precision, 2)),
    )


def chunked_prefill(
    step_time: StepTime | OperatorStepTime, new: int, cached: int, budget: int
) -> float:
    """An unloaded prefill, cut where the token budget ends, s."""
    total, before = 0.0, cached
    while before < cached + new:
        n = min(budget, cached + new - before)
        total += step_time.seconds([(n, before)])
        before += n
    return total


def prefill_grid(
    step_time: StepTime | OperatorStepTime, budget: int, longest: int
) -> tuple[PrefillPoint, ...]:
    """g(n | h) of a step time at lengths and depths up to ``longest`` tokens in all."""
    points = []
    for cached in (0, 512, 1024, 2048, 4096, 8192, 16384):
        for new in (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384):
            if new + cached <= longest:
                seconds = chunked_prefill(step_time, new, cached, budget)
                points.append(
                    PrefillPoint(new=new, cached=cached, seconds=(seconds,), median=seconds)
                )
    return tuple(points)


def fitted(points: Sequence[PrefillPoint]) -> PrefillFit | None:
    """The best form for the points; None when there are too few."""
    return fit_prefill(points) if len(points) >= 3 else None


def decode_models(
    step_time: StepTime | OperatorStepTime,
    most: int,
    context: int = DECODE_CONTEXT,
    pool_tokens: float | None = None,
) -> tuple[DecodeModel, ...]:
    """Seconds a generated token at each number of sequences that fits."""
    models = []
    for sequences in DECODE_CONCURRENCY:
        if sequences > most or (pool_tokens is not None and sequences * context > pool_tokens):
            break
        seconds = step_time.seconds(decodes=sequences, decode_context=float(sequences * context))
        models.append(
            DecodeModel(
                per_token=seconds, concurrency=float(sequences), context_tokens=float(context)
            )
        )
    return tuple(models)


def one_of(options: Iterable[str], wanted: str | None, field: str, where: str) -> str:
    """``wanted`` if it is among ``options``; the only option when nothing is wanted."""
    known = list(options)
    if wanted is None and len(known) == 1:
        return known[0]
    if wanted is not None and wanted in known:
        return wanted
    said = "say which" if wanted is None else f"{wanted!r} is not"
    raise CalibrationError(f"{where}: {field}: {said} one of {', '.join(known)}")
