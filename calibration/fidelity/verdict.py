"""Verdict: what the cells of a bench say together, and what their noise forbids them to say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from calibration.fidelity.analysis import GOAL
from calibration.fidelity.prediction import FIGURES

OUTCOMES = ("within", "misses", "cannot be told", "no answer")


def summary(cells: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """{prediction: {verdict: cells × figures}}; a model without an answer counts as such."""
    found: dict[str, dict[str, int]] = {}
    for cell in cells:
        for model, figures in cell["errors"].items():
            row = found.setdefault(model, dict.fromkeys(OUTCOMES, 0))
            for error in figures.values():
                row[error["verdict"] if error["verdict"] in row else "no answer"] += 1
    return found


def misses(cells: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """{prediction: {cause: ["A 0.9: p90 +7 %, p99 +12 %", …]}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        for model, figures in cell["errors"].items():
            by_cause: dict[str, list[str]] = {}
            for name, error in figures.items():
                if error["verdict"] == "misses":
                    said = f"{name} {100 * error['error']:+.0f} %"
                    by_cause.setdefault(error["cause"], []).append(said)
            for cause, each in by_cause.items():
                line = f"{title(cell)}: {', '.join(each)}"
                found.setdefault(model, {}).setdefault(cause, []).append(line)
    return found


def unanswered(cells: list[dict[str, Any]]) -> dict[str, dict[str, list[str]]]:
    """{model: {why it has no answer: [cell, …]}}."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        for model, figures in cell["errors"].items():
            first = figures[FIGURES[0]]
            if first["error"] is None:
                found.setdefault(model, {}).setdefault(first["verdict"], []).append(title(cell))
    return found


def noisy(cells: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """(cell, figure, noise, requests over those measured that bring it down to the goal) of every
    figure whose noise alone is beyond the goal: no prediction can be told to keep it there."""
    return [
        (title(cell), name, noise, (noise / GOAL) ** 2)
        for cell in cells
        for name, noise in zip(FIGURES, cell["noise"], strict=True)
        if noise > GOAL
    ]


def title(cell: dict[str, Any]) -> str:
    return f"{cell['workload']} {cell['load']:g}"


def invalid(cells: list[dict[str, Any]]) -> dict[str, str]:
    """{cell: why its measurement is not to be trusted}."""
    return {title(c): c["invalid_reason"] for c in cells if c.get("invalid_reason")}


def markdown(cells: list[dict[str, Any]]) -> str:
    """The errors as a table of a README, what misses with its cause, and what cannot be told.

    Mean / p50 / p90 / p99 in %: bold beyond the goal with its noise, a question mark where noise
    does not let it be told.
    """
    models = list(dict.fromkeys(m for c in cells for m in c["errors"]))
    head = ["cell", "requests", "noise ±", *(f"`{m}`" for m in models)]
    lines = [_row(head), _row(["---"] * len(head))]
    for c in cells:
        noise = "/".join(f"{100 * x:.1f}" for x in c["noise"])
        each = [_errors(c["errors"][m]) if m in c["errors"] else "–" for m in models]
        lines.append(_row([title(c), f"{c['requests']:,}", noise, *each]))
    lines += [
        "",
        f"Error of TTFT mean/p50/p90/p99 in %. **Bold**: beyond {GOAL:.0%} with its whole noise; "
        f"plain: within {GOAL:.0%} with it; ?: the noise (95 %) does not let it be told.",
        "",
        _row(["", *OUTCOMES]),
        _row(["---"] * (1 + len(OUTCOMES))),
    ]
    for model, row in summary(cells).items():
        lines.append(_row([f"`{model}`", *(str(row[o]) for o in OUTCOMES)]))
    lines += ["", f"Figures of {len(cells)} cells × {len(FIGURES)}.", ""]
    for told, each in (("misses", misses(cells)), ("no answer", unanswered(cells))):
        for model, causes in each.items():
            lines += [
                f"- `{model}` {told}, {cause}: {_joined(where)}." for cause, where in causes.items()
            ]
    if found := noisy(cells):
        lines.append(f"- {noise_line(found)}")
    lines += [f"- {cell} is not valid: {why}." for cell, why in invalid(cells).items()]
    return "\n".join(lines) + "\n"


def noise_line(found: list[tuple[str, str, float, float]]) -> str:
    """One sentence on the figures that nothing can be claimed of."""
    where: dict[str, list[str]] = {}
    for cell, name, noise, _ in found:
        where.setdefault(cell, []).append(f"{name} ± {100 * noise:.0f} %")
    return (
        f"Nothing is claimed of {len(found)} figures whose noise alone is more than {GOAL:.0%}: "
        f"{_joined(f'{cell}: ' + ', '.join(each) for cell, each in where.items())}. "
        f"{max(x[3] for x in found):.0f} times as many requests would bring the worst down to it."
    )


def _errors(figures: dict[str, Any]) -> str:
    each = []
    for name in FIGURES:
        error = figures[name]
        if error["error"] is None:
            each.append("–")
            continue
        text = f"{100 * error['error']:+.0f}"
        told = {"misses": f"**{text}**", "cannot be told": f"{text}?"}
        each.append(told.get(error["verdict"], text))
    return "–" if set(each) == {"–"} else "/".join(each)


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _joined(parts: Iterable[str]) -> str:
    return "; ".join(parts)
