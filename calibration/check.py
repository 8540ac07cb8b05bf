"""Check: whether a calibration still holds on this machine, from a few of its own points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration import facts as known
from calibration.derive import drift, kappa, prefill_points
from calibration.design import DESIGNS, longest_prompt
from calibration.journal import Journal
from calibration.record import Calibration, PrefillPoint
from calibration.stages import Progress, Stages
from cluster.engines.base import Engine, EngineFacts
from testbed.errors import CalibrationError

POINTS = 8
TOLERANCE = 0.05
"""Relative change of the unloaded prefill up to which a record is said to hold."""
Z = 1.959963984540054


async def check(
    engine: Engine,
    facts: EngineFacts,
    *,
    record: Calibration,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure a few points of ``record`` again on a started, idle engine.

    Returns
    -------
    ``holds``, with one line in ``reasons`` for each thing that does not; ``relative_time`` (1.03:
    3 % slower now) with its 95 % ``interval``; ``points``: calibrated and now, their ratio, and z
    against both errors; ``kappa`` then and now.

    Raises
    ------
    CalibrationError
        The record has no grid to measure again.
    """
    chosen = _chosen(record.prefill_points)
    design = DESIGNS["check"]
    deepest = max(p.new + p.cached for p in record.prefill_points)
    journal = Journal(None, {})
    stages = Stages(
        engine,
        facts,
        design,
        journal,
        seed=seed,
        longest=longest_prompt(facts, deepest),
        progress=progress,
        points=[(p.new, p.cached) for p in chosen],
    )
    await stages.warm_up()
    try:
        await stages.pin_chain()
        await stages.prefill()
    finally:
        await stages.unpin_chain()
    await engine.forget()
    fresh, rounds, _ = prefill_points(journal.samples("prefill"))
    result = compare(record.prefill_points, fresh)
    block_bytes = facts.block_size * facts.bytes_per_token
    now = kappa(journal.samples("pin"), block_bytes)
    then = record.memory.kappa
    reasons = differences(record, facts)
    low, high = result["interval"]
    if low > 1 + TOLERANCE or high < 1 - TOLERANCE:
        change = 100 * (result["relative_time"] - 1)
        reasons.append(
            f"prefill takes {abs(change):.0f} % {'longer' if change > 0 else 'less'} than when "
            f"calibrated (95 %: {100 * (low - 1):+.0f} to {100 * (high - 1):+.0f} %)"
        )
    if now is not None and then and abs(now.value / then - 1) > 0.01:
        reasons.append(f"κ is {now.value:g} bytes per token, not {then:g}")
    return {
        "holds": not reasons,
        "reasons": reasons,
        **result,
        "drift": drift(fresh, rounds),
        "kappa": {"calibrated": then, "now": None if now is None else now.value},
        "environment": known.environment(),
    }


def compare(then: Sequence[PrefillPoint], now: Sequence[PrefillPoint]) -> dict[str, Any]:
    """Two measurements of one grid: the change of level, and how far each point departs.

    The level is the mean log ratio over the points that both have; z of a point counts the
    errors of both medians.

    Raises
    ------
    CalibrationError
        They share no point.
    """
    earlier = {(p.new, p.cached): p for p in then}
    shared = [(earlier[p.new, p.cached], p) for p in now if (p.new, p.cached) in earlier]
    if not shared:
        raise CalibrationError("prefill_points: none of the points measured now is in the record")
    logs = np.array([math.log(b.median / a.median) for a, b in shared])
    errors = np.array(
        [
            math.hypot((a.standard_error or 0.0) / a.median, (b.standard_error or 0.0) / b.median)
            for a, b in shared
        ]
    )
    # Points share the machine's moment, so their scatter bounds the level's error from below only.
    spread = float(np.std(logs, ddof=1)) if len(logs) > 1 else 0.0
    error = max(float(np.sqrt((errors**2).sum())), spread * math.sqrt(len(logs))) / len(logs)
    level = float(logs.mean())
    return {
        "relative_time": math.exp(level),
        "interval": [math.exp(level - Z * error), math.exp(level + Z * error)],
        "points": [
            {
                "new": a.new,
                "cached": a.cached,
                "calibrated": a.median,
                "now": b.median,
                "relative_time": b.median / a.median,
                "z": float(x / e) if e > 0 else None,
            }
            for (a, b), x, e in zip(shared, logs, errors, strict=True)
        ],
    }


def differences(record: Calibration, facts: EngineFacts) -> list[str]:
    """What the record says of its engine that is not so of this one, a line each."""
    pairs = [
        ("engine", record.engine.name, facts.name),
        ("engine version", record.engine.version, facts.version),
        ("model", record.model.name, facts.model),
        ("dtype", record.engine.dtype, facts.dtype),
        ("block size", record.engine.block_size, facts.block_size),
        ("KV pool, blocks", record.engine.num_blocks, facts.num_blocks),
        ("token budget", record.engine.token_budget, facts.token_budget),
        ("sequences", record.engine.max_sequences, facts.max_sequences),
        ("device", record.device.name, known.device_facts(facts).name),
    ]
    return [
        f"{what}: calibrated with {then}, here it is {now}"
        for what, then, now in pairs
        if then is not None and then != now
    ]


def _chosen(points: Sequence[PrefillPoint]) -> list[PrefillPoint]:
    """Cold and cached points by turns, spread over lengths, the costliest left out."""
    solid = [p for p in points if len(p.seconds) >= 3] or list(points)
    if not solid:
        raise CalibrationError("prefill_points: this record holds no grid to measure again")
    picked: list[PrefillPoint] = []
    for group in ([p for p in solid if p.cached == 0], [p for p in solid if p.cached > 0]):
        ordered = sorted(group, key=lambda p: p.median)
        ordered = [p for p in ordered if p.median <= 0.5] or ordered[:1]
        at = np.linspace(0, len(ordered) - 1, min(POINTS // 2, len(ordered)))
        picked += [ordered[i] for i in np.unique(at.round().astype(int))]
    return picked
