"""Overload: finite waits for tiers that cannot serve what they get, and which (Theory D1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from testbed.routing.policies import Policy
from testbed.theory.delay.base import DelayModel, TierLoad
from testbed.theory.system import System

_SHORT = 1e-5
"""Radio delays below this share of the prefills decide nothing but ties."""


def overload_growth(system: System, model: DelayModel, s: int, spare: float) -> float:
    """Mean wait of all requests alike at 1 − spare/c of tier s, in every spare/c; seconds.

    It does not depend on the mix that the tier gets: a penalty that did could have several
    answers.
    """
    load = replace(
        system.tier_load(np.zeros(system.shape), s), arrival_rate=1.0, weights=system.probability
    )
    rho = model.utilisation(load)
    if rho <= 0:
        return 1.0
    free = spare / load.concurrency
    mean = float(system.probability @ model.mean(load.scaled((1.0 - free) / rho)))
    return mean / free


def penalised_means(
    system: System, model: DelayModel, association: np.ndarray, spare: float
) -> np.ndarray:
    """Q(A), the mean excess delays (Q, S), s; straight lines above 1 − spare/c (Theory D1)."""
    result = np.zeros(system.shape)
    for s in range(system.shape[1]):
        load = system.tier_load(association, s)
        rho = model.utilisation(load)
        ceiling = 1.0 - spare / load.concurrency
        if rho <= ceiling:
            result[:, s] = model.mean(load)
            continue
        edge = model.mean(load.scaled(ceiling / rho))
        more = overload_growth(system, model, s, spare) * (rho - ceiling)
        result[:, s] = edge * (1.0 + more / float(load.weights @ edge))
    return result


def unsettled_reason(system: System, caused: np.ndarray, advertised: np.ndarray) -> str:
    """What is left open where a search did not settle: which wait, by how much, and why."""
    off = np.where(np.isfinite(caused), np.abs(caused - advertised), np.inf)
    off[:, system.density <= 0] = 0.0
    q, s = np.unravel_index(int(np.argmax(off)), off.shape)
    text = (
        f"a node of {system.names[s]} advertises a mean wait of {advertised[q, s]:.6g} s and "
        f"causes one of {caused[q, s]:.6g} s"
    )
    near = float(system.radio.delay(np.array(1.0 / np.sqrt(np.pi * system.node_density))))
    scale = float(system.residual[:, system.density > 0].max())
    if near < _SHORT * scale:
        text += (
            f"; a radio delay of {near:.2g} s beside prefills of up to {scale:.2g} s makes the "
            "choice between tiers of equal cost jump"
        )
    return text


def overload_reason(
    system: System,
    policy: Policy,
    loads: tuple[TierLoad, ...],
    rho: np.ndarray,
    settled: bool = True,
) -> str:
    """Which tiers cannot serve what they get, and by how much (Theory D1-D3).

    A search that did not settle has found no stable point; that there is none would be more.
    """
    parts = [
        f"{system.names[s]} has utilisation {rho[s]:.4g}: {loads[s].arrival_rate:.4g} requests/s "
        f"per node where it can serve {loads[s].arrival_rate / rho[s]:.4g}"
        for s in np.argsort(-rho, kind="stable")
        if rho[s] >= 1
    ]
    text = "; ".join(parts)
    if policy.load_aware:
        found = "" if settled else " was found, and the search did not settle"
        text = f"no stable operating point{found}: {text}"
    if system.capacity_margin < 0:
        text += (
            f"; no routing can help: the least demand is {system.least_demand:.4g} busy servers "
            f"per km², the capacity {system.capacity:.4g}"
        )
    return text
