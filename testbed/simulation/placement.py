"""Placement: how many nodes there are, where they stand and which profile each holds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from testbed.errors import ScenarioError
from testbed.scenario import Scenario, SimulationSpec
from testbed.seeds import generator
from testbed.simulation.plane import Plane, new_plane, read_positions, wrap_positions
from testbed.simulation.system import System


@dataclass(frozen=True)
class Layout:
    """Nodes of one run.

    Attributes
    ----------
    assigned : (N,) profile of each node
    plane : their points; a single cell without meaning in palm
    area : km² that they stand for
    longest : km, the largest distance that matters to a radio table
    random : the layout is drawn, so that replications differ in it
    """

    palm: bool
    assigned: np.ndarray
    plane: Plane
    area: float
    longest: float
    random: bool
    description: str


def lay_out(scenario: Scenario, system: System, spec: SimulationSpec, seed: int) -> Layout:
    """Nodes as ``simulation.space`` says.

    Raises
    ------
    ScenarioError
        Too few nodes for a profile, or a positions file that does not fit.
    """
    density = scenario.nodes.density
    fraction = system.density / system.density.sum()
    if spec.space == "palm":
        counts = whole_counts(fraction, spec.nodes)
        for s, share, count in zip(system.profiles, fraction, counts, strict=True):
            if share > 0 and count == 0:
                raise ScenarioError(
                    f"simulation.nodes: {spec.nodes} nodes leave none for profile {s!r}, "
                    f"a fraction of {share:g}"
                )
        return Layout(
            palm=True,
            assigned=np.repeat(np.arange(len(counts)), counts),
            plane=new_plane(np.zeros((1, 2)), 1.0, 1.0),
            area=spec.nodes / density,
            longest=math.sqrt(40.0 / (math.pi * system.density[system.density > 0].min())),
            random=False,
            description=f"palm: exact nearest distances, {spec.nodes} nodes",
        )
    draw = generator(seed, "nodes")
    marks = None
    if spec.positions is not None:
        points, marks = read_positions(spec.positions, system.profiles)
        points, plane = wrap_positions(points, density, spec.positions)
        description = f"torus: {len(points)} nodes from {spec.positions}"
    else:
        side = math.sqrt(spec.nodes / density)
        points = draw.random((max(1, int(draw.poisson(spec.nodes))), 2)) * side
        plane = new_plane(points, side, side)
        description = (
            f"torus: {len(points)} nodes of a Poisson process on {side:.4g} × {side:.4g} km"
        )
    assigned = draw.choice(len(fraction), len(points), p=fraction) if marks is None else marks
    return Layout(
        palm=False,
        assigned=assigned.astype(np.int64),
        plane=plane,
        area=float(plane.size.prod()),
        longest=float(np.hypot(*plane.size)) / 2,
        random=spec.positions is None or marks is None,
        description=description,
    )


def whole_counts(fraction: np.ndarray, total: int) -> np.ndarray:
    """``total`` nodes shared out in proportion, by largest remainder; (S,) whole numbers."""
    ideal = np.asarray(fraction, dtype=float) / np.sum(fraction) * total
    counts = np.floor(ideal + 1e-9).astype(np.int64)
    for s in np.argsort(counts - ideal, kind="stable")[: total - counts.sum()]:
        counts[s] += 1
    return counts


def move_bytes(scenario: Scenario) -> np.ndarray:
    """Bytes that a node of profile s loads to become t, (S, S) (Theory G4).

    What both hold of each prefix family is there already: the smaller of the two reusable depths
    of its types, the deepest over the family, κ bytes a token, and no more than s pins at all.
    """
    profiles = scenario.profiles
    families = sorted({q.prefix_family for q in scenario.requests})
    bytes_ = np.zeros((len(profiles), len(profiles)))
    for i, s in enumerate(profiles):
        for j, t in enumerate(profiles):
            shared = sum(
                max(
                    min(s.reusable[q.name], t.reusable[q.name])
                    for q in scenario.requests
                    if q.prefix_family == family
                )
                for family in families
            )
            if i != j:
                there = min(shared * scenario.memory.per_token, s.persistent_bytes)
                bytes_[i, j] = max(0.0, t.persistent_bytes - there)
    return bytes_
