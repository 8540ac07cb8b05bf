"""Quantities: the figures that outcomes share, in the order in which a page shows them.

A quantity is found by its meaning, not by its spelling: a quantile asked as ``0.9`` and as
``0.90`` is one figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from testbed.outcome import Outcome
from testbed.reporting.agreement import Reading
from testbed.reporting.wording import plain, seconds

LATENCY, COVERAGE, ASSOCIATION, TIERS, NETWORK = (
    "latency",
    "coverage",
    "association",
    "tiers",
    "network",
)

TIER_FIELDS = {
    "utilisation": ("utilisation", "1"),
    "wait_probability": ("P(wait)", "1"),
    "mean_wait": ("mean wait", "s"),
    "arrival_rate": ("arrivals", "/s"),
    "service_rate": ("service rate", "/s"),
}
NETWORK_FIELDS = {
    "reusable_prefix_tokens": ("reused prefix", "tokens"),
    "offloading_ratio": ("offloading ratio", "1"),
    "mean_distance": ("mean distance", "km"),
}


@dataclass(frozen=True)
class Quantity:
    """One figure: its path in the comparison, its name, its unit and the part it belongs to."""

    path: str
    label: str
    unit: str
    part: str
    names: tuple[str, ...] = ()

    @property
    def probability(self) -> bool:
        """A share of one, whose differences are judged in percentage points."""
        return self.unit == "1"


@dataclass(frozen=True)
class _Found:
    quantity: Quantity
    own_path: str
    value: float


def readings(outcome: Outcome) -> dict[Quantity, Reading]:
    """Every comparable figure of an outcome with its 95 % interval, if it has one."""
    return {
        f.quantity: Reading(f.value, outcome.confidence.get(f.own_path)) for f in _figures(outcome)
    }


def quantities(outcomes: Sequence[Outcome]) -> list[Quantity]:
    """The union of the outcomes' figures, in page order."""
    seen = {q for o in outcomes for q in readings(o)}
    order = {LATENCY: 0, COVERAGE: 1, NETWORK: 2, TIERS: 3, ASSOCIATION: 4}
    first = {q: i for o in reversed(outcomes) for i, q in enumerate(readings(o))}
    return sorted(seen, key=lambda q: (order[q.part], _numeric(q), first[q], q.path))


def percentile(zeta: float) -> str:
    """The name of a quantile: ``p99`` for 0.99."""
    return f"p{100 * zeta:.10g}"


def _numeric(quantity: Quantity) -> float:
    """Quantiles and targets in numerical order; other parts keep the outcome's own order."""
    if quantity.part not in (LATENCY, COVERAGE) or quantity.path == "ttft.mean":
        return -1.0
    return float(quantity.names[0])


def _figures(outcome: Outcome) -> Iterator[_Found]:
    ttft = outcome.ttft
    yield _Found(Quantity("ttft.mean", "TTFT mean", "s", LATENCY), "ttft.mean", ttft.mean)
    yield from _by_number(
        ttft.quantiles, "ttft.quantiles", "s", LATENCY, lambda z: f"TTFT {percentile(z)}"
    )
    yield from _by_number(
        ttft.coverage, "ttft.coverage", "1", COVERAGE, lambda t: f"coverage at {seconds(t)}"
    )
    for field, (label, unit) in NETWORK_FIELDS.items():
        yield _Found(Quantity(field, label, unit, NETWORK), field, getattr(outcome, field))
    for name, tier in outcome.tiers.items():
        for field, (label, unit) in TIER_FIELDS.items():
            path = f"tiers.{name}.{field}"
            quantity = Quantity(path, f"{plain(name)}: {label}", unit, TIERS, (name, field))
            yield _Found(quantity, path, getattr(tier, field))
    for request, row in outcome.association.items():
        for profile, value in row.items():
            path = f"association.{request}.{profile}"
            label = f"{plain(request)} → {plain(profile)}"
            yield _Found(Quantity(path, label, "1", ASSOCIATION, (request, profile)), path, value)


def _by_number(
    figures: dict[str, float], path: str, unit: str, part: str, label: Callable[[float], Any]
) -> Iterator[_Found]:
    for key, value in figures.items():
        number = float(key)
        quantity = Quantity(f"{path}.{number:.10g}", label(number), unit, part, (f"{number:.10g}",))
        yield _Found(quantity, f"{path}.{key}", value)
