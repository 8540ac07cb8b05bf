"""Newton's method for the operating point, compiled (Theory D1).

A tier's wait is a *level* ω_s, seconds, of a curve of its utilisation:

    W̄_qs = share_qs·ω_s,   ω_s = m_s·f_s(ρ_s),

with f the Erlang-C curve C/(c − a) and m_s the mean service time of the mix that arrives, or,
for any other delay model, a local fit of it: f = ρ^k/(1 − ρ) and a constant m_s
(`operating_point`).

The equation that is solved is not ω = ω(A(ω)), whose residual explodes beside ρ = 1, but

    ρ_s(ω) = R_s(ω_s/m_s),   R = f⁻¹:

the utilisation that a tier gets against the one that its wait stands for. It stays of order 1 at
an overloaded iterate, so Newton's method can start there. Its derivative is exact:
∂A_s/∂K_t = ∫ v_s' v_t' e^−v dy for t ≠ s, rows summing to 0 (Theory C3 differentiated). A step
is measured along both axes of the wait curve, as ρ̂ where nobody waits and as ω where somebody
does, and is shortened until the residual falls.
"""

from __future__ import annotations

import numba
import numpy as np

from testbed.theory.geometry import association_response
from testbed.theory.wait_curve import advance, penalised_level, supported, wait_curve

_BACKTRACK = 0.5


@numba.njit(cache=True)
def _demand(
    level: np.ndarray,
    flow: np.ndarray,
    fixed: np.ndarray,
    share: np.ndarray,
    burden: np.ndarray,
    area: np.ndarray,
    power: float,
    rate: np.ndarray,
    rho: np.ndarray,
    rate_response: np.ndarray,
    rho_response: np.ndarray,
) -> None:
    """Fill requests/s and utilisation per node (S,) and their derivatives by ω (S, S)."""
    types, tiers = fixed.shape
    costs = np.empty(tiers)
    part = np.empty(tiers)
    response = np.empty((tiers, tiers))
    for s in range(tiers):
        rate[s] = 0.0
        rho[s] = 0.0
        for t in range(tiers):
            rate_response[s, t] = 0.0
            rho_response[s, t] = 0.0
    for q in range(types):
        for s in range(tiers):
            costs[s] = fixed[q, s] + share[q, s] * level[s]
        association_response(costs, area, power, part, response)
        for s in range(tiers):
            each = flow[q, s]
            rate[s] += each * part[s]
            rho[s] += each * part[s] * burden[q, s]
            for t in range(tiers):
                d = each * response[s, t] * share[q, t]
                rate_response[s, t] += d
                rho_response[s, t] += d * burden[q, s]


@numba.njit(cache=True)
def _solve(matrix: np.ndarray, right: np.ndarray, answer: np.ndarray) -> None:
    """Gaussian elimination with row pivoting, in place.

    The systems are tiny and their rows span many decades; LAPACK's solver costs seconds to
    compile in and raises where this one leaves a direction alone.
    """
    size = right.size
    for i in range(size):
        pivot = i
        for k in range(i + 1, size):
            if abs(matrix[k, i]) > abs(matrix[pivot, i]):
                pivot = k
        if pivot != i:
            for j in range(i, size):
                matrix[i, j], matrix[pivot, j] = matrix[pivot, j], matrix[i, j]
            right[i], right[pivot] = right[pivot], right[i]
        if matrix[i, i] == 0.0:
            continue
        for k in range(i + 1, size):
            factor = matrix[k, i] / matrix[i, i]
            if factor != 0.0:
                for j in range(i + 1, size):
                    matrix[k, j] -= factor * matrix[i, j]
                right[k] -= factor * right[i]
    for i in range(size - 1, -1, -1):
        total = right[i]
        for j in range(i + 1, size):
            total -= matrix[i, j] * answer[j]
        answer[i] = total / matrix[i, i] if matrix[i, i] != 0.0 else 0.0


