"""LearnedMapFile: fitted surfaces of the excess delay, their provenance and held-out error."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import ClassVar, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from testbed.step_time import AnyStepTime
from testbed.theory.delay.monotone_surface import Axis, MixBasis
from testbed.theory.delay.table_file import TableFile

FIGURES = ("mean", "p50", "p90", "p99")
PROBABILITIES = (0.5, 0.9, 0.99)
_NODES = 6
"""Gauss-Legendre nodes in each interval of the delay axis."""


def fingerprint(step_time: AnyStepTime) -> str:
    """SHA-256 of a step time's numbers."""
    return hashlib.sha256(step_time.packed.tobytes()).hexdigest()


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Surface(_Part):
    """Coefficients of logit P(excess > t), one row per type; see `learned_map`."""

    unit: float = Field(gt=0, description="s; delays are divided by it before the logarithm")
    delay: Axis = Field(description="of ln(t/unit)")
    load: Axis = Field(description="of logit ρ")
    demand: Axis = Field(description="of v = ln(λ Σ w p)")
    tail: float = Field(gt=0, description="decay beyond the delay axis, per its last delay")
    shape: tuple[int, int, int, int, int] = Field(
        description="of main: types, delay, load, slots, mix"
    )
    main: tuple[float, ...] = Field(description="in C order")
    shift: tuple[float, ...] = Field(description="types, demand, mix; in C order")

    @model_validator(mode="after")
    def _monotone(self) -> Self:
        types, delays, loads, _, mixes = self.shape
        if (delays, loads) != (self.delay.count, self.load.count):
            raise ValueError(f"shape: {self.shape} does not fit the axes")
        if len(self.main) != np.prod(self.shape):
            raise ValueError(f"main: {len(self.main)} coefficients for the shape {self.shape}")
        if len(self.shift) != types * self.demand.count * mixes:
            raise ValueError(f"shift: {len(self.shift)} coefficients")
        main, shift = self.main_table, self.shift_table
        for name, steps in (
            ("main: rises with the delay", -np.diff(main, axis=1)),
            ("main: falls with the load", np.diff(main, axis=2)),
            ("main: rises with slots", -np.diff(main, axis=3)),
            ("shift: falls with the load", np.diff(shift, axis=1)),
        ):
            if (steps < 0).any():
                raise ValueError(name)
        return self

    @cached_property
    def main_table(self) -> np.ndarray:
        """(Q, J, U, K, M)."""
        return np.array(self.main).reshape(self.shape)

    @cached_property
    def shift_table(self) -> np.ndarray:
        """(Q, V, M)."""
        return np.array(self.shift).reshape(self.shape[0], self.demand.count, self.shape[-1])

    @cached_property
    def quadrature(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """y (N,), weights of ∫ … e^y dy (N,), and the delay axis's basis there (N, J)."""
        nodes, weights = np.polynomial.legendre.leggauss(_NODES)
        low, high = np.array(self.delay.knots[:-1]), np.array(self.delay.knots[1:])
        half, middle = 0.5 * (high - low)[:, None], 0.5 * (high + low)[:, None]
        y = (middle + half * nodes).ravel()
        return y, (half * weights).ravel() * np.exp(y), self.delay.basis(y)


class HeldOut(_Part):
    """One load that no fit saw; excess delays in s, [type][figure of :data:`FIGURES`]."""

    load: float = Field(description="share of the capacity that the simulator shows there")
    rate: float = Field(gt=0, description="requests/s")
    mix: tuple[float, ...]
    slots: int
    requests: int
    capacity: tuple[float, float] = Field(description="requests/s: simulated, by the map")
    simulated: tuple[tuple[float, ...], ...]
    standard_errors: tuple[tuple[float, ...], ...] = Field(description="of the simulated figures")
    predicted: tuple[tuple[float, ...], ...] | None = Field(
        description="absent where the map takes the load for beyond its range"
    )

    def shown(self, q: int, figure: int) -> str:
        """Error of a figure of a type in % and its noise; ms where the simulator shows none."""
        if self.predicted is None:
            return "beyond the map"
        truth, found = self.simulated[q][figure], self.predicted[q][figure]
        noise = self.standard_errors[q][figure]
        if truth <= 0:
            return f"{1e3 * found:.2g} ms for 0"
        return f"{100 * (found / truth - 1):+.1f} ± {100 * noise / truth:.1f}"


class Fit(_Part):
    """How well a profile's surfaces meet what they were fitted on."""

    cells: int = Field(description="loads simulated")
    requests: int = Field(description="simulated at each, warm-up of a tenth included")
    points: int = Field(description="points of the laws, all types")
    misfit: float = Field(description="root mean square of logit P(excess > t), simulated − fitted")
    noise: float = Field(description="the same of the simulation's own standard errors")
    capacity_misfit: float = Field(description="root mean square of the relative error of C")


class LearnedProfile(_Part):
    """One profile's node: what it was asked, where it is known, its surfaces."""

    profile: str
    types: tuple[str, ...] = Field(min_length=1)
    new_tokens: tuple[float, ...]
    cached_tokens: tuple[float, ...]
    output_tokens: tuple[float, ...] = Field(description="means of geometric laws")
    prefill_seconds: tuple[float, ...] = Field(description="unloaded, by the step time")
    step_time: str = Field(description="SHA-256 of its numbers")
    lookahead: bool = Field(description="the engine forms a step while the one before runs")
    least_load: float = Field(gt=0, description="least share of capacity simulated; below: ∝ λ")
    most_load: float = Field(lt=1, description="largest share of capacity simulated")
    least_slots: int = Field(ge=1)
    most_slots: int = Field(ge=1)
    least_share: float = Field(ge=0, description="of a type in the simulated mixes")
    mix_degree: int = Field(ge=0)
    slots_axis: Axis = Field(description="of log₂ slots")
    seconds: tuple[float, ...] = Field(description="1/C, s: slots, mix; in C order")
    surface: Surface
    fit: Fit
    held_out: tuple[HeldOut, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for name in ("new_tokens", "cached_tokens", "output_tokens", "prefill_seconds"):
            if len(getattr(self, name)) != len(self.types):
                raise ValueError(f"{name}: not one number per type")
        whole = (len(self.types), self.slots_axis.count, self.mix.count)
        if (self.surface.shape[0], *self.surface.shape[3:]) != whole:
            raise ValueError("surface: its shape does not fit types, slots and mix")
        if len(self.seconds) != whole[1] * whole[2]:
            raise ValueError(f"seconds: {len(self.seconds)} coefficients")
        if min(self.seconds) <= 0 or (np.diff(self.seconds_table, axis=0) > 0).any():
            raise ValueError("seconds: not above 0, or rising with slots")
        return self

    @cached_property
    def mix(self) -> MixBasis:
        return MixBasis(len(self.types), self.mix_degree)

    @cached_property
    def seconds_table(self) -> np.ndarray:
        """(K, M)."""
        return np.array(self.seconds).reshape(self.slots_axis.count, -1)


class LearnedEngine(_Part):
    """The simulated engine; its pool never binds, slots alone do."""

    scheduler: str
    token_budget: int
    block_size: int


class LearnedMapFile(TableFile):
    """Surfaces of all profiles of a scenario, and where they come from."""

    model: ClassVar[str] = "learned_map"
    schema_version: int = Field(default=1, ge=1, le=1)
    scenario: str = Field(description="name of the scenario that it was fitted for")
    seed: int
    created_at: str
    software: str = Field(description="of the testbed that simulated and fitted")
    engine: LearnedEngine
    profiles: tuple[LearnedProfile, ...] = Field(min_length=1)
