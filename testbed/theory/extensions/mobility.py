"""Mobility: users move while a session lasts, and its warm state stays behind (Theory H10).

A user served at the first turn has moved by d at the next. The node that served it is still the
best one if no better node lies in the union of the exclusion discs around both places,

    P(stay at s | q, d) = ∫∫ λ_s exp(−Σ_t λ_t·|B(0, ϱ_st(r)) ∪ B(d, ϱ_st(r'))|) r dr dθ,

r and r' being the node's distances from the old and the new place. A session whose context is warm
at the old node can go on in three ways:

    stay     from the old node, over what has become a longer path
    rehome   from the node that is best now, which computes the context again unless it is the same
    migrate  from the node that is best now, which fetches the state first unless it is the same

The plane looks the same from the new place, so that the means of the last two follow from the
association alone and the probabilities of staying.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from testbed.errors import ScenarioError
from testbed.radio import RadioModel
from testbed.scenario import Backhaul, Prefill, Scenario, Users
from testbed.theory.extensions.discs import union_area
from testbed.theory.extensions.radio_law import joint_law, serving_nodes
from testbed.theory.extensions.remote_fetch import fetch_time
from testbed.theory.predict import locate
from testbed.theory.prefill import prefill_time
from testbed.theory.system import System
from testbed.tier_engine import one_engine

_RADII = 16
_ANGLES = 40

_u, _w = np.polynomial.legendre.leggauss(_ANGLES)
_COSINE = np.cos(0.5 * np.pi * (_u + 1.0))
_TURN = 0.5 * _w
"""Directions on one side of the move, and their weights, which sum to 1."""


def stay_probability(system: System, costs: np.ndarray, displacement: ArrayLike) -> np.ndarray:
    """P(served by s, and by the same node after a move by d), (Q, S, D) (Theory H10).

    Parameters
    ----------
    costs : (Q, S) K_sq, s, the same at both times
    displacement : (D,) km

    Gauss–Legendre in the node's distance and direction, good to about 10⁻⁴. At d = 0 it is A_sq.
    """
    moved = np.atleast_1d(np.asarray(displacement, dtype=float))
    types, tiers = system.shape
    result = np.zeros((types, tiers, len(moved)))
    for q in range(types):
        for s in np.flatnonzero(system.density > 0):
            r, weight = serving_nodes(system, costs[q], s, _RADII)
            apart = _apart(r, moved)
            void = np.zeros((len(r), _ANGLES, len(moved)))
            for t in np.flatnonzero(system.density > 0):
                lead = costs[q, s] - costs[q, t]
                before = _exclusion(system.radio, r, lead)[:, None, None]
                after = _exclusion(system.radio, apart, lead)
                void += system.density[t] * union_area(before, after, moved)
            ring = 2.0 * np.pi * system.density[s] * r * weight
            result[q, s] = np.einsum("r,a,rad->d", ring, _TURN, np.exp(-void))
    return result


@dataclass(frozen=True)
class NextTurn:
    """Mean TTFT of a session's next turn for each way to go on, (D,) s, and P(same node), (D,)."""

    stay: np.ndarray
    rehome: np.ndarray
    migrate: np.ndarray
    same: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """Index of the least mean: 0 stay, 1 rehome, 2 migrate, (D,)."""
        return np.argmin([self.stay, self.rehome, self.migrate], axis=0)


@dataclass(frozen=True)
class Session:
    """A session at its next turn: ``context`` tokens warm at its node, ``new_tokens`` more."""

    context: float
    new_tokens: float


def next_turn(
    system: System,
    costs: np.ndarray,
    wait: np.ndarray,
    q: int,
    displacement: ArrayLike,
    session: Session,
    *,
    prefill: Prefill,
    per_token: float,
    backhaul: Backhaul,
) -> NextTurn:
    """What the next turn of a session of type q takes after a move by d (Theory H10).

    Parameters
    ----------
    costs : (Q, S) K_sq by which the policy chose and chooses, s
    wait : (Q, S) mean wait of the tiers' nodes, s
    displacement : (D,) km
    per_token : κ, bytes

    A node that has not served the session holds what its profile has of the type's prefix and must
    compute, or fetch, the rest of the context.
    """
    moved = np.atleast_1d(np.asarray(displacement, dtype=float))
    shared = np.minimum(system.reusable[q], session.context)
    warm = float(prefill_time(prefill, session.new_tokens, session.context))
    cold = prefill_time(prefill, session.context - shared + session.new_tokens, shared)
    carried = warm + fetch_time(backhaul, (session.context - shared) * per_token)
    law = joint_law(system.radio, system.density, costs[q])
    share = law.mass.sum(axis=0)
    arriving = float((law.mass * system.radio.delay(law.distance)).sum() + share @ wait[q])
    same = stay_probability(system, costs, moved)[q]
    lengthened = np.zeros(len(moved))
    for s in np.flatnonzero(system.density > 0):
        r, weight = serving_nodes(system, costs[q], s, _RADII)
        void = sum(
            np.pi * system.density[t] * _exclusion(system.radio, r, costs[q, s] - costs[q, t]) ** 2
            for t in np.flatnonzero(system.density > 0)
        )
        ring = 2.0 * np.pi * system.density[s] * r * weight * np.exp(-void)
        lengthened += np.einsum("r,a,rad->d", ring, _TURN, system.radio.delay(_apart(r, moved)))

    def follow(elsewhere: np.ndarray) -> np.ndarray:
        return arriving + share @ elsewhere - (elsewhere - warm) @ same

    return NextTurn(
        stay=lengthened + float(share @ wait[q]) + warm,
        rehome=follow(cold),
        migrate=follow(carried),
        same=same.sum(axis=0),
    )


