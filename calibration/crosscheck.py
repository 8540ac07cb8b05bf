"""Cross-check: what the step time implies, beside the same quantity measured directly.

Prefill, decode occupancy, co-batching and capacity all follow from the seconds of a step. Each is
also measured at the caller, and the two are laid side by side here; neither is fitted to the
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.design import usable_blocks
from calibration.record import FitReport, PrefillPoint
from calibration.steps import Steps
from cluster.engines.base import EngineFacts
from testbed.simulation.engine_model import EngineConfig, simulate_engine
from testbed.step_time import COEFFICIENTS, StepTime

Sample = Mapping[str, Any]
CAPACITY_REQUESTS = 600


def prefill_from_steps(
    points: Sequence[PrefillPoint],
    step_time: StepTime,
    facts: EngineFacts,
    overhead: float,
) -> FitReport:
    """g(n | h) of the grid from the steps its chunks make, plus what a step does not hold.

    ``overhead``: the first step after idleness and the delivery to the caller, s.
    """
    said = np.array(
        [prefill_seconds(p.new, p.cached, step_time, facts.token_budget) for p in points]
    )
    seen = np.array([p.median for p in points])
    return _report("prefill from step time", said + overhead, seen)


def prefill_seconds(new: int, cached: int, step_time: StepTime, budget: int) -> float:
    """An unloaded prefill in chunks of at most ``budget`` tokens."""
    done, seconds = 0, 0.0
    while done < new:
        chunk = min(budget, new - done)
        seconds += step_time.seconds([(chunk, cached + done)])
        done += chunk
    return seconds


def decode_from_steps(samples: Sequence[Sample], step_time: StepTime) -> FitReport | None:
    """Occupancy after the first token of each burst, from its decode steps."""
    said, seen = [], []
    for s in samples:
        steps, batch, context = s["output"] - 1, s["batch"], s["context"]
        if steps < 1:
            continue
        said.append(
            sum(
                step_time.seconds(decodes=batch, decode_context=batch * (context + k))
                for k in range(steps)
            )
        )
        seen.append(float(np.median(s["seconds"])))
    if not seen:
        return None
    return _report("decode from step time", np.array(said), np.array(seen))


def interference(samples: Sequence[Sample], step_time: StepTime | None) -> list[dict[str, Any]]:
    """How much k prefills of n tokens and m decodes slow each other, by case.

    ``ttft``: median over the k at the caller, from their send; ``stall``: the longest pause
    between two tokens of a decode meanwhile; ``pause``: its usual one. ``step``: seconds of a
    step that holds them all, by the step time.
    """
    cases: dict[tuple[int, int, int], list[Sample]] = {}
    for s in samples:
        cases.setdefault((s["decodes"], s["prefills"], s["new"]), []).append(s)
    found = []
    for (m, k, n), group in sorted(cases.items()):
        entry: dict[str, Any] = {"decodes": m, "prefills": k, "new": n, "repeats": len(group)}
        entry["ttft"] = float(np.median([t for s in group for t in s["ttft"]]))
        if m > 0:
            entry["stall"] = float(np.median([s["stall"] for s in group]))
            entry["pause"] = float(np.median([s["pause"] for s in group]))
        if step_time is not None:
            context = float(np.median([s["context"] for s in group]))
            entry["step"] = step_time.seconds([(n, 0)] * k, m, m * context)
            entry["step_without_decodes"] = step_time.seconds([(n, 0)] * k)
        found.append(entry)
    return found


def by_kind(rows: Steps, step_time: StepTime) -> dict[str, dict[str, float]]:
    """Median relative residual of the step time, by what a step holds."""
    residual = rows.columns @ step_time.vector() / rows.seconds - 1.0
    prefill = rows.columns[:, COEFFICIENTS.index("c_pre")] > 0
    both = rows.columns[:, COEFFICIENTS.index("c_both")] > 0
    kinds = {"prefill": prefill & ~both, "mixed": both, "decode": ~prefill}
    return {
        name: {
            "steps": int(mask.sum()),
            "median_bias": float(np.median(residual[mask])),
            "median_error": float(np.median(np.abs(residual[mask]))),
        }
        for name, mask in kinds.items()
        if mask.any()
    }


def capacity_from_steps(
    classes: Sequence[Any], step_time: StepTime, facts: EngineFacts, pinned_blocks: int, seed: int
) -> float:
    """Requests/s of a saturated engine: the engine model on a stratified mix, all waiting.

    ``classes`` as :class:`calibration.load.RequestClass`. The first and last tenth, when seats
    fill and drain, are left out.
    """
    draw = np.random.default_rng(np.random.SeedSequence([seed, 31]))
    weights = np.array([c.weight for c in classes])
    counts = np.maximum(1, np.rint(weights / weights.sum() * 20).astype(int))
    block = np.repeat(np.arange(len(classes)), counts)
    kinds = np.concatenate(
        [draw.permutation(block) for _ in range(-(-CAPACITY_REQUESTS // len(block)))]
    )
    means = np.array([c.output for c in classes])[kinds]
    longest = np.array([facts.max_model_len - c.new - c.cached for c in classes])[kinds]
    outputs = np.minimum(draw.geometric(1.0 / means), np.minimum(8 * means, longest)).astype(int)
    lengths = np.array([c.new + c.cached for c in classes])[kinds]
    trace = simulate_engine(
        EngineConfig(
            token_budget=facts.token_budget,
            max_sequences=facts.max_sequences,
            block_size=facts.block_size,
            num_blocks=usable_blocks(facts) + 1,
            max_model_len=facts.max_model_len,
            pinned_blocks=pinned_blocks,
        ),
        step_time,
        np.zeros(len(kinds)),
        lengths,
        outputs,
        reusable_tokens=np.array([c.cached for c in classes])[kinds],
    )
    ended = np.sort(trace.finished)
    low, high = len(ended) // 10, 9 * len(ended) // 10
    return float((high - low) / (ended[high] - ended[low]))


def _report(name: str, said: np.ndarray, seen: np.ndarray) -> FitReport:
    residual = said / seen - 1.0
    return FitReport(
        name=name,
        points=len(seen),
        relative_error=float(np.sqrt(np.mean(residual**2))),
        coefficients={"median_bias": float(np.median(residual))},
    )
