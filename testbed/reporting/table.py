"""Table: rows of text with a tone, shown alike on a terminal and in a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from testbed.outcome import flatten
from testbed.reporting.wording import MISSING, plain

Tone = Literal["", "good", "bad", "unsure", "faint", "strong"]

RICH_STYLES: dict[Tone, str] = {
    "": "",
    "good": "green",
    "bad": "bold red",
    "unsure": "yellow",
    "faint": "dim",
    "strong": "bold",
}


@dataclass(frozen=True)
class Cell:
    """Text, how it is meant, and whether it is a figure (then it is set to the right)."""

    text: str
    tone: Tone = ""
    figure: bool = False


def words(text: object, tone: Tone = "") -> Cell:
    return Cell(plain(text), tone)


def figure(text: str | None, tone: Tone = "") -> Cell:
    return Cell(MISSING, "faint", True) if text is None else Cell(text, tone, True)


@dataclass(frozen=True)
class Table:
    """A caption, column heads, rows of as many cells, and a note beneath.

    ``spans`` is an optional head above the heads: (text, number of columns), in order. ``starts``
    are the rows with which a block of rows begins.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    spans: tuple[tuple[str, int], ...] = ()
    starts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.head):
                raise ValueError(f"{self.caption}: {len(row)} cells under {len(self.head)} heads")

    @property
    def figures(self) -> tuple[bool, ...]:
        """For each column, whether it holds figures (any row does)."""
        return tuple(any(row[i].figure for row in self.rows) for i in range(len(self.head)))

    @property
    def edges(self) -> frozenset[int]:
        """Columns with which a span starts, but for the first."""
        starts = accumulate(columns for _, columns in self.spans[:-1])
        return frozenset(starts)


def facts(caption: str, pairs: Mapping[str, object], note: str = "") -> Table:
    """A table of two columns."""
    rows = tuple((words(k, "faint"), words(v)) for k, v in pairs.items())
    return Table(caption, ("", ""), rows, note)


def flat(value: Any, *, hide: Sequence[str] = ()) -> dict[str, str]:
    """Nested plain data as {dotted path: text}, without the paths that start with one hidden."""
    return {
        path: _said(leaf)
        for path, leaf in flatten(value)
        if not any(path == h or path.startswith(f"{h}.") for h in hide)
    }


def _said(leaf: Any) -> str:
    if leaf is None:
        return "none"
    if isinstance(leaf, bool):
        return "yes" if leaf else "no"
    return f"{leaf:,.6g}" if isinstance(leaf, float) else str(leaf)


def to_rich(table: Table) -> RichTable:
    """The table for a terminal; text is never read as markup."""
    rich = RichTable(
        title=Text(plain(table.caption), style="bold"),
        title_justify="left",
        caption=Text(plain(table.note), style="dim") if table.note else None,
        caption_justify="left",
        box=SIMPLE_HEAD if any(table.head) else None,
        show_header=any(table.head),
        pad_edge=False,
        header_style="dim",
    )
    for i, (head, figures) in enumerate(zip(table.head, table.figures, strict=True)):
        rich.add_column(
            Text(plain(head)),
            justify="right" if figures else "left",
            overflow="fold",
            no_wrap=figures,
            min_width=None if figures else _readable(table, i),
        )
    for i, row in enumerate(table.rows):
        if i and i in table.starts:
            rich.add_section()
        rich.add_row(*(Text(plain(c.text), style=_style(c.tone)) for c in row))
    return rich


def _readable(table: Table, column: int) -> int:
    """Below this width a column of words would be folded into single letters."""
    texts = [table.head[column], *(row[column].text for row in table.rows)]
    return min(16, max(len(word) for text in texts for word in text.split() or [""]))


def _style(tone: Tone) -> Style:
    return Style.parse(RICH_STYLES[tone]) if tone else Style.null()
