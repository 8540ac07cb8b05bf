"""PaperDelayFigures: Figs. 7 to 12 drawn under several delay models side by side."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from testbed.reporting.layout import as_percent
from testbed.reporting.paper_layout import heading, key, shares
from testbed.reporting.paper_model import POLICIES
from testbed.reporting.style import DASHES, FAINT, INK, PALETTE, panels, styled

LABELS = {
    "erlang_c": "Erlang-C",
    "token_server": "token server",
    "step_chain": "step chain",
    "step_chain_mix": "step chain",
}
"""Names of delay models in figures; others keep their own."""
ROLES = ("fallback", "shallow", "deep")
OF_CAPACITY = "share of load-aware capacity"


def label(model: str) -> str:
    return LABELS.get(model, model)


def delay_figures(found: dict[str, Any]) -> dict[str, Figure]:
    """The figures of :func:`~testbed.reporting.paper_delay.conclusions`, by file name."""
    return {
        "fig-7": depth_figure(found),
        "fig-8": policy_figure(found),
        "fig-9": popularity_figure(found),
        "fig-10": mix_figure(found),
        "fig-11": adapted_figure(found),
        "fig-12": density_figure(found),
    }


@styled
def depth_figure(found: dict[str, Any]) -> Figure:
    """Fig. 7, and the greatest intensity that each uniform depth serves."""
    depths, models = found["axes"]["depth"], found["models"]
    drawing, ((*each, limit),) = panels(1, len(models) + 1, height=2.9)
    for k, ((name, values), at) in enumerate(zip(models.items(), each, strict=True)):
        for i, (load, curve) in enumerate(values["depth"].items()):
            x = found["shares"]["depth"][load]
            look = {"color": PALETTE[i], "linestyle": DASHES[i]}
            at.plot(depths, curve, label=f"{load}: {x:.0%} of the best depth's capacity", **look)
            at.plot(depths[int(np.argmax(curve))], max(curve), "o", color=PALETTE[i], markersize=5)
        at.set(title=f"{label(name)}: coverage", xlabel="cached depth, tokens")
        shares(at)
        capacity = np.array(values["capacity"]["uniform"])
        limit.plot(
            np.array(depths)[capacity > 0], capacity[capacity > 0], color=PALETTE[k + 3],
            linestyle=DASHES[k], label=label(name),
        )  # fmt: skip
    limit.set(title="Greatest intensity", xlabel="cached depth, tokens", yscale="log")
    limit.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    limit.set_ylabel("requests/s per km²")
    limit.legend(fontsize=7)
    key(drawing, each[0])
    heading(drawing, "Fig. 7: coverage against a uniform cached depth; dots mark the best")
    return drawing


@styled
def policy_figure(found: dict[str, Any]) -> Figure:
    """Fig. 8: coverage and the deep tier's utilisation."""
    x, models = found["axes"]["policies"], found["models"]
    drawing, axes = panels(2, len(models), height=2.3, sharex=True)
    for j, (name, values) in enumerate(models.items()):
        for i, (policy, words) in enumerate(POLICIES.items()):
            look = {"color": PALETTE[i], "linestyle": DASHES[i]}
            curve = values["policies"][policy]
            axes[0][j].plot(x, curve["coverage"], label=words, **look)
            axes[1][j].plot(x, curve["deep_utilisation"], **look)
        axes[1][j].axhline(1, color=FAINT, linewidth=0.9)
        axes[0][j].set(title=f"{label(name)}: coverage")
        axes[1][j].set(title="Utilisation of a deep node", ylim=(0, 1.6))
        axes[1][j].set_xlabel(OF_CAPACITY)
        shares(axes[0][j])
    key(drawing, axes[0][0])
    heading(drawing, "Fig. 8: three policies against load")
    return drawing


