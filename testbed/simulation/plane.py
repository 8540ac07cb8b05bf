"""Plane: nodes at points of a rectangle whose edges are wrapped, and who is near whom."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from testbed.errors import ScenarioError

_NODES_PER_CELL = 2.0


class Plane(NamedTuple):
    """N points on a torus, sorted into cells of a grid."""

    size: np.ndarray  # (2,) width and height, km
    cells: np.ndarray  # (2,) int64, columns and rows
    position: np.ndarray  # (N, 2) km
    first: np.ndarray  # (columns·rows + 1,) where each cell's points begin in ``member``
    member: np.ndarray  # (N,) int64, points by cell


def new_plane(position: np.ndarray, width: float, height: float) -> Plane:
    """Sort points into cells; positions are in [0, width) × [0, height)."""
    count = len(position)
    side = math.sqrt(width * height * _NODES_PER_CELL / max(count, 1))
    columns, rows = max(1, int(width / side)), max(1, int(height / side))
    column = np.minimum((position[:, 0] / width * columns).astype(np.int64), columns - 1)
    row = np.minimum((position[:, 1] / height * rows).astype(np.int64), rows - 1)
    cell = row * columns + column
    return Plane(
        size=np.array([width, height]),
        cells=np.array([columns, rows], dtype=np.int64),
        position=np.ascontiguousarray(position, dtype=np.float64),
        first=np.concatenate([[0], np.cumsum(np.bincount(cell, minlength=columns * rows))]),
        member=np.argsort(cell, kind="stable").astype(np.int64),
    )


@numba.njit(cache=True)
def nearest_of_each(
    plane: Plane,
    x: float,
    y: float,
    mark: np.ndarray,
    present: np.ndarray,
    shunned: np.ndarray,
    node: np.ndarray,
    distance: np.ndarray,
) -> None:
    """The nearest K points of each mark, into ``node`` and ``distance``, each (S, K).

    ``mark`` (N,) is a point's mark, negative for one that is no candidate; ``present`` (S,) how
    many points bear each mark; ``shunned`` points that are passed over, closed by a negative one.
    Missing points are -1 at infinite distance. Rings of cells are searched from the inside until
    nothing outside them can be nearer.
    """
    marks, k = node.shape
    for s in range(marks):
        for j in range(k):
            node[s, j] = -1
            distance[s, j] = math.inf  # squared until the end
    columns, rows = plane.cells[0], plane.cells[1]
    width, height = plane.size[0] / columns, plane.size[1] / rows
    column, row = min(int(x / width), columns - 1), min(int(y / height), rows - 1)
    left, below = x - column * width, y - row * height
    edge = max(0.0, min(min(left, width - left), min(below, height - below)))
    step = min(width, height)
    for ring in range(max(columns // 2, rows // 2) + 1):
        for dx in range(max(-ring, -((columns - 1) // 2)), min(ring, columns // 2) + 1):
            stride = 1 if abs(dx) == ring else 2 * ring
            at = column + dx
            at += columns if at < 0 else (-columns if at >= columns else 0)
            for dy in range(-ring, ring + 1, max(1, stride)):
                if -((rows - 1) // 2) <= dy <= rows // 2:
                    up = row + dy
                    up += rows if up < 0 else (-rows if up >= rows else 0)
                    cell = up * columns + at
                    for i in range(plane.first[cell], plane.first[cell + 1]):
                        n = plane.member[i]
                        s = mark[n]
                        if s < 0:
                            continue
                        ox = abs(x - plane.position[n, 0])
                        ox = min(ox, plane.size[0] - ox)
                        oy = abs(y - plane.position[n, 1])
                        oy = min(oy, plane.size[1] - oy)
                        d = ox * ox + oy * oy
                        if d < distance[s, k - 1]:
                            _insert(n, d, shunned, node[s], distance[s])
        reach = ring * step + edge
        reach *= reach
        done = True
        for s in range(marks):
            wanted = min(k, present[s])
            if wanted > 0 and distance[s, wanted - 1] > reach:
                done = False
                break
        if done:
            break
    for s in range(marks):
        for j in range(k):
            distance[s, j] = math.sqrt(distance[s, j])


@numba.njit(cache=True)
def _insert(n: int, d: float, shunned: np.ndarray, node: np.ndarray, distance: np.ndarray) -> None:
    for i in range(shunned.shape[0]):
        if shunned[i] < 0:
            break
        if shunned[i] == n:
            return
    j = node.shape[0] - 1
    while j > 0 and distance[j - 1] > d:
        distance[j] = distance[j - 1]
        node[j] = node[j - 1]
        j -= 1
    distance[j] = d
    node[j] = n


def read_positions(
    path: str | Path, profiles: tuple[str, ...]
) -> tuple[np.ndarray, np.ndarray | None]:
    """Nodes of a CSV file `x,y[,profile]`, km: (N, 2) positions and (N,) profile indices.

    A first row that is not numbers is taken as a heading. Profiles are given for all or none.

    Raises
    ------
    ScenarioError
        The file is missing, or a row is malformed; the line is named.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = [(i, [c.strip() for c in r]) for i, r in enumerate(csv.reader(file), 1) if r]
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise ScenarioError(f"simulation.positions: {path}: {reason}") from None
    points, marks = [], []
    for place, (number, row) in enumerate(rows):
        try:
            x, y = float(row[0]), float(row[1])
        except (ValueError, IndexError):
            if place == 0:
                continue
            raise ScenarioError(f"{path}:{number}: not `x,y` in kilometres") from None
        if not (math.isfinite(x) and math.isfinite(y)):
            raise ScenarioError(f"{path}:{number}: a coordinate is not finite")
        points.append((x, y))
        if len(row) > 2 and row[2]:
            if row[2] not in profiles:
                raise ScenarioError(f"{path}:{number}: {row[2]!r} is not a profile")
            marks.append(profiles.index(row[2]))
    if not points:
        raise ScenarioError(f"{path}: no node in it")
    if marks and len(marks) != len(points):
        raise ScenarioError(f"{path}: {len(marks)} of {len(points)} nodes have a profile")
    return np.array(points), np.array(marks, dtype=np.int64) if marks else None


def wrap_positions(points: np.ndarray, density: float, source: str) -> tuple[np.ndarray, Plane]:
    """Put given points on a torus of area N/λ_b with the proportions of their bounding box.

    Raises
    ------
    ScenarioError
        The points span more than that area.
    """
    low = points.min(axis=0)
    span = points.max(axis=0) - low
    area = len(points) / density
    if span[0] <= 0 or span[1] <= 0:
        width = height = math.sqrt(area)
    else:
        width = math.sqrt(area * span[0] / span[1])
        height = area / width
    if span[0] >= width or span[1] >= height:
        raise ScenarioError(
            f"{source}: {len(points)} nodes at nodes.density {density:g} fill "
            f"{width:.4g} × {height:.4g} km, but they span {span[0]:.4g} × {span[1]:.4g} km"
        )
    placed = points - low + (np.array([width, height]) - span) / 2
    return placed, new_plane(placed, width, height)
