"""Comparison: outcomes side by side, whichever way they were asked.

Outcomes that ask the same question (the same scenario apart from policy, delay model and
intensity) form a group; within it, each policy at each intensity is a case. The reference of a
case is what was measured, else what was simulated, else the first prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any

from testbed.errors import OutcomeError, ScenarioError
from testbed.outcome import Outcome, dump_json, flatten
from testbed.reporting.agreement import Agreement, Reading, agree
from testbed.reporting.drift import drift, drift_words
from testbed.reporting.paired import Paired
from testbed.reporting.quantities import Quantity, quantities, readings
from testbed.reporting.verdict import Judged, Verdict, judge
from testbed.reporting.wording import answers
from testbed.scenario import Scenario, SimulationSpec

KINDS = ("measured", "simulated", "predicted")
VARIED = ("name", "policy", "delay_model", "solver", "targets")
VARIED_WITHIN = {
    "demand": ("intensity",),
    "workload": ("seed",),
    "simulation": ("space", "nodes", "positions", "node_model", "service_file", "waits", "warm_up"),
}
"""Scenario fields that leave the question the same: what varies between cases, what is printed,
and how an answer is computed."""


@dataclass(frozen=True)
class Row:
    """One figure of a case; readings and agreements in the order of the case's answers.

    The reference's own agreement is None, as is that of an answer without this figure.
    """

    quantity: Quantity
    readings: tuple[Reading | None, ...]
    agreements: tuple[Agreement | None, ...]


@dataclass(frozen=True)
class Case:
    """One policy at one intensity; the first answer is the reference."""

    policy: str
    intensity: float | None
    outcomes: tuple[Outcome, ...]
    labels: tuple[str, ...]
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def reference(self) -> Outcome:
        return self.outcomes[0]

    @property
    def drift_words(self) -> str | None:
        """What drift could do to the reference; None where nothing was measured."""
        return drift_words(self.reference) if self.reference.kind == "measured" else None

    def row(self, path: str) -> Row | None:
        """The row of a figure by its path, ``ttft.quantiles.0.99``; None if no answer has it."""
        return next((r for r in self.rows if r.quantity.path == path), None)

    def part(self, part: str) -> tuple[Row, ...]:
        return tuple(r for r in self.rows if r.quantity.part == part)

    def to_dict(self) -> dict[str, Any]:
        reference_drift = drift(self.reference)
        return {
            "policy": self.policy,
            "intensity": self.intensity,
            "reference": self.labels[0],
            "answers": {
                label: _facts(o) for label, o in zip(self.labels, self.outcomes, strict=True)
            },
            "figures": [self._row_dict(r) for r in self.rows],
            "verdicts": [v.to_dict() for v in self.verdicts],
            "drift": reference_drift.to_dict() if reference_drift else None,
            "drift_words": self.drift_words,
        }

    def _row_dict(self, row: Row) -> dict[str, Any]:
        return {
            "path": row.quantity.path,
            "label": row.quantity.label,
            "unit": row.quantity.unit,
            "values": {
                label: r.to_dict()
                for label, r in zip(self.labels, row.readings, strict=True)
                if r is not None
            },
            "agreement": {
                label: a.to_dict()
                for label, a in zip(self.labels, row.agreements, strict=True)
                if a is not None
            },
        }


@dataclass(frozen=True)
class Group:
    """One question: its scenario (of the first outcome) and its cases."""

    name: str
    scenario: dict[str, Any]
    cases: tuple[Case, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(o for case in self.cases for o in case.outcomes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "scenario": self.scenario,
            "cases": [case.to_dict() for case in self.cases],
        }


@dataclass(frozen=True)
class Comparison:
    """Groups in order of first appearance, and the fields in which their questions differ."""

    groups: tuple[Group, ...]

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(o for group in self.groups for o in group.outcomes)

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(case for group in self.groups for case in group.cases)

    @cached_property
    def differences(self) -> dict[str, tuple[Any, ...]]:
        """{scenario field: its value in each group} for fields that are not the same in all."""
        flat = [dict(flatten(question(g.scenario))) for g in self.groups]
        paths = list(dict.fromkeys(path for f in flat for path in f))
        values = {path: tuple(f.get(path) for f in flat) for path in paths}
        return {p: v for p, v in values.items() if any(x != v[0] for x in v)}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for ``--json``: an infinite figure stays a float (dump_json writes "inf")."""
        return {
            "groups": [group.to_dict() for group in self.groups],
            "differences": {path: list(values) for path, values in self.differences.items()},
        }