@styled
def popularity_figure(found: dict[str, Any]) -> Figure:
    """Fig. 9, load-aware."""
    x = found["axes"]["popularity"]
    drawing, ((ratio, served),) = panels(1, 2, height=2.7)
    for j, (name, values) in enumerate(found["models"].items()):
        look = {"color": PALETTE[j + 3], "linestyle": DASHES[j], "label": label(name)}
        for at, part in ((ratio, "offloading"), (served, "fallback_share")):
            curve = values["popularity"][part]
            at.plot(x, [np.nan if y is None else y for y in curve], **look)
    ratio.set(title="Offloading ratio")
    served.set(title="Requests that the fallback serves")
    for at in (ratio, served):
        at.set_xlabel("probability of the long type")
        at.xaxis.set_major_formatter(FuncFormatter(as_percent))
        shares(at)
    key(drawing, ratio)
    heading(
        drawing,
        f"Fig. 9: the long type more popular, at {found['shares']['popularity']:.0%} of the "
        "preset's capacity",
    )
    return drawing


def best_mixes(
    found: dict[str, Any], model: str, among: str = "bounded"
) -> tuple[np.ndarray, np.ndarray]:
    """The best mix at each load (L, 3) in the order of :data:`ROLES`, and its coverage (L,)."""
    mixes = np.array(found["axes"][among])
    each = found["models"][model]["mixes"].values()
    coverage = np.array([values[among] for values in each])
    return mixes[coverage.argmax(axis=1)], coverage.max(axis=1)


@styled
def mix_figure(found: dict[str, Any]) -> Figure:
    """Fig. 10: the best candidate, and the best of all mixes."""
    x, models = np.array(found["axes"]["mixes"]), found["models"]
    drawing, axes = panels(2, len(models), height=2.3, sharex=True)
    for j, name in enumerate(models):
        for at, among, words in (
            (axes[0][j], "bounded", "candidates"),
            (axes[1][j], "free", "any mix"),
        ):
            best, coverage = best_mixes(found, name, among)
            for k, role in enumerate(ROLES):
                served = coverage > 0
                at.plot(
                    x[served], best[served, k], color=PALETTE[k], linestyle=DASHES[k], marker="o",
                    markersize=3.5, label=role,
                )  # fmt: skip
            at.set(title=f"{label(name)}: {words}")
            shares(at)
        axes[1][j].set_xlabel(OF_CAPACITY)
    key(drawing, axes[0][0])
    heading(drawing, "Fig. 10: best mix of profiles against load, share of the nodes")
    return drawing


def fixed_mixes(found: dict[str, Any], model: str) -> dict[str, np.ndarray]:
    """Fig. 11: coverage of the adapted mix and of two that stay fixed, (L,) each."""
    each = list(found["models"][model]["mixes"].values())
    light = int(np.argmax(each[0]["bounded"]))
    return {
        "adapted": best_mixes(found, model)[1],
        "fixed at its light-load best": np.array([v["bounded"][light] for v in each]),
        "fixed, a third each": np.array([v["third"][0] for v in each]),
    }


@styled
def adapted_figure(found: dict[str, Any]) -> Figure:
    """Fig. 11."""
    x, models = found["axes"]["mixes"], found["models"]
    drawing, (axes,) = panels(1, len(models), height=2.7)
    for at, name in zip(axes, models, strict=True):
        for i, (words, curve) in enumerate(fixed_mixes(found, name).items()):
            at.plot(x, curve, color=PALETTE[i], linestyle=DASHES[i], label=words)
        _load_axis(at, name)
    key(drawing, axes[0])
    heading(drawing, "Fig. 11: adapting the mix to load")
    return drawing


def _load_axis(at: Axes, model: str) -> None:
    at.set(title=f"{label(model)}: coverage", xlabel=OF_CAPACITY)
    shares(at)


@styled
def density_figure(found: dict[str, Any]) -> Figure:
    """Fig. 12."""
    x, models = found["axes"]["density"], found["models"]
    drawing, (axes,) = panels(1, len(models), height=2.7)
    for at, (name, values) in zip(axes, models.items(), strict=True):
        for i, (policy, words) in enumerate(POLICIES.items()):
            look = {"color": PALETTE[i], "linestyle": DASHES[i]}
            at.plot(x, values["density"][policy], label=words, **look)
        at.axvline(1.0, color=INK, linewidth=0.4)
        at.set(title=f"{label(name)}: coverage", xlabel="nodes per km²")
        shares(at)
    key(drawing, axes[0])
    heading(
        drawing,
        f"Fig. 12: density of nodes, demand at {found['shares']['density']:.0%} of the capacity "
        "at density 1",
    )
    return drawing
