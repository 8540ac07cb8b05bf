"""FidelityReport: the cells of a bench as tables, figures and one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from calibration.fidelity.analysis import GOAL, SIMULATOR
from calibration.fidelity.measurement import why_invalid
from calibration.fidelity.plan import Folder
from calibration.fidelity.prediction import FIGURES
from calibration.fidelity.two_tiers import POLICIES, POLICY_CELLS
from calibration.fidelity.verdict import (
    OUTCOMES,
    invalid,
    markdown,
    misses,
    noise_line,
    noisy,
    summary,
    title,
    unanswered,
)
from testbed.errors import CalibrationError
from testbed.outcome import dump_json, write_atomically
from testbed.reporting.page import Finding, Section, write_page
from testbed.reporting.style import DASHES, FAINT, INK, MARKERS, PALETTE, panels, save, styled
from testbed.reporting.table import Cell, Table, Tone, figure, words

FEW_CELLS = 4
"""Cells up to which the page's head names every miss."""
TONES: dict[str, Tone] = {"within": "good", "misses": "bad", "cannot be told": "unsure"}
LIMIT = 60.0
"""Errors beyond this many per cent are drawn at the edge."""


def gather(folder: Folder) -> dict[str, Any]:
    """All finished cells of a bench, in the order of its plan, with its checks."""
    header = folder.header
    names = list(header["workloads"])
    wanted = [
        (name, load)
        for each in names
        for name in (POLICIES if each == POLICY_CELLS else (each,))
        for load in header["loads"]
    ]
    cells = []
    for name, load in wanted:
        found = folder.read(f"{name}-{load:g}", "analysis.json")
        said = folder.read(f"{name}-{load:g}", "prediction.json")
        if found is None or said is None:
            continue
        kept = {key: said.get(key) for key in ("rate", "overhead", "models_written_at")}
        predicted = {"predicted_at": said["written_at"], "routed_by_model": said.get("routed")}
        why = found.get("invalid_reason") or why_invalid(
            found.get("pace"), found.get("cached_as_asked", 1.0)
        )
        cell = {"workload": name, "load": load, **predicted, **kept, **found}
        cells.append({**cell, "invalid_reason": why})
    return {
        "plan": header,
        "cells": cells,
        "checks": {n: (folder.read(n, "checks.json") or {}).get("checks", []) for n in names},
        "complete": len(cells) == len(wanted),
        "summary": summary(cells),
    }


