"""Derive: journalled samples turned into the quantities of the record."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration.fit import BOOTSTRAP, robust_nnls, summarise
from calibration.journal import Journal
from calibration.record import ConcurrencyRecord, DecodeModel, Estimate, PrefillPoint

Sample = dict[str, Any]
PRIOR_SAMPLES = 4.0


def prefill_points(
    samples: Sequence[Sample],
) -> tuple[list[PrefillPoint], list[dict[int, float]], int]:
    """Grid points, the passes over them, and how many samples missed the intended depth.

    A sample counts under the depth that the engine reported, whatever was intended.
    """
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    missed = 0
    for s in samples:
        times[s["new"], s["cached"]].append(s["seconds"])
        missed += tuple(s["point"]) != (s["new"], s["cached"])
    keys = sorted(times, key=lambda p: (p[1], p[0]))
    index = {key: i for i, key in enumerate(keys)}
    rounds: dict[int, dict[int, float]] = defaultdict(dict)
    for s in samples:
        rounds[s["round"]][index[s["new"], s["cached"]]] = s["seconds"]
    points = moderate([summarise(n, h, times[n, h]) for n, h in keys])
    return points, [rounds[r] for r in sorted(rounds)], missed


def moderate(points: Sequence[PrefillPoint]) -> list[PrefillPoint]:
    """Standard errors that lean on all points where one has few samples.

    Three samples may lie close by chance, so a point's relative variance is averaged with the
    median one of the grid, which counts as :data:`PRIOR_SAMPLES` degrees of freedom (a moderated
    variance, as in differential expression).
    """
    known = [p for p in points if p.standard_error is not None]
    if not known:
        return list(points)
    own = {id(p): (p.standard_error or 0.0) ** 2 * len(p.seconds) / p.median**2 for p in known}
    usual = float(np.median(list(own.values())))
    moderated = []
    for p in points:
        freedom = len(p.seconds) - 1 if id(p) in own else 0
        variance = PRIOR_SAMPLES * usual + freedom * own.get(id(p), 0.0)
        variance /= PRIOR_SAMPLES + freedom
        error = p.median * math.sqrt(variance / len(p.seconds))
        moderated.append(p.model_copy(update={"standard_error": error}))
    return moderated


def drift(points: Sequence[PrefillPoint], rounds: Sequence[dict[int, float]]) -> dict[str, Any]:
    """The machine's speed over the passes: median time relative to each point's own median."""
    per_round = [
        float(np.median([seconds / points[i].median for i, seconds in passed.items()]))
        for passed in rounds
        if len(passed) >= max(2, len(points) // 2)
    ]
    spread = float(np.std(per_round, ddof=1)) if len(per_round) > 1 else None
    return {"relative_time_by_round": per_round, "standard_deviation": spread}


def kappa(pins: Sequence[Sample], block_bytes: float) -> Estimate | None:
    """κ (Theory A4) as the pool counts it: bytes held per pinned token."""
    if not pins or block_bytes <= 0:
        return None
    ratios = np.array([p["blocks"] * block_bytes / p["tokens"] for p in pins])
    error = float(np.std(ratios, ddof=1) / math.sqrt(len(ratios))) if len(ratios) > 1 else None
    return Estimate(value=float(ratios.mean()), standard_error=error, samples=len(ratios))


def decode_models(
    samples: Sequence[Sample], *, seed: int = 0, movement: float = 0.0
) -> tuple[DecodeModel, ...]:
    """D(output) by batch, from the shortest context measured there.

    A batch is measured within a few seconds: ``movement``, by how much the speed of decode steps
    moved over the calibration (a share), is part of its errors.
    """
    by_batch: dict[int, list[Sample]] = defaultdict(list)
    for s in samples:
        by_batch[s["batch"]].append(s)
    models = []
    for batch in sorted(by_batch):
        context = min(s["context"] for s in by_batch[batch])
        # Those of one burst share its steps and its moment: together they are one observation.
        rows = [
            (s["output"] - 1, float(np.median(s["seconds"])))
            for s in by_batch[batch]
            if s["context"] == context and s["output"] > 1
        ]
        if len({steps for steps, _ in rows}) < 2:
            continue
        steps = np.array([r[0] for r in rows], dtype=float)
        seconds = np.array([r[1] for r in rows])
        columns = np.stack([np.ones_like(steps), steps], axis=1)
        (base, per_token), _ = robust_nnls(columns, seconds)
        draw = np.random.default_rng(np.random.SeedSequence([seed, 23, batch]))
        fits = []
        for _ in range(BOOTSTRAP // 2):
            pick = draw.integers(0, len(rows), len(rows))
            if len(np.unique(steps[pick])) > 1:
                fits.append(robust_nnls(columns[pick], seconds[pick], rounds=4)[0])
        spread = np.std(np.array(fits), axis=0, ddof=1) if len(fits) > 1 else (0.0, 0.0)
        models.append(
            DecodeModel(
                base=float(base),
                per_token=float(per_token),
                standard_errors={
                    "base": math.hypot(spread[0], movement * base),
                    "per_token": math.hypot(spread[1], movement * per_token),
                },
                concurrency=batch,
                context_tokens=context + float(steps.mean()) / 2,
            )
        )
    return tuple(models)


def concurrency_records(
    journal: Journal, block_size: int, block_bytes: float, pool_bytes: float, max_sequences: int
) -> tuple[ConcurrencyRecord, ...]:
    """c_s as seen beside floor((M − B_s)/m_run) (Theory A9), by profile."""
    records = []
    for name in _profiles(journal):
        samples = journal.samples(f"concurrency/{name}")
        pin = next(s for s in samples if "pinned_blocks" in s)
        bursts = [s for s in samples if "role" in s]
        counts = [s for s in bursts if s["role"] == "count"]
        persistent = pin["pinned_blocks"] * block_bytes
        m_run = _per_sequence(bursts, block_bytes)
        calm = max(
            (s for s in counts if s["preemptions"] == 0), key=lambda s: s["running"], default=None
        )
        measured, limit = None, None
        if calm is not None:
            measured = calm["running"]
            if measured >= max_sequences:
                limit = "sequences"
            elif calm["waiting"] > 0 or len(counts) > 1:
                limit = "pool"
        size = next((s for s in bursts if s["role"] == "size" and s["blocks"] > 0), None)
        unused = None
        if size is not None and block_bytes > 0:
            # What the last output wrote is never read: it takes no place.
            filled = (size["new"] + size["output"] - 1) / block_size
            unused = max(0.0, 1.0 - filled * size["running"] / size["blocks"])
        formula = None
        if m_run is not None:
            formula = math.floor((pool_bytes - persistent) / m_run.value * (1 + 1e-12))
        records.append(
            ConcurrencyRecord(
                profile=name,
                persistent_bytes=persistent,
                measured=measured,
                formula=formula,
                per_sequence=m_run,
                preemptions=sum(s["preemptions"] for s in bursts),
                limit=limit,
                fragmentation=unused,
            )
        )
    return tuple(records)


def reference_estimate(journal: Journal, block_bytes: float) -> Estimate | None:
    """m_run over every profile: what one reference request holds of its own."""
    samples = [s for name in _profiles(journal) for s in journal.samples(f"concurrency/{name}")]
    return _per_sequence([s for s in samples if "role" in s], block_bytes)


def _profiles(journal: Journal) -> list[str]:
    prefix = "concurrency/"
    return [
        s["of"].removeprefix(prefix) for s in journal.samples("done") if s["of"].startswith(prefix)
    ]


def _per_sequence(bursts: Sequence[Sample], block_bytes: float) -> Estimate | None:
    values = np.array(
        [
            s["blocks"] * block_bytes / s["running"]
            for s in bursts
            if s["role"] == "size" and s["running"] and s["blocks"] > 0
        ]
    )
    if len(values) == 0 or block_bytes <= 0:
        return None
    error = float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None
    return Estimate(value=float(values.mean()), standard_error=error, samples=len(values))
