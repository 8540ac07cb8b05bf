"""LearnedMap: the law of the excess delay as a smooth function of load, mix and slots (Theory H3).

For each profile a surface is fitted once on simulated engines; the scenario names the file:
``learned_map:map.json``. With ρ the share of the capacity C(mix, slots) and v = ln(λ Σ w_q p_q)
the load that prefills alone are (p_q seconds of an unloaded prefill), a type's law is

    logit P(excess > t) = shift(v, mix) + surface(ln t, logit ρ, log₂ slots, mix).

By their coefficients the surface falls in the delay and with slots and rises in the load, the
shift rises in v, and C rises with slots: so more load at the same slots, or fewer slots at the
same load, never make a delay likely to be shorter. As λ → 0 a delay is as likely as another
request is near, ∝ λ. All of it is smooth, and :meth:`LearnedMap.gradient` is exact.

It is known for loads up to the largest that was simulated. A law beyond it, other slots, prompts
or step times are refused; only a search passes beyond it on its way, by delays that go on growing
like 1/(1 − ρ).
"""

from __future__ import annotations

import numpy as np
from scipy.special import expit

from testbed.errors import OutOfRangeError, ScenarioError
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import DelayModel, ExcessDelay, TierLoad, register
from testbed.theory.delay.learned_map_file import LearnedMapFile, LearnedProfile, fingerprint
from testbed.theory.delay.learned_map_point import LoadPoint, LoadSlopes, capacity_seconds, locate


