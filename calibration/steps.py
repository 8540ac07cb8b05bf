"""Steps: the step-time formula regressed on the step log of the engine itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from calibration.fit import robust_nnls
from calibration.record import FitReport
from testbed.errors import CalibrationError
from testbed.step_time import COEFFICIENTS, StepTime

CONTIGUOUS = 1.5e-3
"""s between two steps beyond which the engine had run out of work between them."""
INTERRUPTED = 3.0
"""Times its expected seconds beyond which a step was held up by something else."""
BLOCK = 20
"""Consecutive steps resampled together: neighbours share the machine's speed."""
BOOTSTRAP = 200
FOLDS = 5
MOMENTS = 12
"""Parts of a log, in order of time, between which the machine's speed is seen to move."""
DECODE = ("c_dec", "e", "f")
"""Coefficients of steps that only decode; the others are those of steps with a prefill."""


@dataclass(frozen=True)
class Steps:
    """Rows ready for regression.

    ``columns`` (N, 9) in the order of :data:`COEFFICIENTS`; ``seconds`` (N,): from the start of a
    step to that of the next one while there is work, so that nothing between steps is lost;
    ``idle`` (N,): the engine had nothing to do before this step.
    """

    columns: np.ndarray
    seconds: np.ndarray
    idle: np.ndarray
    gap: float

    def __len__(self) -> int:
        return len(self.seconds)


def step_rows(
    log: Mapping[str, np.ndarray], windows: Iterable[tuple[int, int]] | None = None
) -> Steps:
    """Rows of a step log, of all of it or of the half-open ``windows`` of row numbers."""
    started, finished = log["started"], log["finished"]
    total = len(started)
    gap = np.empty(total)
    if total:
        gap[0] = np.inf
        gap[1:] = started[1:] - finished[:-1]
    after = np.r_[gap[1:], np.inf] if total else gap
    contiguous = (after >= 0) & (after < CONTIGUOUS)
    usual = float(np.median(after[contiguous])) if contiguous.any() else 0.0
    seconds = finished - started + np.where(contiguous, after, usual)
    prefill = log["prefills"] > 0
    decodes = log["decodes"] > 0
    columns = np.stack(
        [
            prefill.astype(float),
            np.where(prefill, log["prefills"] - 1.0, 0.0),
            (prefill & decodes).astype(float),
            log["new_tokens"],
            log["new_squared"],
            log["new_context"],
            (~prefill & decodes).astype(float),
            log["decodes"],
            log["decode_context"],
        ],
        axis=1,
    )
    keep = np.ones(total, dtype=bool) if windows is None else np.zeros(total, dtype=bool)
    for low, high in windows or ():
        keep[low:high] = True
    keep &= prefill | decodes
    # A negative gap marks another engine process: its clock may even have started anew.
    idle = ~((gap >= 0) & (gap < CONTIGUOUS))
    return Steps(columns[keep], seconds[keep], idle[keep], usual)


def fit_steps(rows: Steps, *, seed: int = 0) -> tuple[StepTime, FitReport]:
    """Step-time coefficients, their standard errors and the fit's relative error.

    What a step after idleness costs more is fitted beside the formula (``idle_start`` in the
    report): a busy engine does not pay it, and the formula has no place for it. Errors come from
    a bootstrap over blocks of consecutive steps, and from how the speed of steps with a prefill
    and of steps without one moved over the log (``movement_prefill``, ``movement_decode``):
    another run finds the machine at another moment. The held-out error leaves out every fifth
    block.

    Raises
    ------
    CalibrationError
        The log holds too few steps, or none of one kind.
    """
    if len(rows) < 5 * len(COEFFICIENTS):
        raise CalibrationError(f"step log: {len(rows)} steps are too few for a regression")
    columns = np.column_stack([rows.columns, rows.idle])
    names = (*COEFFICIENTS, "idle_start")
    solution, weights = robust_nnls(columns, rows.seconds)
    residual = columns @ solution / rows.seconds - 1.0
    blocks = np.arange(len(rows)) // BLOCK
    fold = blocks % FOLDS
    held = np.zeros(len(rows))
    for k in range(FOLDS):
        if (fold == k).all() or not (fold == k).any():
            continue
        part, _ = robust_nnls(columns[fold != k], rows.seconds[fold != k])
        held[fold == k] = columns[fold == k] @ part / rows.seconds[fold == k] - 1.0
    said = columns @ solution
    prefill = columns[:, COEFFICIENTS.index("c_pre")] > 0
    movement = {
        "prefill": movement_of(rows.seconds[prefill], said[prefill]),
        "decode": movement_of(rows.seconds[~prefill], said[~prefill]),
    }
    moved = np.array([movement["decode" if n in DECODE else "prefill"] for n in names])
    errors = np.hypot(_errors(columns, rows.seconds, blocks, seed), moved * solution)
    step = StepTime.from_vector(solution[: len(COEFFICIENTS)])
    seen = {n: float(s) for n, s in zip(names, solution, strict=True)}
    seen["outlier_share"] = float((weights < 0.3).mean())
    seen["time_weighted_bias"] = float((columns @ solution).sum() / rows.seconds.sum() - 1.0)
    seen["median_relative_error"] = float(np.median(np.abs(residual)))
    seen["gap"] = rows.gap
    seen |= {f"movement_{kind}": value for kind, value in movement.items()}
    return step, FitReport(
        name="step_time",
        points=len(rows),
        relative_error=float(np.sqrt(np.average(residual**2, weights=weights))),
        held_out_error=float(np.sqrt(np.average(held**2, weights=weights))),
        coefficients=seen,
        standard_errors={n: float(e) for n, e in zip(names, errors, strict=True)},
    )


def movement_of(seconds: np.ndarray, said: np.ndarray) -> float:
    """Standard deviation over :data:`MOMENTS` parts of the time that steps take against what is
    said of them, as a share; interruptions left out. 0 where the steps are too few to tell."""
    usual = seconds < INTERRUPTED * said
    seconds, said = seconds[usual], said[usual]
    if len(seconds) < 2 * MOMENTS:
        return 0.0
    parts = np.array_split(np.arange(len(seconds)), MOMENTS)
    return float(np.std([seconds[i].sum() / said[i].sum() for i in parts], ddof=1))


def relative_step_time(rows: Steps, step_time: StepTime) -> float | None:
    """Seconds of steps that follow another at once over what the step time says of them.

    1.03: they took 3 % longer. Steps that took thrice as long tell of an interruption, not of
    the engine's speed, and are left out.
    """
    busy = ~rows.idle
    if not busy.any():
        return None
    seconds = rows.seconds[busy]
    said = rows.columns[busy] @ step_time.vector()
    usual = seconds < INTERRUPTED * said
    return float(seconds[usual].sum() / said[usual].sum())


def _errors(columns: np.ndarray, seconds: np.ndarray, blocks: np.ndarray, seed: int) -> np.ndarray:
    draw = np.random.default_rng(np.random.SeedSequence([seed, 19]))
    members = [np.flatnonzero(blocks == b) for b in np.unique(blocks)]
    solutions = []
    for _ in range(BOOTSTRAP):
        picked = draw.integers(0, len(members), len(members))
        rows = np.concatenate([members[b] for b in picked])
        solutions.append(robust_nnls(columns[rows], seconds[rows], rounds=4)[0])
    return np.std(np.array(solutions), axis=0, ddof=1)
