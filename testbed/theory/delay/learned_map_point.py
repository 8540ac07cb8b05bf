"""LoadPoint: where a node's load lies on fitted surfaces, with exact derivatives (Theory H3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.theory.delay.learned_map_file import LearnedProfile


@dataclass(frozen=True)
class LoadSlopes:
    """Derivatives by (λ, w_1 … w_Q, slots), P = 2 + Q of them.

    Attributes
    ----------
    rho, log_scale : (P,)
    coefficients : (Q, J, P)
    """

    rho: np.ndarray
    log_scale: np.ndarray
    coefficients: np.ndarray


@dataclass(frozen=True)
class LoadPoint:
    """A load's place.

    Attributes
    ----------
    rho : λ over capacity
    log_scale : ln of the seconds that a unit of the delay axis stands for
    coefficients : (Q, J) of the delay axis
    slopes : of all three, where they were asked for
    """

    rho: float
    log_scale: float
    coefficients: np.ndarray
    slopes: LoadSlopes | None = None


def stretch(rho: float, most: float) -> tuple[float, float]:
    """ln((1 − ρ_most)/(1 − ρ)) beyond the largest load that was fitted, and its slope; else 0."""
    if rho <= most:
        return 0.0, 0.0
    spare = 1.0 - min(rho, 1.0 - 1e-12)
    return float(np.log((1.0 - most) / spare)), 1.0 / spare


def capacity_seconds(profile: LearnedProfile, weights: np.ndarray, slots: float) -> float:
    """1/C, s a request of the mix (Q,)."""
    basis = profile.slots_axis.basis(np.log2(slots))
    return float(basis @ profile.seconds_table @ profile.mix.values(weights))


def locate(
    profile: LearnedProfile,
    rate: float,
    weights: np.ndarray,
    slots: float,
    *,
    slopes: bool = False,
) -> LoadPoint:
    """The place of a load λ > 0 of a mix (Q,), types in the profile's order."""
    surface, place = profile.surface, np.log2(slots)
    mix, of_slots = profile.mix.values(weights), profile.slots_axis.basis(place)
    seconds = float(of_slots @ profile.seconds_table @ mix)
    rho = rate * seconds
    inside = min(max(rho, profile.least_load), profile.most_load)
    further, further_slope = stretch(rho, profile.most_load)
    prefill = np.array(profile.prefill_seconds)
    demand = float(weights @ prefill)
    v = np.asarray(np.log(min(rho, profile.most_load) / seconds * demand))
    low = surface.demand.knots[0]

    u = np.asarray(np.log(inside / (1.0 - inside)))
    # (Q, J, U, K, M) · mix -> (Q, J, U, K); what is left is small.
    mixed = surface.main_table @ mix
    here = mixed @ of_slots
    shift_mixed = surface.shift_table @ mix
    shift = shift_mixed @ surface.demand.basis(v) + min(float(v) - low, 0.0)
    coefficients = here @ surface.load.basis(u) + shift[:, None]
    log_scale = further + float(np.log(surface.unit))
    if not slopes:
        return LoadPoint(rho, log_scale, coefficients)

    parameters = weights.size + 2
    mix_slopes = profile.mix.slopes(weights)
    by_slots = profile.slots_axis.slope(place) / (slots * np.log(2.0))
    by_seconds = np.zeros(parameters)
    by_seconds[1:-1] = of_slots @ profile.seconds_table @ mix_slopes
    by_seconds[-1] = by_slots @ profile.seconds_table @ mix
    by_rho = rate * by_seconds
    by_rho[0] += seconds
    by_u = by_rho / (inside * (1.0 - inside)) if inside == rho else np.zeros(parameters)
    if rho > profile.most_load:
        by_v = -by_seconds / seconds
    else:
        by_v = np.zeros(parameters)
        by_v[0] = 1.0 / rate
    by_v[1:-1] += prefill / demand

    load = surface.load.basis(u)
    by = (here @ surface.load.slope(u))[..., None] * by_u
    by[..., -1] += (mixed @ by_slots) @ load
    along = np.einsum("qjukm,u,k->qjm", surface.main_table, load, of_slots)
    by[..., 1:-1] += along @ mix_slopes
    by_shift = (shift_mixed @ surface.demand.slope(v) + float(v < low))[:, None] * by_v
    by_shift[:, 1:-1] += (
        np.einsum("qvm,v->qm", surface.shift_table, surface.demand.basis(v)) @ mix_slopes
    )
    return LoadPoint(
        rho,
        log_scale,
        coefficients,
        LoadSlopes(by_rho, further_slope * by_rho, by + by_shift[:, None, :]),
    )
