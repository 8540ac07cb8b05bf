"""Fleet questions beyond one placement and one density: periods, memory nodes, moving users."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import Scenario
from testbed.theory.constraints import PlacementSet

Answer = tuple[dict[str, Any], list[str]]
"""The JSON document, and the lines for people."""

_MOST_CANDIDATES = 2000


def over_periods(
    scenario: Scenario,
    file: Path,
    allowed: PlacementSet,
    *,
    budget: float,
    parts: int,
    deadline: float | None,
) -> Answer:
    """Placements over the periods of a file within a migration budget (Theory H9, G4)."""
    from testbed.simulation.placement import move_bytes
    from testbed.theory.extensions.periods import plan_periods, read_periods
    from testbed.theory.placement import simplex_grid

    periods = read_periods(file, scenario)
    names = [s.name for s in scenario.profiles]
    candidates = [pi for pi in simplex_grid(len(names), parts) if allowed.contains(pi)]
    if not candidates:
        raise ScenarioError(f"placement: no point of a grid of {parts} parts is allowed")
    if len(candidates) > _MOST_CANDIDATES:
        raise ScenarioError(
            f"placement: {len(candidates)} candidates on a grid of {parts} parts; take fewer parts"
        )
    found = plan_periods(
        scenario,
        periods,
        np.array(candidates),
        move_bytes(scenario),
        budget,
        deadline=deadline,
    )
    lines = []
    for i, period in enumerate(periods):
        shares = ", ".join(f"{n} {x:.3g}" for n, x in zip(names, found.fraction[i], strict=True))
        lines.append(
            f"{i}: intensity {period.intensity:g}: coverage {found.coverage[i]:.4f} with {shares}; "
            f"{found.moved[i]:.3g} bytes a node moved"
        )
    lines.append(f"coverage over the periods: {found.value:.4f}")
    return found.to_dict(names), lines


def with_memory_nodes(scenario: Scenario, density: float, path: float | None) -> Answer:
    """Profiles on memory nodes of their own, compute nodes without any (Theory H7).

    The links are ``simulation.backhaul``; ``path`` is ξ of the way between the nodes, s·km^−α with
    the radio's α.
    """
    from testbed.radio import PowerLaw
    from testbed.scenario import PowerLawRadio
    from testbed.theory.extensions.memory_nodes import MemoryPool, solve

    if scenario.simulation is None or scenario.simulation.backhaul is None:
        raise ScenarioError("simulation.backhaul: memory nodes need the links that they send over")
    if path is None or not path > 0:
        raise ScenarioError("--memory-path: needs ξ > 0 of the way between nodes, s·km^-α")
    alpha = scenario.radio.alpha if isinstance(scenario.radio, PowerLawRadio) else 2.0
    pool = MemoryPool(density, scenario.simulation.backhaul, PowerLaw(path, alpha))
    point = solve(scenario, pool)
    document = point.to_dict(scenario)
    ttft = document["ttft"]
    lines = [f"mean TTFT {ttft['mean']:.4g} s"]
    lines += [f"coverage at {t} s: {p:.4f}" for t, p in ttft["coverage"].items()]
    for name, row in document["association"].items():
        lines.append(f"{name}: " + ", ".join(f"{way} {100 * p:.1f} %" for way, p in row.items()))
    busy = ", ".join(f"{n} {100 * u:.1f} %" for n, u in document["link_utilisation"].items())
    lines.append(f"links busy: {busy}")
    if not point.feasible:
        lines.append(str(point.reason))
    return document, lines


def next_turns(scenario: Scenario, new_tokens: float, seconds: float) -> Answer:
    """How sessions of moving users should go on (Theory H10)."""
    from testbed.theory.extensions.mobility import plan_next_turn

    found = plan_next_turn(scenario, new_tokens, seconds)
    lines = [
        f"{name}: {turn.best}; stay {turn.stay:.4g} s, rehome {turn.rehome:.4g} s, migrate "
        f"{turn.migrate:.4g} s; the old node is still best for {100 * turn.same:.1f} % "
        f"({1e3 * turn.moved:.0f} m on)"
        for name, turn in found.items()
    ]
    return {name: turn.to_dict() for name, turn in found.items()}, lines
