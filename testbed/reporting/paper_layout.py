"""Layout shared by the paper's figures: one heading, one key beneath, shares in per cent."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from testbed.reporting.layout import as_percent
from testbed.reporting.style import INK


def heading(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", weight="bold")


def key(figure: Figure, axes: Axes, *, columns: int = 4, title: str | None = None) -> None:
    """The lines of one panel, explained beneath the figure."""
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower left",
        ncols=columns,
        title=title,
        title_fontsize=8,
        alignment="left",
    )


def shares(axes: Axes, *, top: float | None = 1.0) -> None:
    """A vertical axis of probabilities or fractions, from 0."""
    axes.set_ylim(0, None if top is None else 1.03 * top if top == 1.0 else top)
    axes.yaxis.set_major_formatter(FuncFormatter(as_percent))


def reported_points(axes: Axes, points: dict[float, float], label: str | None) -> None:
    """Values that the text gives, as crosses."""
    axes.plot(
        list(points), list(points.values()), "x", color=INK, markersize=7, markeredgewidth=1.6,
        label=label, zorder=5,
    )  # fmt: skip
