"""Style: one look for every figure of the project, and how a figure becomes a file or markup.

Figures are built without pyplot (no global state, nothing to close) and drawn by Agg. The colours
are Okabe and Ito's, told apart with every common colour blindness; lines also differ by dash and
marker, so that a print in grey still reads. The same figure gives the same bytes.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from testbed.outcome import write_atomically

INK = "#1b1f24"
"""Text, axes and whatever was measured."""
FAINT = "#6b7280"
"""Ticks, notes and reference lines."""
GRID = "#d8dce2"
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
"""Okabe-Ito without its yellow (unreadable on white) and its black (the ink)."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (5, 1.5, 1, 1.5)), (0, (1.2, 1.2)), (0, (8, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
WIDTH = 9.0
"""Inches: the width of the report's column."""

STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "figure.titlesize": 10,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "figure.constrained_layout.use": True,
    "text.parse_math": False,  # a name may hold a dollar sign
    "svg.fonttype": "none",  # text stays text: it can be selected, searched and read aloud
    "svg.hashsalt": "edge-serving-testbed",
    "path.simplify": True,
}

Share = bool | Literal["none", "all", "row", "col"]
P = ParamSpec("P")
R = TypeVar("R")


def styled(function: Callable[P, R]) -> Callable[P, R]:
    """Run a plotting function under the project's style, whatever the caller's rcParams."""

    @wraps(function)
    def inner(*args: P.args, **kwargs: P.kwargs) -> R:
        with matplotlib.rc_context(STYLE):
            return function(*args, **kwargs)

    return inner


@styled
def panels(
    rows: int = 1,
    columns: int = 1,
    *,
    width: float = WIDTH,
    height: float = 2.6,
    sharex: Share = False,
    sharey: Share = False,
) -> tuple[Figure, list[list[Axes]]]:
    """A figure of ``rows × columns`` axes, ``width`` inches wide and ``height`` inches a row."""
    figure = Figure(figsize=(width, height * rows))
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex, sharey=sharey)
    return figure, [list(row) for row in grid]


@styled
def svg(figure: Figure) -> str:
    """SVG markup of a figure, ready to stand inside an HTML page, whose font it takes over.

    No XML prolog, no metadata, no date, no address, and no identifier that nothing refers to:
    equal figures give equal text.
    """
    _settle(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r"<[^>]+>", lambda match: _lean(match.group(0), used), text)
    text = re.sub(r"<defs>\s*</defs>", "", text)
    return re.sub(r"\s*\n\s*", "\n", text).strip()


@styled
def save(figure: Figure, path: str | Path) -> tuple[Path, Path]:
    """Write ``path`` with the suffixes ``.svg`` and ``.png`` (180 dots per inch, white ground).

    Returns
    -------
    The two paths written, SVG first. A suffix ``.svg`` or ``.png`` in ``path`` is replaced.
    """
    path = Path(path)
    stem = path.with_suffix("") if path.suffix in (".svg", ".png") else path
    vector, raster = stem.with_name(stem.name + ".svg"), stem.with_name(stem.name + ".png")
    text, image = io.StringIO(), io.BytesIO()
    _settle(figure)
    figure.savefig(text, format="svg", facecolor="white", metadata={"Date": None})
    figure.savefig(image, format="png", dpi=180, facecolor="white", metadata={"Software": None})
    write_atomically(vector, text.getvalue())
    write_atomically(raster, image.getvalue())
    return vector, raster


def _settle(figure: Figure) -> None:
    """Lay the figure out once for all: each constrained layout moves the axes a little further."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
        figure.set_layout_engine("none")


def _lean(tag: str, used: set[str]) -> str:
    """One tag without namespaces, unused identifiers, fonts and digits nobody can see."""
    tag = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", tag).replace("xlink:href", "href")
    tag = re.sub(r"font-family: [^;\"]*;? ?", "", tag)
    tag = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", tag)
    tag = re.sub(r' id="([^"]*)"', lambda m: m.group(0) if m.group(1) in used else "", tag)
    return re.sub(
        r' d="[^"]*"', lambda m: re.sub(r"(\.\d\d)\d+", r"\1", m.group(0)).replace("\n", " "), tag
    )
