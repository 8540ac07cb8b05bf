"""Case tables: what the answers to a question say, figure by figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from testbed.reporting.agreement import Agreement, Reading, Status, agree
from testbed.reporting.compare import Case, Comparison, Row
from testbed.reporting.quantities import COVERAGE, LATENCY, Quantity
from testbed.reporting.table import Cell, Table, Tone, figure, words
from testbed.reporting.verdict import Level
from testbed.reporting.wording import (
    NBSP,
    amount,
    asked,
    load,
    percent,
    plain,
    points,
    provenance,
    span,
)

MARKS: dict[Status, str] = {
    "agrees": "✓ agrees",
    "close": "≈ close",
    "misses": "✗ misses",
    "too noisy": "? too noisy",
    "unbounded": "∞ unbounded",
    "no interval": "– no interval",
}
MARK_NOTE = (
    "✓ within the 95 % noise · ≈ outside it, by at most 5 % or 2 points · ✗ misses · ? within a "
    "noise too wide to say (over ±10 % or 5 points) · ∞ one side is unbounded · – no interval."
)
STATUS_TONES: dict[Status, Tone] = {
    "agrees": "good",
    "close": "good",
    "misses": "bad",
    "too noisy": "unsure",
    "unbounded": "unsure",
    "no interval": "faint",
}
LEVEL_MARKS: dict[Level, str] = {
    "agrees": "✓",
    "close": "≈",
    "misses": "✗",
    "too noisy": "?",
    "not comparable": "–",
    "unstable": "∞",
    "invalid": "✗",
}
LEVEL_TONES: dict[Level, Tone] = {
    "agrees": "good",
    "close": "good",
    "misses": "bad",
    "too noisy": "unsure",
    "not comparable": "faint",
    "unstable": "unsure",
    "invalid": "bad",
}


def case_name(case: Case) -> str:
    return f"{plain(case.policy)}, {load(case.intensity)}"


def figures_table(case: Case, parts: Sequence[str], caption: str) -> Table:
    """Every figure of some parts: the reference with its interval, and each answer against it.

    Noise stands beside the reference, and beside an answer only where the answer adds its own.
    """
    others = range(1, len(case.outcomes))
    noisy = {i for i in others if case.outcomes[i].confidence}
    spans = [("", 1), (marked(case, 0), 3)]
    head = ["", "value", "95 % interval", "noise"]
    for i in others:
        spans.append((marked(case, i), 4 if i in noisy else 3))
        head += ["value", "error", *(["noise"] if i in noisy else []), ""]
    rows = tuple(
        (
            words(row.quantity.label),
            _value(row, 0),
            _interval(row, 0),
            _own_noise(row),
            *(c for i in others for c in _muted(case, i, _columns(row, i, i in noisy))),
        )
        for row in _rows(case, parts)
    )
    title = f"{caption}: {case_name(case)} ({provenance(case.outcomes)})"
    sizes = [len(case.part(part)) for part in parts]
    starts = tuple(accumulate(sizes[:-1], initial=0))
    return Table(title, tuple(head), rows, spans=tuple(spans), starts=starts)


def _muted(case: Case, i: int, cells: Sequence[Cell]) -> list[Cell]:
    """Cells without a judging colour where an invalid outcome leaves nothing to judge."""
    if case.verdicts[i - 1].level != "invalid":
        return list(cells)
    return [replace(cell, tone="faint") for cell in cells]


def _columns(row: Row, i: int, noisy: bool) -> tuple[Cell, ...]:
    value, error, noise, status = _against(row, i, brief=True)
    mark = Cell(status.text.partition(" ")[0] if row.agreements[i] else "", status.tone)
    return (value, error, *((noise,) if noisy else ()), mark)


def _own_noise(row: Row) -> Cell:
    reading = row.readings[0]
    if reading is None or reading.interval is None:
        return figure(None)
    return _noise(
        row.quantity, agree(Reading(reading.value), reading, probability=row.quantity.probability)
    )


def pair_table(case: Case, parts: Sequence[str], i: int, *, intervals: bool = True) -> Table:
    """One answer against the reference, narrow enough for a terminal.

    Parameters
    ----------
    intervals : show the reference's interval beside the noise that follows from it
    """
    reference, answer = case.reference.kind, case.outcomes[i].kind
    names = (reference, answer) if reference != answer else ("reference", "answer")
    shown = ("95 % interval",) if intervals else ()
    rows = tuple(
        (
            words(row.quantity.label),
            _value(row, 0),
            *((_interval(row, 0),) if intervals else ()),
            *_muted(case, i, _against(row, i, brief=True)),
        )
        for row in _rows(case, parts)
    )
    return Table(
        f"{case_name(case)}: {marked(case, i)} against {marked(case, 0)}",
        ("", names[0], *shown, names[1], "error", "noise", "verdict"),
        rows,
    )


def _rows(case: Case, parts: Sequence[str]) -> list[Row]:
    return [row for part in parts for row in case.part(part)]


def summary_table(comparison: Comparison, cases: Sequence[Case]) -> Table:
    """A row an answer: where it stands on mean, highest quantile and first coverage target."""
    chosen = _chosen(cases)
    head = ["policy", "load", "answer", *(q.label for q in chosen for _ in (0, 1)), "verdict"]
    for i in range(len(chosen)):
        head[4 + 2 * i] = "error"
    rows: list[tuple[Cell, ...]] = []
    starts = []
    for case in cases:
        starts.append(len(rows))
        for i, (label, outcome) in enumerate(zip(case.labels, case.outcomes, strict=True)):
            first = i == 0
            cells = [
                words(plain(case.policy), "strong") if first else words(""),
                figure(asked(case.intensity) if case.intensity is not None else None)
                if first
                else words(""),
                words(marked(case, i) if not outcome.valid else label),
            ]
            for quantity in chosen:
                row = case.row(quantity.path)
                cells += (
                    [figure(None), figure(None)]
                    if row is None
                    else [
                        _value(row, i),
                        *([Cell("", figure=True)] if first else _muted(case, i, (_error(row, i),))),
                    ]
                )
            cells.append(_level(case, i))
            rows.append(tuple(cells))
    return Table(
        f"Every answer ({provenance(comparison.outcomes)})",
        tuple(head),
        tuple(rows),
        note="Load in requests/s per km². Errors are signed, in per cent of the reference (the "
        "first answer of each case); pts are percentage points.",
        starts=tuple(starts),
    )


def _chosen(cases: Sequence[Case]) -> list[Quantity]:
    rows = [row.quantity for case in cases for row in case.rows]
    chosen = [q for q in rows if q.path == "ttft.mean"][:1]
    quantiles = [q for q in rows if q.part == LATENCY and q.names]
    if quantiles:
        chosen.append(max(quantiles, key=lambda q: float(q.names[0])))
    return chosen + [q for q in rows if q.part == COVERAGE][:1]


def _level(case: Case, i: int) -> Cell:
    if i == 0:
        valid = case.reference.valid
        return words("reference" if valid else "reference, INVALID", "faint" if valid else "bad")
    level = case.verdicts[i - 1].level
    return words(level.upper() if level == "invalid" else level, LEVEL_TONES[level])


def marked(case: Case, i: int) -> str:
    """A label that says where an outcome is not to be relied on."""
    outcome, label = case.outcomes[i], case.labels[i]
    if not outcome.valid:
        return f"{label} (INVALID)"
    return label if outcome.feasible else f"{label} (infeasible)"


def _value(row: Row, i: int) -> Cell:
    reading = row.readings[i]
    return figure(None if reading is None else amount(reading.value, row.quantity.unit))


def _interval(row: Row, i: int) -> Cell:
    reading = row.readings[i]
    if reading is None or reading.interval is None:
        return figure(None)
    return figure(span(reading.interval, row.quantity.unit), "faint")


def _against(row: Row, i: int, *, brief: bool = False) -> tuple[Cell, Cell, Cell, Cell]:
    agreement = row.agreements[i]
    if agreement is None:
        return _value(row, i), figure(None), figure(None), words("")
    return (
        _value(row, i),
        _error(row, i, brief=brief),
        _noise(row.quantity, agreement),
        words(MARKS[agreement.status], STATUS_TONES[agreement.status]),
    )


def _error(row: Row, i: int, *, brief: bool = False) -> Cell:
    agreement = row.agreements[i]
    if agreement is None:
        return figure(None)
    tone: Tone = "bad" if agreement.status == "misses" else ""
    text = None if agreement.error_percent is None else percent(agreement.error_percent)
    if row.quantity.probability and agreement.difference is not None:
        shift = points(agreement.difference)
        text = shift if text is None or brief else f"{shift} ({text})"
    return figure(text, tone)


def _noise(quantity: Quantity, agreement: Agreement) -> Cell:
    if agreement.noise is None:
        return figure(None)
    tone: Tone = "unsure" if agreement.status == "too noisy" else "faint"
    if quantity.probability:
        return figure(f"±{100 * agreement.noise:.1f}{NBSP}pts", tone)
    if agreement.noise_percent is None or math.isinf(agreement.noise_percent):
        return figure("unbounded", tone)
    return figure(f"±{percent(agreement.noise_percent, signed=False)}", tone)
