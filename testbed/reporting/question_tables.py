"""Question tables: the scenario that was asked, with its units and the theory's symbols."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from testbed.errors import ScenarioError
from testbed.reporting.compare import Comparison, Group
from testbed.reporting.table import Cell, Table, facts, figure, flat, words
from testbed.reporting.wording import asked, plain, seconds, share, significant
from testbed.scenario import Prefill, Profile, Scenario

MOST_TYPES = 6
"""With more request types than this, a profile's reusable prefix is shown as its mean alone."""


def question_tables(group: Group) -> list[Table]:
    """System, request types and profiles; a scenario of another version is shown field by field."""
    try:
        scenario = Scenario.from_dict(group.scenario)
    except ScenarioError:
        return [facts("Scenario", flat(group.scenario))]
    return [_system(scenario, group), _requests(scenario), _profiles(scenario)]


def difference_table(comparison: Comparison) -> Table | None:
    """The fields in which the questions of a comparison differ; None for one question."""
    if not comparison.differences:
        return None
    head = ("field", *(plain(group.name) for group in comparison.groups))
    rows = tuple(
        (words(path), *(words("–" if v is None else v) for v in values))
        for path, values in comparison.differences.items()
    )
    return Table("Where the questions differ", head, rows)


def scenario_yaml(group: Group) -> str:
    """The scenario of a group's first outcome, as a file."""
    try:
        return Scenario.from_dict(group.scenario).to_yaml()
    except ScenarioError:
        return "\n".join(f"{path}: {text}" for path, text in flat(group.scenario).items())


def _system(scenario: Scenario, group: Group) -> Table:
    m = scenario.memory
    radio = ", ".join(f"{k} {v}" for k, v in flat(scenario.radio.model_dump()).items())
    pairs = {
        "radio": radio,
        "nodes, λ_b": f"{asked(scenario.nodes.density)} per km²",
        "demand, λ_req": f"{_loads(group)} requests/s per km²",
        "policies": ", ".join(dict.fromkeys(plain(case.policy) for case in group.cases)),
        "prefill, g(n | h)": _law(scenario.prefill),
        "memory, M": bytes_(m.capacity),
        "one sequence, m_run": bytes_(m.per_sequence),
        "one token, κ": bytes_(m.per_token),
    }
    for s in scenario.profiles:
        own = {
            "engine": s.engine,
            "g(n | h)": None if s.prefill is None else _law(s.prefill),
            "D_q": None
            if s.decode_occupancy is None
            else ", ".join(f"{q} {seconds(x)}" for q, x in s.decode_occupancy.items()),
            "calibration": s.calibration,
        }
        stated = ", ".join(f"{k} {v}" for k, v in own.items() if v is not None)
        if stated:
            pairs[f"{s.name}: its engine"] = stated
    for name, section in (("workload", scenario.workload), ("engine", scenario.engine)):
        if section is not None:
            data = section.model_dump(mode="json", exclude_none=True)
            pairs[name] = ", ".join(f"{k} {v}" for k, v in flat(data).items())
    return facts("System", pairs)


def _law(p: Prefill) -> str:
    return " + ".join(
        text
        for value, text in (
            (p.overhead, seconds(p.overhead)),
            (p.linear, f"{seconds(p.linear)}·n"),
            (p.quadratic, f"{significant(p.quadratic * 1e9)} ns·n²"),
            (p.context, f"{significant(p.context * 1e9)} ns·n·h"),
        )
        if value
    )


def _loads(group: Group) -> str:
    loads = sorted({case.intensity for case in group.cases if case.intensity is not None})
    return ", ".join(asked(load) for load in loads)


def _requests(scenario: Scenario) -> Table:
    prefill = scenario.prefill
    rows = tuple(
        (
            words(q.name, "strong"),
            figure(share(q.probability)),
            figure(asked(q.tokens)),
            figure(asked(q.output_tokens)),
            figure(
                seconds(
                    prefill.overhead + prefill.linear * q.tokens + prefill.quadratic * q.tokens**2
                )
            ),
            figure(seconds(q.decode_occupancy)),
        )
        for q in scenario.requests
    )
    head = ("request type", "p_q", "tokens, L_q", "output tokens", "cold prefill", "decode, D_q")
    return Table("Request types", head, rows)


def _profiles(scenario: Scenario) -> Table:
    each = len(scenario.requests) <= MOST_TYPES
    names: Sequence[str] = [q.name for q in scenario.requests] if each else []
    head = (
        "profile",
        "share of nodes, π_s",
        "pinned, B_s",
        "slots, c_s",
        "mean reusable",
        *(f"{plain(q)}: h" for q in names),
    )
    rows = tuple(
        (
            words(s.name, "strong"),
            figure(share(s.fraction)),
            figure(bytes_(s.persistent_bytes)),
            figure(str(scenario.concurrency(s))),
            figure(f"{significant(_mean_reusable(scenario, s))}"),
            *_reusable(s, names),
        )
        for s in scenario.profiles
    )
    return Table("Cache profiles", head, rows, note="Reusable prefixes in tokens.")


def _mean_reusable(scenario: Scenario, profile: Profile) -> float:
    return math.fsum(q.probability * profile.reusable[q.name] for q in scenario.requests)


def _reusable(profile: Profile, names: Sequence[str]) -> list[Cell]:
    return [figure(asked(profile.reusable[q])) for q in names]


def bytes_(value: Any) -> str:
    """A number of bytes in binary units, exact below 1 KiB."""
    number = float(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024 or unit == "GiB":
            return (
                f"{significant(number)}\u00a0{unit}" if unit != "B" else f"{asked(number)}\u00a0B"
            )
        number /= 1024
    raise AssertionError("unreachable")
