"""Fits: non-negative least squares on relative errors, with bootstrap errors and held-out tests.

Times span three decades, so every fit minimises Σ ((model − t)/t)²: a millisecond counts as much
at 8 ms as ten do at 80. Coefficients are times of work that is done or not done, hence ≥ 0.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from calibration.record import FitReport, PrefillFit, PrefillPoint
from testbed.errors import CalibrationError
from testbed.scenario import Prefill

PREFILL_TERMS = ("overhead", "linear", "quadratic", "context")
PREFILL_FORMS = {
    "baseline": ("linear", "quadratic"),
    "overhead": ("overhead", "linear", "quadratic"),
    "context": ("overhead", "linear", "quadratic", "context"),
}
"""Theory A8, with an overhead, and with context (Theory H1)."""

BOOTSTRAP = 400
OUTLIER_DEVIATIONS = 5.0
_TO_SIGMA = 1.4826
"""Median absolute deviation to standard deviation, for a normal sample."""
_MEDIAN_PENALTY = math.sqrt(math.pi / 2)
"""Standard error of a median over that of a mean, for a normal sample."""


def relative_nnls(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Coefficients ≥ 0, shape (K,), minimising relative squared error.

    ``columns`` has shape (N, K), ``seconds`` shape (N,) and is positive. Columns are scaled to
    unit length first, so that units do not matter; a column of zeros gets 0.
    """
    scaled = columns / seconds[:, None]
    length = np.sqrt((scaled**2).sum(axis=0))
    length[length == 0] = 1.0
    solution, _ = nnls(scaled / length, np.ones(len(seconds)))
    return solution / length


def robust_nnls(
    columns: np.ndarray, seconds: np.ndarray, *, tuning: float = 1.5, rounds: int = 12
) -> tuple[np.ndarray, np.ndarray]:
    """Like :func:`relative_nnls` with Huber weights: (coefficients (K,), weights (N,)).

    A residual beyond ``tuning`` robust deviations pulls as if it stood there. A step that another
    process interrupted thus keeps its sign but not its size.
    """
    weights = np.ones(len(seconds))
    solution = relative_nnls(columns, seconds)
    for _ in range(rounds):
        residual = columns @ solution / seconds - 1.0
        scale = max(_TO_SIGMA * float(np.median(np.abs(residual))), 1e-9)
        fresh = np.minimum(1.0, tuning * scale / np.maximum(np.abs(residual), 1e-300))
        settled = float(np.abs(fresh - weights).max()) < 1e-3
        weights = fresh
        root = np.sqrt(weights)
        scaled = columns * (root / seconds)[:, None]
        length = np.sqrt((scaled**2).sum(axis=0))
        length[length == 0] = 1.0
        solution = nnls(scaled / length, root)[0] / length
        if settled:
            break
    return solution, weights


def summarise(new: int, cached: int, seconds: Sequence[float]) -> PrefillPoint:
    """A grid point: the median, its error, and how many samples lie far from it."""
    times = np.asarray(seconds, dtype=float)
    median = float(np.median(times))
    deviation = _TO_SIGMA * float(np.median(np.abs(times - median)))
    error = None
    if len(times) >= 3:
        error = _MEDIAN_PENALTY * deviation / math.sqrt(len(times))
    far = np.abs(times - median) > OUTLIER_DEVIATIONS * deviation if deviation > 0 else times < 0
    return PrefillPoint(
        new=new,
        cached=cached,
        seconds=tuple(float(t) for t in times),
        median=median,
        standard_error=error,
        outliers=int(far.sum()),
    )


def is_tight(seconds: Sequence[float], relative: float, least: int = 3) -> bool:
    """Whether the 95 % interval of the median is within ± ``relative``."""
    if len(seconds) < least:
        return False
    point = summarise(1, 0, seconds)
    return 1.96 * (point.standard_error or 0.0) <= relative * point.median


def prefill_columns(new: np.ndarray, cached: np.ndarray) -> np.ndarray:
    """Columns of overhead, linear, quadratic and context (Theory H1), shape (N, 4)."""
    return np.stack([np.ones_like(new), new, new**2, new * cached], axis=1)


