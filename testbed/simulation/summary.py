"""Summary: the outcome of a simulation, from its tally."""

from __future__ import annotations

from typing import Any

import numpy as np

from testbed.outcome import Counts, Outcome, Series, Tier, Ttft, figure_key
from testbed.scenario import Scenario
from testbed.simulation.intervals import LEVEL, Interval
from testbed.simulation.system import System
from testbed.simulation.tally import EXACT_LIMIT, RELATIVE_BIN, Tally

SERIES_LIMIT = 20_000
"""Requests up to which an outcome keeps every TTFT."""


def summarise(
    scenario: Scenario,
    system: System,
    tally: Tally,
    *,
    seed: int,
    warnings: tuple[str, ...] = (),
    extra: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    stream: str | None = None,
) -> Outcome:
    """Figures, intervals and verdict of a simulated scenario.

    ``stream`` is the fingerprint of the requests; with it the outcome keeps up to
    ``SERIES_LIMIT`` of their TTFTs.

    A tier is called unstable when its offered load, requests times occupancy over servers, is 1
    or more: its delays then grow with the length of the run and mean nothing beyond it. TTFT is
    over completed requests; where none is, it is infinite and the outcome is not valid.
    """
    something = tally.completed > 0
    confidence: dict[str, tuple[float, float]] = {}
    doubtful: list[str] = []

    def state(path: str, interval: Interval | None) -> float:
        if interval is None:
            return 0.0
        confidence[path] = interval.bounds
        if not interval.reliable:
            doubtful.append(path)
        return interval.estimate

    counts = Counts(
        sent=tally.completed + tally.rejected + tally.failed,
        completed=tally.completed,
        rejected=tally.rejected,
        failed=tally.failed,
    )
    association = {
        q: {
            s: state(f"association.{q}.{s}", tally.association(i, j))
            for j, s in enumerate(system.profiles)
        }
        for i, q in enumerate(system.types)
    }
    tiers, unstable = {}, []
    for j, s in enumerate(system.profiles):
        path = f"tiers.{s}"
        c = int(system.concurrency[j])
        rate = state(f"{path}.arrival_rate", tally.arrival_rate(j))
        occupancy = tally.occupancy(j)
        service = 0.0
        if occupancy is not None and occupancy.estimate > 0:
            service = 1 / occupancy.estimate
            confidence[f"{path}.service_rate"] = (
                1 / occupancy.high,
                1 / occupancy.low if occupancy.low > 0 else np.inf,
            )
        busy = tally.busy(j)
        rho = state(f"{path}.utilisation", None if busy is None else _scaled(busy, 1 / c))
        if rho >= 1:
            unstable.append((s, rho))
        tiers[s] = Tier(
            density=float(system.density[j]),
            concurrency=c,
            arrival_rate=rate,
            service_rate=service,
            utilisation=rho,
            wait_probability=state(f"{path}.wait_probability", tally.wait_probability(j)),
            mean_wait=state(f"{path}.mean_wait", tally.mean_wait(j)),
        )
    ttft = Ttft(
        mean=state("ttft.mean", tally.mean("ttft")) if something else np.inf,
        coverage={
            key: state(f"ttft.coverage.{key}", tally.coverage(i)) if something else 0.0
            for i, key in enumerate(map(figure_key, tally.targets))
        },
        quantiles={
            key: state(f"ttft.quantiles.{key}", tally.quantile(z)) if something else np.inf
            for z in scenario.targets.quantiles
            for key in (figure_key(z),)
        },
    )
    reason = None
    if unstable:
        parts = ", ".join(f"{s} at {rho:.4g}" for s, rho in unstable)
        reason = f"offered load of 1 or more: {parts}"
        warnings = (
            *warnings,
            "an unstable tier's queue grows for as long as it is simulated: TTFT figures hold for "
            "this length of run, not for a stationary network",
        )
    if doubtful:
        warnings = (
            *warnings,
            f"{len(doubtful)} of {len(confidence)} intervals rest on batches that are still "
            "correlated and may be too narrow; simulate more requests",
        )
    return Outcome(
        kind="simulated",
        clock="virtual",
        scenario_name=scenario.name,
        scenario=scenario.to_dict(),
        policy=scenario.policy,
        feasible=not unstable,
        reason=reason,
        association=association,
        tiers=tiers,
        ttft=ttft,
        mean_distance=state("mean_distance", tally.mean("distance") if something else None),
        reusable_prefix_tokens=state(
            "reusable_prefix_tokens", tally.mean("reused") if something else None
        ),
        offloading_ratio=state("offloading_ratio", tally.offloading() if something else None),
        capacity_margin=system.capacity_margin(),
        requests=counts,
        confidence=confidence,
        curve=tally.curve() if something else None,
        series=None if stream is None else _series(tally, stream),
        valid=something,
        invalid_reason=None if something else "no request was completed",
        warnings=warnings,
        seed=seed,
        extra={
            "confidence": {
                "level": LEVEL,
                "batches": tally.batches,
                "doubtful": doubtful,
                "quantiles": "exact"
                if tally.exact is not None
                else f"within {RELATIVE_BIN:.1%} (histogram; exact up to {EXACT_LIMIT} requests)",
            },
            **(extra or {}),
        },
        environment=environment or {},
    )


def _series(tally: Tally, stream: str) -> Series | None:
    if tally.exact is None or tally.requests > SERIES_LIMIT:
        return None
    return Series(
        stream=stream,
        first=tally.requests - len(tally.exact),
        ttft=tuple(round(x, 6) if x == x else None for x in tally.exact.tolist()),
    )


def _scaled(interval: Interval, factor: float) -> Interval:
    return interval._replace(
        estimate=interval.estimate * factor,
        low=interval.low * factor,
        high=interval.high * factor,
    )
