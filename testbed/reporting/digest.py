"""Digest: one sentence an answer over all cases, for the top of a page."""

from __future__ import annotations

import math
from collections.abc import Sequence

from testbed.reporting.agreement import Agreement
from testbed.reporting.compare import Case, Comparison
from testbed.reporting.quantities import LATENCY, percentile
from testbed.reporting.verdict import Level
from testbed.reporting.wording import percent

ORDER: tuple[Level, ...] = (
    "misses",
    "too noisy",
    "close",
    "agrees",
    "unstable",
    "not comparable",
    "invalid",
)
WORDS: dict[Level, str] = {
    "misses": "misses in",
    "unstable": "has no stable load to compare in",
    "too noisy": "cannot be told in",
    "close": "is close in",
    "agrees": "agrees in",
    "not comparable": "has no interval to judge by in",
    "invalid": "cannot be judged, for an invalid outcome, in",
}


def digest(comparison: Comparison) -> list[tuple[str, Level, str]]:
    """(answer, its worst level, how often it agrees and misses and between what the errors lie).

    Errors that an invalid or infeasible outcome has a part in are left out of the ranges.
    """
    found: dict[str, list[tuple[Case, int]]] = {}
    for case in comparison.cases:
        for i, label in enumerate(case.labels[1:], 1):
            found.setdefault(label, []).append((case, i))
    return [(label, _worst(places), _sentence(places)) for label, places in found.items()]


def _worst(places: Sequence[tuple[Case, int]]) -> Level:
    return min((case.verdicts[i - 1].level for case, i in places), key=ORDER.index)


def _sentence(places: Sequence[tuple[Case, int]]) -> str:
    levels = [case.verdicts[i - 1].level for case, i in places]
    counts = [
        f"{WORDS[level]} {levels.count(level)} of {len(levels)}"
        for level in ORDER
        if level in levels
    ]
    sure = [(c, i) for c, i in places if c.verdicts[i - 1].level not in ("invalid", "unstable")]
    ranges = [
        text
        for path, name in (("ttft.mean", "mean TTFT"), *_highest(places))
        if (text := _range(name, [a for case, i in sure if (a := _agreement(case, i, path))]))
    ]
    cases = "case" if len(levels) == 1 else "cases"
    said = f"{', '.join(counts)} {cases}"
    return f"{said}: {'; '.join(ranges)}." if ranges else f"{said}."


def _highest(places: Sequence[tuple[Case, int]]) -> list[tuple[str, str]]:
    quantiles = {
        row.quantity.path: float(row.quantity.names[0])
        for case, i in places
        for row in case.part(LATENCY)
        if row.quantity.names and row.agreements[i] is not None
    }
    if not quantiles:
        return []
    path = max(quantiles, key=lambda p: quantiles[p])
    return [(path, percentile(quantiles[path]))]


def _agreement(case: Case, i: int, path: str) -> Agreement | None:
    row = case.row(path)
    return None if row is None else row.agreements[i]


def _range(name: str, agreements: Sequence[Agreement]) -> str | None:
    errors = sorted(a.error_percent for a in agreements if a.error_percent is not None)
    if not errors:
        return None
    text = f"{name} off by {percent(errors[0])}"
    if percent(errors[0]) != percent(errors[-1]):
        text += f" to {percent(errors[-1])}"
    noise = [a.noise_percent for a in agreements if a.noise_percent is not None]
    if noise and math.isinf(max(noise)):
        text += " (noise without bound)"
    elif noise:
        text += f" (noise up to ±{percent(max(noise), signed=False)})"
    return text
