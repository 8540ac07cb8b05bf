"""Figs. 7 and 8: how deep to cache, and three routing policies against load."""

from __future__ import annotations

import math

import numpy as np

from testbed.reporting.paper_claims import Claim, Drawn
from testbed.reporting.paper_layout import heading, key, reported_points, shares
from testbed.reporting.paper_model import POLICIES, PaperModel
from testbed.reporting.style import DASHES, FAINT, INK, PALETTE, panels, styled
from testbed.theory.system import System

DEPTHS = 96
DEPTH_LOADS = {"light": 2.0, "moderate": 8.0, "heavy": 12.0}
"""Requests/s per km² of Fig. 7; the text names the loads without numbers."""
INTENSITIES = np.arange(0.5, 6.01, 0.25)
"""Requests/s per km² of Fig. 8."""
LIGHT = 1.0
SAME = 0.005
"""Coverages nearer than this are called almost identical."""


def uniform_depth(model: PaperModel, depth: float) -> System | None:
    """Every node caches the first ``depth`` tokens of the deep profile's chain (Theory A3, A9).

    A type reuses what it shares with that chain, at most its own hit in the deep profile. None
    where no sequence fits beside the cache.
    """
    scenario = model.scenario
    deep = scenario.profiles[model.order[2]]
    memory = scenario.memory
    persistent = depth * memory.per_token
    if memory.capacity - persistent < memory.per_sequence:
        return None
    only = {
        "name": "uniform",
        "fraction": 1.0,
        "persistent_bytes": persistent,
        "reusable": {q: min(h, depth) for q, h in deep.reusable.items()},
    }
    return System.from_scenario(scenario.replace(profiles=[only]))


def deepest(model: PaperModel) -> float:
    """Tokens of the deepest cache that leaves room for one sequence, or the longest prompt."""
    memory = model.scenario.memory
    room = (memory.capacity - memory.per_sequence) / memory.per_token
    return float(min(room, model.system.tokens.max()))


@styled
def cached_depth(model: PaperModel) -> Drawn:
    """Fig. 7: coverage against a uniform cached depth that costs concurrency (Theory A9)."""
    depths = np.linspace(0.0, math.floor(deepest(model)), DEPTHS)
    systems = [uniform_depth(model, d) for d in depths]
    coverage = {
        name: np.array(
            [0.0 if s is None else model.coverage(system=s, intensity=load) for s in systems]
        )
        for name, load in DEPTH_LOADS.items()
    }
    slots = np.array([0 if s is None else int(s.concurrency[0]) for s in systems])
    drawing, ((at, room),) = panels(1, 2, height=2.9)
    best = {}
    for i, (name, values) in enumerate(coverage.items()):
        k = int(values.argmax())
        best[name] = float(depths[k])
        at.plot(
            depths, values, color=PALETTE[i], linestyle=DASHES[i],
            label=f"{name}: {DEPTH_LOADS[name]:g} requests/s per km²",
        )  # fmt: skip
        at.plot(depths[k], values[k], "o", color=PALETTE[i], markersize=6)
    at.set(xlabel="cached depth, tokens", title=f"Coverage at {model.deadline:g} s")
    shares(at)
    key(drawing, at)
    room.plot(depths, slots, color=INK, drawstyle="steps-post")
    room.set(xlabel="cached depth, tokens", title="Sequences that fit beside it")
    room.set_ylim(bottom=0)
    heading(drawing, "Coverage against a uniform cached depth")

    light, moderate, heavy = coverage.values()
    order = list(best.values())
    last = int(np.flatnonzero(slots > 0)[-1])
    claims = (
        Claim(
            7,
            "at light load deeper reuse initially improves coverage",
            "improves",
            f"{light[0]:.3f} without cache, {light.max():.3f} at {best['light']:,.0f} tokens",
            light.max() > light[0],
        ),
        Claim(
            7,
            "the optimum is interior",
            "interior",
            ", ".join(f"{d:,.0f}" for d in order) + f" of at most {depths[last]:,.0f} tokens",
            all(0 < d < depths[last] for d in order),
        ),
        Claim(
            7,
            "at moderate and heavy load the optimum moves towards shallower caching",
            "shallower",
            " → ".join(f"{d:,.0f}" for d in order) + " tokens",
            order[0] >= order[1] >= order[2] and order[2] < order[0],
            note="loads are ours: " + ", ".join(f"{n} {v:g}" for n, v in DEPTH_LOADS.items()),
        ),
        Claim(
            7,
            "past the optimum more cache rapidly costs coverage or stability",
            "unstable",
            f"{heavy.max():.3f} → {heavy[last]:.3f} at heavy load, {moderate.max():.3f} → "
            f"{moderate[last]:.3f} at moderate",
            heavy[last] < heavy.max() - 0.05,
        ),
    )
    return Drawn(
        7,
        "Cached depth against concurrency",
        drawing,
        "All nodes hold the same chain. Dots mark the best depth at each load; where coverage is 0 "
        "no stable operating point exists.",
        claims,
    )


