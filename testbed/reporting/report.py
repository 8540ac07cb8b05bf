"""Report: a comparison as one page, verdicts first, every misfit shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from testbed.reporting.calibration_tables import calibration_tables
from testbed.reporting.case_tables import (
    LEVEL_MARKS,
    LEVEL_TONES,
    MARK_NOTE,
    case_name,
    figures_table,
    summary_table,
)
from testbed.reporting.compare import Case, Comparison, Group
from testbed.reporting.digest import digest
from testbed.reporting.figures import (
    association_bars,
    can_draw_load,
    error_bars,
    load_curves,
    ttft_cdf,
    ttft_tail,
)
from testbed.reporting.glossary import glossary_table
from testbed.reporting.page import (
    Block,
    Code,
    Finding,
    Grid,
    Heading,
    Picture,
    Section,
    Text,
    write_page,
)
from testbed.reporting.quantities import ASSOCIATION, COVERAGE, LATENCY, NETWORK, TIERS
from testbed.reporting.question_tables import difference_table, question_tables, scenario_yaml
from testbed.reporting.table import Table
from testbed.reporting.trust_tables import (
    drift_table,
    environment_table,
    overview_line,
    reproduction_table,
    validity_table,
    warning_table,
)
from testbed.reporting.wording import plain


def write_report(
    path: str | Path,
    comparison: Comparison,
    *,
    title: str,
    sections: Sequence[Section] = (),
    calibration: Mapping[str, Any] | None = None,
    calibration_after: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``report.html``: self-contained, the same bytes for the same comparison.

    Parameters
    ----------
    sections : more sections, shown after the calibration
    calibration, calibration_after : ``calibration.json`` as plain data, from before the runs and,
        where it was repeated, after them. Left out, ``environment.calibration`` of the outcomes
        is shown, if there.

    Returns
    -------
    The path written.

    Examples
    --------
    >>> write_report("report.html", compare(outcomes), title="Demo")  # doctest: +SKIP
    """
    page = [_glance(comparison), _verdicts(comparison)]
    several = len(comparison.groups) > 1
    for group in comparison.groups:
        suffix = f": {plain(group.name)}" if several else ""
        page += [
            Section.of(f"The question{suffix}", *question_tables(group)),
            _latency(group, suffix),
            _tiers(group, suffix),
        ]
    page += [_trust(comparison), *_calibration(comparison, calibration, calibration_after)]
    page += [*sections, _reproduction(comparison), Section.of("Glossary", glossary_table())]
    findings = [
        Finding(LEVEL_MARKS[level], LEVEL_TONES[level], name, text)
        for name, level, text in digest(comparison)
    ]
    lead = [overview_line(comparison.outcomes)]
    return write_page(path, title, page, lead=lead, findings=findings)


def _verdicts(comparison: Comparison) -> Section:
    blocks: list[Block | str | Table] = []
    for case in comparison.cases:
        blocks.append(Heading(_named(comparison, case)))
        blocks += [
            Finding(
                LEVEL_MARKS[verdict.level],
                LEVEL_TONES[verdict.level],
                verdict.answer,
                verdict.summary,
                verdict.grounds,
            )
            for verdict in case.verdicts
        ]
        if not case.verdicts:
            blocks.append("Nothing stands beside this answer.")
        if case.drift_words is not None:
            blocks.append(case.drift_words)
    if (table := difference_table(comparison)) is not None:
        blocks.append(table)
    return Section.of("Verdicts", *blocks)


def _named(comparison: Comparison, case: Case) -> str:
    name = f"{case_name(case)}, against {case.labels[0]}"
    if len(comparison.groups) > 1:
        return f"{plain(case.reference.scenario_name)}: {name}"
    return name


def _glance(comparison: Comparison) -> Section:
    blocks: list[Block | Table] = [summary_table(comparison, comparison.cases)]
    blocks += [
        Picture(
            load_curves(group.outcomes),
            "A colour a policy. Points with bars are measured or simulated with their 95 % "
            "intervals, lines are predictions. TTFT at an infeasible load is left out.",
        )
        for group in comparison.groups
        if can_draw_load(group)
    ]
    return Section.of("At a glance", *blocks)


def _latency(group: Group, suffix: str) -> Section:
    outcomes = group.outcomes
    blocks: list[Block | Table] = [
        Picture(
            ttft_cdf(outcomes),
            "Bars on a curve are 95 % intervals: flat ones of quantiles, upright ones of coverage "
            "at the targets (the thin upright lines).",
        ),
        Picture(ttft_tail(outcomes), "The same, as the share of requests that took longer."),
    ]
    if any(case.verdicts for case in group.cases):
        note = (
            "The band is ±5 %. A whisker is the 95 % interval of the error; a hollow mark lies "
            "within the noise."
        )
        blocks.append(Picture(error_bars(outcomes), note))
    parts = (LATENCY, COVERAGE)
    blocks.append(Text(MARK_NOTE))
    blocks += [figures_table(case, parts, "TTFT and coverage") for case in group.cases]
    return Section.of(f"Time to first token{suffix}", *blocks)


def _tiers(group: Group, suffix: str) -> Section:
    note = (
        "Bar and whisker: the reference and its 95 % interval. Marks: the other answers. Under "
        "each policy the shares of one request type add up to 100 %."
    )
    blocks: list[Block | Table] = [Picture(association_bars(group.outcomes), note)]
    parts = (ASSOCIATION, NETWORK, TIERS)
    blocks += [figures_table(case, parts, "Association, reuse and tiers") for case in group.cases]
    return Section.of(f"Association, tiers and reuse{suffix}", *blocks)


def _trust(comparison: Comparison) -> Section:
    tables = [validity_table(comparison), warning_table(comparison), drift_table(comparison)]
    return Section.of("Validity and drift", *(t for t in tables if t is not None))


def _calibration(
    comparison: Comparison, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[Section]:
    if before is None:
        found = (o.environment.get("calibration") for o in comparison.outcomes)
        before = next((c for c in found if isinstance(c, Mapping)), None)
    if before is None:
        return []
    return [Section.of("Calibration", *calibration_tables(before, after))]


def _reproduction(comparison: Comparison) -> Section:
    blocks: list[Block] = [Grid(reproduction_table(comparison))]
    for group in comparison.groups:
        caption = f"scenario.yaml: {plain(group.name)}, as {case_name(group.cases[0])} was asked"
        blocks.append(Code(caption, scenario_yaml(group)))
    if (environment := environment_table(comparison.outcomes)) is not None:
        blocks.append(Grid(environment))
    return Section.of("Reproduction and environment", *blocks)
