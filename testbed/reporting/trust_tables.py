"""Trust tables: how far outcomes can be relied on, what they were made with, how to repeat them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from testbed.errors import ScenarioError
from testbed.outcome import Counts, Outcome
from testbed.reporting.compare import Comparison, intensity
from testbed.reporting.drift import drift, drift_span
from testbed.reporting.table import Cell, Table, Tone, figure, flat, words
from testbed.reporting.wording import (
    answer,
    asked,
    percent,
    plain,
    provenance,
    seconds,
    significant,
)
from testbed.scenario import Scenario, scenario_hash

MOST_VALUES = 3
"""Different values of one environment field that are written out."""


def validity_table(comparison: Comparison) -> Table:
    """A row for every answer that sent requests: how they ended, how late the driver was."""
    rows = []
    for case in comparison.cases:
        for label, outcome in zip(case.labels, case.outcomes, strict=True):
            if outcome.kind == "predicted" and outcome.valid:
                continue
            rows.append((*_where(outcome, label), *_trust(outcome)))
    head = ("policy", "load", "answer", "valid", "sent", "completed", "rejected", "failed")
    late = ("lag p50", "lag p99", "p99 / median", "overhead p50", "overhead p99")
    rates = ("TTFT mean", "from send", "asked", "achieved")
    return Table(
        f"Requests and punctuality ({provenance(comparison.outcomes)})",
        (*head, *late, *rates),
        tuple(rows),
        note="Lag: how late a request left for its replica, beyond the emulated radio. Overhead: "
        "from the intended send to the engine's arrival stamp on an idle replica, without that "
        "radio. TTFT counts from the intended time; 'from send' from the actual one. Asked and "
        "achieved: requests/s.",
    )


def _trust(outcome: Outcome) -> tuple[Cell, ...]:
    counts, extra = outcome.requests, outcome.extra
    lag, sent = _mapping(extra, "dispatch_lag"), extra.get("ttft_from_send")
    from_send = sent.get("mean") if isinstance(sent, Mapping) else sent
    median = next((t for z, t in outcome.ttft.quantiles.items() if float(z) == 0.5), None)
    idle = _mapping(_mapping(extra, "harness_overhead"), "idle_replica")
    ratio = 100 * lag["p99"] / median if median and "p99" in lag else None
    return (
        words("yes", "good") if outcome.valid else words("INVALID", "bad"),
        *(_count(counts, name) for name in ("sent", "completed", "rejected", "failed")),
        _time(lag.get("p50")),
        _time(lag.get("p99")),
        figure(None if ratio is None else percent(ratio, signed=False)),
        _time(idle.get("p50")),
        _time(idle.get("p99")),
        _time(outcome.ttft.mean),
        _time(from_send),
        *(_rate(extra.get(key)) for key in ("requested_rate", "achieved_rate")),
    )


def _count(counts: Counts | None, name: str) -> Cell:
    if counts is None:
        return figure(None)
    number = int(getattr(counts, name))
    return figure(f"{number:,}", "bad" if number and name in ("rejected", "failed") else "")


def _time(value: Any) -> Cell:
    return figure(seconds(float(value)) if isinstance(value, int | float) else None)


def _rate(value: Any) -> Cell:
    return figure(significant(float(value)) if isinstance(value, int | float) else None)


def doubts(outcome: Outcome) -> list[tuple[str, Tone]]:
    """What an outcome says against itself, worst first."""
    said: list[tuple[str, Tone]] = []
    if not outcome.valid:
        said.append((f"INVALID: {outcome.invalid_reason or 'no reason given'}", "bad"))
    if not outcome.feasible:
        said.append((f"infeasible: {outcome.reason or 'no reason given'}", "bad"))
    if not outcome.converged:
        said.append((f"not converged in {outcome.iterations} iterations", "bad"))
    said += [(f"note: {warning}", "unsure") for warning in outcome.warnings]
    return [(plain(text), tone) for text, tone in said]


def warning_table(comparison: Comparison) -> Table | None:
    """Everything that an outcome says against itself; None when all are silent."""
    rows = tuple(
        (*_where(outcome, label), words(text, tone))
        for case in comparison.cases
        for label, outcome in zip(case.labels, case.outcomes, strict=True)
        for text, tone in doubts(outcome)
    )
    head = ("policy", "load", "answer", "what it says")
    return Table("What the answers say against themselves", head, rows) if rows else None


def drift_table(comparison: Comparison) -> Table | None:
    """The machine's speed before and after each measured run; None where nothing was measured."""
    rows = []
    for case in comparison.cases:
        for label, outcome in zip(case.labels, case.outcomes, strict=True):
            if outcome.kind != "measured":
                continue
            speed, moved = _mapping(outcome.extra, "machine_speed"), drift(outcome)
            ends = tuple(_speed(speed.get(end)) for end in ("before", "after"))
            if moved is None:
                rows.append((*_where(outcome, label), *ends, *(figure(None) for _ in range(3))))
                continue
            rows.append(
                (
                    *_where(outcome, label),
                    *ends,
                    figure(percent(float(speed["drift_percent"]))),
                    figure(f"× {significant(moved.sensitivity, 2)}"),
                    figure(drift_span(moved), "strong"),
                )
            )
    head = ("policy", "load", "answer", "before", "after", "drift", "TTFT moves", "could explain")
    clocks = provenance(o for o in comparison.outcomes if o.kind == "measured")
    said = {str(_mapping(o.extra, "machine_speed").get("what", "")) for o in comparison.outcomes}
    note = "Could explain: error of the mean TTFT that drift alone could give a right answer."
    speeds = " ".join(f"Speed: {plain(text)}." for text in sorted(said) if text)
    caption = f"Drift of the machine ({clocks})"
    return Table(caption, head, tuple(rows), f"{note} {speeds}".strip()) if rows else None


