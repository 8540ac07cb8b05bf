"""Tables on a terminal: one outcome, or outcomes side by side."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from testbed.outcome import Outcome
from testbed.reporting.case_tables import LEVEL_MARKS, LEVEL_TONES, case_name, pair_table
from testbed.reporting.compare import Case, Comparison, intensity
from testbed.reporting.outcome_tables import association_table, latency_table, tier_table
from testbed.reporting.quantities import ASSOCIATION, COVERAGE, LATENCY, NETWORK, TIERS
from testbed.reporting.table import RICH_STYLES, Table, Tone, to_rich
from testbed.reporting.trust_tables import doubts
from testbed.reporting.wording import answer, load, plain, provenance, seconds, share

MOST_DETAILED = 3
"""With more pairs of answer and reference than this, tiers and association are left to the report
and to ``--json``."""
WIDE = 96
"""Columns from which intervals are shown beside the noise."""


def render_comparison(console: Console, comparison: Comparison) -> None:
    """Verdicts in words first, then every figure of every case against its reference.

    Examples
    --------
    >>> render_comparison(Console(), compare([predicted, measured]))  # doctest: +SKIP
    """
    pairs = sum(len(case.verdicts) for case in comparison.cases)
    parts: tuple[str, ...] = (LATENCY, COVERAGE, NETWORK)
    if pairs <= MOST_DETAILED:
        parts += (TIERS, ASSOCIATION)
    for group in comparison.groups:
        heading = f"{plain(group.name)} ({provenance(group.outcomes)})"
        console.rule(Text(heading, style="bold"), align="left")
        for case in group.cases:
            _verdicts(console, case)
            for i, outcome in enumerate(case.outcomes):
                for warning in outcome.warnings:
                    _hang(console, Text(f"    {case.labels[i]}: {plain(warning)}", "yellow"))
                _counts(console, outcome, case.labels[i])
            console.print()
        for case in group.cases:
            for i in range(1, len(case.outcomes)):
                show(console, pair_table(case, parts, i, intervals=console.width >= WIDE))
    if comparison.differences:
        _say(console, "These are different questions. They differ in:", "strong")
        for path, values in comparison.differences.items():
            _say(console, f"  {path}: {' | '.join(map(str, values))}")
    if pairs > MOST_DETAILED:
        _say(console, "Tiers and association: in the report and with --json.", "faint")


def render_outcome(console: Console, outcome: Outcome) -> None:
    """One answer whole: TTFT, coverage, tiers, association, and whether to rely on it."""
    heading = f"{plain(outcome.scenario_name)}: {answer(outcome)}"
    console.rule(Text(heading, style="bold"), align="left")
    _say(console, f"{plain(outcome.policy)}, {load(intensity(outcome))}")
    for text, tone in doubts(outcome):
        _hang(console, Text(text, RICH_STYLES[tone]))
    _counts(console, outcome, outcome.kind)
    console.print()
    for table in (latency_table(outcome), tier_table(outcome), association_table(outcome)):
        show(console, table)
    margin = outcome.capacity_margin
    _say(console, f"capacity margin (Theory D2): {share(margin)}", "bad" if margin < 0 else "")


def show(console: Console, table: Table) -> None:
    """A table and an empty line."""
    console.print(to_rich(table))
    console.print()


def _verdicts(console: Console, case: Case) -> None:
    _say(console, case_name(case), "strong")
    for verdict in case.verdicts:
        line = Text("  ")
        line.append(f"{LEVEL_MARKS[verdict.level]} ", RICH_STYLES[LEVEL_TONES[verdict.level]])
        line.append(verdict.headline)
        _hang(console, line)
        for ground in verdict.grounds:
            _hang(console, Text(f"    {ground}", "dim"))
    if case.drift_words is not None:
        _hang(console, Text(f"    {case.drift_words}", "dim"))


def _counts(console: Console, outcome: Outcome, label: str) -> None:
    """How an answer's requests ended and how punctual its driver was."""
    if outcome.requests is not None:
        r = outcome.requests
        text = (
            f"    {label}: {r.sent:,} sent, {r.completed:,} completed, {r.rejected:,} rejected, "
            f"{r.failed:,} failed"
        )
        lag = outcome.extra.get("dispatch_lag")
        if isinstance(lag, Mapping) and {"p50", "p99"} <= lag.keys():
            text += f"; dispatch lag p50 {seconds(lag['p50'])}, p99 {seconds(lag['p99'])}"
        _hang(console, Text(text, "bold red" if r.completed < r.sent else "dim"))


def _hang(console: Console, text: Text) -> None:
    """Print with the continuation lines indented as the first."""
    indent = len(text.plain) - len(text.plain.lstrip(" "))
    text = text[indent:]
    console.print(Padding(text, (0, 0, 0, indent)))


def _say(console: Console, text: str, tone: Tone = "") -> None:
    console.print(Text(text, style=RICH_STYLES[tone]))
