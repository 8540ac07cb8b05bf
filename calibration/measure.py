"""Measure: the whole calibration of one started engine, from its first request to its record."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calibration import facts as known
from calibration.crosscheck import by_kind, crowd_points, decode_from_steps, prefill_from_steps
from calibration.crowding import CrowdedStages
from calibration.derive import (
    concurrency_records,
    decode_models,
    drift,
    kappa,
    prefill_points,
    reference_estimate,
)
from calibration.design import DESIGNS, Effort, longest_prompt, usable_blocks
from calibration.fit import fit_prefill
from calibration.journal import Journal
from calibration.load import RequestClass
from calibration.record import Calibration, MemoryRecord, Source
from calibration.stages import Progress, sequence_reference
from calibration.steps import fit_steps, step_rows
from calibration.under_load import load_records, measure_loads
from cluster.engines.base import Engine, EngineFacts
from cluster.engines.step_log import read_steps

FALLBACK = "fallback"
STEADY = 0.03
"""Standard deviation of the speed between passes above which a record carries a warning."""
ENGINE_PREFILL = "prefill, engine's own stamps"
"""Queued to the engine's own first-token stamp: g without the delivery to the caller."""


async def calibrate(
    engine: Engine,
    facts: EngineFacts,
    *,
    effort: Effort = "quick",
    seed: int = 0,
    progress: Progress | None = None,
    max_prompt: int | None = None,
    profiles: Mapping[str, Sequence[np.ndarray]] | None = None,
    reference: tuple[int, int] | None = None,
    classes: Mapping[str, Sequence[RequestClass]] | None = None,
    resume_dir: str | Path | None = None,
) -> Calibration:
    """Measure g(n | h), step time, decode, κ, m_run and c_s on a started, idle engine.

    Runs in the process that owns the engine and leaves the engine's pins as they were. The
    unloaded prefill counts from the engine's queued stamp to the first token in this process,
    each request finding the engine idle.

    Parameters
    ----------
    effort
        ``quick`` (about a minute on a small model), ``full`` (about a quarter of an hour),
        ``check`` (the least that can be compared with an earlier record).
    seed
        Of prompts and orders.
    progress
        Called with (stage, done, total).
    max_prompt
        Longest prompt of the grid, tokens; absent: what the engine and half its pool hold.
    profiles
        Name -> token chains that a replica of the profile pins; c_s is measured with them pinned.
        Absent: one profile that pins nothing.
    reference
        (prompt, output) tokens of the request that m_run and c_s speak of; absent: a quarter of
        the longest prompt.
    classes
        Profile -> request classes of its Poisson load (``full`` alone); absent: half 256, half
        1,024 new tokens behind the profile's longest chain.
    resume_dir
        Folder of the journal; a run that was killed goes on from what it holds.

    Raises
    ------
    CalibrationError
        The engine is too small to calibrate, or ``resume_dir`` holds something else.
    EngineError
        The engine failed.
    """
    design = DESIGNS[effort]
    longest = longest_prompt(facts, max_prompt)
    profiles = profiles or {FALLBACK: []}
    header = {
        "schema_version": 1,
        "engine": facts.name,
        "model": facts.model,
        "device": facts.device,
        "num_blocks": facts.num_blocks,
        "block_size": facts.block_size,
        "max_sequences": facts.max_sequences,
        "token_budget": facts.token_budget,
        "effort": effort,
        "seed": seed,
        "longest": longest,
        "profiles": {name: [len(c) for c in chains] for name, chains in profiles.items()},
    }
    journal = Journal(resume_dir, header)
    before = known.environment()
    started = time.perf_counter()
    try:
        stages = CrowdedStages(
            engine, facts, design, journal, seed=seed, longest=longest, progress=progress
        )
        reference = reference or sequence_reference(facts, longest)
        await stages.warm_up()
        try:
            await stages.pin_chain()
            await stages.prefill()
            await stages.decode()
            await stages.relay()
            await stages.crowds()
            await stages.mix()
        finally:
            await stages.unpin_chain()
        await stages.concurrency(profiles, reference)
        await engine.forget()
        seconds = time.perf_counter() - started
        record = _record(engine, facts, journal, seed, effort, reference, before, seconds)
        if not design.loads:
            return record
        used = await measure_loads(stages, profiles, classes or {})
        await engine.forget()
        log = engine.placement.step_log
        loads = load_records(journal, record, facts, used, log)
        extra = {**record.extra, "seconds": time.perf_counter() - started}
        return record.model_copy(update={"waiting": loads, "extra": extra})
    finally:
        journal.close()