def _speed(value: Any) -> Cell:
    if isinstance(value, Mapping):
        return figure("; ".join(f"{plain(k)} {v}" for k, v in flat(value).items()))
    if isinstance(value, int | float):
        return figure(significant(float(value), 4))
    return figure(None if value is None else plain(value))


def _where(outcome: Outcome, label: str) -> tuple[Cell, Cell, Cell]:
    load = intensity(outcome)
    return (
        words(outcome.policy),
        figure(None if load is None else asked(load)),
        words(label if outcome.valid else f"{label} (INVALID)"),
    )


def _mapping(extra: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = extra.get(key)
    return value if isinstance(value, Mapping) else {}


def environment_table(outcomes: Iterable[Outcome]) -> Table | None:
    """What the outcomes were made with; values that differ between them stand side by side.

    Members that only a number tells apart (nodes, replicas) are one row with ``*`` in its path.
    """
    merged: dict[str, list[str]] = {}
    for outcome in outcomes:
        for path, text in flat(outcome.environment, hide=("calibration",)).items():
            values = merged.setdefault(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path), [])
            if text not in values:
                values.append(text)
    rows = tuple((words(path, "faint"), words(_some(v))) for path, v in merged.items())
    return Table("Environment", ("", ""), rows) if rows else None


def _some(values: Sequence[str]) -> str:
    shown = "; ".join(values[:MOST_VALUES])
    return shown if len(values) <= MOST_VALUES else f"{shown}; … ({len(values)} values)"


def reproduction_table(comparison: Comparison) -> Table:
    """How each answer can be had again: command, seed, and what the inputs hash to."""
    rows = []
    for case in comparison.cases:
        for label, outcome in zip(case.labels, case.outcomes, strict=True):
            rows.append(
                (
                    *_where(outcome, label),
                    words(command(outcome)),
                    figure(None if outcome.seed is None else str(outcome.seed)),
                    words(_hash(outcome.scenario)),
                    words(outcome.environment.get("code", "–")),
                )
            )
    head = ("policy", "load", "answer", "command", "seed", "scenario hash", "code")
    return Table("How to reproduce", head, tuple(rows))


def command(outcome: Outcome) -> str:
    """The command as recorded in the environment, else as the command line documents it."""
    if recorded := outcome.environment.get("command"):
        return plain(recorded)
    verb = {"predicted": "predict", "simulated": "simulate", "measured": "run"}[outcome.kind]
    text = f"testbed {verb} scenario.yaml"
    if outcome.delay_model and outcome.delay_model != outcome.scenario.get("delay_model"):
        text += f" --delay-model {plain(outcome.delay_model)}"
    if extension := outcome.extra.get("extension"):
        text += f" --extension {plain(str(extension))}"
    if outcome.requests is not None:
        text += f" --requests {outcome.requests.sent}"
    return text if outcome.seed is None else f"{text} --seed {outcome.seed}"


def _hash(scenario: dict[str, Any]) -> str:
    try:
        return scenario_hash(Scenario.from_dict(scenario))
    except ScenarioError:
        return "not readable by this version"


def overview_line(outcomes: Sequence[Outcome]) -> str:
    """Kinds present, counted: ``6 measured · wall clock, 12 predicted · erlang_c``."""
    labels = [answer(o) for o in outcomes]
    return ", ".join(f"{labels.count(label)} {label}" for label in dict.fromkeys(labels))
