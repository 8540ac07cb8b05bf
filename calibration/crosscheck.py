"""Cross-check: what the step time implies, beside the same quantity measured directly.

Prefill, decode occupancy, co-batching and capacity all follow from the seconds of a step. Each is
also measured at the caller, and the two are laid side by side here; neither is fitted to the
other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calibration.design import Crowd
from calibration.fit import summarise
from calibration.paired import engine_config
from calibration.record import CrowdPoint, FitReport, PrefillPoint
from calibration.steps import Steps
from cluster.engines.base import EngineFacts
from testbed.simulation.engine_model import simulate_engine
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


def crowded_prefill(crowd: Crowd, context: float, step_time: StepTime) -> tuple[np.ndarray, float]:
    """Seconds from the first step to each of the k first tokens, (k,), and the longest step.

    ``context``: tokens that each decode attends to in the first step.
    """
    left = [crowd.new] * crowd.prefills
    ends = np.zeros(crowd.prefills)
    now = longest = 0.0
    while left[-1] > 0:
        budget, chunks = crowd.chunk - crowd.decodes, []
        for i, rest in enumerate(left):
            n = min(rest, budget)
            if n > 0:
                chunks.append((n, crowd.cached + crowd.new - rest))
                budget -= n
                left[i] -= n
        seconds = step_time.seconds(chunks, crowd.decodes, crowd.decodes * context)
        now += seconds
        longest = max(longest, seconds)
        context += 1
        for i in range(crowd.prefills):
            if left[i] == 0 and ends[i] == 0:
                ends[i] = now
    return ends, longest


def crowd_points(
    samples: Sequence[Sample], step_time: StepTime | None
) -> tuple[tuple[CrowdPoint, ...], FitReport | None]:
    """Each case of g(n | h; batch, chunk) with its samples, beside what the step time says."""
    cases: dict[Crowd, list[Sample]] = {}
    for s in samples:
        cases.setdefault(Crowd(*s["crowd"]), []).append(s)
    points = []
    for crowd, group in sorted(cases.items()):
        good = [s for s in group if s["together"]]
        if not good:
            continue
        times = summarise(crowd.new, crowd.cached, [float(np.mean(s["seconds"])) for s in good])
        stalls = [s["stall"] for s in good if s["stall"] is not None]
        pauses = [s["pause"] for s in good if s["pause"] is not None]
        said = step = None
        if step_time is not None:
            context = float(np.median([s["context"] for s in good]))
            ends, step = crowded_prefill(crowd, context, step_time)
            said = float(ends.mean())
        points.append(
            CrowdPoint(
                **crowd._asdict(),
                seconds=times.seconds,
                median=times.median,
                standard_error=times.standard_error,
                outliers=times.outliers,
                apart=len(group) - len(good),
                predicted=said,
                stall=float(np.median(stalls)) if stalls else None,
                pause=float(np.median(pauses)) if pauses else None,
                longest_step=step,
            )
        )
    seen = np.array([p.median for p in points if p.predicted is not None])
    if len(seen) == 0:
        return tuple(points), None
    said = np.array([p.predicted for p in points if p.predicted is not None])
    return tuple(points), _report("prefill among others from step time", said, seen)


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
        engine_config(facts, pinned_blocks),
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
