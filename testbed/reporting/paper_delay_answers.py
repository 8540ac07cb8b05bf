"""PaperDelayAnswers: what becomes of the paper's conclusions under another delay model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from testbed.environment import environment
from testbed.outcome import dump_json, write_atomically
from testbed.presets import preset as load_preset
from testbed.reporting.paper_delay import conclusions
from testbed.reporting.paper_delay_figures import ROLES, best_mixes, delay_figures, fixed_mixes
from testbed.reporting.paper_delay_pieces import Pieces
from testbed.reporting.style import save

MODELS = ("erlang_c", "token_server", "step_chain_mix")
SHOWN = (0.1, 0.2, 0.4, 0.6, 0.8, 0.9)
"""Loads of Fig. 8 that stand in the table."""
HOT = 0.9
"""Utilisation from which a node counts as a hotspot."""
Answer = dict[str, str]
"""A question under ``question``, and the answer of each model under its name."""


def draw_delay_figures(
    out: str | Path, preset: str = "paper-reproduction", *, models: Sequence[str] = MODELS
) -> list[Answer]:
    """Figs. 7 to 12 of a preset under each delay model: ``fig-N.svg``, ``fig-N.png``, and all
    numbers in ``figures.json``.

    What is computed is kept in ``pieces.json`` as it comes: a run that was interrupted goes on.

    Raises
    ------
    ScenarioError
        There is no such preset or model, or the preset does not have what the figures need.
    """
    scenario, folder = load_preset(preset), Path(out)
    found = conclusions(scenario, models, Pieces(folder / "pieces.json", scenario))
    rows = answers(found)
    for name, figure in delay_figures(found).items():
        save(figure, folder / name)
    made = environment()
    record = {
        **found,
        "answers": rows,
        "environment": {k: made[k] for k in ("testbed", "code", "python", "packages")},
    }
    write_atomically(folder / "figures.json", dump_json(record, indent=False) + b"\n")
    return rows


def answers(found: dict[str, Any]) -> list[Answer]:
    """The questions, answered by each model."""
    rows: list[Answer] = []

    def row(question: str, each: Callable[..., str]) -> None:
        rows.append({"question": question, **{n: each(n, v) for n, v in found["models"].items()}})

    def capacity(policy: str) -> Callable[[str, dict[str, Any]], str]:
        return lambda _, v: f"{v['capacity'][policy]:.3g}"

    row("greatest intensity, load-aware, requests/s per km²", capacity("load_aware"))
    row("… queue-unaware", capacity("prefix_only"))
    row("… nearest node", capacity("nearest"))
    row("… best uniform depth", lambda _, v: f"{max(v['capacity']['uniform']):.3g}")
    for outputs in next(iter(found["models"].values()))["outputs"]:
        row(
            f"depth of the greatest capacity, {outputs} generated tokens",
            lambda _, v, n=outputs: _at_most(found, v["outputs"][n]),
        )
    row(
        f"the preset's intensity {found['intensity']:g}, of the greatest load-aware",
        lambda _, v: f"{found['intensity'] / v['capacity']['load_aware']:.2f}",
    )
    for load, x in found["shares"]["depth"].items():
        row(
            f"best uniform depth at {load} load ({x:.0%}), tokens: coverage",
            lambda _, v, load=load: (
                f"{_at_most(found, v['depth'][load])}: {max(v['depth'][load]):.3f}"
            ),
        )
    row(
        "queue-unaware: its deep nodes saturate at this share of the load-aware capacity",
        lambda _, v: f"{v['capacity']['prefix_only'] / v['capacity']['load_aware']:.2f}",
    )
    row(
        f"load-aware: deep nodes reach a utilisation of {HOT:g} at the share",
        lambda _, v: _first(found, v["policies"]["load_aware"]["deep_utilisation"], HOT),
    )
    row(
        "queue-unaware falls below nearest node at the share",
        lambda _, v: _first(found, _less(v, "nearest", "prefix_only"), 0.0),
    )
    for x in SHOWN:
        k = found["axes"]["policies"].index(x)
        row(
            f"coverage at {x:.0%}: load-aware / queue-unaware / nearest",
            lambda _, v, k=k: " / ".join(f"{c['coverage'][k]:.3f}" for c in v["policies"].values()),
        )
    for other, words in (("prefix_only", "queue-unaware"), ("nearest", "nearest node")):
        row(
            f"load-aware's greatest lead on {words}, at the share",
            lambda _, v, other=other: _greatest(found, _less(v, "load_aware", other)),
        )
        row(
            f"load-aware's least lead on {words}, at the share",
            lambda _, v, other=other: _greatest(found, _less(v, "load_aware", other), least=True),
        )
    row(
        "offloading ratio, long type from {:.0%} to {:.0%}".format(
            *np.array(found["axes"]["popularity"])[[0, -1]]
        ),
        lambda _, v: " → ".join(
            "not served" if v["popularity"]["offloading"][i] is None
            else f"{v['popularity']['offloading'][i]:.3f}"
            for i in (0, -1)
        ),
    )  # fmt: skip
    for among, words in (("bounded", "best candidate mix"), ("free", "best of any mix")):
        for k, x in enumerate(found["axes"]["mixes"]):
            row(
                f"{words} at {x:.0%}: {' / '.join(ROLES)}",
                lambda n, _, k=k, among=among: _mix(found, n, among, k),
            )
    row(
        "adapted mix ahead of its light-load best, greatest",
        lambda n, _: f"{_ahead(found, n, 'fixed at its light-load best'):+.3f}",
    )
    row(
        "adapted mix ahead of a third each, greatest",
        lambda n, _: f"{_ahead(found, n, 'fixed, a third each'):+.3f}",
    )
    for d in (0.5, 1.0, 2.0, 4.0):
        k = found["axes"]["density"].index(d)
        row(
            f"coverage at density {d:g}: load-aware / queue-unaware / nearest",
            lambda _, v, k=k: " / ".join(f"{c[k]:.3f}" for c in v["density"].values()),
        )
    return rows


def _at_most(found: dict[str, Any], values: Sequence[float]) -> str:
    return f"{found['axes']['depth'][int(np.argmax(values))]:,.0f}"


def _less(model: dict[str, Any], one: str, other: str) -> np.ndarray:
    """Coverage of one policy less that of another over the loads of Fig. 8."""
    each = model["policies"]
    return np.array(each[one]["coverage"]) - np.array(each[other]["coverage"])


def _first(found: dict[str, Any], values: Sequence[float] | np.ndarray, level: float) -> str:
    """The load from which a curve lies above a level, between two loads in a straight line."""
    x, y = np.array(found["axes"]["policies"]), np.array(values)
    above = np.flatnonzero(y > level)
    if not len(above):
        return "nowhere"
    i = int(above[0])
    if i == 0:
        return f"{x[0]:g} or less"
    return f"{x[i - 1] + (level - y[i - 1]) / (y[i] - y[i - 1]) * (x[i] - x[i - 1]):.2f}"


def _greatest(found: dict[str, Any], lead: np.ndarray, *, least: bool = False) -> str:
    k = int(np.argmin(lead) if least else np.argmax(lead))
    return f"{lead[k]:+.3f} at {found['axes']['policies'][k]:.2f}"


def _mix(found: dict[str, Any], model: str, among: str, k: int) -> str:
    best, coverage = best_mixes(found, model, among)
    if coverage[k] <= 0:
        return "none is served"
    return " / ".join(f"{x:.0%}" for x in best[k]) + f": {coverage[k]:.3f}"


def _ahead(found: dict[str, Any], model: str, other: str) -> float:
    curves = fixed_mixes(found, model)
    return float((curves["adapted"] - curves[other]).max())
