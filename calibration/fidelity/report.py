"""FidelityReport: the cells of a bench as tables, figures and one page."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from calibration.fidelity.analysis import GOAL, SIMULATOR
from calibration.fidelity.plan import FidelityPlan, Folder
from calibration.fidelity.prediction import FIGURES
from testbed.outcome import dump_json, write_atomically
from testbed.reporting.page import Section, write_page
from testbed.reporting.style import DASHES, FAINT, INK, MARKERS, PALETTE, panels, save, styled
from testbed.reporting.table import Cell, Table, Tone, figure, words

TONES: dict[str, Tone] = {"within": "good", "misses": "bad", "cannot be told": "unsure"}
LIMIT = 60.0
"""Errors beyond this many per cent are drawn at the edge."""


def gather(plan: FidelityPlan, folder: Folder) -> dict[str, Any]:
    """All finished cells of a bench, in the order of its plan, with its checks."""
    wanted = [(name, load) for name in plan.workloads for load in plan.loads]
    cells = []
    for name, load in wanted:
        found = folder.read(f"{name}-{load:g}", "analysis.json")
        said = folder.read(f"{name}-{load:g}", "prediction.json")
        if found is None or said is None:
            continue
        kept = ("rate", "overhead", "models_written_at")
        cells.append(
            {
                "workload": name,
                "load": load,
                "predicted_at": said["written_at"],
                **{key: said[key] for key in kept},
                **found,
            }
        )
    checks = {n: (folder.read(n, "checks.json") or {}).get("checks", []) for n in plan.workloads}
    return {
        "plan": plan.header(),
        "cells": cells,
        "checks": checks,
        "complete": len(cells) == len(wanted),
        "summary": summary(cells),
    }


def summary(cells: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """{prediction: {verdict: cells × figures}}; a model without an answer counts as such."""
    found: dict[str, dict[str, int]] = {}
    for cell in cells:
        for model, figures in cell["errors"].items():
            row = found.setdefault(
                model, {"within": 0, "misses": 0, "cannot be told": 0, "no answer": 0}
            )
            for error in figures.values():
                row[error["verdict"] if error["verdict"] in row else "no answer"] += 1
    return found


def error_table(cells: list[dict[str, Any]]) -> Table:
    """A row a cell and prediction: error ± noise of each figure, and why it misses."""
    rows, starts = [], []
    for cell in cells:
        starts.append(len(rows))
        for k, (model, errors) in enumerate(cell["errors"].items()):
            head = f"{cell['workload']} {cell['load']:g}" if k == 0 else ""
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
    heads = ("within", "misses", "cannot be told", "no answer")
    rows = tuple(
        (words(model), *(figure(str(row[h])) for h in heads)) for model, row in found.items()
    )
    return Table(f"Figures within {GOAL:.0%}, of cells × {len(FIGURES)}", ("", *heads), rows)


def cell_table(cells: list[dict[str, Any]]) -> Table:
    """What was measured in each cell, and how quiet it was."""
    rows = []
    for c in cells:
        speed, pace = c["speed"], c["pace"]
        rows.append(
            (
                words(f"{c['workload']} {c['load']:g}", "strong"),
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


def markdown(cells: list[dict[str, Any]]) -> str:
    """Errors as a table of a README: mean / p50 / p90 / p99 in %, noise in its own row."""
    columns = [f"{c['workload']} {c['load']:g}" for c in cells]
    lines = ["| | " + " | ".join(columns) + " |", "|" + "---|" * (len(columns) + 1)]
    for model in dict.fromkeys(m for c in cells for m in c["errors"]):
        row = []
        for c in cells:
            each = [c["errors"][model][f]["error"] for f in FIGURES]
            row.append("/".join("–" if e is None else f"{100 * e:+.0f}" for e in each))
        lines.append(f"| `{model}` | " + " | ".join(row) + " |")
    noise = ["/".join(f"{100 * x:.0f}" for x in c["noise"]) for c in cells]
    lines.append("| noise ± | " + " | ".join(noise) + " |")
    return "\n".join(lines) + "\n"


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


def publish(plan: FidelityPlan, folder: Folder) -> dict[str, Any]:
    """Write results.json, errors.svg and report.html of what is done; the results."""
    results = gather(plan, folder)
    write_atomically(folder.path / "results.json", dump_json(results))
    cells = results["cells"]
    if not cells:
        return results
    save(error_figure(cells), folder.path / "errors.svg")
    (folder.path / "errors.png").unlink()
    write_atomically(folder.path / "errors.md", markdown(cells))
    told = "complete" if results["complete"] else "not complete yet"
    kept = plan.spec.device or plan.spec.name
    write_page(
        folder.path / "report.html",
        f"Fidelity: {plan.spec.name} on {kept}",
        [
            Section.of("Verdicts", summary_table(results["summary"])),
            Section.of("Errors", error_figure(cells), error_table(cells)),
            Section.of("Measurements", cell_table(cells), check_table(results["checks"])),
            Section.of("Workloads", *(f"{n}: {w.what}." for n, w in plan.workloads.items())),
        ],
        lead=[
            f"{len(cells)} cells of the {plan.effort} bench, {told}. Every prediction was on disk "
            "before its cell was measured. Models are compared with the engine's figure on these "
            "arrivals times the simulator's long-run figure over the simulator's on the same "
            "arrivals; the simulator with the engine directly.",
        ],
    )
    return results


def _error(error: dict[str, Any]) -> Cell:
    if error["error"] is None:
        return figure("–", "faint")
    text = f"{100 * error['error']:+.1f} ± {100 * error['noise']:.1f}"
    return figure(text, TONES.get(error["verdict"], ""))


def _causes(errors: dict[str, Any]) -> str:
    said = [e["cause"] for e in errors.values() if e["cause"]]
    reasons = [e["verdict"] for e in errors.values() if e["error"] is None]
    return "; ".join(dict.fromkeys(said or reasons[:1]))