def compare(outcomes: Sequence[Outcome]) -> Comparison:
    """Lay two or more outcomes side by side.

    Invalid outcomes take part and are marked; they are the reference only where no valid outcome
    of their kind is there.

    Raises
    ------
    OutcomeError
        Fewer than two outcomes.

    Example
    -------
    >>> comparison = compare([predicted, measured])  # doctest: +SKIP
    >>> comparison.cases[0].verdicts[0].headline  # doctest: +SKIP
    """
    if len(outcomes) < 2:
        raise OutcomeError(f"compare: at least two outcomes are needed, not {len(outcomes)}")
    return lay_out(outcomes)


def lay_out(outcomes: Sequence[Outcome]) -> Comparison:
    """As :func:`compare`, and a single outcome is a case without anything beside it."""
    if not outcomes:
        raise OutcomeError("compare: no outcome given")
    groups: dict[bytes, dict[tuple[str, float | None], list[Outcome]]] = {}
    for outcome in outcomes:
        cases = groups.setdefault(dump_json(_sorted(question(outcome.scenario))), {})
        cases.setdefault((outcome.policy, intensity(outcome)), []).append(outcome)
    return Comparison(tuple(_group(cases) for cases in groups.values()))


def question(scenario: dict[str, Any]) -> dict[str, Any]:
    """A scenario without the fields that may differ between answers to one question.

    Defaults are filled in where the scenario can be read, so that a default left out equals the
    same value written out; a scenario of another version is taken as it is.
    """
    try:
        read = Scenario.from_dict(scenario)
        data = read.replace(simulation=read.simulation or SimulationSpec()).to_dict()
    except ScenarioError:
        data = scenario
    kept = {k: v for k, v in data.items() if k not in VARIED}
    for section, fields in VARIED_WITHIN.items():
        if isinstance(kept.get(section), dict):
            kept[section] = {k: v for k, v in kept[section].items() if k not in fields}
    return kept


def intensity(outcome: Outcome) -> float | None:
    """λ_req of the outcome's scenario, requests/s per km² (Theory A1); None if not stated."""
    demand = outcome.scenario.get("demand")
    value = demand.get("intensity") if isinstance(demand, dict) else None
    return None if value is None else float(value)


def _facts(outcome: Outcome) -> dict[str, Any]:
    """What says how far to trust an answer."""
    kept = ("kind", "clock", "delay_model", "seed", "valid", "invalid_reason", "feasible")
    more = ("reason", "converged", "iterations", "capacity_margin", "warnings", "requests")
    return outcome.model_dump(mode="json", include={*kept, *more})


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _sorted(value[k]) for k in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(v) for v in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _group(cases: dict[tuple[str, float | None], list[Outcome]]) -> Group:
    first = next(iter(cases.values()))[0]
    policies = list(dict.fromkeys(policy for policy, _ in cases))
    keys = sorted(cases, key=lambda key: (policies.index(key[0]), key[1] or 0.0))
    name = _common([o.scenario_name for found in cases.values() for o in found])
    return Group(name, first.scenario, tuple(_case(*k, cases[k]) for k in keys))


def _common(names: Sequence[str]) -> str:
    """One name for outcomes of one question: the words with which all their names begin."""
    if len(set(names)) == 1:
        return names[0]
    columns = zip(*(name.split() for name in names), strict=False)
    shared = [words[0] for words in takewhile(lambda words: len(set(words)) == 1, columns)]
    return " ".join(shared) or " / ".join(dict.fromkeys(names))


def _case(policy: str, load: float | None, outcomes: list[Outcome]) -> Case:
    ordered = sorted(outcomes, key=lambda o: (KINDS.index(o.kind), not o.valid))
    labels = answers(ordered)
    read = [readings(o) for o in ordered]
    pairs = [None, *(Paired.of(o, ordered[0]) for o in ordered[1:])]
    rows = tuple(_row(q, [r.get(q) for r in read], pairs) for q in quantities(ordered))
    return Case(
        policy,
        load,
        tuple(ordered),
        tuple(labels),
        rows,
        tuple(_verdict(ordered, labels, rows, i) for i in range(1, len(ordered))),
    )


def _row(quantity: Quantity, found: list[Reading | None], pairs: Sequence[Paired | None]) -> Row:
    reference = found[0]
    agreements = tuple(
        None
        if i == 0 or reading is None or reference is None
        else agree(
            reading,
            reference,
            probability=quantity.probability,
            halves=None if pair is None else pair.halves(quantity),
            paired=0 if pair is None else len(pair),
        )
        for i, (reading, pair) in enumerate(zip(found, pairs, strict=True))
    )
    return Row(quantity, tuple(found), agreements)


def _verdict(
    outcomes: Sequence[Outcome], labels: Sequence[str], rows: Sequence[Row], i: int
) -> Verdict:
    figures = []
    for row in rows:
        answer, reference, agreement = row.readings[i], row.readings[0], row.agreements[i]
        if answer is not None and reference is not None and agreement is not None:
            figures.append(Judged(row.quantity, answer.value, reference.value, agreement))
    return judge(outcomes[i], outcomes[0], (labels[i], labels[0]), figures)