def read_benches(paths: list[Path]) -> list[tuple[str, list[dict[str, Any]]]]:
    """(engine, its cells) of bench folders; folders of one engine stand together.

    Raises
    ------
    CalibrationError
        A folder holds no bench, or no cell has been measured in any.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        results = gather(Folder.existing(path))
        found.setdefault(engine_of(results["plan"]), []).extend(results["cells"])
    if not any(found.values()):
        raise CalibrationError(f"{', '.join(map(str, paths))}: no cell has been measured yet")
    return [(engine, cells) for engine, cells in found.items() if cells]


def engine_of(header: dict[str, Any]) -> str:
    """What was measured, in words."""
    engine = header["engine"]
    if engine.get("device"):
        return f"{engine['name']} in device time of {engine['device']}, {engine['model']}"
    if engine["name"] == "emulated":
        return "the emulated engine"
    return f"{engine['name']}, {engine['model']}"


def error_table(cells: list[dict[str, Any]]) -> Table:
    """A row a cell and prediction: error ± noise of each figure, and why it misses."""
    rows, starts = [], []
    for cell in cells:
        starts.append(len(rows))
        for k, (model, errors) in enumerate(cell["errors"].items()):
            head = title(cell) if k == 0 else ""
            each = [_error(errors[f]) for f in FIGURES]
            rows.append((words(head, "strong"), words(model), *each, words(_causes(errors))))
    note = (
        f"Error in % ± the half-width of its 95 % noise. Green: within {GOAL:.0%} with its noise; "
        "red: beyond it; yellow: the noise does not let it be told."
    )
    return Table(
        "TTFT, prediction against the engine", ("cell", "prediction", *FIGURES, "cause of a miss"),
        tuple(rows), note, starts=tuple(starts),
    )  # fmt: skip


def summary_table(found: dict[str, dict[str, int]]) -> Table:
    rows = tuple(
        (words(model), *(figure(str(row[o])) for o in OUTCOMES)) for model, row in found.items()
    )
    return Table(f"Figures within {GOAL:.0%}, of cells × {len(FIGURES)}", ("", *OUTCOMES), rows)


def cell_table(cells: list[dict[str, Any]]) -> Table:
    """What was measured in each cell, and how quiet it was."""
    rows = []
    for c in cells:
        speed, pace = c["speed"], c["pace"]
        rows.append(
            (
                words(title(c), "strong"),
                figure(str(c["requests"])),
                figure(f"{c['rate']:.3g}"),
                *(figure(f"{1e3 * x:.1f}") for x in c["measured"]),
                *(figure(f"{100 * x:.1f}") for x in c["noise"]),
                figure(None if speed is None else f"{speed['speed']:.3f}"),
                figure(None if pace is None else f"{100 * pace['late']:.1f}"),
                figure(f"{1e3 * c['dispatch_lag']['p99']:.1f}"),
                figure(f"{1e3 * c['overhead']:.1f}"),
            )
        )
    head = (
        "cell", "requests", "1/s", *(f"{f}, ms" for f in FIGURES), *(f"± {f}, %" for f in FIGURES),
        "speed", "late, %", "lag p99, ms", "way, ms",
    )  # fmt: skip
    note = (
        "speed: calibrated over measured time of the run's own steps. late: device-time steps "
        "handed over late. way: TTFT beyond the step on the idle engine, added to predictions."
    )
    return Table("Measured", head, tuple(rows), note)


def check_table(checks: dict[str, list[dict[str, Any]]]) -> Table:
    rows = []
    for name, each in checks.items():
        for check in each:
            relative = check.get("relative_time")
            rows.append(
                (
                    words(name),
                    words(check["when"]),
                    words(check["at"]),
                    figure(None if relative is None else f"{relative:.3f}"),
                    figure(f"{1e3 * check['overhead']:.2f}"),
                    figure(str(check["requests"])),
                )
            )
    return Table(
        "Checks on the idle engine",
        ("workload", "", "UTC", "time, relative", "way, ms", "requests"),
        tuple(rows),
    )


def routing_table(cells: list[dict[str, Any]]) -> Table:
    """Share of the requests that the deep replica served, as every model says and as measured."""
    own = [c for c in cells if c.get("routed")]
    models = list(dict.fromkeys(m for c in own for m in c["routed_by_model"] or {}))
    rows = []
    for c in own:
        said = [(c["routed_by_model"] or {}).get(m, {}).get("deep") for m in models]
        each = [None if x is None else f"{100 * x:.1f}" for x in (*said, c["routed"]["deep"])]
        rows.append((words(title(c), "strong"), *(figure(x) for x in each)))
    return Table("Requests at the deep replica, %", ("cell", *models, "measured"), tuple(rows))


@styled
def error_figure(cells: list[dict[str, Any]]) -> Figure:
    """Error of every prediction over load, a column a workload and a row a figure; the noise
    floor is a band."""
    names = list(dict.fromkeys(c["workload"] for c in cells))
    models = list(dict.fromkeys(m for c in cells for m in c["errors"]))
    drawn, axes = panels(len(FIGURES), len(names), height=1.9, sharex="col", sharey=True)
    for j, name in enumerate(names):
        own = [c for c in cells if c["workload"] == name]
        x = [c["load"] for c in own]
        for i, f in enumerate(FIGURES):
            at = axes[i][j]
            floor = [100 * c["noise"][i] for c in own]
            at.fill_between(
                x, [-min(n, LIMIT) for n in floor], [min(n, LIMIT) for n in floor],
                color=FAINT, alpha=0.25, linewidth=0, label="noise" if (i, j) == (0, 0) else None,
            )  # fmt: skip
            for edge in (-100 * GOAL, 100 * GOAL):
                at.axhline(edge, color=FAINT, linewidth=0.7, linestyle=":")
            for k, model in enumerate(models):
                points = [
                    (c["load"], 100 * c["errors"][model][f]["error"])
                    for c in own
                    if c["errors"][model][f]["error"] is not None
                ]
                at.plot(
                    [p for p, _ in points], [min(max(e, -LIMIT), LIMIT) for _, e in points],
                    color=INK if model == SIMULATOR else PALETTE[(k - 1) % len(PALETTE)],
                    linestyle=DASHES[k % len(DASHES)], marker=MARKERS[k % len(MARKERS)],
                    markersize=3.5, linewidth=1.2, label=model if (i, j) == (0, 0) else None,
                )  # fmt: skip
            at.set_ylim(-1.05 * LIMIT, 1.05 * LIMIT)
            if i == 0:
                at.set_title(name)
            if j == 0:
                at.set_ylabel(f"{f}, error %")
            if i == len(FIGURES) - 1:
                at.set_xlabel("load")
    drawn.legend(loc="outside lower left", ncols=4)
    drawn.suptitle(
        f"Error of TTFT over load; beyond ±{LIMIT:.0f} % at the edge", x=0.01, ha="left",
        weight="bold",
    )  # fmt: skip
    return drawn


def publish(folder: Folder) -> dict[str, Any]:
    """Write results.json, errors.svg, errors.md and report.html of what is done; the results."""
    results = gather(folder)
    write_atomically(folder.path / "results.json", dump_json(results))
    cells = results["cells"]
    if not cells:
        return results
    save(error_figure(cells), folder.path / "errors.svg")
    (folder.path / "errors.png").unlink()
    write_atomically(folder.path / "errors.md", markdown(cells))
    told = "complete" if results["complete"] else "not complete yet"
    what = results["plan"]["workloads"]
    routed = [routing_table(cells)] if any(c.get("routed") for c in cells) else []
    write_page(
        folder.path / "report.html",
        f"Fidelity: {engine_of(results['plan'])}",
        [
            Section.of("Verdicts", summary_table(results["summary"])),
            Section.of("Errors", error_figure(cells), error_table(cells)),
            Section.of("Measurements", cell_table(cells), *routed, check_table(results["checks"])),
            Section.of("Workloads", *(f"{n}: {w}." for n, w in what.items())),
        ],
        lead=[
            f"{len(cells)} cells of the {results['plan']['effort']} bench, {told}. Every "
            "prediction was on disk before its cell was measured. Models are compared with the "
            "engine's figure on these arrivals times the simulator's long-run figure over the "
            "simulator's on the same arrivals; the simulator with the engine directly.",
        ],
        findings=_findings(cells, results["summary"]),
    )
    return results


def _findings(cells: list[dict[str, Any]], counts: dict[str, dict[str, int]]) -> list[Finding]:
    """What the bench claims of every prediction, and what it cannot."""
    found = []
    for model, row in counts.items():
        tone: Tone = "bad" if row["misses"] else "unsure" if row["cannot be told"] else "good"
        if row["no answer"] == sum(row.values()):
            tone = "faint"
        text = ", ".join(f"{n} {name}" for name, n in row.items() if n)
        causes = misses(cells).get(model, {}) | unanswered(cells).get(model, {})
        grounds = tuple(f"{cause}: {_where(where)}" for cause, where in causes.items())
        found.append(Finding(_MARKS[tone], tone, model, text, grounds))
    if floor := noisy(cells):
        found.append(Finding("?", "unsure", "noise", noise_line(floor)))
    for cell, why in invalid(cells).items():
        found.append(Finding("✗", "bad", cell, f"not valid: {why}"))
    return found


def _where(cells: list[str]) -> str:
    """The figures by name where they are few; the table of errors has them all."""
    if len(cells) <= FEW_CELLS:
        return "; ".join(cells)
    return f"{sum(max(1, c.count('%')) for c in cells)} figures in {len(cells)} cells"


_MARKS: dict[Tone, str] = {"good": "✓", "bad": "✗", "unsure": "?", "faint": "–"}


def _error(error: dict[str, Any]) -> Cell:
    if error["error"] is None:
        return figure("–", "faint")
    text = f"{100 * error['error']:+.1f} ± {100 * error['noise']:.1f}"
    return figure(text, TONES.get(error["verdict"], ""))


def _causes(errors: dict[str, Any]) -> str:
    said = [e["cause"] for e in errors.values() if e["cause"]]
    reasons = [e["verdict"] for e in errors.values() if e["error"] is None]
    return "; ".join(dict.fromkeys(said or reasons[:1]))
