"""Outcome tables: one answer by itself."""

from __future__ import annotations

from testbed.outcome import Outcome
from testbed.reporting.quantities import COVERAGE, LATENCY, NETWORK, TIER_FIELDS, readings
from testbed.reporting.table import Table, figure, words
from testbed.reporting.wording import amount, plain, provenance, significant, span


def latency_table(outcome: Outcome) -> Table:
    """TTFT, coverage and the network's figures with their intervals."""
    rows = []
    for quantity, reading in readings(outcome).items():
        if quantity.part in (LATENCY, COVERAGE, NETWORK):
            interval = span(reading.interval, quantity.unit) if reading.interval else None
            value = amount(reading.value, quantity.unit)
            rows.append((words(quantity.label), figure(value, "strong"), figure(interval, "faint")))
    return Table(
        f"Time to first token ({provenance([outcome])})",
        ("", "value", "95 % interval"),
        tuple(rows),
    )


def tier_table(outcome: Outcome) -> Table:
    """A row a tier (Theory B)."""
    rows = tuple(
        (
            words(name, "strong"),
            figure(significant(tier.density)),
            figure(str(tier.concurrency)),
            *(figure(amount(getattr(tier, f), unit)) for f, (_, unit) in TIER_FIELDS.items()),
        )
        for name, tier in outcome.tiers.items()
    )
    head = ("tier", "/km²", "slots", *(label for label, _ in TIER_FIELDS.values()))
    return Table(f"Tiers ({provenance([outcome])})", head, rows)


def association_table(outcome: Outcome) -> Table:
    """Requests of each type by the profile that serves them, a row a type."""
    profiles = list(dict.fromkeys(s for row in outcome.association.values() for s in row))
    rows = tuple(
        (
            words(q, "strong"),
            *(figure(amount(row[s], "1") if s in row else None) for s in profiles),
        )
        for q, row in outcome.association.items()
    )
    head = ("request type", *map(plain, profiles))
    return Table(f"Association ({provenance([outcome])})", head, rows)