def fit_prefill(
    points: Sequence[PrefillPoint],
    rounds: Sequence[dict[int, float]] = (),
    *,
    seed: int = 0,
    movement: float = 0.0,
) -> PrefillFit:
    """g(n | h) (Theory A8, H1) from the medians of a grid.

    Every form of :data:`PREFILL_FORMS` and a monotone piecewise-linear one are fitted; the form
    of :class:`testbed.scenario.Prefill` with the least leave-one-point-out error is chosen.
    Standard errors come from a bootstrap over grid points and, where given, over rounds.

    Parameters
    ----------
    rounds
        One mapping of point index to seconds for each pass over the grid: passes are minutes
        apart, so resampling them whole carries the machine's drift into the errors.
    movement
        By how much the machine's speed moved from pass to pass (standard deviation, a share): a
        run at another moment finds another level, which resampling one run cannot show.

    Raises
    ------
    CalibrationError
        Fewer than 3 points.
    """
    if len(points) < 3:
        raise CalibrationError(f"prefill: {len(points)} points are too few to fit")
    new = np.array([p.new for p in points], dtype=float)
    cached = np.array([p.cached for p in points], dtype=float)
    seconds = np.array([p.median for p in points])
    full = prefill_columns(new, cached)
    reports, forms = [], {}
    for name, terms in PREFILL_FORMS.items():
        if len(terms) >= len(points):
            continue
        which = [PREFILL_TERMS.index(t) for t in terms]
        solution = relative_nnls(full[:, which], seconds)
        coefficients = dict.fromkeys(PREFILL_TERMS, 0.0)
        coefficients.update(zip(terms, map(float, solution), strict=True))
        forms[name] = (which, coefficients)
        reports.append(_report(name, full[:, which], seconds, solution, terms))
    reports.append(_piecewise(new, cached, seconds))
    best = min(reports[:-1], key=lambda r: r.held_out_error or math.inf)
    which, coefficients = forms[best.name]
    errors = _bootstrap(full[:, which], points, rounds, seed)
    named = {}
    if errors is not None:
        named = {
            PREFILL_TERMS[i]: math.hypot(e, movement * coefficients[PREFILL_TERMS[i]])
            for i, e in zip(which, errors, strict=True)
        }
    return PrefillFit(
        coefficients=Prefill(**coefficients),
        standard_errors=named,
        relative_error=best.held_out_error,
        alternatives=tuple(reports),
    )


def _report(
    name: str,
    columns: np.ndarray,
    seconds: np.ndarray,
    solution: np.ndarray,
    terms: Sequence[str],
) -> FitReport:
    return FitReport(
        name=name,
        points=len(seconds),
        relative_error=_rms(columns @ solution / seconds - 1.0),
        held_out_error=_rms(_left_out(columns, seconds)),
        coefficients=dict(zip(terms, map(float, solution), strict=True)),
    )


def _left_out(columns: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Relative residual of each point under the fit to all the others."""
    residual = np.empty(len(seconds))
    for i in range(len(seconds)):
        keep = np.arange(len(seconds)) != i
        residual[i] = columns[i] @ relative_nnls(columns[keep], seconds[keep]) / seconds[i] - 1.0
    return residual


def _piecewise(new: np.ndarray, cached: np.ndarray, seconds: np.ndarray) -> FitReport:
    """Monotone in n: a slope ≥ 0 between each pair of knots, and the context term."""
    cold = np.unique(new[cached == 0]) if (cached == 0).any() else np.unique(new)
    knots = np.unique(np.r_[0.0, cold])
    ramps = [np.clip(new - a, 0.0, b - a) for a, b in itertools.pairwise(knots)]
    beyond = np.clip(new - knots[-1], 0.0, None)
    columns = np.stack([np.ones_like(new), *ramps, beyond, new * cached], axis=1)
    solution = relative_nnls(columns, seconds)
    terms = ["overhead", *(f"slope_to_{int(b)}" for b in knots[1:]), "slope_beyond", "context"]
    return _report("piecewise", columns, seconds, solution, terms)


def _bootstrap(
    columns: np.ndarray,
    points: Sequence[PrefillPoint],
    rounds: Sequence[dict[int, float]],
    seed: int,
) -> np.ndarray | None:
    """Standard errors, shape (K,); None where the points are too few to resample."""
    draw = np.random.default_rng(np.random.SeedSequence([seed, 17]))
    medians = np.array([p.median for p in points])
    table = np.full((len(rounds), len(points)), np.nan)
    for r, passed in enumerate(rounds):
        for i, value in passed.items():
            table[r, i] = value
    solutions = []
    for _ in range(BOOTSTRAP):
        seconds = medians
        if len(rounds) >= 3:
            picked = table[draw.integers(0, len(rounds), len(rounds))]
            seen = ~np.isnan(picked).all(axis=0)
            seconds = medians.copy()
            seconds[seen] = np.nanmedian(picked[:, seen], axis=0)
        rows = draw.integers(0, len(points), len(points))
        if len(np.unique(rows)) < columns.shape[1]:
            continue
        solutions.append(relative_nnls(columns[rows], seconds[rows]))
    if len(solutions) < BOOTSTRAP // 4:
        return None
    return np.std(np.array(solutions), axis=0, ddof=1)


def _rms(residual: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(residual))))
