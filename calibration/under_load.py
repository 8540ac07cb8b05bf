"""Under load: the stage that sends Poisson load to each profile and keeps what it saw."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.crosscheck import capacity_from_steps
from calibration.design import usable_blocks
from calibration.journal import Journal
from calibration.load import COLUMNS, Load, RequestClass, default_classes
from calibration.record import Calibration, LoadRecord
from calibration.stages import Stages
from calibration.steps import relative_step_time, step_rows
from calibration.waiting import Setting, load_record, relative_times, step_reasons
from cluster.engines.base import EngineFacts
from cluster.engines.step_log import read_steps
from testbed.seeds import generator
from testbed.theory.prefill import prefill_time

LEAST_SECONDS = 30.0
"""s of each load at least, however many profiles share the time."""
SEED = 0
"""Of the mix in the implied capacity: its size, not its order, decides."""


async def measure_loads(
    stages: Stages,
    profiles: Mapping[str, Sequence[np.ndarray]],
    classes: Mapping[str, Sequence[RequestClass]],
) -> dict[str, tuple[RequestClass, ...]]:
    """Capacity, then Poisson load at each share of it, on every profile; all goes to the journal.

    Unloaded requests before, between and after the loads say how fast the machine was.

    Returns
    -------
    The request classes that each profile was loaded with.
    """
    used = {}
    design, journal = stages.design, stages.journal
    seconds = max(min(LEAST_SECONDS, design.load_seconds), design.load_seconds / len(profiles))
    for name, chains in profiles.items():
        block = stages.facts.block_size
        chain = max(chains, key=len) if chains else np.zeros(0, dtype=np.int32)
        chain = chain[: len(chain) // block * block]
        mix = tuple(classes.get(name) or default_classes(stages.longest, len(chain)))
        used[name] = mix
        stage = f"waiting/{name}"
        if journal.is_done(stage):
            continue
        have = {s["load"] for s in journal.samples(stage) if s["role"] == "load"}
        async with stages.pinned(name, chains) as blocks:
            # Each part of a resumed job starts with its own look at the machine.
            load = Load(stages.engine, stages.facts, mix, chain, seed=stages.seed, stream=stage)
            total = len(design.loads) + 2
            stages.progress(stage, 0, total)
            await _alone(load, stages, stage)
            capacity = next(
                (s["rate"] for s in journal.samples(stage) if s["role"] == "capacity"), None
            )
            if capacity is None:
                capacity, error = await load.capacity(design.capacity_seconds)
                journal.add(stage, role="capacity", rate=capacity, error=error, pinned=blocks)
                await _alone(load, stages, stage)
            stages.progress(stage, 2, total)
            order = generator(stages.seed, "calibration", stage).permutation(len(design.loads))
            for at, i in enumerate(order):
                rho = design.loads[i]
                if rho not in have:
                    await asyncio.sleep(0.2)
                    first = stages.rows()
                    run = await load.poisson(rho * capacity, seconds, f"load {rho}")
                    journal.add(
                        stage,
                        role="load",
                        load=rho,
                        rate=rho * capacity,
                        first=first,
                        last=stages.rows(),
                        run={c: np.asarray(run[c]).tolist() for c in COLUMNS},
                    )
                    await _alone(load, stages, stage)
                stages.progress(stage, at + 3, total)
        journal.done(stage)
    return used


async def _alone(load: Load, stages: Stages, stage: str) -> None:
    times = await load.unloaded(stages.design.alone_repeats, stages.design.spacing)
    stages.journal.add(stage, role="alone", times=times.tolist())


def load_records(
    journal: Journal,
    calibration: Calibration,
    facts: EngineFacts,
    classes: Mapping[str, tuple[RequestClass, ...]],
    step_log: str | None,
) -> tuple[LoadRecord, ...]:
    """Journalled loads beside what the delay models make of the calibration alone."""
    records = []
    log = read_steps(step_log) if step_log else None
    for name, mix in classes.items():
        samples = journal.samples(f"waiting/{name}")
        capacity = next(s for s in samples if s["role"] == "capacity")
        alone = [np.array(s["times"]) for s in samples if s["role"] == "alone"]
        speeds = relative_times(alone)
        setting = Setting(
            classes=mix,
            unloaded=np.median(np.concatenate(alone, axis=1), axis=1),
            prefill=np.array(
                [float(prefill_time(calibration.prefill_or_raise(), c.new, c.cached)) for c in mix]
            ),
            decode=np.array([calibration.occupancy(c.output, c.new, c.cached) for c in mix]),
            capacity=capacity["rate"],
            concurrency=seats(mix, facts, round(capacity["pinned"])),
            step_time=calibration.step_time,
            facts=facts,
            pinned_blocks=round(capacity["pinned"]),
            wake=calibration.idle_start,
        )
        implied = None
        if calibration.step_time is not None:
            implied = capacity_from_steps(
                mix, calibration.step_time, facts, setting.pinned_blocks, SEED
            )
        seen = -1
        for s in samples:
            if s["role"] == "alone":
                seen += 1
            if s["role"] != "load":
                continue
            window: dict[str, Any] = {}
            speed = None
            if log is not None:
                window = {k: v[s["first"] : s["last"]] for k, v in log.items()}
                if calibration.step_time is not None:
                    rows = step_rows(log, [(s["first"], s["last"])])
                    speed = relative_step_time(rows, calibration.step_time)
            records.append(
                load_record(
                    name,
                    s["load"],
                    s["rate"],
                    s["run"],
                    setting,
                    (speeds[seen], speeds[min(seen + 1, len(speeds) - 1)]),
                    step_reasons(window) if window else {},
                    speed,
                ).model_copy(
                    update={"capacity_error": capacity["error"], "capacity_from_steps": implied}
                )
            )
    return tuple(sorted(records, key=lambda r: (r.profile, r.load)))


def seats(mix: Sequence[RequestClass], facts: EngineFacts, pinned_blocks: int) -> int:
    """Sequences of a mix at once: the engine's limit, or what the pool holds beside the pinned
    prefix, whose blocks requests share (Theory A9, H12).

    The measured c_s speaks of one reference request; the mix has its own lengths.
    """
    weights = np.array([c.weight for c in mix]) / sum(c.weight for c in mix)
    blocks = [math.ceil((c.new + c.output) / facts.block_size) for c in mix]
    room = usable_blocks(facts) - pinned_blocks
    return max(1, min(facts.max_sequences, int(room // float(weights @ blocks))))