@numba.njit(cache=True)
def newton(
    flow: np.ndarray,
    fixed: np.ndarray,
    share: np.ndarray,
    burden: np.ndarray,
    servers: np.ndarray,
    exponent: np.ndarray,
    unit: np.ndarray,
    growth: np.ndarray,
    area: np.ndarray,
    power: float,
    spare: float,
    level: np.ndarray,
    floor: float,
    arc: float,
    tolerance: float,
    rho: np.ndarray,
    history: np.ndarray,
) -> tuple[int, bool]:
    """Bring the levels ω (S,), seconds, to the operating point, in place.

    Parameters
    ----------
    flow : (Q, S) λ_req p_q/λ_s, requests/s that a node would get if its tier took the whole type;
        0 at a tier without nodes
    fixed : (Q, S) the cost without the wait, s
    share : (Q, S) cost of a unit of ω
    burden : (Q, S) utilisation of a node per request/s of type q (S_sq/c_s in Theory B)
    servers, exponent : (S,) c_s, and the curve: −1 for Erlang-C, else k
    unit : (S,) m_s of the curves that are not Erlang-C's, s
    growth : (S,) s of ω per unit of utilisation above the ceiling
    area, power : the geometry's π λ_s ξ^(−2/α) and 2/α
    spare : free servers below which the wait is a straight line: ceiling = 1 − spare/c
    floor : s; waits are compared relative to at least this
    arc : s of wait that weigh like a whole utilisation in the measure of a step
    rho : (S,), filled with the utilisation that the last iterate gave
    history : (most iterations, S), filled with ω of each iterate, s

    Returns
    -------
    iterations (evaluations of the association), and whether the largest relative change of ω, or
    of a Newton step, fell below ``tolerance``
    """
    types, tiers = fixed.shape
    typical = unit.copy()
    used = np.zeros(tiers, np.bool_)
    for s in range(tiers):
        total = 0.0
        work = 0.0
        for q in range(types):
            total += flow[q, s]
            work += flow[q, s] * burden[q, s]
        used[s] = work > 0.0
        if used[s] and exponent[s] < 0.0:
            typical[s] = servers[s] * work / total
    service = typical.copy()
    rate = np.zeros(tiers)
    rate_response = np.zeros((tiers, tiers))
    rho_response = np.zeros((tiers, tiers))
    matrix = np.zeros((tiers, tiers))
    right = np.zeros(tiers)
    expected = np.zeros(tiers)
    gradient = np.zeros(tiers)
    base = np.zeros(tiers)
    base_expected = np.zeros(tiers)
    base_service = np.ones(tiers)
    rise = np.zeros(tiers)
    climb = np.zeros(tiers)
    shift = np.zeros(tiers)
    ceiling = np.empty(tiers)
    for s in range(tiers):
        ceiling[s] = 1.0 - spare / servers[s]
    merit = np.inf
    part = 0.0
    for iteration in range(history.shape[0]):
        longest = 0.0
        for s in range(tiers):
            history[iteration, s] = level[s]
            longest = max(longest, level[s])
        _demand(
            level, flow, fixed, share, burden, area, power,
            rate, rho, rate_response, rho_response,
        )  # fmt: skip
        change = 0.0
        worst = 0.0
        for s in range(tiers):
            if not used[s]:
                continue
            if exponent[s] < 0.0:
                # A tier that an overshoot has emptied keeps the mean of all requests.
                service[s] = servers[s] * rho[s] / rate[s] if rho[s] > 0.0 else typical[s]
            target, slope = penalised_level(
                servers[s], exponent[s], service[s], growth[s], rho[s], ceiling[s]
            )
            miss = abs(target - level[s]) / max(target, level[s], floor)
            change = max(change, miss)
            if miss < tolerance:
                # Waits too short to tell apart (or below the smallest number) stand for this ρ.
                expected[s] = rho[s]
                gradient[s] = slope
            else:
                expected[s], gradient[s] = supported(
                    servers[s], exponent[s], service[s], growth[s], level[s], ceiling[s],
                    expected[s],
                )  # fmt: skip
            worst = max(worst, abs(rho[s] - expected[s]))
        if change < tolerance:
            return iteration + 1, True

        if worst < (1.0 - 1e-4 * part) * merit or part < 1e-12:
            merit = worst
            for s in range(tiers):
                base[s] = level[s]
                base_expected[s] = expected[s]
                base_service[s] = service[s]
                right[s] = 0.0
                for t in range(tiers):
                    matrix[s, t] = 0.0
                matrix[s, s] = 1.0
                if not used[s]:
                    continue
                # dω = ∂ω/∂ρ·dρ̂ + f·dm with dρ̂ = (ρ − ρ̂) + ∂ρ/∂ω·dω and m = c ρ/rate; f is
                # that of the ceiling where ω is past it.
                right[s] = gradient[s] * (rho[s] - expected[s])
                for t in range(tiers):
                    matrix[s, t] -= gradient[s] * rho_response[s, t]
                if exponent[s] < 0.0 and rho[s] > 0.0:
                    scaled = min(expected[s], ceiling[s])
                    by_mean = service[s] * wait_curve(servers[s], exponent[s], scaled)[0]
                    for t in range(tiers):
                        drift = rho_response[s, t] / rho[s] - rate_response[s, t] / rate[s]
                        matrix[s, t] -= by_mean * drift
            _solve(matrix, right, rise)
            size = 0.0
            for s in range(tiers):
                if used[s]:
                    climb[s] = rho[s] - expected[s]
                    shift[s] = 0.0
                    for t in range(tiers):
                        climb[s] += rho_response[s, t] * rise[t]
                        if exponent[s] < 0.0 and rho[s] > 0.0:
                            drift = rho_response[s, t] / rho[s] - rate_response[s, t] / rate[s]
                            shift[s] += service[s] * drift * rise[t]
                    if level[s] <= floor:
                        size = max(size, abs(climb[s]))
                    # Long waits differ by no less than their own rounding.
                    if abs(rise[s]) > 1e-14 * longest:
                        size = max(size, abs(rise[s]) / max(level[s], floor))
            if size < tolerance:
                for s in range(tiers):
                    level[s] = max(level[s] + rise[s], 0.0)
                return iteration + 1, True
            part = min(1.0, 4.0 * part) if iteration > 0 else 1.0
        else:
            part *= _BACKTRACK
        for s in range(tiers):
            if used[s]:
                x = base_expected[s] + base[s] / arc + part * (climb[s] + rise[s] / arc)
                # The mean service moves with the mix; the place is taken on the moved curve.
                mean = max(base_service[s] + part * shift[s], 0.1 * base_service[s])
                place = advance(servers[s], exponent[s], mean, growth[s], arc, x, ceiling[s])
                level[s] = penalised_level(
                    servers[s], exponent[s], mean, growth[s], place, ceiling[s]
                )[0]
    return history.shape[0], False
