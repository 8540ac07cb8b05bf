"""Replay: requests sent to one engine from inside its own process, an open loop.

Runs as a job of :meth:`cluster.deployment.Deployment.measure`, so that no connection stands
between the sender and the engine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from calibration.prompts import Prompts
from cluster.engines.base import Engine, EngineFacts
from cluster.engines.step_log import STEP_COLUMNS, read_steps
from testbed.errors import EngineError

PIN = "fidelity"
LEAD = 0.3
"""s from the start of a replay to its time 0."""
STAMPS = ("sent", "queued", "scheduled", "engine_first_token", "first_token", "finished")
SETTLE = 0.2
"""s after the last answer, until the step log is complete."""


async def pin_chain(
    engine: Engine, facts: EngineFacts, *, progress: Any, tokens: int, seed: int
) -> int:
    """Pin the workload's prefix, replacing the last workload's; tokens pinned."""
    del progress
    if tokens == 0:
        return 0
    return await engine.pin(PIN, chain_of(facts, tokens, seed))


def chain_of(facts: EngineFacts, tokens: int, seed: int) -> np.ndarray:
    """The prefix that types share, (tokens,) ids."""
    return Prompts(seed, facts.vocabulary, PIN, "chain").cold(tokens)


async def replay(
    engine: Engine,
    facts: EngineFacts,
    *,
    progress: Callable[[str, int, int], None],
    requests: dict[str, np.ndarray],
    chain: int,
    chain_seed: int,
    seed: int,
    label: str,
) -> dict[str, Any]:
    """Send the requests at their times; stamps in seconds of the engine's clock since time 0.

    ``requests`` holds the arrays of a :class:`calibration.fidelity.workload.Requests`; ``chain``
    and ``chain_seed`` are what :func:`pin_chain` was given, ``seed`` and ``label`` tell prompts of
    one replay from those of another.

    Returns
    -------
    (N,) arrays: ``intended`` and :data:`STAMPS` (NaN where an engine gives none), ``cached``;
    ``steps``, the rows (n, 13) that the engine's step log gained; ``pace`` of device time.

    Raises
    ------
    EngineError
        A request failed.
    """
    scale = engine.spec.time_scale
    shared = chain_of(facts, chain, chain_seed)
    made = Prompts(seed, facts.vocabulary, PIN, label)
    arrival, outputs = requests["arrival"], requests["outputs"]
    prompts = [
        made.after(shared, h, n) for n, h in zip(requests["new"], requests["cached"], strict=True)
    ]
    await engine.forget()
    before = _rows(engine)
    stamps = np.full((len(arrival), len(STAMPS)), np.nan)
    cached = np.zeros(len(arrival), dtype=int)
    start = time.perf_counter() + LEAD
    done = 0

    async def one(i: int) -> None:
        nonlocal done
        await asyncio.sleep(start + arrival[i] * scale - time.perf_counter())
        sent = time.perf_counter()
        g = await engine.generate(f"{label}-{seed}-{i}", prompts[i], int(outputs[i]))
        given = (
            sent, g.queued, g.scheduled, g.engine_first_token, g.first_token, g.finished,
        )  # fmt: skip
        stamps[i] = [np.nan if t is None else (t - start) / scale for t in given]
        cached[i] = g.cached_tokens
        done += 1
        progress(label, done, len(arrival))

    progress(label, 0, len(arrival))
    tasks = [asyncio.create_task(one(i)) for i in range(len(arrival))]
    try:
        await asyncio.gather(*tasks)
    except EngineError:
        raise
    except Exception as error:
        raise EngineError(f"{label}: a request failed: {error}") from error
    finally:
        for task in tasks:
            task.cancel()
    await asyncio.sleep(SETTLE)
    load = await engine.load()
    return {
        "intended": arrival,
        **{name: stamps[:, k] for k, name in enumerate(STAMPS)},
        "cached": cached,
        "steps": _gained(engine, before),
        "pace": None if load.pace is None else {**asdict(load.pace), "late": load.pace.late_share},
        "preemptions": load.preemptions,
    }


def _rows(engine: Engine) -> int:
    path = engine.placement.step_log
    width = 8 * len(STEP_COLUMNS)
    return os.path.getsize(path) // width if path and os.path.exists(path) else 0


def _gained(engine: Engine, before: int) -> dict[str, np.ndarray] | None:
    path = engine.placement.step_log
    if not path or not os.path.exists(path):
        return None
    return {name: column[before:].copy() for name, column in read_steps(path).items()}
