"""Speed: a few points measured again, to say how fast the machine is now against its record."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from calibration.prompts import Prompts
from calibration.record import Calibration, PrefillPoint
from cluster.engines.base import Engine
from testbed.errors import CalibrationError
from testbed.seeds import generator

BOOTSTRAP = 1000
SPACING = 0.02
POINTS = 3
LEAST_ROUNDS = 4


async def speed_check(
    engine: Engine, calibration: Calibration, *, seed: int = 0, budget: float = 8.0
) -> dict[str, Any]:
    """Relative speed of a started, idle engine against its calibration.

    A few cold points of the calibration's own grid are measured again in passes, within
    ``budget`` seconds but at least four times, and each is compared with its own calibrated
    median, so that no misfit of a formula enters.

    Returns
    -------
    ``relative_time`` (1.03: everything takes 3 % longer now than when it was calibrated) with
    its 95 % ``interval``, which carries the errors of the calibration's medians as well;
    ``relative_speed`` its inverse; ``points``, ``samples``, ``seconds`` and the stamp ``at``.

    Raises
    ------
    CalibrationError
        The record holds no cold point that this engine can serve.
    """
    chosen = _points(calibration, engine.spec.max_model_len - 1, budget)
    vocabulary = calibration.model.vocabulary or 256
    prompts = Prompts(seed, vocabulary, "speed", time.perf_counter_ns() & 0xFFFFFFFF)
    started = time.perf_counter()
    times: list[list[float]] = [[] for _ in chosen]
    count = 0
    # One request off the record: the first after a pause finds cold caches.
    await engine.generate(f"speed-{seed}-{started}-w", prompts.cold(chosen[0].new), 1)
    while True:
        order = generator(seed, "calibration", "speed", count).permutation(len(chosen))
        for i in order:
            await asyncio.sleep(SPACING)
            name = f"speed-{seed}-{started}-{count}-{i}"
            g = await engine.generate(name, prompts.cold(chosen[i].new), 1)
            times[i].append(g.first_token - (g.received if g.queued is None else g.queued))
        count += 1
        elapsed = time.perf_counter() - started
        if count >= LEAST_ROUNDS and elapsed * (count + 1) / count > budget:
            break
    table = np.array(times)
    ratio, low, high = relative_time(table, chosen, seed=seed)
    return {
        "relative_time": ratio,
        "interval": [low, high],
        "relative_speed": 1.0 / ratio,
        "points": [
            {
                "new": p.new,
                "calibrated": p.median,
                "now": float(np.median(row)),
                "relative_time": float(np.median(row)) / p.median,
            }
            for p, row in zip(chosen, table, strict=True)
        ],
        "samples": int(table.size),
        "seconds": time.perf_counter() - started,
        "at": started,
    }


def relative_time(
    times: np.ndarray, points: Sequence[PrefillPoint], *, seed: int = 0
) -> tuple[float, float, float]:
    """Geometric mean over points of now/then, with a 95 % interval.

    ``times`` has shape (P, R): P points in R passes. The interval resamples whole passes, since
    the points of one pass share the machine's moment, and draws the calibrated medians within
    their standard errors.
    """
    then = np.array([p.median for p in points])
    error = np.array([p.standard_error or 0.0 for p in points])
    centre = float(np.exp(np.mean(np.log(np.median(times, axis=1) / then))))
    draw = np.random.default_rng(np.random.SeedSequence([seed, 29]))
    passes = draw.integers(0, times.shape[1], (BOOTSTRAP, times.shape[1]))
    now = np.median(times[:, passes], axis=2)
    shift = (error / then)[:, None] * draw.standard_normal((len(points), BOOTSTRAP))
    reference = then[:, None] * np.exp(shift)
    logs = np.mean(np.log(now / reference), axis=0)
    low, high = np.quantile(np.exp(logs), [0.025, 0.975])
    return centre, float(low), float(high)


def _points(calibration: Calibration, limit: int, budget: float) -> list[PrefillPoint]:
    """Three cold points, spread over the lengths that are cheap enough to repeat."""
    cold = [p for p in calibration.prefill_points if p.cached == 0 and p.new <= limit]
    if not cold:
        raise CalibrationError("prefill_points: no cold point in this record to measure again")
    cold.sort(key=lambda p: p.new)
    cheap = [p for p in cold if p.median <= budget / 60] or cold[:1]
    picks = np.unique(np.linspace(0, len(cheap) - 1, min(POINTS, len(cheap))).round().astype(int))
    return [cheap[i] for i in picks]
