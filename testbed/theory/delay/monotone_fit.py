"""MonotoneFit: least squares whose coefficients keep an order.

    minimise ½|A θ − b|² + ½ r|D θ|²    subject to    G θ > 0,

each row of G the difference of two coefficients. Solved from inside by the logarithmic barrier
and Newton's method, so that the order holds strictly for what comes out.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse import csr_matrix

_GAP = 1e-7
"""Most by which the objective may be above its least, relative to its value there."""
_SHRINK = 0.1
_STEPS = 200
_JITTER = 1e-12


def differences(shape: tuple[int, ...], axis: int, order: int = 1) -> csr_matrix:
    """Differences of coefficients of ``shape`` (C order) along an axis, (rows, coefficients)."""
    index = np.arange(int(np.prod(shape))).reshape(shape)
    stencil = np.array([1.0])
    for _ in range(order):
        stencil = np.convolve(stencil, [1.0, -1.0])
    length = shape[axis] - order
    if length <= 0:
        return csr_matrix((0, index.size))
    parts = [np.take(index, np.arange(k, k + length), axis=axis).ravel() for k in range(order + 1)]
    rows = np.tile(np.arange(parts[0].size), order + 1)
    values = np.repeat(stencil[::-1], parts[0].size)
    return csr_matrix((values, (rows, np.concatenate(parts))), shape=(parts[0].size, index.size))


def ordered_least_squares(
    normal: np.ndarray, right: np.ndarray, order: csr_matrix, start: np.ndarray
) -> np.ndarray:
    """θ of least ½ θᵀNθ − rᵀθ with G θ > 0.

    Parameters
    ----------
    normal : (n, n) N, positive definite
    right : (n,) r
    order : (m, n) G
    start : (n,) with G θ > 0

    Raises
    ------
    ValueError
        ``start`` is not inside.
    """
    theta = start.astype(float).copy()
    slack = order @ theta
    if slack.size and slack.min() <= 0:
        raise ValueError("start: not strictly inside the constraints")

    def value(theta: np.ndarray) -> float:
        return float(0.5 * theta @ (normal @ theta) - right @ theta)

    free = _solve(normal, right)
    if not order.shape[0] or (order @ free).min() > 0:
        return np.asarray(free)
    scale = max(value(theta) - value(free), 1e-300)
    barrier = scale / order.shape[0]
    # With m constraints the barrier's point is above the least by at most m times its weight.
    while True:
        for _ in range(_STEPS):
            inverse = 1.0 / slack
            gradient = normal @ theta - right - barrier * (order.T @ inverse)
            weighted = order.multiply((barrier * inverse**2)[:, None]).tocsr()
            hessian = normal + (order.T @ weighted).toarray()
            step = -_solve(hessian, gradient)
            decrease = -float(gradient @ step)
            if decrease < 1e-3 * barrier:
                break
            move = order @ step
            falling = move < 0
            part = min(1.0, 0.99 * float((slack[falling] / -move[falling]).min(initial=np.inf)))
            curve, slope = float(step @ (normal @ step)), float((normal @ theta - right) @ step)
            while part > 1e-12:
                change = part * slope + 0.5 * part**2 * curve
                change -= barrier * float(np.log1p(part * move / slack).sum())
                if change <= -0.1 * part * decrease:
                    break
                part *= 0.5
            theta += part * step
            slack = order @ theta
        if barrier * order.shape[0] <= _GAP * max(abs(value(theta)), 1e-300):
            return theta
        barrier *= _SHRINK


def _solve(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """x with M x = r, M positive definite but for rounding: beside a bound the barrier's part of
    M is larger by far than the rest."""
    scale = 1.0 / np.sqrt(np.diag(matrix))
    unit = matrix * scale[:, None] * scale
    unit[np.diag_indices_from(unit)] += _JITTER
    return np.asarray(scale * cho_solve(cho_factor(unit), scale * right))