@dataclass(frozen=True)
class TurnChoice:
    """A type's next turn after a pause, averaged over how far its users have moved.

    ``stay``, ``rehome`` and ``migrate`` are mean TTFTs, s; ``same`` the probability that the old
    node is still the best one; ``moved`` the mean displacement, km.
    """

    stay: float
    rehome: float
    migrate: float
    same: float
    moved: float

    @property
    def best(self) -> str:
        return min(("stay", "rehome", "migrate"), key=lambda way: float(getattr(self, way)))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "best": self.best}


def plan_next_turn(scenario: Scenario, new_tokens: float, seconds: float) -> dict[str, TurnChoice]:
    """Where each type's session should go on ``seconds`` after its last turn (Theory H10).

    The whole prompt and its outputs are warm at the old node; ``new_tokens`` more come. Users move
    as ``simulation.users`` says, state as ``simulation.backhaul``. What a node holds of a prefix
    before any fetch is what its profile has.

    Raises
    ------
    ScenarioError
        The scenario has no backhaul, or no stable operating point.

    Examples
    --------
    >>> from testbed.presets import preset
    >>> walking = preset("paper-baseline").replace(simulation={
    ...     "users": {"mobility": "gauss_markov", "count": 100},
    ...     "backhaul": {"rate": 1e9}})
    >>> plan_next_turn(walking, new_tokens=200, seconds=60)["long"].best
    'stay'
    """
    spec = scenario.simulation
    if spec is None or spec.backhaul is None:
        raise ScenarioError("simulation.backhaul: moving a session's state needs one")
    if not (new_tokens > 0 and seconds >= 0):
        raise ScenarioError(
            f"next turn: {new_tokens:g} tokens after {seconds:g} s; give more than 0, at least 0"
        )
    one_engine(scenario, "the next turn of a session")
    # The session's own state may be fetched; shared prefixes are what each profile holds.
    still = scenario.replace(
        simulation=spec.model_copy(update={"backhaul": None}).model_dump(exclude_none=True)
    )
    latency = locate(still)
    if not latency.point.feasible:
        raise ScenarioError(f"{scenario.name}: {latency.point.reason}")
    moved, count = np.unique(displacements(spec.users, seconds), return_counts=True)
    share = count / count.sum()
    found = {}
    for q, request in enumerate(scenario.requests):
        turn = next_turn(
            latency.system,
            latency.point.costs,
            latency.point.wait,
            q,
            moved,
            Session(request.tokens + request.output_tokens, new_tokens),
            prefill=scenario.prefill,
            per_token=scenario.memory.per_token,
            backhaul=spec.backhaul,
        )
        ways = (turn.stay, turn.rehome, turn.migrate, turn.same, moved)
        found[request.name] = TurnChoice(*(float(way @ share) for way in ways))
    return found


def displacements(users: Users, seconds: float, levels: int = 32) -> np.ndarray:
    """How far a user has moved after ``seconds``, km, at ``levels`` levels of equal mass.

    ``gauss_markov``: both components are Gaussian with variance 2σ²m²(τ − 1 + e^−τ), τ = t/m, so
    that the displacement has a Rayleigh law. ``random_waypoint``: straight at the given speed,
    true within a leg. ``none``: 0.
    """
    if users.mobility == "none":
        return np.zeros(levels)
    if users.mobility == "random_waypoint":
        return np.full(levels, users.speed * seconds)
    deviation = users.speed * math.sqrt(2.0 / math.pi)
    tau = seconds / users.memory
    scale = deviation * users.memory * math.sqrt(2.0 * max(tau + math.expm1(-tau), 0.0))
    level = (np.arange(levels) + 0.5) / levels
    return scale * np.sqrt(-2.0 * np.log1p(-level))


def _exclusion(radio: RadioModel, distance: np.ndarray, lead: float) -> np.ndarray:
    return radio.distance(radio.delay(distance) + lead)


def _apart(r: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """Distance of a node at r and each direction from the new place, (R, A, D)."""
    squared = r[:, None, None] ** 2 + moved**2 - 2.0 * r[:, None, None] * _COSINE[:, None] * moved
    return np.sqrt(np.maximum(squared, 0.0))
