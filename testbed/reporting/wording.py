"""Wording: figures, intervals and answers as people read them, the same in terminal and page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from testbed.outcome import Outcome

MISSING = "–"
MINUS = "−"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
NBSP = "\u00a0"

CLOCKS = {
    "none": "",
    "virtual": "virtual time",
    "wall clock": "wall clock",
    "device time": "device time",
    "emulated": "emulated",
}


def plain(text: object) -> str:
    """Text without control characters, which a name could use to rewrite a terminal."""
    return "".join(c if c.isprintable() or c == NBSP else "\ufffd" for c in str(text))


def significant(value: float, digits: int = 3) -> str:
    """A number with ``digits`` significant digits, thousands separated, never in disguise.

    >>> significant(0.0842), significant(1234.5), significant(float("inf")), significant(-2e-8)
    ('0.0842', '1,234', '∞', '−2.00×10⁻⁸')
    """
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if magnitude < -4 or magnitude >= 9:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        text = f"{mantissa}×10{str(int(exponent)).translate(SUPERSCRIPT)}"
    else:
        text = f"{value:,.{max(digits - 1 - magnitude, 0)}f}"
    return text.replace("-", MINUS)


def seconds(value: float) -> str:
    """A duration with its unit: microseconds, milliseconds or seconds.

    >>> seconds(0.0842), seconds(3.2)
    ('84.2\\xa0ms', '3.20\\xa0s')
    """
    if math.isinf(value) or value == 0 or abs(value) >= 1:
        return f"{significant(value)}{NBSP}s"
    if abs(value) < 1e-9:
        return f"<{NBSP}1{NBSP}ns"
    if abs(value) >= 1e-3:
        return f"{significant(value * 1e3)}{NBSP}ms"
    return f"{significant(value * 1e6)}{NBSP}µs"


def share(value: float) -> str:
    """A probability or fraction as per cent with one decimal."""
    return f"{significant(value) if math.isinf(value) else f'{100 * value:.1f}'}{NBSP}%"


def percent(value: float, *, signed: bool = True) -> str:
    """A figure that is already in per cent; one decimal below ten.

    >>> percent(-49.2), percent(3.21), percent(4.0, signed=False)
    ('−49\\xa0%', '+3.2\\xa0%', '4.0\\xa0%')
    """
    if math.isinf(value):
        text = "∞"
    else:
        text = f"{abs(value):.1f}" if abs(value) < 9.95 else f"{abs(value):,.0f}"
    if signed and text not in ("0.0", "0"):
        text = ("+" if value > 0 else MINUS) + text
    return f"{text}{NBSP}%"


def points(value: float) -> str:
    """A difference of two probabilities in percentage points, signed."""
    text = f"{abs(100 * value):.1f}"
    sign = "" if text == "0.0" else "+" if value > 0 else MINUS
    return f"{sign}{text}{NBSP}pts"


def amount(value: float, unit: str) -> str:
    """A figure with its unit. ``unit``: ``s``, ``1`` (a probability or fraction), or any other."""
    if unit == "s":
        return seconds(value)
    if unit == "1":
        return share(value)
    return f"{significant(value)}{'' if unit.startswith('/') else NBSP}{unit}"


def span(interval: tuple[float, float], unit: str) -> str:
    """An interval; the unit is said once where both ends share it.

    >>> span((0.081, 0.0876), "s")
    '81.0–87.6\\xa0ms'
    """
    low, high = (amount(end, unit) for end in interval)
    if math.isinf(interval[1]) and math.isfinite(interval[0]):
        return f"≥{NBSP}{low}"
    if math.isinf(interval[0]) and math.isfinite(interval[1]):
        return f"≤{NBSP}{high}"
    if unit.startswith("/"):
        low = low.removesuffix(unit)
    number, _, low_unit = low.rpartition(NBSP)
    if low_unit == high.rpartition(NBSP)[2]:
        low = number
    return f"{low}–{high}"


def asked(value: float) -> str:
    """A number that somebody chose: whole ones as written, others to four digits.

    >>> asked(4096.0), asked(2.63769)
    ('4,096', '2.638')
    """
    text = f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:,.4g}"
    return text.replace("-", MINUS)


def load(intensity: float | None) -> str:
    """The load of a case."""
    if intensity is None:
        return "intensity not stated"
    return f"{asked(intensity)} requests/s per km²"


def answer(outcome: Outcome) -> str:
    """What gave the figures and on which clock: ``measured · device time``."""
    if outcome.kind == "predicted":
        parts = (outcome.delay_model, outcome.extra.get("extension"))
        return " · ".join(["predicted", *(plain(str(part)) for part in parts if part)])
    return f"{outcome.kind} · {CLOCKS[outcome.clock] or outcome.clock}"


def answers(outcomes: Sequence[Outcome]) -> list[str]:
    """Distinct labels of outcomes that stand side by side.

    Twins are told apart by what they modelled a node as, by their seed, and at last by number.
    """
    labels = [answer(o) for o in outcomes]
    for tell in (_node_model, _seed):
        twins = {label for label in labels if labels.count(label) > 1}
        labels = [
            label + tell(o) if label in twins else label
            for label, o in zip(labels, outcomes, strict=True)
        ]
    return [
        f"{label}, #{labels[:i].count(label) + 1}" if labels.count(label) > 1 else label
        for i, label in enumerate(labels)
    ]


def _node_model(outcome: Outcome) -> str:
    section = outcome.scenario.get("simulation")
    if outcome.kind != "simulated" or not isinstance(section, dict):
        return ""
    return f", {plain(section['node_model'])} nodes" if "node_model" in section else ""


def _seed(outcome: Outcome) -> str:
    return "" if outcome.seed is None else f", seed {outcome.seed}"


def provenance(outcomes: Iterable[Outcome]) -> str:
    """Kinds and clocks of what is drawn or tabulated, for the heading of a figure or table.

    >>> provenance([measured, predicted])  # doctest: +SKIP
    'measured: device time; predicted'
    """
    seen: dict[str, set[str]] = {}
    for outcome in outcomes:
        clocks = seen.setdefault(outcome.kind, set())
        if CLOCKS[outcome.clock]:
            clocks.add(CLOCKS[outcome.clock])
    return "; ".join(
        kind + (f": {' and '.join(sorted(seen[kind]))}" if seen[kind] else "")
        for kind in ("measured", "simulated", "predicted")
        if kind in seen
    )
