"""DelayMap: the law of the excess delay from a table (Theory H3).

A simulator or a measurement tabulates, for one tier at a time, the CDF of each type's excess
delay at a few arrival rates of one mix. The scenario names the file: ``delay_map:tables.json``.

Between two rates the CDF is a convex combination of its neighbours, so it stays monotone in the
delay and in the rate; the weight is linear in 1/(1 − ρ), along which a mean wait is close to a
straight line. Below the first rate the first law holds. Between the last rate and the capacity
the last law is stretched by (1 − ρ_last)/(1 − ρ), the scaling of heavy traffic. A load outside
the table, or of another mix, is said in the outcome's warnings.
"""

from __future__ import annotations

from typing import ClassVar, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy.interpolate import PchipInterpolator

from testbed.errors import ScenarioError
from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, register
from testbed.theory.delay.table_file import TableFile

MIX_TOLERANCE = 0.05
"""Total variation between a load's mix and the table's above which the outcome says so."""


class DelayTable(BaseModel):
    """CDFs of the excess delay at one node of one profile, at several arrival rates."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    profile: str = Field(description="name of the scenario's profile")
    types: tuple[str, ...] = Field(min_length=1, description="request types, in order")
    mix: tuple[float, ...] = Field(description="share of each type in the arrivals, sum 1")
    concurrency: int = Field(ge=1, description="c, sequences at once")
    capacity: float = Field(gt=0, description="requests/s of this mix at which the node saturates")
    rates: tuple[float, ...] = Field(min_length=1, description="requests/s, rising, < capacity")
    seconds: tuple[float, ...] = Field(min_length=3, description="delays, s: from 0, rising")
    cdf: tuple[tuple[tuple[float, ...], ...], ...] = Field(
        description="P(excess delay <= seconds), [rate][type][second]"
    )
    source: str = Field(default="", description="what made the table: engine, requests, seed")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(self.mix) != len(self.types) or abs(sum(self.mix) - 1.0) > 1e-6:
            raise ValueError("mix: one share per type, with sum 1")
        if min(self.mix) < 0:
            raise ValueError("mix: a share is negative")
        rates, seconds, cdf = map(np.asarray, (self.rates, self.seconds, self.cdf))
        if (np.diff(rates) <= 0).any() or rates[0] <= 0 or rates[-1] >= self.capacity:
            raise ValueError("rates: not rising from above 0 to below the capacity")
        if (np.diff(seconds) <= 0).any() or seconds[0] != 0:
            raise ValueError("seconds: not rising from 0")
        if cdf.shape != (len(rates), len(self.types), len(seconds)):
            raise ValueError(f"cdf: shape {cdf.shape} is not rates x types x seconds")
        if (np.diff(cdf, axis=2) < 0).any() or cdf.min() < 0 or cdf.max() > 1:
            raise ValueError("cdf: not rising within [0, 1]")
        if cdf[:, :, -1].min() < 0.99:
            raise ValueError("cdf: ends below 0.99; the delays do not reach the tail")
        return self

    @classmethod
    def from_samples(
        cls,
        profile: str,
        mix: dict[str, float],
        concurrency: int,
        capacity: float,
        samples: dict[float, dict[str, np.ndarray]],
        *,
        points: int = 200,
        source: str = "",
    ) -> Self:
        """Tabulate samples of excess delays, s: ``samples[rate][type]`` is an array.

        The delays of the table are quantiles of all samples together, so that they lie where the
        law changes; excess delays below 0 (a clock's rounding) count as 0.
        """
        rates = sorted(samples)
        pooled = np.concatenate([samples[r][q] for r in rates for q in mix])
        levels = np.concatenate(
            [np.linspace(0, 0.9, points // 2), 1 - np.geomspace(0.1, 1e-4, points - points // 2)]
        )
        grid = np.unique(np.concatenate([[0.0], np.quantile(np.maximum(pooled, 0.0), levels)]))
        grid = np.append(grid, max(float(pooled.max()), grid[-1] * 1.001) + 1e-9)
        cdf = tuple(
            tuple(
                tuple(
                    (np.searchsorted(np.sort(samples[r][q]), grid, side="right")
                     / len(samples[r][q])).tolist()
                )
                for q in mix
            )
            for r in rates
        )  # fmt: skip
        return cls(
            profile=profile,
            types=tuple(mix),
            mix=tuple(mix.values()),
            concurrency=concurrency,
            capacity=capacity,
            rates=tuple(rates),
            seconds=tuple(grid.tolist()),
            cdf=cdf,
            source=source,
        )


class DelayMapFile(TableFile):
    """Tables of all tiers of a scenario."""

    model: ClassVar[str] = "delay_map"
    schema_version: int = Field(default=1, ge=1, le=1)
    tables: tuple[DelayTable, ...] = Field(min_length=1)


class _Law:
    """One tabulated CDF: monotone cubic within the table, exponential beyond it."""

    def __init__(self, seconds: np.ndarray, cdf: np.ndarray) -> None:
        self.last = float(seconds[-1])
        self.inside = PchipInterpolator(seconds, cdf)
        self.left = 1.0 - float(cdf[-1])
        # The tail decays as between the last points that it can be read from.
        survival = 1.0 - cdf
        usable = np.flatnonzero(survival > max(self.left, 1e-12))
        start = int(usable[-1]) if len(usable) else 0
        drop = np.log(survival[start] / self.left) if self.left > 0 else np.inf
        self.rate = drop / (self.last - seconds[start])
        tail = self.left / self.rate if self.left > 0 else 0.0
        self.mean = self.last - float(self.inside.integrate(0.0, self.last)) + tail
        self.at_zero = float(cdf[0])
        gaps = np.diff(seconds)[np.diff(cdf) > 0.02]
        self.decay = 0.5 / float(gaps.min()) if len(gaps) else 4.0 / self.last

    def cdf(self, w: np.ndarray) -> np.ndarray:
        inside = self.inside(np.clip(w, 0.0, self.last))
        beyond = 1.0
        if self.left > 0:
            beyond = 1.0 - self.left * np.exp(-self.rate * np.maximum(w - self.last, 0.0))
        return np.where(w < 0, 0.0, np.where(w > self.last, beyond, inside))


class MappedDelay(ExcessDelay):
    """A convex combination of two tabulated laws, stretched by a factor."""

    def __init__(
        self, low: list[_Law], high: list[_Law], weight: float, stretch: float, mix: np.ndarray
    ) -> None:
        self._low, self._high = low, high
        self._weight, self._stretch = weight, stretch
        means = [(1 - weight) * a.mean + weight * b.mean for a, b in zip(low, high, strict=True)]
        self.mean = stretch * np.array(means)
        zero = [
            (1 - weight) * a.at_zero + weight * b.at_zero for a, b in zip(low, high, strict=True)
        ]
        self.wait_probability = 1.0 - float(mix @ np.array(zero))

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        w = np.asarray(seconds, dtype=float) / self._stretch
        low, high = self._low[q].cdf(w), self._high[q].cdf(w)
        return (1.0 - self._weight) * low + self._weight * high

    def decay(self, q: int) -> float:
        return max(self._low[q].decay, self._high[q].decay) / self._stretch


class DelayMap(DelayModel):
    """Tabulated laws, one table per profile (Theory H3)."""

    name = "delay_map"

    def __init__(self, file: DelayMapFile, source: str = "delay map") -> None:
        self.source = source
        self._tables = {table.profile: table for table in file.tables}
        self._laws = {
            table.profile: [
                [_Law(np.array(table.seconds), np.array(cdf)) for cdf in at_rate]
                for at_rate in table.cdf
            ]
            for table in file.tables
        }

    def _table(self, load: TierLoad) -> DelayTable:
        table = self._tables.get(load.profile)
        if table is None:
            raise ScenarioError(f"{self.source}: no table for profile {load.profile!r}")
        if missing := set(load.types) - set(table.types):
            raise ScenarioError(
                f"{self.source}: the table of {load.profile!r} has no request type "
                f"{sorted(missing)[0]!r}"
            )
        if table.concurrency != load.concurrency:
            raise ScenarioError(
                f"{self.source}: the table of {load.profile!r} is for {table.concurrency} "
                f"sequences, the scenario has {load.concurrency}"
            )
        return table

    def utilisation(self, load: TierLoad) -> float:
        return load.arrival_rate / self._table(load).capacity

    def caveat(self, load: TierLoad) -> str | None:
        table = self._table(load)
        notes = []
        share = dict(zip(table.types, table.mix, strict=True))
        away = 0.5 * sum(abs(w - share[q]) for q, w in zip(load.types, load.weights, strict=True))
        if load.arrival_rate > 0 and away > MIX_TOLERANCE:
            notes.append(f"its mix is {away:.2f} away from the table's (total variation)")
        if 0 < load.arrival_rate < table.rates[0]:
            notes.append(f"its rate is below the table's first {table.rates[0]:.4g} requests/s")
        if load.arrival_rate > table.rates[-1]:
            notes.append(f"its rate is above the table's last {table.rates[-1]:.4g} requests/s")
        return f"delay map of {load.profile}: {'; '.join(notes)}" if notes else None

    def excess(self, load: TierLoad) -> MappedDelay:
        table = self._table(load)
        order = [table.types.index(q) for q in load.types]
        laws = self._laws[load.profile]
        rho = load.arrival_rate / table.capacity
        known = np.array(table.rates) / table.capacity
        at = int(np.searchsorted(known, rho))
        if at == 0 or at == len(known):
            edge = [laws[min(at, len(known) - 1)][i] for i in order]
            stretch = (1.0 - known[-1]) / (1.0 - rho) if at else 1.0
            return MappedDelay(edge, edge, 0.0, float(stretch), load.weights)
        low, high, here = (1.0 / (1.0 - x) for x in (known[at - 1], known[at], rho))
        weight = (here - low) / (high - low)
        return MappedDelay(
            [laws[at - 1][i] for i in order],
            [laws[at][i] for i in order],
            float(weight),
            1.0,
            load.weights,
        )


def _load(argument: str | None) -> DelayMap:
    if argument is None:
        raise ScenarioError("delay_model: delay_map needs its table: delay_map:FILE")
    return DelayMap(DelayMapFile.load(argument), argument)


register("delay_map", _load, variant=True)
