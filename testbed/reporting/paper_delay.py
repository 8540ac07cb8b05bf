"""Paper's conclusions under two delay models: Erlang-C, and the step chain of a real scheduler.

Both describe the same engine as long as it serves one request: the step time is the one whose
unloaded occupancy is the preset's. They differ in what happens under load: c independent
processors, or prefills in series through one token budget with c slots. Loads are given as shares
of the greatest intensity that a model's load-aware policy can serve, since the two capacities lie
far apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from testbed.errors import ScenarioError
from testbed.outcome import dump_json, write_atomically
from testbed.presets import preset as load_preset
from testbed.reporting.page import Section, write_page
from testbed.reporting.paper_layout import heading, key, shares
from testbed.reporting.paper_model import POLICIES, PaperModel
from testbed.reporting.paper_routing import deepest, uniform_depth
from testbed.reporting.style import DASHES, FAINT, PALETTE, panels, save, styled
from testbed.reporting.table import Table, figure, words
from testbed.routing.policies import get_policy
from testbed.scenario import Scenario
from testbed.step_time import StepTime
from testbed.theory.delay import DelayModel, get_delay_model
from testbed.theory.delay.step_chain_mix import MixedStepChain
from testbed.theory.geometry import associate
from testbed.theory.latency import Latency
from testbed.theory.operating_point import OperatingPoint, solve
from testbed.theory.system import System

OUTPUTS = 18.0
"""Generated tokens: 17 decode steps make up the preset's decode occupancy."""
BUDGET = 8192
"""Tokens in a step: no prompt of the preset is cut."""
SHARES = (0.1, 0.3, 0.45, 0.6, 0.75, 0.9)
DEPTH_SHARES = {"light": 0.15, "moderate": 0.6, "heavy": 0.9}
"""Of the greatest intensity that the best uniform depth can serve (Fig. 7)."""
DEPTHS = 13
DENSITIES = np.array([0.5, 1.0, 2.0, 3.0])
LONG = np.array([0.1, 0.3, 0.5, 0.7])
BASELINE = 0.6
"""Share of capacity at which Figs. 9 and 12 stand."""
MIX_STEP, LEAST_FALLBACK, MOST_DEEP = 0.1, 0.3, 0.2
BRACKET = 4.0
"""The greatest load-aware intensity is sought up to this many times the queue-unaware one."""
PRECISION = 0.02
LABELS = {"erlang_c": "Erlang-C", "step_chain": "step chain"}


@dataclass(frozen=True)
class Asked:
    """The preset under one delay model; ``model`` keeps what it has solved."""

    paper: PaperModel
    model: DelayModel
    system: System

    @classmethod
    def of(cls, scenario: Scenario, delay_model: str) -> Asked:
        paper = PaperModel(scenario)
        system = in_steps(paper.system, scenario)
        model = MixedStepChain() if delay_model == "step_chain" else get_delay_model(delay_model)
        return cls(paper, model, system)

    def latency(self, policy: str, system: System, start: OperatingPoint | None = None) -> Latency:
        solver = self.paper.scenario.solver
        point = solve(
            system, get_policy(policy), self.model, damping=solver.damping, tolerance=1e-7,
            max_iterations=solver.max_iterations, start=start,
        )  # fmt: skip
        return Latency(system, point, self.model)

    def at(self, intensity: float, **changed: Any) -> System:
        return replace(self.system, intensity=intensity, **changed)

    def coverage(self, policy: str, system: System) -> float:
        return self.latency(policy, system).coverage(self.paper.deadline)

    def greatest_blind(self, policy: str, system: System) -> float:
        """The intensity at which the first tier saturates; the association does not depend on it
        (Theory D3)."""
        rule = get_policy(policy)
        association = associate(system, rule.fixed_cost(system.residual, np.zeros(system.shape)))
        loads = [system.tier_load(association, s) for s in range(system.shape[1])]
        busiest = max(self.model.utilisation(x) for x in loads if x.arrival_rate > 0)
        return system.intensity / busiest

    def greatest(self) -> float:
        """The intensity beyond which load-aware finds no stable operating point, by bisection."""
        low = self.greatest_blind("prefix_only", self.system)
        high = BRACKET * low
        while high / low > 1.0 + PRECISION:
            middle = float(np.sqrt(low * high))
            if self.latency("load_aware", self.at(middle)).point.feasible:
                low = middle
            else:
                high = middle
        return low


def in_steps(system: System, scenario: Scenario) -> System:
    """The system with the engine whose unloaded occupancy is the scenario's (Theory A10).

    Raises
    ------
    ScenarioError
        Types have different decode occupancies: one step time cannot give them all.
    """
    decode = {q.decode_occupancy for q in scenario.requests}
    if len(decode) != 1:
        raise ScenarioError(f"{scenario.name}: decode occupancies differ between types")
    prefill = scenario.prefill
    step = StepTime(
        c_pre=prefill.overhead,
        a=prefill.linear,
        b=prefill.quadratic,
        d=prefill.context,
        c_dec=decode.pop() / (OUTPUTS - 1.0),
    )
    return replace(
        system,
        step_time=step,
        token_budget=BUDGET,
        output_tokens=np.full(len(system.types), OUTPUTS),
    )