class LearnedLaw(ExcessDelay):
    """The law of the excess delay of every type at one load, with its derivatives.

    Types are in the profile's order. Up to the delay axis's first knot the mass lies at 0; beyond
    its last the law goes on as an exponential.
    """

    def __init__(self, profile: LearnedProfile, point: LoadPoint, weights: np.ndarray) -> None:
        self.point, self._surface = point, profile.surface
        surface = profile.surface
        y, self._measure, self._values = surface.quadrature
        self._scale = float(np.exp(point.log_scale))
        self._survival = expit(point.coefficients @ self._values.T)
        first, last = expit(point.coefficients[:, 0]), expit(point.coefficients[:, -1])
        self._head = float(np.exp(surface.delay.knots[0]))
        self._end = float(np.exp(surface.delay.knots[-1]))
        self.mean = self._scale * (
            self._head * first + self._survival @ self._measure + self._end / surface.tail * last
        )
        self.wait_probability = float(weights @ first)
        density = -np.diff(self._survival, axis=1) / np.diff(np.exp(y))
        self._fastest = np.maximum(density.max(axis=1), 1.0 / self._end) / self._scale

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        w = np.asarray(seconds, dtype=float)
        survival, fade = self._beyond(q, self._place(w))
        return np.where(w < 0, 0.0, 1.0 - survival * fade)

    def decay(self, q: int) -> float:
        return float(self._fastest[q])

    def cdf_gradient(self, q: int, seconds: np.ndarray) -> np.ndarray:
        """(…, 2 + Q): derivatives of the CDF at delays > 0 by (λ, w_1 … w_Q, slots)."""
        axis, tail, slopes = self._surface.delay, self._surface.tail, self._slopes
        y = self._place(np.asarray(seconds, dtype=float))
        survival, fade = self._beyond(q, y)
        bend = survival * (1.0 - survival) * fade
        by_scale = -bend * (axis.slope(y) @ self.point.coefficients[q])
        last = axis.knots[-1]
        ended = survival * fade * tail * np.exp(np.maximum(y - last, 0.0))
        by_scale = np.where(y > last, ended, by_scale)
        by_coefficients = bend[..., None] * axis.basis(y)
        return np.asarray(
            -(by_coefficients @ slopes.coefficients[q] + by_scale[..., None] * slopes.log_scale)
        )

    def mean_gradient(self) -> np.ndarray:
        """(Q, 2 + Q): derivatives of the mean excess delay by (λ, w_1 … w_Q, slots)."""
        point, surface = self.point, self._surface
        bend = self._survival * (1.0 - self._survival)
        first, last = expit(point.coefficients[:, 0]), expit(point.coefficients[:, -1])
        by = np.einsum("qy,y,yj->qj", bend, self._measure, self._values)
        by[:, 0] += self._head * first * (1.0 - first)
        by[:, -1] += self._end / surface.tail * last * (1.0 - last)
        return np.asarray(
            self._scale * np.einsum("qj,qjp->qp", by, self._slopes.coefficients)
            + self.mean[:, None] * self._slopes.log_scale
        )

    @property
    def _slopes(self) -> LoadSlopes:
        if self.point.slopes is None:
            raise ValueError("the load was placed without its slopes")
        return self.point.slopes

    def _place(self, w: np.ndarray) -> np.ndarray:
        """Delays on the delay axis."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(np.maximum(w, 0.0)) - self.point.log_scale)

    def _beyond(self, q: int, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """P(excess > w) is the product: what the surface says, and its fading beyond its end."""
        axis = self._surface.delay
        survival = expit(axis.combined(self.point.coefficients[q], y))
        past = np.exp(np.maximum(y - axis.knots[-1], 0.0)) - 1.0
        return survival, np.exp(-self._surface.tail * past)


class LearnedMap(DelayModel):
    """Fitted surfaces, one set per profile (Theory H3)."""

    name = "learned_map"
    uses_step_time = True

    def __init__(self, file: LearnedMapFile, source: str = "learned map") -> None:
        self.file, self.source = file, source
        self._profiles = {p.profile: p for p in file.profiles}
        # With the step time itself, so that its identity stays its own.
        self._checked: dict[tuple[object, ...], tuple[np.ndarray, AnyStepTime | None]] = {}

    def utilisation(self, load: TierLoad) -> float:
        profile, order = self._fitting(load)
        seconds = capacity_seconds(profile, load.weights[order], load.concurrency)
        return load.arrival_rate * seconds

    def mean(self, load: TierLoad) -> np.ndarray:
        if load.arrival_rate <= 0:
            return np.zeros(load.weights.size)
        law, order = self._law(load)
        mean = np.empty(order.size)
        mean[order] = law.mean
        return mean

    def gradient(self, load: TierLoad) -> tuple[np.ndarray, np.ndarray]:
        """Mean excess delays (Q,), s, and their derivatives (Q, 2 + Q) by (λ, w_1 … w_Q, slots).

        A derivative by a share holds the other shares: only along mixes that sum to 1 does it mean
        something. At least one request must arrive.
        """
        law, order = self._law(load, slopes=True)
        mean, slope = np.empty(order.size), np.empty((order.size, order.size + 2))
        mean[order] = law.mean
        columns = np.concatenate([[0], 1 + order, [order.size + 1]])
        slope[np.ix_(order, columns)] = law.mean_gradient()
        return mean, slope

    def excess(self, load: TierLoad) -> ExcessDelay:
        """The law at a load that was fitted.

        Raises
        ------
        OutOfRangeError
            The load is beyond those simulated, or for other slots.
        ScenarioError
            Another profile, other prompts or another step time than those simulated.
        """
        profile, _ = self._fitting(load)
        rho = self.utilisation(load)
        if rho > profile.most_load * (1.0 + 1e-9):
            raise OutOfRangeError(
                f"delay_model: {self.source}: profile {load.profile!r} is at {rho:.3f} of its "
                f"capacity, the map was fitted up to {profile.most_load:g}"
            )
        if load.arrival_rate <= 0:
            return _Nobody(load.weights.size)
        law, order = self._law(load)
        return _Reordered(law, order)

    def _law(self, load: TierLoad, slopes: bool = False) -> tuple[LearnedLaw, np.ndarray]:
        profile, order = self._fitting(load)
        weights = np.asarray(load.weights, dtype=float)[order]
        point = locate(profile, load.arrival_rate, weights, float(load.concurrency), slopes=slopes)
        return LearnedLaw(profile, point, weights), order

    def _fitting(self, load: TierLoad) -> tuple[LearnedProfile, np.ndarray]:
        """The profile's surfaces, and where its types stand among the load's."""
        profile = self._profiles.get(load.profile)
        if profile is None:
            raise ScenarioError(f"delay_model: {self.source}: nothing for profile {load.profile!r}")
        key = (
            load.profile, load.types, load.concurrency, load.token_budget, load.lookahead,
            id(load.step_time), load.new_tokens.tobytes(), load.cached_tokens.tobytes(),
            load.output_tokens.tobytes(),
        )  # fmt: skip
        if key not in self._checked:
            if len(self._checked) > 256:
                self._checked.clear()
            self._checked[key] = self._check(profile, load), load.step_time
        return profile, self._checked[key][0]

    def _check(self, profile: LearnedProfile, load: TierLoad) -> np.ndarray:
        where = f"delay_model: {self.source}: profile {load.profile!r}"
        if sorted(load.types) != sorted(profile.types):
            raise ScenarioError(
                f"{where} was fitted for the types {', '.join(profile.types)}, "
                f"not {', '.join(load.types)}"
            )
        if not profile.least_slots <= load.concurrency <= profile.most_slots:
            raise OutOfRangeError(
                f"{where} has {load.concurrency} slots, the map was fitted for "
                f"{profile.least_slots} to {profile.most_slots}"
            )
        order = np.array([load.types.index(q) for q in profile.types])
        for what, theirs, ours in (
            ("new tokens", profile.new_tokens, load.new_tokens),
            ("cached tokens", profile.cached_tokens, load.cached_tokens),
            ("output tokens", profile.output_tokens, load.output_tokens),
        ):
            given = np.asarray(ours, dtype=float)[order]
            if not np.allclose(given, theirs, rtol=1e-6, atol=1e-6):
                raise ScenarioError(
                    f"{where} was fitted for {what} {_listed(theirs)}, not {_listed(given)}"
                )
        engine = self.file.engine
        if load.step_time is None or fingerprint(load.step_time) != profile.step_time:
            raise ScenarioError(f"{where} was fitted with another step time than the scenario's")
        if (load.token_budget, load.lookahead) != (engine.token_budget, profile.lookahead):
            raise ScenarioError(
                f"{where} was fitted for steps of {engine.token_budget} tokens, formed "
                f"{'ahead' if profile.lookahead else 'one by one'}; the scenario's are not"
            )
        return order


def _listed(values: object) -> str:
    return ", ".join(f"{x:g}" for x in np.asarray(values, dtype=float))


class _Reordered(ExcessDelay):
    """A law whose types stand elsewhere: ``order`` (Q,) are their places."""

    def __init__(self, law: ExcessDelay, order: np.ndarray) -> None:
        self._law, self._place = law, np.argsort(order)
        self.wait_probability = law.wait_probability
        self.mean = law.mean[self._place]

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        return self._law.cdf(int(self._place[q]), seconds)

    def decay(self, q: int) -> float:
        return self._law.decay(int(self._place[q]))


class _Nobody(ExcessDelay):
    """Nobody arrives, so nobody is delayed."""

    def __init__(self, types: int) -> None:
        self.wait_probability, self.mean = 0.0, np.zeros(types)

    def cdf(self, q: int, seconds: np.ndarray) -> np.ndarray:
        return np.where(np.asarray(seconds) < 0, 0.0, 1.0)

    def decay(self, q: int) -> float:
        return 0.0


def _load(argument: str | None) -> LearnedMap:
    if argument is None:
        raise ScenarioError("delay_model: learned_map needs its file: learned_map:FILE")
    return LearnedMap(LearnedMapFile.load(argument), argument)


register("learned_map", _load, variant=True)
