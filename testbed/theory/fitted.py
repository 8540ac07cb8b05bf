"""Fitted: the operating point of any delay model by curves fitted to it (Theory D1, H2, H3)."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad
from testbed.theory.delay.search_model import search_model
from testbed.theory.geometry import associate
from testbed.theory.overload import overload_growth, penalised_means
from testbed.theory.search import SPARE_SERVERS, Curve, Search, relative_change
from testbed.theory.system import System

_DIFFERENCE = 1e-4
"""Relative step in the load at which a delay model's slope is taken."""
_LARGEST_LOG = 460.0


def fitted_waits(
    search: Search, damping: float, start: np.ndarray | None
) -> tuple[np.ndarray, bool]:
    """The same for any delay model: its wait curves are fitted at the loads, solved, refitted.

    A fit ω = m·ρ^k/(1 − ρ) meets the model's mean and slope at the present load, so the refitting
    converges like Newton's method in the load; what the mix does to the wait enters with the next
    fit, damped by η when the change grows.
    """
    system, policy = search.system, search.policy
    model = Remembered(search_model(search.model))
    wait = np.zeros(system.shape) if start is None else start.copy()
    wait[:, system.density <= 0] = 0.0
    level = np.zeros(system.shape[1])
    converged = False
    for spare in SPARE_SERVERS:
        ceiling = 1.0 - spare / system.concurrency
        old: Curve | None = None
        growth: np.ndarray | None = None
        last, grew = np.inf, False
        association = associate(system, policy.fixed_cost(system.residual, wait))
        while search.used < len(search.history):
            curve = _fit(system, model, association, ceiling, growth)
            if old is not None:
                curve = _blend(old, curve, damping if grew else 1.0)
            old = curve
            if not search.settle(level, spare, curve):
                break
            before, wait = wait, curve.share * level
            association = associate(system, policy.fixed_cost(system.residual, wait))
            if growth is None and (search.utilisation > ceiling).any():
                # The slope of the straight line costs evaluations beside saturation, where a
                # model is slowest: it is asked for only where a tier is on that line.
                growth = np.array(
                    [overload_growth(system, model, s, spare) for s in range(system.shape[1])]
                )
                old = None
                continue
            target = penalised_means(system, model, association, spare)
            change = relative_change(target, wait, search.floor)
            grew, last = change > last, change
            moved = relative_change(before, wait, search.floor)
            converged = min(change, moved) < search.tolerance
            if converged:
                break
        if not converged or search.conclusive(spare):
            break
    return wait, converged


class Remembered(DelayModel):
    """A delay model whose mean is asked for once at each load: a fit's load is the last target's,
    and models that follow every step of an engine take seconds."""

    def __init__(self, model: DelayModel) -> None:
        self.model = model
        self.name = model.name
        self._means: dict[tuple[str, float, bytes], np.ndarray] = {}

    def utilisation(self, load: TierLoad) -> float:
        return self.model.utilisation(load)

    def excess(self, load: TierLoad) -> ExcessDelay:
        return self.model.excess(load)

    def mean(self, load: TierLoad) -> np.ndarray:
        key = (load.profile, load.arrival_rate, load.weights.tobytes())
        if key not in self._means:
            self._means[key] = self.model.mean(load)
        return self._means[key]


def _fit(
    system: System,
    model: DelayModel,
    association: np.ndarray,
    ceiling: np.ndarray,
    growth: np.ndarray | None,
) -> Curve:
    """Curves through the model's mean and slope at each tier's load; ``ceiling`` (S,)."""
    types, tiers = system.shape
    share = np.ones((types, tiers))
    burden = system.occupancy / system.concurrency
    exponent = np.ones(tiers)
    unit = np.zeros(tiers)
    for s in range(tiers):
        load = system.tier_load(association, s)
        if load.arrival_rate <= 0:
            load = replace(load, arrival_rate=1.0)
        rho = model.utilisation(load)
        if rho <= 0:
            continue
        if load.offered_load > 0:
            burden[:, s] *= rho / (load.offered_load / load.concurrency)
        at = min(max(rho, 1e-3), float(ceiling[s]))
        here = model.mean(load if at == rho else load.scaled(at / rho))
        before = model.mean(load.scaled(at / rho * (1.0 - _DIFFERENCE)))
        mean, mean_before = float(load.weights @ here), float(load.weights @ before)
        if mean <= 0:
            continue
        share[:, s] = here / mean
        if mean_before > 0:
            steepness = np.log(mean / mean_before) / -np.log1p(-_DIFFERENCE)
            # A wait that vanishes like ρ^k is fitted with a k that its unit can still hold.
            most = _LARGEST_LOG / max(-np.log(at), 1e-300)
            exponent[s] = min(max(steepness - at / (1.0 - at), 0.0), most)
        unit[s] = mean * (1.0 - at) * at ** -exponent[s]
    if growth is None:
        growth = np.maximum(unit * ceiling**exponent / (1.0 - ceiling) ** 2, 1e-300)
    return Curve(share, burden, exponent, unit, growth)


def _blend(old: Curve, new: Curve, part: float) -> Curve:
    def mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return (1.0 - part) * a + part * b

    return Curve(*(mix(getattr(old, f.name), getattr(new, f.name)) for f in fields(Curve)))
