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
    "equal": "equal cells, own waits",
    "own3": "real cells, own waits, three candidates a profile",
    "own fast": "real cells, own waits over 1 s",
    "own slow": "real cells, own waits over 50 s",
}
DRAWN = ("mean", "cells", "own", "equal")
DEADLINE = "0.8"


@styled
def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Coverage against load: lines are theory, points are simulated."""
    drawing, (axes,) = panels(1, len(POLICIES), height=3.0, sharey=True)
    for at, (policy, title) in zip(axes, POLICIES.items(), strict=True):
        mine = [c for c in cells if c["policy"] == policy]
        x = [c["share"] for c in mine]
        for i, kind in enumerate(DRAWN):
            words = WORDS[kind]
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
    """Markdown: coverage, the slowest tenth, the law of areas, and how busy deep nodes are."""
    return "\n\n".join(
        [
            *(_coverage(cells, policy) for policy in POLICIES),
            _slowest(cells),
            _areas(cells),
            _busy(cells),
        ]
    )


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _coverage(cells: Sequence[dict[str, Any]], policy: str) -> str:
    mine = [c for c in cells if c["policy"] == policy]
    rows = []
    for kind in mine[0]["simulated"]:
        for what in ("theory", "simulated"):
            row = [f"{WORDS[kind]}, {what}"]
            for cell in mine:
                if what == "simulated":
                    y, half = cell[what][kind]["coverage"][DEADLINE]
                    row.append(f"{y:.3f} ± {half:.3f}")
                elif kind in cell[what]:
                    row.append(f"{cell[what][kind]['coverage'][DEADLINE]:.3f}")
            if len(row) > 1:
                rows.append(row)
    loads = [f"load {c['share']:g} ({c['intensity']:.3g}/s per km²)" for c in mine]
    return _rows([POLICIES[policy], *loads], rows)


def _slowest(cells: Sequence[dict[str, Any]]) -> str:
    def said(cell: dict[str, Any], kind: str) -> str:
        if kind not in cell["theory"]:
            return "–"
        value = cell["theory"][kind]["quantiles"]["0.9"]
        return "never" if isinstance(value, str) else f"{value:.2f}"

    def seen(cell: dict[str, Any], kind: str) -> str:
        if kind not in cell["simulated"]:
            return "–"
        value, half = cell["simulated"][kind]["quantiles"]["0.9"]
        return f"{value:.2f} ± {half:.2f}"

    head = ["policy", "load", "mean load, theory"]
    head += [f"{WORDS[k]}, {w}" for k in ("cells", "own") for w in ("theory", "simulated")]
    rows = [
        [POLICIES[c["policy"]], f"{c['share']:g}", said(c, "mean")]
        + [x for k in ("cells", "own") for x in (said(c, k), seen(c, k))]
        for c in cells
    ]
    return _rows(head, rows)


def _areas(cells: Sequence[dict[str, Any]]) -> str:
    head = ["policy", "load", "tier", "CV², exact", "drawn", "at 10 / 50 / 90 / 99 %, gamma"]
    head += ["drawn", "greatest distance of the CDFs"]
    rows = []
    for cell in cells:
        if cell["policy"] != "load_aware" and cell is not _first(cells, cell["policy"]):
            continue  # The association does not depend on the load.
        for tier, found in cell["areas"].items():
            load = f"{cell['share']:g}" if cell["policy"] == "load_aware" else "any"
            law, drawn = (
                " / ".join(f"{v:.2f}" for v in found[k]) for k in ("quantiles", "quantiles_drawn")
            )
            cv2 = [f"{found[k]:.3f}" for k in ("cv2", "cv2_drawn")]
            distance = f"{found['distance']:.3f}"
            rows.append([POLICIES[cell["policy"]], load, tier, *cv2, law, drawn, distance])
    return _rows(head, rows)


def _first(cells: Sequence[dict[str, Any]], policy: str) -> dict[str, Any]:
    return next(c for c in cells if c["policy"] == policy)


def _busy(cells: Sequence[dict[str, Any]]) -> str:
    rows = []
    for cell in cells:
        for kind, seen in cell["simulated"].items():
            if kind not in cell["theory"] or "deep" not in seen["node_utilisation"]:
                continue
            law, drawn = (
                " / ".join(f"{v:.2f}" for v in part["node_utilisation"]["deep"])
                for part in (cell["theory"][kind], seen)
            )
            over = f"{seen['overloaded_nodes'][0]:.1f}"
            rows.append(
                [POLICIES[cell["policy"]], f"{cell['share']:g}", WORDS[kind], law, drawn, over]
            )
    head = ["policy", "load", "waits", "deep nodes at 10 / 50 / 90 / 99 %, theory", "simulated"]
    return _rows([*head, "overloaded nodes of 256"], rows)
