"""Page: sections of text, tables and figures as one self-contained HTML file.

Everything is inside the file: style, figures (SVG), text. It needs no script and no network,
follows the reader's light or dark preference, fits a phone, and prints. All text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from matplotlib.figure import Figure

from testbed.outcome import write_atomically
from testbed.reporting.style import FAINT, GRID, INK, PALETTE, svg
from testbed.reporting.table import Table, Tone
from testbed.reporting.wording import plain


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = "text"


@dataclass(frozen=True)
class Grid:
    """A table of a page."""

    table: Table
    kind: str = "grid"


@dataclass(frozen=True)
class Picture:
    """A figure with a line on how to read it; its own heading becomes its accessible name."""

    figure: Figure
    note: str = ""
    kind: str = "picture"


@dataclass(frozen=True)
class Finding:
    """A judgement: a mark and its tone, what is judged, the verdict, and its grounds in order."""

    mark: str
    tone: Tone
    name: str
    text: str
    grounds: tuple[str, ...] = ()
    kind: str = "finding"


@dataclass(frozen=True)
class Code:
    """Text to copy, folded away until asked for."""

    caption: str
    text: str
    kind: str = "code"


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str
    kind: str = "heading"


Block = Text | Grid | Picture | Finding | Code | Heading


@dataclass(frozen=True)
class Section:
    """A titled part of a page. A string block is a paragraph, a Table or Figure stands alone."""

    title: str
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, title: str, *content: str | Table | Figure | Block) -> Section:
        """A section from whatever it holds.

        >>> Section.of("Notes", "One paragraph.").blocks[0].text
        'One paragraph.'
        """
        return cls(title, tuple(_block(c) for c in content))


def write_page(
    path: str | Path,
    title: str,
    sections: Sequence[Section],
    *,
    lead: Sequence[str] = (),
    findings: Sequence[Finding] = (),
) -> Path:
    """Write a page; the same content gives the same bytes.

    Parameters
    ----------
    lead, findings : paragraphs and judgements under the title, before the contents
    """
    text = _template().render(
        title=plain(title),
        lead=list(lead),
        findings=list(findings),
        sections=[(f"s{i}", section) for i, section in enumerate(sections, 1)],
        inline=_Inline(),
    )
    path = Path(path)
    write_atomically(path, text)
    return path


def _block(content: str | Table | Figure | Block) -> Block:
    if isinstance(content, str):
        return Text(content)
    if isinstance(content, Table):
        return Grid(content)
    return Picture(content) if isinstance(content, Figure) else content


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("testbed.reporting", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2")


COLORS = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    GRID: "var(--rule)",
    "#ffffff": "var(--ground)",
    **{color: f"var(--c{i})" for i, color in enumerate(PALETTE)},
}


class _Inline:
    """Figures as markup of one page: identifiers of their own, colours from the page's style."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, picture: Picture) -> Markup:
        self._count += 1
        prefix = f"f{self._count}-"
        heading = picture.figure.get_suptitle() or picture.note or "figure"
        text = re.sub(r"<[^>]+>", lambda match: _own(match.group(0), prefix), svg(picture.figure))
        head = Markup('<svg role="img" aria-label="{}" ').format(plain(heading))
        # svg() has escaped every text of the figure already.
        return Markup(head + Markup(re.sub(r'^<svg width="[^"]*" height="[^"]*" ', "", text)))


def _own(tag: str, prefix: str) -> str:
    tag = re.sub(r' id="', f' id="{prefix}', tag)
    tag = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", tag)
    return re.sub(r"#[0-9a-f]{6}\b", lambda m: COLORS.get(m.group(0), m.group(0)), tag)
