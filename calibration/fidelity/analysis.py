"""Analysis: the error of each prediction of a measured cell, its noise, and what causes it.

With M measured, S simulated on the same arrivals and L simulated at length, the engine's
stationary figure is estimated as M·L/S: the chance of this sample leaves with the simulator as
control variate. The error of a model P is then P·S/(M·L) − 1, and that of the simulator S/M − 1.
Noise comes from resampling blocks of consecutive requests of M and S together, and from the long
run's own standard error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from calibration.fidelity.prediction import FIGURES, counted, figures_of

GOAL = 0.05
"""Relative error that a prediction claims to keep."""
Z = 1.96
BOOTSTRAP = 400
BLOCKS = 20
"""Blocks of consecutive requests that are resampled whole."""
EXPLAINS = 0.5
"""A cause is named when it takes away at least this share of the (log) error."""
SIMULATOR = "simulator"
CAUSE_NOT_FOUND = "cause not found"
GROUNDS = {
    "simulator_without_lookahead": "what scheduling ahead adds",
    "simulator_with_steady_waits": "routing by steady waits, not by what nodes told last",
}
"""Simulations of a prediction without one thing, and what a model does not know that meets them."""


@dataclass(frozen=True)
class Error:
    """One prediction's error at one figure, as shares; ``noise`` is the 95 % half-width."""

    error: float | None
    noise: float | None
    verdict: str
    cause: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Trial:
    """One changed simulation of the measured arrivals, to see whether it explains the error.

    ``ttft`` (N,) s, comparable with the plain simulation's.
    """

    cause: str
    ttft: np.ndarray


def analyse(
    prediction: dict[str, Any],
    measured: np.ndarray,
    simulated: np.ndarray,
    trials: list[Trial],
    *,
    overhead: float,
    seed: int,
    jitter: np.ndarray | None = None,
) -> dict[str, Any]:
    """Errors of all predictions of a cell.

    Parameters
    ----------
    measured, simulated : (N,) TTFT of the same requests, s, from the intended send;
        ``simulated`` carries the overhead already
    overhead : s that the way to the engine and back takes, as calibrated before the cell
    jitter : (4,) standard deviations of ln S by what nobody chooses, where there is such a thing

    Returns
    -------
    ``figures`` measured, simulated and the stationary estimate, (4,) s; ``noise`` (4,) shares;
    ``errors`` {prediction: {figure: Error}}.
    """
    keep = counted(len(measured))
    m, s = figures_of(measured[keep]), figures_of(simulated[keep])
    long = np.array(prediction["simulator"]["figures"]) + overhead
    spread = np.array(prediction["simulator"]["standard_errors"]) / long
    paired, alone = resampled_noise(measured[keep], simulated[keep], seed)
    if jitter is not None:
        paired = np.hypot(paired, jitter)
    noise = Z * np.hypot(paired, spread)
    offset = np.log(s / m)
    stationary = m * long / s
    changed = [(t.cause, np.log(figures_of(t.ttft[keep]) / m)) for t in trials]
    errors: dict[str, dict[str, Any]] = {
        SIMULATOR: {
            name: _judged(
                float(s[k] / m[k] - 1.0),
                float(Z * paired[k]),
                lambda k=k: engine_cause(k, offset, changed, paired),
            ).to_dict()
            for k, name in enumerate(FIGURES)
        }
    }
    changed_ground = {
        cause: np.array(prediction[key]["figures"]) + overhead
        for key, cause in GROUNDS.items()
        if prediction.get(key) is not None
    }
    for model, figures in prediction["models"].items():
        if figures is None:
            errors[model] = {
                name: Error(None, None, prediction["left_out"][model]).to_dict() for name in FIGURES
            }
            continue
        said = np.array(figures) + overhead
        form = np.log(said / long)
        beside = {cause: np.log(said / seen) for cause, seen in changed_ground.items()}
        errors[model] = {
            name: _judged(
                float(said[k] / stationary[k] - 1.0),
                float(noise[k]),
                lambda k=k, form=form, beside=beside: model_cause(
                    k, form, beside, offset, changed, paired
                ),
            ).to_dict()
            for k, name in enumerate(FIGURES)
        }
    return {
        "measured": m.tolist(),
        "simulated": s.tolist(),
        "stationary": stationary.tolist(),
        "noise": noise.tolist(),
        "noise_unpaired": (Z * alone).tolist(),
        "noise_simulator": (Z * paired).tolist(),
        "errors": errors,
        "requests": int(keep.stop - keep.start),
    }


def resampled_noise(
    measured: np.ndarray, simulated: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Standard errors (4,) of ln(M/S) on the same requests, and of ln M alone."""
    blocks = np.array_split(np.arange(len(measured)), min(BLOCKS, len(measured)))
    draw = np.random.default_rng(np.random.SeedSequence([seed, 41]))
    both, one = [], []
    for _ in range(BOOTSTRAP):
        rows = np.concatenate([blocks[i] for i in draw.integers(0, len(blocks), len(blocks))])
        m = figures_of(measured[rows])
        both.append(np.log(m / figures_of(simulated[rows])))
        one.append(np.log(m))
    return np.std(both, axis=0, ddof=1), np.std(one, axis=0, ddof=1)


def _judged(error: float, noise: float, cause: Callable[[], str]) -> Error:
    """Within the goal, beyond it, or not to be told: by the whole interval."""
    if abs(error) + noise <= GOAL:
        return Error(error, noise, "within")
    if abs(error) - noise > GOAL:
        return Error(error, noise, "misses", cause())
    return Error(error, noise, "cannot be told")


def engine_cause(
    k: int, offset: np.ndarray, changed: list[tuple[str, np.ndarray]], paired: np.ndarray
) -> str:
    """What makes simulator and engine differ at figure ``k``: the trial that comes nearest."""
    best, left = CAUSE_NOT_FOUND, (1.0 - EXPLAINS) * abs(offset[k])
    for cause, values in changed:
        if abs(values[k]) <= max(left, paired[k]):
            if abs(values[k]) <= left:
                left = abs(values[k])
            best = cause
    return best


def model_cause(
    k: int,
    form: np.ndarray,
    beside: dict[str, np.ndarray],
    offset: np.ndarray,
    changed: list[tuple[str, np.ndarray]],
    paired: np.ndarray,
) -> str:
    """Where a delay model's error comes from: its form (against the simulator with the same step
    time), the engine's steps (simulator against engine), or both.

    ``beside`` has its logarithmic errors (4,) against the simulator without one thing, named as a
    cause where at most half of the error is left there.
    """
    total = form[k] + offset[k]
    causes = []
    if form[k] * total > 0 and abs(form[k]) >= EXPLAINS * abs(total):
        left = {cause: abs(errors[k]) for cause, errors in beside.items()}
        told = min(left, key=left.__getitem__, default=None)
        if told is not None and left[told] <= EXPLAINS * abs(form[k]):
            causes.append(f"model form: {told}")
        else:
            causes.append("model form")
    if offset[k] * total > 0 and abs(offset[k]) >= EXPLAINS * abs(total):
        causes.append(f"engine: {engine_cause(k, offset, changed, paired)}")
    return "; ".join(causes) or "several small causes: model form and engine"
