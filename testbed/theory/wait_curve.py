"""WaitCurve: a tier's wait as a curve of its utilisation, and its inverse (Theory B, D1).

    ω = m·f(ρ), seconds: f the Erlang-C curve C/(c − a) with m the mean service time, or
    f = ρ^k/(1 − ρ) with a constant m, a local fit of any other delay model.

Above a ceiling just below ρ = 1 the curve goes on as a straight line.
"""

from __future__ import annotations

import math

import numba
import numpy as np

from testbed.theory.delay.erlang_c import scaled_wait


@numba.njit(cache=True)
def wait_curve(servers: int, exponent: float, rho: float) -> tuple[float, float]:
    """f(ρ) and df/dρ for ρ < 1: Erlang-C's W̄μ where ``exponent`` < 0, else ρ^k/(1 − ρ)."""
    if exponent < 0.0:
        return scaled_wait(servers, rho)
    if rho <= 0.0:
        return 0.0, 1.0 if exponent == 1.0 else 0.0
    value = rho**exponent / (1.0 - rho)
    return value, value * (exponent / rho + 1.0 / (1.0 - rho))


@numba.njit(cache=True)
def penalised_level(
    servers: int, exponent: float, service: float, growth: float, rho: float, ceiling: float
) -> tuple[float, float]:
    """ω = m·f(ρ) and dω/dρ for any ρ ≥ 0, seconds; above ``ceiling`` a line of slope ``growth``.

    The line keeps the wait of an overloaded tier finite and increasing (Theory D1). Its slope
    must not depend on the mix: such a penalty could have several answers.
    """
    if rho <= ceiling:
        value, slope = wait_curve(servers, exponent, rho)
        return service * value, service * slope
    at_ceiling, _ = wait_curve(servers, exponent, ceiling)
    return service * at_ceiling + growth * (rho - ceiling), growth


@numba.njit(cache=True)
def supported(
    servers: int,
    exponent: float,
    service: float,
    growth: float,
    level: float,
    ceiling: float,
    guess: float,
) -> tuple[float, float]:
    """R: the ρ̂ whose wait is ``level``, and dω/dρ there; the inverse of `penalised_level`.

    Newton's method on ln ω in y = −ln(1 − ρ), where it is close to a straight line, inside a
    bracket; ``guess`` is a utilisation to start from.
    """
    if level <= 0.0:
        return 0.0, service * wait_curve(servers, exponent, 0.0)[1]
    at_ceiling, _ = wait_curve(servers, exponent, ceiling)
    if level >= service * at_ceiling:
        return ceiling + (level - service * at_ceiling) / growth, growth
    low = 0.0
    high = -math.log1p(-ceiling)
    y = -math.log1p(-min(guess, ceiling))
    if not low < y < high:
        y = 0.5 * high
    slope = 0.0
    for _ in range(200):
        value, slope = wait_curve(servers, exponent, -math.expm1(-y))
        if service * value < level:
            low = y
        else:
            high = y
        step = np.inf
        if value > 0.0 and slope > 0.0:
            step = math.log(level / (service * value)) * value / (slope * math.exp(-y))
        if abs(step) <= 1e-15 * y or high - low <= 1e-15 * high:
            break
        y = y + step if low < y + step < high else 0.5 * (low + high)
    return -math.expm1(-y), service * slope


@numba.njit(cache=True)
def advance(
    servers: int,
    exponent: float,
    service: float,
    growth: float,
    arc: float,
    x: float,
    ceiling: float,
) -> float:
    """The ρ̂ at which ρ̂ + ω(ρ̂)/arc = ``x``: a place on the wait curve by distance along it."""
    if x <= 0.0:
        return 0.0
    edge = ceiling + service * wait_curve(servers, exponent, ceiling)[0] / arc
    if x >= edge:
        return ceiling + (x - edge) / (1.0 + growth / arc)
    low = 0.0
    high = min(x, ceiling)
    rho = high
    for _ in range(200):
        value, slope = wait_curve(servers, exponent, rho)
        miss = x - rho - service * value / arc
        if miss < 0.0:
            high = rho
        else:
            low = rho
        step = miss / (1.0 + service * slope / arc)
        if abs(step) <= 1e-15 * (1.0 - rho) or high - low <= 1e-16:
            break
        rho += step
        if not low < rho < high:
            # The bracket may span many decades of the gap 1 − ρ: halve its logarithm.
            rho = 1.0 - math.sqrt((1.0 - low) * (1.0 - high))
    return rho