def _record(
    engine: Engine,
    facts: EngineFacts,
    journal: Journal,
    seed: int,
    effort: Effort,
    reference: tuple[int, int],
    before: dict[str, Any],
    seconds: float,
) -> Calibration:
    points, rounds, missed = prefill_points(journal.samples("prefill"))
    notes = [
        "prefill: from the engine's queued stamp to the first token in the caller's process, "
        "each request finding the engine idle; medians are fitted, every sample is kept",
        f"m_run and c_s: requests of {reference[0]} new prompt tokens and {reference[1]} output "
        "tokens",
    ]
    if missed:
        notes.append(
            f"{missed} prefill samples hit another depth of the cache than intended; they count "
            "under what the engine reported"
        )
    least = DESIGNS[effort].least_rounds
    solid = [i for i, p in enumerate(points) if len(p.seconds) >= least]
    if len(solid) < len(points):
        notes.append(
            f"prefill: {len(points) - len(solid)} points with fewer than {least} samples are kept "
            "but not fitted"
        )
    step_time, fits, kinds, movement = None, [], None, 0.0
    submits = [s["submit"] for s in journal.samples("prefill")]
    deliveries = [d for s in journal.samples("prefill") if (d := s["delivery"]) is not None]
    delivery = float(np.median(deliveries)) if deliveries else None
    windows = [(w["first"], w["last"]) for w in journal.samples("window")]
    if windows and engine.placement.step_log:
        rows = step_rows(read_steps(engine.placement.step_log), windows)
        step_time, report = fit_steps(rows, seed=seed)
        fits.append(report)
        idle = report.coefficients["idle_start"]
        movement = report.coefficients["movement_decode"]
        kinds = by_kind(rows, step_time)
        measured = [points[i] for i in solid]
        fits.append(prefill_from_steps(measured, step_time, facts, idle + (delivery or 0.0)))
        if decoded := decode_from_steps(journal.samples("decode"), step_time):
            fits.append(decoded)
    else:
        notes.append("this engine writes no step log: there is no step time in this record")
    crowds, among = crowd_points(journal.samples("crowd"), step_time)
    if among is not None:
        fits.append(among)
    inside = [
        {**s, "seconds": s["seconds"] - s["delivery"]}
        for s in journal.samples("prefill")
        if s["delivery"] is not None
    ]
    if inside:
        at_engine = [p for p in prefill_points(inside)[0] if len(p.seconds) >= least]
        best = fit_prefill(at_engine, seed=seed)
        chosen = min(best.alternatives[:-1], key=lambda r: r.held_out_error or 0.0)
        fits.append(chosen.model_copy(update={"name": ENGINE_PREFILL}))
    moved = drift(points, rounds)
    after = known.environment()["load_average"]
    notes += _doubts(moved["standard_deviation"], max(before["load_average"][0], after[0]))
    block_bytes = facts.block_size * facts.bytes_per_token
    pool_bytes = usable_blocks(facts) * block_bytes
    return Calibration(
        source=Source(
            kind="measured" if facts.clock == "wall clock" else "emulated",
            tool="testbed",
            tool_version=known.code_version(),
            notes=tuple(notes),
        ),
        engine=known.engine_facts(facts),
        model=known.model_facts(facts),
        device=known.device_facts(facts),
        prefill=fit_prefill(
            [points[i] for i in solid],
            [{k: r[i] for k, i in enumerate(solid) if i in r} for r in rounds],
            seed=seed,
            movement=moved["standard_deviation"] or 0.0,
        ),
        prefill_points=tuple(points),
        crowds=crowds,
        step_time=step_time,
        memory=MemoryRecord(
            pool_bytes=pool_bytes or None,
            kappa_nominal=facts.bytes_per_token or None,
            kappa_measured=kappa(journal.samples("pin"), block_bytes),
            block_size=facts.block_size,
            num_blocks=usable_blocks(facts),
            source="the engine's own pool: blocks that requests can take",
        ),
        m_run=reference_estimate(journal, block_bytes),
        c_s=concurrency_records(
            journal, facts.block_size, block_bytes, pool_bytes, facts.max_sequences
        ),
        decode=decode_models(journal.samples("decode"), seed=seed, movement=movement),
        fits=tuple(fits),
        environment={**before, "load_average_after": after},
        extra={
            "effort": effort,
            "seed": seed,
            "seconds": seconds,
            "resumed_samples": journal.resumed,
            "reference": {"new": reference[0], "output": reference[1]},
            "submit_overhead": float(np.median(submits)) if submits else None,
            "delivery_overhead": delivery,
            "step_kinds": kinds,
            "drift": moved,
        },
    )


def _doubts(drift_deviation: float | None, load_average: float) -> list[str]:
    """What speaks against trusting these figures, one sentence each."""
    doubts = []
    if drift_deviation is not None and drift_deviation > STEADY:
        doubts.append(
            f"the machine's speed moved by {100 * drift_deviation:.0f} % (standard deviation) from "
            "one pass over the grid to the next: measure again on a quiet machine"
        )
    cores = os.cpu_count() or 1
    if load_average > cores + 1:
        doubts.append(
            f"the load average reached {load_average:.1f} on {cores} cores: others were computing"
        )
    return doubts