@styled
def policies_against_load(model: PaperModel) -> Drawn:
    """Fig. 8: coverage of the three policies against the spatial request intensity."""
    curves = {
        policy: np.array([model.coverage(policy, intensity=x) for x in INTENSITIES.tolist()])
        for policy in POLICIES
    }
    deep = model.order[2]
    load = {
        policy: np.array(
            [model.ask(policy, intensity=x).point.utilisation[deep] for x in INTENSITIES.tolist()]
        )
        for policy in POLICIES
    }
    drawing, ((at, busy),) = panels(1, 2, height=2.9)
    reported = {
        "load_aware": {3.0: 0.69, 4.0: 0.63},
        "prefix_only": {3.0: 0.55, 4.0: 0.23},
        "nearest": {LIGHT: 0.52, 4.0: 0.52},
    }
    for i, (policy, label) in enumerate(POLICIES.items()):
        at.plot(INTENSITIES, curves[policy], color=PALETTE[i], linestyle=DASHES[i], label=label)
        busy.plot(INTENSITIES, load[policy], color=PALETTE[i], linestyle=DASHES[i])
    for i, points in enumerate(reported.values()):
        reported_points(at, points, None if i else "reported in the text")
    at.set(xlabel="requests/s per km²", title=f"Coverage at {model.deadline:g} s")
    shares(at)
    key(drawing, at)
    busy.axhline(1, color=FAINT, linewidth=0.9)
    busy.set(xlabel="requests/s per km²", title="Utilisation of a deep node")
    shares(busy, top=None)
    heading(drawing, "Three policies against load")

    def asked(policy: str, intensity: float) -> float:
        return model.coverage(policy, intensity=intensity)

    apart = abs(asked("load_aware", LIGHT) - asked("prefix_only", LIGHT))
    nearest = asked("nearest", 4.0)
    claims = (
        *(
            Claim.value(8, f"{POLICIES[policy]}, intensity {x:g}", value, asked(policy, x))
            for policy, points in reported.items()
            for x, value in points.items()
        ),
        Claim(
            8,
            "under light load queue-unaware and load-aware are almost identical",
            "identical",
            f"{apart:.4f} apart at intensity {LIGHT:g}",
            apart < SAME,
        ),
        Claim(
            8,
            "cache awareness without load awareness can be worse than none",
            "worse",
            f"{asked('prefix_only', 4.0):.3f} against {nearest:.3f} at intensity 4",
            asked("prefix_only", 4.0) < nearest,
            note="a deep tier past its capacity adds nothing to coverage (Theory D3)",
        ),
    )
    return Drawn(
        8,
        "Routing policies against load",
        drawing,
        "Crosses are the values that the text reports. Right: why queue-unaware routing falls: "
        "it sends the deep nodes more than they can serve.",
        claims,
    )
