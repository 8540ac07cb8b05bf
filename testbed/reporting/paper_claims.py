"""Claims: what the paper reports of its figures, beside what was computed here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

from testbed.reporting.table import Table, Tone, figure, words
from testbed.reporting.wording import MINUS, NBSP, significant

LAST_DIGIT = 0.01
"""The text gives probabilities with two digits and "approximately": nearer than this one unit of
the last digit counts as reproduced."""


@dataclass(frozen=True)
class Claim:
    """One sentence of the paper, as a value or as something that holds or not.

    Attributes
    ----------
    figure : number in the paper
    statement : what is claimed
    reported : the value in the text, or its words
    ours : the value computed here, or what was found
    reproduced : whether ours meets what is reported
    note : what a reader must know to judge it
    """

    figure: int
    statement: str
    reported: float | str
    ours: float | str
    reproduced: bool
    note: str = ""

    @classmethod
    def value(
        cls,
        figure: int,
        statement: str,
        reported: float,
        ours: float,
        *,
        tolerance: float = LAST_DIGIT,
        note: str = "",
    ) -> Claim:
        """A number of the text; reproduced when ours lies within ``tolerance`` of it."""
        near = abs(ours - reported) <= tolerance * (1 + 1e-9)
        return cls(figure, statement, float(reported), float(ours), near, note)

    @property
    def distance(self) -> float | None:
        """Ours − reported, where both are numbers."""
        if isinstance(self.reported, str) or isinstance(self.ours, str):
            return None
        return self.ours - self.reported

    def to_dict(self) -> dict[str, Any]:
        return {
            "figure": self.figure,
            "statement": self.statement,
            "reported": self.reported,
            "ours": self.ours,
            "distance": self.distance,
            "reproduced": self.reproduced,
            "note": self.note,
        }


@dataclass(frozen=True)
class Drawn:
    """One figure of the paper as computed here: picture, how to read it, claims, more tables."""

    number: int
    title: str
    figure: Figure
    reading: str
    claims: tuple[Claim, ...]
    tables: tuple[Table, ...] = field(default=())


def claim_table(claims: Sequence[Claim], caption: str, *, numbered: bool = True) -> Table:
    """Paper reports, ours, distance; a row a claim."""
    rows = []
    starts = []
    last = None
    for i, claim in enumerate(claims):
        tone: Tone = "good" if claim.reproduced else "bad"
        row = [
            words(claim.statement),
            words(_reported(claim.reported), "faint"),
            words(_ours(claim.ours), "strong"),
            figure(None if claim.distance is None else signed(claim.distance)),
            words("reproduced" if claim.reproduced else "not reproduced", tone),
            words(claim.note, "faint"),
        ]
        if numbered:
            first = claim.figure != last
            if first:
                starts.append(i)
            row.insert(0, words(f"Fig.{NBSP}{claim.figure}" if first else "", "strong"))
        last = claim.figure
        rows.append(tuple(row))
    head = ("claim", "paper reports", "ours", "distance", "", "note")
    return Table(caption, ("", *head) if numbered else head, tuple(rows), starts=tuple(starts))


def signed(value: float) -> str:
    """Three decimals with a sign, but for 0."""
    if math.isinf(value):
        return significant(value)
    text = f"{abs(value):.3f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def _reported(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.2f}"


def _ours(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3f}"
