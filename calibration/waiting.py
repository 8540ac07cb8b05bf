"""Waiting: measured delay under load beside every delay model's law, and why they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from calibration.load import RequestClass
from calibration.paired import engine_config, simulate_same, simulated_alone
from calibration.record import LoadRecord, ModelFit
from cluster.engines.base import EngineFacts
from testbed.errors import TestbedError
from testbed.simulation.intervals import (
    Interval,
    interval_mean,
    interval_proportion,
    interval_quantile,
    mser5,
)
from testbed.step_time import StepTime
from testbed.theory.delay import TierLoad, get_delay_model, independent_models

QUANTILES = (0.5, 0.9, 0.95, 0.99)
RESOLUTION_SHARE = 0.1
"""Part of the shortest unloaded TTFT below which an excess delay is the clock's, not a queue's."""
GRID = 120
"""Points of the curves that the record keeps; distances are taken at every observation."""
SATURATED = "erlang_c, saturated rate"
SIMULATOR = "step simulator, same arrivals"
AT_SPEED = "step simulator, at the run's own speed"
"""The same with every step slower or faster as the run's steps were: without the drift."""


@dataclass(frozen=True)
class Setting:
    """What predictions may know: the calibration of one profile, nothing of the run's waits.

    ``unloaded`` (Q,) TTFT of each class alone, from the intended send; ``prefill`` (Q,) g(n | h);
    ``decode`` (Q,) occupancy beyond it; ``capacity`` requests/s; ``concurrency`` c_s;
    ``wake`` what the first step after idleness takes more, s.
    """

    classes: tuple[RequestClass, ...]
    unloaded: np.ndarray
    prefill: np.ndarray
    decode: np.ndarray
    capacity: float
    concurrency: int
    step_time: StepTime | None
    facts: EngineFacts
    pinned_blocks: int
    wake: float = 0.0

    @property
    def weights(self) -> np.ndarray:
        weights = np.array([c.weight for c in self.classes])
        return weights / weights.sum()

    @property
    def resolution(self) -> float:
        """Seconds of excess delay that count as none."""
        return RESOLUTION_SHARE * float(self.unloaded.min())

    def tier(self, rate: float) -> TierLoad:
        """The load as the delay models take it (Theory B), at the unloaded service rate."""
        return TierLoad(
            arrival_rate=rate,
            weights=self.weights,
            residual_prefill=self.prefill,
            new_tokens=np.array([c.new for c in self.classes], dtype=float),
            cached_tokens=np.array([c.cached for c in self.classes], dtype=float),
            occupancy=self.prefill + self.decode,
            output_tokens=np.array([c.output for c in self.classes]),
            concurrency=self.concurrency,
            step_time=self.step_time,
            token_budget=self.facts.token_budget,
            lookahead=bool(self.facts.extra.get("async_scheduling", False)),
        )


def load_record(
    profile: str,
    load: float,
    rate: float,
    run: Mapping[str, Any],
    setting: Setting,
    relative_time: tuple[float, float],
    reasons: dict[str, float],
    speed: float | None = None,
) -> LoadRecord:
    """One load: its measured law with intervals, and each model beside it.

    ``speed``: seconds of the run's steps over what the step time says of them.
    """
    kinds = np.asarray(run["kind"], dtype=int)
    intended = np.asarray(run["intended"])
    ttft = np.asarray(run["first"]) - intended
    cut, stationary = mser5(ttft)
    kept = slice(cut, None)
    excess = ttft - setting.unloaded[kinds]
    resolution = setting.resolution
    delayed = interval_proportion(excess[kept] > resolution)
    mean = interval_mean(ttft[kept])
    quantiles = {str(z): interval_quantile(ttft[kept], z) for z in QUANTILES}
    top = max(float(np.quantile(excess[kept], 0.999)), 4 * resolution)
    grid = np.geomspace(resolution, max(top, 1.01 * resolution), GRID)
    measured = _empirical(excess[kept], grid)
    curve = {"seconds": tuple(grid.tolist()), "measured": tuple(measured.tolist())}
    models, laws = _models(setting, rate, run, cut, speed)
    fits = []
    for fit, law in zip(models, laws, strict=True):
        if law is None:
            fits.append(fit)
            continue
        predicted = law.cdf(grid)
        curve[fit.model] = tuple(predicted.tolist())
        seen = {"mean": mean.estimate, **{z: q.estimate for z, q in quantiles.items()}}
        said = {"mean": law.mean, **{str(z): law.quantile(z) for z in QUANTILES}}
        errors = {k: said[k] / seen[k] - 1.0 for k in seen if np.isfinite(said[k])}
        fits.append(
            fit.model_copy(
                update={
                    "ks_distance": ks_distance(excess[kept], law, resolution),
                    "mean": said["mean"],
                    "quantiles": {str(z): said[str(z)] for z in QUANTILES},
                    "errors": errors,
                }
            )
        )
    half = interval_proportion(excess[kept] > np.median(excess[kept]))
    return LoadRecord(
        profile=profile,
        load=load,
        arrival_rate=rate,
        capacity=setting.capacity,
        requests=len(ttft) - cut,
        warm_up=cut,
        stationary=stationary,
        seconds=float(intended[-1]),
        resolution=resolution,
        mean=_triple(mean),
        quantiles={z: _open(q) for z, q in quantiles.items()},
        wait_probability=_triple(delayed),
        engine_wait=float(
            np.mean(np.asarray(run["scheduled"])[kept] - np.asarray(run["queued"])[kept])
        ),
        ks_noise=ks_noise(half),
        relative_time=relative_time,
        step_relative_time=speed,
        reliable=mean.reliable and all(q.reliable for q in quantiles.values()),
        curve=curve,
        models=tuple(fits),
        reasons={**reasons, **_occupancy(run, setting, excess, cut)},
    )


