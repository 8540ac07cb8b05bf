"""PaperDelay: Figs. 7 to 12 of a preset in numbers, under several delay models.

Capacities under the models lie far apart, so that loads are shares of the greatest intensity that
the load-aware policy can serve under the model itself; the loads of the paper's figures are the
shares that they are of the preset's own model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from testbed.reporting import paper_design, paper_mix, paper_routing
from testbed.reporting.paper_delay_case import DelayCase, in_steps
from testbed.reporting.paper_delay_pieces import Pieces
from testbed.reporting.paper_model import POLICIES, PaperModel
from testbed.scenario import Scenario
from testbed.theory.system import System

DEPTHS = 33
"""Cached depths of Fig. 7."""
LONGER = (1.0, 4.0, 16.0, 64.0)
"""Decode steps, as multiples of those of Fig. 7, at which the capacity over the depth is found."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
"""Loads of Fig. 8, shares of the greatest load-aware intensity."""
LONG_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""Probabilities of the long type, Fig. 9."""
HEAVY = (0.85,)
"""Load of Figs. 10 and 11 beside those of the paper; the greatest intensity is that of the
preset's mix, and other mixes serve more."""
FREE_STEP = 0.1
"""Grid of the mixes without bounds."""
DENSITIES = (0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Nodes per km² of Fig. 12."""


def capacities(case: DelayCase) -> dict[str, Any]:
    """Greatest intensities, requests/s per km²: of each policy, and of each uniform depth."""
    each = {p: case.greatest_unaware(p, case.system) for p in POLICIES if p != "load_aware"}
    return {**each, "load_aware": case.greatest(), "uniform": uniform_capacity(case)}


def uniform_capacity(case: DelayCase) -> list[float]:
    """Greatest intensity over the cached depth, 0 where nothing fits."""
    systems = uniform_systems(case)
    return [0.0 if s is None else case.greatest_unaware("nearest", s) for s in systems]


def output_capacity(case: DelayCase, factor: float) -> list[float]:
    """The same with longer outputs."""
    return uniform_capacity(case.with_outputs(factor))


def uniform_depths(paper: PaperModel) -> np.ndarray:
    """Cached depths of Fig. 7, tokens."""
    return np.linspace(0.0, np.floor(paper_routing.deepest(paper)), DEPTHS)


def uniform_systems(case: DelayCase) -> list[System | None]:
    systems = [paper_routing.uniform_depth(case.paper, d) for d in uniform_depths(case.paper)]
    return [None if s is None else in_steps(s, case.scenario, case.outputs) for s in systems]


def depth_coverage(case: DelayCase, intensity: float) -> list[float]:
    """Fig. 7: coverage over the cached depth, 0 where nothing fits."""
    return [
        0.0 if s is None else case.coverage("nearest", replace(s, intensity=intensity))
        for s in uniform_systems(case)
    ]


def policy_curve(case: DelayCase, policy: str, most: float) -> dict[str, list[float | None]]:
    """Fig. 8 over :data:`SHARES` of the intensity ``most``: coverage, mean TTFT, and the deep
    tier's utilisation, mean wait (None where it has no end) and share of the requests."""
    deep = case.paper.order[2]
    found: dict[str, list[float | None]] = {
        k: [] for k in ("coverage", "mean", "deep_utilisation", "deep_wait", "deep_share")
    }
    for x in SHARES:
        latency = case.latency(policy, case.at(x * most))
        point = latency.point
        wait = float(point.loads[deep].weights @ point.wait[:, deep])
        found["coverage"].append(latency.coverage(case.paper.deadline))
        found["mean"].append(_finite(latency.mean))
        found["deep_utilisation"].append(float(point.utilisation[deep]))
        found["deep_wait"].append(_finite(wait))
        share = float(latency.system.probability @ point.association[:, deep])
        found["deep_share"].append(share)
    return found


def popularity(case: DelayCase, intensity: float) -> dict[str, list[float | None]]:
    """Fig. 9 over the probability of the long type: offloading ratio, and requests' share that
    the fallback serves."""
    ratio: list[float | None] = []
    fallback: list[float | None] = []
    for p in LONG_SHARES:
        mix = case.paper.with_probability(case.paper.long, p)
        latency = case.latency("load_aware", case.at(intensity, probability=mix))
        ok = latency.point.feasible
        served = float(mix @ latency.point.association[:, case.paper.order[0]])
        ratio.append(latency.offloading_ratio if ok else None)
        fallback.append(served if ok else None)
    return {"offloading": ratio, "fallback_share": fallback}


def density_curve(case: DelayCase, policy: str, intensity: float) -> list[float]:
    """Fig. 12: coverage over the density of nodes at fixed demand."""
    return [case.coverage(policy, case.at(intensity, node_density=d)) for d in DENSITIES]


def mix_coverage(case: DelayCase, mixes: np.ndarray, intensity: float) -> list[float]:
    """Figs. 10 and 11: load-aware coverage of each mix (N, S), neighbours after each other."""
    found, start = [], None
    for pi in mixes:
        latency = case.latency("load_aware", case.at(intensity, fraction=pi), start)
        start = latency.point if latency.point.feasible else None
        found.append(latency.coverage(case.paper.deadline))
    return found


def conclusions(scenario: Scenario, models: Sequence[str], pieces: Pieces) -> dict[str, Any]:
    """Figs. 7 to 12 in numbers under each model; what ``pieces`` holds is not computed again."""
    unsettled: list[str] = []

    def kept(case: DelayCase, key: Sequence[str], of: Callable[..., Any], *asked: Any) -> Any:
        def compute() -> dict[str, Any]:
            before = len(case.unsettled)
            return {"value": of(case, *asked), "unsettled": case.unsettled[before:]}

        piece = pieces.get((case.name, *key), compute)
        unsettled.extend(f"{case.name}: {line}" for line in piece["unsettled"])
        return piece["value"]

    own = DelayCase(scenario, scenario.delay_model)
    reference = kept(own, ("capacity",), capacities)
    paper = own.paper
    loads = {k: v / max(reference["uniform"]) for k, v in paper_routing.DEPTH_LOADS.items()}
    popular = paper_design.REPORTED_LOAD / reference["load_aware"]
    dense = scenario.demand.intensity / reference["load_aware"]
    named = (paper_mix.LIGHT, paper_mix.MODERATE, paper_mix.HIGH)
    adapted = (*(x / reference["load_aware"] for x in named), *HEAVY)
    mixes = {
        "bounded": paper_mix.candidates(paper),
        "free": paper.mixes(FREE_STEP, 0.0, 1.0),
        "third": np.full((1, 3), 1 / 3),
    }
    found: dict[str, Any] = {}
    for name in models:
        case = DelayCase(scenario, name)
        capacity = kept(case, ("capacity",), capacities)
        most, best = capacity["load_aware"], max(capacity["uniform"])
        found[name] = {
            "capacity": capacity,
            "depth": {
                load: kept(case, ("depth", load), depth_coverage, x * best)
                for load, x in loads.items()
            },
            "outputs": {
                f"{case.with_outputs(x).outputs:g}": kept(
                    case, ("outputs", f"{x:g}"), output_capacity, x
                )
                for x in LONGER
            },
            "policies": {p: kept(case, ("policies", p), policy_curve, p, most) for p in POLICIES},
            "popularity": kept(case, ("popularity",), popularity, popular * most),
            "mixes": {
                f"{x:.3g}": {
                    label: kept(case, ("mixes", f"{x:.3g}", label), mix_coverage, each, x * most)
                    for label, each in mixes.items()
                }
                for x in adapted
            },
            "density": {
                p: kept(case, ("density", p), density_curve, p, dense * most) for p in POLICIES
            },
        }
    return {
        "scenario": scenario.name,
        "deadline": paper.deadline,
        "intensity": scenario.demand.intensity,
        "shares": {"depth": loads, "popularity": popular, "density": dense},
        "axes": {
            "depth": uniform_depths(paper).tolist(),
            "policies": list(SHARES),
            "popularity": list(LONG_SHARES),
            "density": list(DENSITIES),
            "mixes": list(adapted),
            "bounded": mixes["bounded"][:, list(paper.order)].tolist(),
            "free": mixes["free"][:, list(paper.order)].tolist(),
        },
        "models": found,
        "unsettled": unsettled,
    }


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None
