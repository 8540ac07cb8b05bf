"""The figure and the table of ``bench_cells.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from testbed.reporting.paper_layout import heading, key, shares
from testbed.reporting.paper_model import POLICIES
from testbed.reporting.style import DASHES, PALETTE, panels, save, styled

WORDS = {
    "mean": "mean load",
    "cells": "real cells, tiers' mean waits",
    "own": "real cells, own waits",
    "own3": "real cells, own waits, three nodes of a profile",
}
DEADLINE = "0.8"


@styled
def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Coverage against load: lines are theory, points are simulated."""
    drawing, (axes,) = panels(1, len(POLICIES), height=3.0, sharey=True)
    for at, (policy, title) in zip(axes, POLICIES.items(), strict=True):
        mine = [c for c in cells if c["policy"] == policy]
        x = [c["share"] for c in mine]
        for i, (kind, words) in enumerate(WORDS.items()):
            look = {"color": PALETTE[i]}
            if kind in mine[0]["theory"]:
                y = [c["theory"][kind]["coverage"][DEADLINE] for c in mine]
                at.plot(x, y, linestyle=DASHES[i], label=f"{words}, theory", **look)
            if kind in mine[0]["simulated"]:
                seen = [c["simulated"][kind]["coverage"][DEADLINE] for c in mine]
                y, half = zip(*seen, strict=True)
                at.errorbar(
                    x, y, half, fmt="o", markersize=4, capsize=3, label=f"{words}, simulated",
                    **look,
                )  # fmt: skip
        at.set(title=title, xlabel="share of the mean-load capacity")
        shares(at)
    key(drawing, axes[0], columns=2)
    heading(drawing, f"Coverage at {DEADLINE} s: cells of different size")
    save(drawing, path)


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Markdown: coverage and p90 by theory and simulation, and the law of areas."""
    lines = [
        "| policy | load | intensity | loads and waits | theory | simulated | error "
        "| p90 theory, s | p90 simulated, s | nodes overloaded |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for kind, seen in cell["simulated"].items():
            said = cell["theory"].get("own" if kind == "own3" else kind)
            y, half = seen["coverage"][DEADLINE]
            slow, wide = seen["quantiles"]["0.9"]
            theory = said["coverage"][DEADLINE]
            quantile = said["quantiles"]["0.9"]
            late = quantile if isinstance(quantile, str) else f"{quantile:.2f}"
            lines.append(
                f"| {POLICIES[cell['policy']]} | {cell['share']:g} | {cell['intensity']:.3g} | "
                f"{WORDS[kind]} | {theory:.3f} | {y:.3f} ± {half:.3f} | {theory - y:+.3f} | "
                f"{late} | {slow:.2f} ± {wide:.2f} | {seen['overloaded_nodes'][0]:.1f} |"
            )
    lines += [
        "",
        "| policy | load | tier | CV² of areas | drawn | areas at 10 / 50 / 90 / 99 %, gamma "
        "| drawn | greatest distance of CDFs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for tier, found in cell["areas"].items():
            law, drawn = (
                " / ".join(f"{v:.2f}" for v in found[k]) for k in ("quantiles", "quantiles_drawn")
            )
            lines.append(
                f"| {POLICIES[cell['policy']]} | {cell['share']:g} | {tier} | {found['cv2']:.3f} | "
                f"{found['cv2_drawn']:.3f} | {law} | {drawn} | {found['distance']:.3f} |"
            )
    lines += [
        "",
        "| policy | load | tier | loads and waits | utilisation of nodes at 10 / 50 / 90 / 99 %, "
        "theory | simulated |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        for kind, seen in cell["simulated"].items():
            said = cell["theory"].get("own" if kind == "own3" else kind)
            if kind == "mean" or said is None:
                continue
            for tier, busy in seen["node_utilisation"].items():
                law, drawn = (
                    " / ".join(f"{v:.2f}" for v in values)
                    for values in (said["node_utilisation"][tier], busy)
                )
                lines.append(
                    f"| {POLICIES[cell['policy']]} | {cell['share']:g} | {tier} | {WORDS[kind]} | "
                    f"{law} | {drawn} |"
                )
    return "\n".join(lines)