def conclusions(scenario: Scenario, delay_model: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Figs. 7 to 12 in numbers under one delay model."""
    asked = Asked.of(scenario, delay_model)
    say(f"{delay_model}: capacities")
    capacity = {
        p: asked.greatest() if p == "load_aware" else asked.greatest_blind(p, asked.system)
        for p in POLICIES
    }
    most = capacity["load_aware"]
    deep = asked.paper.order[2]
    say(f"{delay_model}: policies")
    curves: dict[str, list[float]] = {p: [] for p in POLICIES}
    busy: dict[str, list[float]] = {p: [] for p in POLICIES}
    for policy in POLICIES:
        for x in SHARES:
            found = asked.latency(policy, asked.at(x * most))
            curves[policy].append(found.coverage(asked.paper.deadline))
            busy[policy].append(float(found.point.utilisation[deep]))
    say(f"{delay_model}: depths")
    depth = _depths(asked)
    say(f"{delay_model}: popularity, density, mixes")
    base = BASELINE * most
    long = asked.paper.long
    popularity = [
        asked.latency(
            "load_aware", asked.at(base, probability=asked.paper.with_probability(long, p))
        )
        for p in LONG.tolist()
    ]
    density = {
        p: [asked.coverage(p, asked.at(base, node_density=d)) for d in DENSITIES.tolist()]
        for p in POLICIES
    }
    mixes = asked.paper.mixes(MIX_STEP, LEAST_FALLBACK, MOST_DEEP)
    best = {}
    for name, x in DEPTH_SHARES.items():
        each = [asked.coverage("load_aware", asked.at(x * most, fraction=pi)) for pi in mixes]
        best[name] = {"mix": mixes[int(np.argmax(each))].tolist(), "coverage": max(each)}
    return {
        "capacity": capacity,
        "shares": list(SHARES),
        "coverage": curves,
        "deep_utilisation": busy,
        "depth": depth,
        "popularity": {
            "probability": LONG.tolist(),
            "offloading": [x.offloading_ratio if x.point.feasible else None for x in popularity],
        },
        "density": {"density": DENSITIES.tolist(), **density},
        "best_mix": best,
    }


def _depths(asked: Asked) -> dict[str, Any]:
    """Fig. 7: coverage over a uniform cached depth at shares of what the best depth can serve."""
    most = float(np.floor(deepest(asked.paper)))
    depths = np.linspace(0.0, most, DEPTHS)
    systems = [uniform_depth(asked.paper, d) for d in depths]
    ready = [None if s is None else in_steps(s, asked.paper.scenario) for s in systems]
    limits = [0.0 if s is None else asked.greatest_blind("nearest", s) for s in ready]
    top = max(limits)
    coverage = {
        name: [
            0.0 if s is None else asked.coverage("nearest", replace(s, intensity=x * top))
            for s in ready
        ]
        for name, x in DEPTH_SHARES.items()
    }
    best = {name: float(depths[int(np.argmax(c))]) for name, c in coverage.items()}
    return {
        "tokens": depths.tolist(), "greatest_intensity": limits, "coverage": coverage, "best": best,
    }  # fmt: skip


@styled
def depth_figure(found: dict[str, Any]) -> Figure:
    drawing, ((*each, limit),) = panels(1, len(found) + 1, height=2.9)
    for k, ((name, values), at) in enumerate(zip(found.items(), each, strict=True)):
        depth = values["depth"]
        for i, (load, curve) in enumerate(depth["coverage"].items()):
            at.plot(
                depth["tokens"], curve, color=PALETTE[i], linestyle=DASHES[i],
                label=f"{load}: {DEPTH_SHARES[load]:.0%} of capacity",
            )  # fmt: skip
            at.plot(depth["best"][load], max(curve), "o", color=PALETTE[i])
        at.set(title=f"{LABELS[name]}: coverage", xlabel="cached depth, tokens")
        shares(at)
        limit.plot(
            depth["tokens"], depth["greatest_intensity"], color=PALETTE[k + 3], linestyle=DASHES[k],
            label=LABELS[name],
        )  # fmt: skip
    limit.set(title="Greatest intensity, 1/s per km²", xlabel="cached depth, tokens", yscale="log")
    limit.legend(fontsize=7)
    key(drawing, each[0])
    heading(drawing, "Fig. 7: cached depth, dots mark the best")
    return drawing


@styled
def policy_figure(found: dict[str, Any]) -> Figure:
    drawing, axes = panels(2, len(found), height=2.4, sharex=True)
    for j, (name, values) in enumerate(found.items()):
        for i, (policy, label) in enumerate(POLICIES.items()):
            look = {"color": PALETTE[i], "linestyle": DASHES[i]}
            axes[0][j].plot(values["shares"], values["coverage"][policy], label=label, **look)
            axes[1][j].plot(values["shares"], values["deep_utilisation"][policy], **look)
        axes[1][j].axhline(1, color=FAINT, linewidth=0.9)
        axes[0][j].set(title=f"{LABELS[name]}: coverage")
        axes[1][j].set(title="Utilisation of a deep node", ylim=(0, 1.6))
        axes[1][j].set_xlabel("share of the greatest load-aware intensity")
        shares(axes[0][j])
    key(drawing, axes[0][0])
    heading(drawing, "Fig. 8: policies against load")
    return drawing


@styled
def density_figure(found: dict[str, Any]) -> Figure:
    drawing, (axes,) = panels(1, len(found) + 1, height=2.9)
    for j, (name, values) in enumerate(found.items()):
        density = values["density"]
        for i, (policy, label) in enumerate(POLICIES.items()):
            axes[j].plot(
                density["density"], density[policy], color=PALETTE[i], linestyle=DASHES[i],
                label=label,
            )  # fmt: skip
        axes[j].set(title=f"{LABELS[name]}: coverage", xlabel="nodes per km²")
        shares(axes[j])
        popular = values["popularity"]
        axes[-1].plot(
            popular["probability"], [np.nan if y is None else y for y in popular["offloading"]],
            color=PALETTE[j + 3], linestyle=DASHES[j], marker="o", label=LABELS[name],
        )  # fmt: skip
    axes[-1].set(title="Fig. 9: offloading ratio", xlabel="probability of the long type")
    axes[-1].legend(fontsize=7)
    key(drawing, axes[0])
    heading(drawing, f"Fig. 12: density, at {BASELINE:.0%} of the baseline's capacity")
    return drawing


def answers(found: dict[str, Any]) -> Table:
    """The questions, answered by each model."""
    rows = []

    def row(question: str, each: Callable[[dict[str, Any]], str]) -> None:
        rows.append((words(question), *(figure(each(v)) for v in found.values())))

    row(
        "greatest intensity, load-aware, 1/s per km²",
        lambda v: f"{v['capacity']['load_aware']:.3g}",
    )
    row("… prefix-aware, queue-unaware", lambda v: f"{v['capacity']['prefix_only']:.3g}")
    row("… nearest node", lambda v: f"{v['capacity']['nearest']:.3g}")
    row(
        "queue-unaware saturates at this share of the load-aware capacity",
        lambda v: f"{v['capacity']['prefix_only'] / v['capacity']['load_aware']:.2f}",
    )
    for name in DEPTH_SHARES:
        row(
            f"best uniform depth at {name} load, tokens",
            lambda v, name=name: f"{v['depth']['best'][name]:,.0f}",
        )
    for x in (0.3, 0.6, 0.9):
        k = SHARES.index(x)
        row(
            f"coverage at {x:.0%}: load-aware / queue-unaware / nearest",
            lambda v, k=k: " / ".join(f"{v['coverage'][p][k]:.3f}" for p in POLICIES),
        )
    for name in DEPTH_SHARES:
        row(
            f"best mix at {name} load: fallback / shallow / deep",
            lambda v, name=name: " / ".join(f"{x:.0%}" for x in v["best_mix"][name]["mix"]),
        )
    return Table(
        "The same engine under two delay models",
        ("", *(LABELS[n] for n in found)),
        tuple(rows),
        "Shares and loads are of each model's own greatest load-aware intensity (Fig. 7: of the "
        "best uniform depth's).",
    )


def draw_delay_models(
    out: str | Path,
    preset: str = "paper-reproduction",
    *,
    models: Sequence[str] = ("erlang_c", "step_chain"),
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Figs. 7 to 9, 10 and 12 of a preset under several delay models: figures, page and values."""
    scenario = load_preset(preset)
    found = {name: conclusions(scenario, name, say) for name in models}
    folder = Path(out)
    write_atomically(folder / "delay-models.json", dump_json(found, indent=True) + b"\n")
    pictures = {
        "depth": depth_figure(found),
        "policies": policy_figure(found),
        "density": density_figure(found),
    }
    for name, picture in pictures.items():
        save(picture, folder / f"{name}.svg")
    write_page(
        folder / "delay-models.html",
        "The paper's conclusions under two delay models",
        [
            Section.of("Answers", answers(found)),
            Section.of("Figures", *pictures.values()),
        ],
        lead=[
            "Both models serve one request alone in the same time. Erlang-C lets c requests be "
            "served side by side at that pace; the step chain runs prefills in series through one "
            f"token budget of {BUDGET} tokens a step, {OUTPUTS:g} tokens generated, as "
            "continuous batching does.",
        ],
    )
    return found
