"""Verdict: in words, how an answer stands to the reference, and what else could explain a miss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from testbed.outcome import Outcome
from testbed.reporting.agreement import NOISY_PERCENT, Agreement
from testbed.reporting.drift import drift, drift_span
from testbed.reporting.quantities import COVERAGE, LATENCY, Quantity
from testbed.reporting.wording import amount, asked, percent, plain, points

Level = Literal["agrees", "close", "misses", "too noisy", "not comparable", "unstable", "invalid"]


class Judged(NamedTuple):
    """A figure that both sides have: p of the answer, m of the reference, and how they agree."""

    quantity: Quantity
    p: float
    m: float
    agreement: Agreement


@dataclass(frozen=True)
class Verdict:
    """One answer judged: a level, a summary in words, and its grounds."""

    answer: str
    reference: str
    level: Level
    summary: str
    grounds: tuple[str, ...]

    @property
    def headline(self) -> str:
        """A sentence that can stand alone."""
        return f"{self.answer} against {self.reference}: {self.summary}"

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "grounds": list(self.grounds)}


def judge(
    answer: Outcome,
    reference: Outcome,
    names: tuple[str, str],
    figures: Sequence[Judged],
) -> Verdict:
    """Judge an answer on TTFT and coverage.

    Parameters
    ----------
    names : labels of the answer and of the reference
    figures : every figure that both have
    """
    judged = [f for f in figures if f.quantity.part in (LATENCY, COVERAGE)]
    level = _level(answer, reference, judged)
    split = answer.feasible != reference.feasible
    grounds = [*_doubts(names[0], answer), *_doubts(names[1], reference)]
    grounds += _counted(judged)
    if shared := max((f.agreement.paired for f in judged), default=0):
        grounds.append(
            f"Both served the same {shared:,} requests: the noise of TTFT is that of their "
            "differences, request by request."
        )
    if (worst := _worst(judged)) is not None:
        grounds.append(worst)
    grounds += _explained(reference, judged)
    return Verdict(names[0], names[1], level, _summary(level, split, judged), tuple(grounds))


def _level(
    answer: Outcome,
    reference: Outcome,
    judged: Sequence[Judged],
) -> Level:
    if not (answer.valid and reference.valid):
        return "invalid"
    if not (answer.feasible or reference.feasible):
        return "unstable"
    if answer.feasible != reference.feasible:
        return "misses"
    statuses = [f.agreement.status for f in judged if f.agreement.status != "no interval"]
    if not statuses:
        return "not comparable"
    if "misses" in statuses or "unbounded" in statuses:
        return "misses"
    if 2 * statuses.count("too noisy") > len(statuses):
        return "too noisy"
    return "close" if "close" in statuses else "agrees"


def _summary(level: Level, split: bool, judged: Sequence[Judged]) -> str:
    opening = {
        "agrees": "agrees within the noise",
        "close": "is close: what lies outside the noise is small",
        "misses": "misses",
        "too noisy": "cannot be told, the noise is too wide",
        "not comparable": "stands beside it, without an interval to judge by",
        "unstable": "both find the load infeasible, so that TTFT depends on how long a run lasts",
        "invalid": "invalid, shown but not to be relied on",
    }[level]
    if level == "misses" and split:
        opening = "misses: one finds the load infeasible, the other serves it"
    mean = next((f for f in judged if f.quantity.path == "ttft.mean"), None)
    return f"{opening}." if mean is None else f"{opening}. {_said(mean)}."


def _said(figure: Judged) -> str:
    """One figure as a clause: both values, the error, and the noise that it stands against."""
    quantity, p, m, a = figure
    text = (
        f"{quantity.label[0].upper()}{quantity.label[1:]} {amount(p, quantity.unit)} against "
        f"{amount(m, quantity.unit)}"
    )
    if math.isinf(p) and math.isinf(m):
        return f"{text}: both without bound"
    if quantity.probability and a.difference is not None:
        return f"{text}: {points(a.difference)}{_noise(a, True)}"
    if a.error_percent is None:
        return text
    if math.isinf(a.error_percent):
        return f"{text}: without bound, where a finite run cannot follow"
    return f"{text}: {percent(a.error_percent)}{_noise(a, False)}"


def _noise(a: Agreement, in_points: bool) -> str:
    if a.noise is None:
        return " (no interval)"
    if in_points:
        return f" (noise ±{points(a.noise).lstrip('+')})"
    if a.noise_percent is None or math.isinf(a.noise_percent):
        return " (noise without bound)"
    return f" (noise ±{percent(a.noise_percent, signed=False)})"


def _counted(judged: Sequence[Judged]) -> list[str]:
    tested = [f for f in judged if f.agreement.within is not None]
    if not tested:
        return ["No 95 % interval on either side: nothing here tells a difference from noise."]
    within = sum(1 for f in tested if f.agreement.within)
    noisy = sum(1 for f in tested if f.agreement.status == "too noisy")
    text = f"{within} of {len(tested)} TTFT and coverage figures lie within the 95 % noise"
    if noisy:
        wide = asked(NOISY_PERCENT)
        text += (
            f", {noisy} of them only because it is wide (over ±{wide} % or 5 points): those "
            "neither confirm nor refute"
        )
    return [text + "."]


def _worst(judged: Sequence[Judged]) -> str | None:
    """The figure farthest off in per cent, of those that lie outside the noise."""
    outside = [
        f
        for f in judged
        if f.agreement.within is False
        and f.quantity.part == LATENCY
        and f.agreement.error_percent is not None
        and math.isfinite(f.agreement.error_percent)
    ]
    if not outside:
        return None
    return (
        f"Farthest off: {_said(max(outside, key=lambda f: abs(f.agreement.error_percent or 0.0)))}."
    )


def _doubts(name: str, outcome: Outcome) -> list[str]:
    """What stands against relying on an outcome at all."""
    doubts = []
    if not outcome.valid:
        doubts.append(
            f"{name} is marked invalid: {plain(outcome.invalid_reason or 'no reason given')}."
        )
    if not outcome.feasible:
        doubts.append(
            f"{name} finds the load infeasible: {plain(outcome.reason or 'no reason given')}."
        )
    if not outcome.converged:
        doubts.append(f"{name} did not converge ({outcome.iterations} iterations).")
    if (r := outcome.requests) is not None and r.completed < r.sent:
        doubts.append(
            f"{name}: {r.rejected:,} rejected and {r.failed:,} failed of {r.sent:,} requests; "
            "they have no TTFT."
        )
    return doubts


def _explained(reference: Outcome, judged: Sequence[Judged]) -> list[str]:
    """Whether the machine's drift could explain a miss of the mean; nothing to say without one."""
    moved = drift(reference)
    mean = next((f.agreement for f in judged if f.quantity.path == "ttft.mean"), None)
    if moved is None or mean is None or mean.error_percent is None or mean.within is not False:
        return []
    noise = mean.noise_percent or 0.0
    low, high = moved.error_percent
    if low - noise <= mean.error_percent <= high + noise:
        return [
            f"Drift alone could put the mean {drift_span(moved)} off: this run cannot tell the "
            "answer's error from the machine's."
        ]
    missing = max(low - noise - mean.error_percent, mean.error_percent - high - noise)
    return [
        f"Drift ({drift_span(moved)}) cannot explain the miss of the mean: "
        f"{percent(missing, signed=False)} are left beyond drift and noise."
    ]