def ks_distance(excess: np.ndarray, law: Any, resolution: float) -> float:
    """Largest gap between a sample's CDF and a law's, at excess delays from the resolution on."""
    ordered = np.sort(excess)
    n = len(ordered)
    first = int(np.searchsorted(ordered, resolution, side="right"))
    at = ordered[first:]
    gaps = [abs(float(law.cdf(np.array([resolution]))[0]) - first / n)]
    if len(at):
        said = law.cdf(at)
        rank = np.arange(first, n)
        gaps += [np.abs(said - (rank + 1) / n).max(), np.abs(said - rank / n).max()]
    return float(max(gaps))


def ks_noise(half: Interval) -> float:
    """95 % Kolmogorov-Smirnov distance of a sample from its own law, its correlation counted.

    ``half`` is the interval of the share above the median: the width it would have if the
    observations were independent tells how many independent ones the sample is worth.
    """
    error = half.half_width / 1.96
    effective = 0.25 / error**2 if error > 0 else 1.0
    return float(1.358 / np.sqrt(max(effective, 1.0)))


# --- Laws --------------------------------------------------------------------------------------


class _Mixture:
    """A delay model's law over the mix: excess delay, and TTFT above the unloaded times."""

    def __init__(self, setting: Setting, excess: Any, mean: float) -> None:
        self._setting = setting
        self._excess = excess
        self.mean = mean

    def cdf(self, seconds: np.ndarray) -> np.ndarray:
        parts = [w * self._excess.cdf(q, seconds) for q, w in enumerate(self._setting.weights)]
        return np.sum(parts, axis=0)

    def _ttft(self, seconds: float) -> float:
        parts = [
            w * float(self._excess.cdf(q, np.asarray(seconds - self._setting.unloaded[q])))
            for q, w in enumerate(self._setting.weights)
        ]
        return float(np.sum(parts))

    def quantile(self, z: float) -> float:
        low, high = 0.0, float(self._setting.unloaded.max())
        for _ in range(60):
            if self._ttft(high) >= z:
                break
            low, high = high, 2.0 * high
        for _ in range(60):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if self._ttft(middle) >= z else (middle, high)
        return high


class _Sample:
    """A simulated sample as a law."""

    def __init__(self, ttft: np.ndarray, excess: np.ndarray) -> None:
        self._ttft = ttft
        self._excess = excess
        self.mean = float(ttft.mean())

    def cdf(self, seconds: np.ndarray) -> np.ndarray:
        return _empirical(self._excess, seconds)

    def quantile(self, z: float) -> float:
        ordered = np.sort(self._ttft)
        return float(ordered[min(len(ordered) - 1, int(np.ceil(z * len(ordered))) - 1)])


def _models(
    setting: Setting, rate: float, run: Mapping[str, Any], cut: int, speed: float | None
) -> tuple[list[ModelFit], list[Any]]:
    """Every registered delay model, Erlang-C at the saturated rate, and the step simulator."""
    fits: list[ModelFit] = []
    laws: list[Any] = []

    def add(name: str, model_name: str, tier: TierLoad) -> None:
        try:
            model = get_delay_model(model_name)
            rho = model.utilisation(tier)
            if rho >= 1:
                fits.append(ModelFit(model=name, note=f"unstable here (utilisation {rho:.2f})"))
                laws.append(None)
                return
            excess = model.excess(tier)
        except TestbedError as error:
            fits.append(ModelFit(model=name, note=str(error)))
            laws.append(None)
            return
        mean = float(setting.weights @ (setting.unloaded + excess.mean))
        fits.append(ModelFit(model=name))
        laws.append(_Mixture(setting, excess, mean))

    tier = setting.tier(rate)
    for name in sorted(independent_models()):
        add(name, name, tier)
    slower = setting.concurrency / (setting.capacity * tier.mean_service)
    add(SATURATED, "erlang_c", replace(tier, occupancy=tier.occupancy * slower))
    if setting.step_time is not None:
        fits.append(ModelFit(model=SIMULATOR))
        laws.append(_simulated(setting, run, cut, 1.0))
        if speed is not None:
            fits.append(ModelFit(model=AT_SPEED))
            laws.append(_simulated(setting, run, cut, speed))
    return fits, laws


def _simulated(setting: Setting, run: Mapping[str, Any], cut: int, speed: float) -> _Sample:
    """The engine model on the run's own arrivals and lengths, delivery added as when unloaded.

    Every step takes ``speed`` times as long as calibrated.
    """
    assert setting.step_time is not None
    kinds = np.asarray(run["kind"], dtype=int)
    config = engine_config(setting.facts, setting.pinned_blocks, setting.wake)
    step_time = StepTime.from_vector(speed * setting.step_time.vector())
    trace = simulate_same(config, step_time, setting.classes, run)
    excess = trace.ttft - simulated_alone(config, setting.step_time, setting.classes)[kinds]
    return _Sample((setting.unloaded[kinds] + excess)[cut:], excess[cut:])


# --- Reasons -----------------------------------------------------------------------------------


def step_reasons(log: Mapping[str, np.ndarray]) -> dict[str, float]:
    """What the engine's steps under load say against c independent servers.

    ``residual_step``: mean wait of an arrival for the step under way to end, E[T²]/2E[T], s.
    ``prefill_time_share``: part of busy time spent in steps with a prefill, which run in series.
    ``prefills_per_step``: in those. ``decode_batch``: mean sequences of a decode step;
    ``decode_step``: its mean seconds.
    """
    if len(log["started"]) == 0:
        return {}
    seconds = log["finished"] - log["started"]
    prefill = log["prefills"] > 0
    pure = ~prefill & (log["decodes"] > 0)
    found = {
        "residual_step": float((seconds**2).sum() / (2 * seconds.sum())),
        "prefill_time_share": float(seconds[prefill].sum() / seconds.sum()),
    }
    if prefill.any():
        found["prefills_per_step"] = float(log["prefills"][prefill].mean())
    if pure.any():
        found["decode_batch"] = float(log["decodes"][pure].mean())
        found["decode_step"] = float(seconds[pure].mean())
    return found


def _occupancy(
    run: Mapping[str, Any], setting: Setting, excess: np.ndarray, cut: int
) -> dict[str, float]:
    """``occupancy`` in service against the ``occupancy_unloaded`` that M/M/c is given, s;
    ``occupancy_cv2`` (1 for an exponential) of both together; ``delayed_with_free_seat``: share of
    the arrivals that found a seat free and were delayed all the same (0 in an M/M/c queue)."""
    scheduled, finished = np.asarray(run["scheduled"]), np.asarray(run["finished"])
    intended = np.asarray(run["intended"])
    kinds = np.asarray(run["kind"], dtype=int)
    held = (finished - scheduled)[cut:]
    gone = np.sort(finished)
    present = np.arange(len(intended)) - np.searchsorted(gone, intended, side="right")
    free = (present < setting.concurrency)[cut:]
    delayed = (excess > setting.resolution)[cut:]
    unloaded = (setting.prefill + setting.decode)[kinds][cut:]
    return {
        "occupancy": float(held.mean()),
        "occupancy_unloaded": float(unloaded.mean()),
        "occupancy_cv2": float(held.var() / held.mean() ** 2),
        "delayed_with_free_seat": float(delayed[free].mean()) if free.any() else 0.0,
    }


def explain(record: LoadRecord) -> str:
    """Why Erlang-C parts from this load, in words, each clause with its measurement."""
    why = record.reasons
    clauses = []
    if "delayed_with_free_seat" in why:
        clauses.append(
            f"{100 * why['delayed_with_free_seat']:.0f} % of the requests that found a seat free "
            "were delayed all the same: a seat is not a server of its own"
        )
    if "residual_step" in why:
        clauses.append(
            f"an arrival first waits {1e3 * why['residual_step']:.1f} ms for the running step to "
            "end: admission is synchronous with steps"
        )
    if "prefill_time_share" in why:
        clauses.append(
            f"{100 * why['prefill_time_share']:.0f} % of busy time goes to steps with a prefill, "
            "one after another: prefills share one token budget in series"
        )
    if "occupancy_unloaded" in why:
        clauses.append(
            f"a request holds its seat {1e3 * why['occupancy']:.0f} ms under load and "
            f"{1e3 * why['occupancy_unloaded']:.0f} ms alone, with a squared coefficient of "
            f"variation of {why['occupancy_cv2']:.2f}: seats slow each other down and service is "
            "not exponential"
        )
    return "; ".join(clauses)


# --- Small parts -------------------------------------------------------------------------------


def _empirical(sample: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(sample), at, side="right") / len(sample)


def _triple(interval: Interval) -> tuple[float, float, float]:
    return interval.estimate, interval.low, interval.high


def _open(interval: Interval) -> tuple[float, float | None, float | None]:
    low = interval.low if np.isfinite(interval.low) else None
    high = interval.high if np.isfinite(interval.high) else None
    return interval.estimate, low, high


def relative_times(passes: Sequence[np.ndarray]) -> list[float]:
    """Geometric mean over classes of each pass's median unloaded TTFT over the first pass's."""
    medians = np.array([np.median(p, axis=1) for p in passes])
    return [float(r) for r in np.exp(np.mean(np.log(medians / medians[0]), axis=1))]
