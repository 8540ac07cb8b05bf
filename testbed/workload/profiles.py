"""Cache profiles from a prefix forest: scores, candidates, dominance, choice (Theory F1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from testbed.errors import ScenarioError
from testbed.prefill import residual_prefill
from testbed.scenario import Prefill
from testbed.workload.forest import no_prefixes
from testbed.workload.knapsack import pack, pack_greedily
from testbed.workload.scaling import ScaledRequests

FALLBACK = "fallback"
_TOGETHER = 100_000
"""Requests whose savings are counted at once: bounds the memory, not the result."""
MIN_SUPPORT = 2
"""A prefix that fewer requests carry is not worth state, nor fit to be advertised (H11)."""

SupportOf = Literal["requests", "sessions", "tenants"]
"""What a minimum support counts. Turns of one session share a path: two requests may be one
person, which matters where the threshold is to protect people."""


@dataclass(frozen=True)
class CandidateProfile:
    """An ancestor-closed vertex set and what it is worth.

    Attributes
    ----------
    held : (V,) bool over the forest's vertices
    persistent_bytes : B_s (Theory A4)
    reusable : (n,) h of every request, tokens (Theory A3)
    saved_seconds : mean ΔG of a request sent to this profile (Theory A5)
    coverage : share of requests with h > 0
    selective : share of requests that reuse more than what all requests share
    upper_bound : proven upper bound of ``saved_seconds`` within the profile's budget, where it
        came from the knapsack
    """

    name: str
    method: str
    held: np.ndarray
    persistent_bytes: float
    reusable: np.ndarray
    saved_seconds: float
    coverage: float
    vertices: int
    pinned_blocks: tuple[int, ...]
    upper_bound: float | None = None
    selective: float = 0.0


@dataclass(frozen=True)
class ForestValue:
    """What every vertex is worth and costs.

    The saving of an ancestor-closed set telescopes along each request's path, so that it is the
    plain sum of its vertices' ``saving``, for any prefill law (Theory A5, A8, H1).

    Attributes
    ----------
    saving : (V,) s per request: mean over all requests of the prefill time that the vertex
        saves once its parent is cached
    whole : (V,) s per request: what the requests that carry the vertex save by its whole prefix
    state_tokens : (V,) tokens of KV state it adds
    support : (V,) requests that carry it
    supported : (V,) bool; carried by at least the minimum of requests, sessions or tenants
    """

    requests: ScaledRequests
    prefill: Prefill
    bytes_per_token: float
    saving: np.ndarray
    whole: np.ndarray
    state_tokens: np.ndarray
    support: np.ndarray
    supported: np.ndarray

    @classmethod
    def of(
        cls,
        requests: ScaledRequests,
        prefill: Prefill,
        bytes_per_token: float,
        *,
        min_support: int = MIN_SUPPORT,
        support_of: SupportOf = "requests",
    ) -> ForestValue:
        """Raises :class:`TraceError` where the trace records no prefixes."""
        forest = requests.forest
        if not len(forest):
            raise no_prefixes(requests.trace)
        saving, whole, support = _savings(requests, prefill)
        carriers = support
        if support_of != "requests":
            labels = requests.trace.session if support_of == "sessions" else requests.trace.tenant
            carriers = np.minimum(support, forest.carriers(labels))
        return cls(
            requests,
            prefill,
            bytes_per_token,
            saving / len(requests),
            whole / len(requests),
            requests.state_tokens,
            support,
            carriers >= min_support,
        )

    def scores(self) -> np.ndarray:
        """(V,) Γ_v = p̂_v·[g(L_v) − g(L_v − ℓ_v)]/B_v, s/byte (Theory F1); 0 where the vertex
        keeps no whole engine block.

        The saving is the mean over the requests that carry v, each with its own length; B_v is
        the state of the path from the root to v.
        """
        state = self.requests.reusable_depth * self.bytes_per_token
        return np.divide(self.whole, state, out=np.zeros(len(state)), where=state > 0)


def fallback(requests: ScaledRequests) -> CandidateProfile:
    """The uncached profile of most concurrency."""
    nothing = np.zeros(len(requests.forest), dtype=bool)
    zeros = np.zeros(len(requests), dtype=np.int64)
    return CandidateProfile(FALLBACK, "uncached", nothing, 0.0, zeros, 0.0, 0.0, 0, ())


def candidate(
    value: ForestValue, name: str, method: str, held: np.ndarray, bound: float | None = None
) -> CandidateProfile:
    """Measure an ancestor-closed set (V,) bool."""
    requests = value.requests
    hits = requests.reusable(held)
    full = residual_prefill(value.prefill, requests.input_tokens, np.zeros(len(requests)))
    left = residual_prefill(value.prefill, requests.input_tokens, hits)
    tips = requests.forest.deepest(held)
    trunk = requests.reusable_depth[requests.forest.common].max(initial=0)
    return CandidateProfile(
        name=name,
        method=method,
        held=held,
        persistent_bytes=float(value.state_tokens[held].sum() * value.bytes_per_token),
        reusable=hits,
        saved_seconds=float((full - left).mean()),
        coverage=float((hits > 0).mean()),
        vertices=int(held.sum()),
        pinned_blocks=tuple(sorted(requests.forest.block_id[tips].tolist())),
        upper_bound=bound,
        selective=float((hits > trunk).mean()),
    )


def candidates(
    value: ForestValue, budget_bytes: float, *, families: int = 8, ladder: int = 4
) -> list[CandidateProfile]:
    """The fallback and candidate profiles within a budget, before pruning.

    Tree knapsack and greedy expansion at the budget and at each quarter of the one before
    (``ladder`` steps), and the knapsack within each of the ``families`` most valuable families
    (subtrees below what all requests share). A set that holds nothing but what all requests
    share is no candidate: it tells no two requests apart.
    """
    forest = value.requests.forest
    saving = np.where(value.supported, value.saving, 0.0)
    found = [fallback(value.requests)]

    def consider(name: str, method: str, held: np.ndarray, bound: float | None) -> None:
        trunk_only = not (held & (forest.family >= 0)).any()
        if held.any() and not (trunk_only and len(forest.common)):
            found.append(candidate(value, name, method, held, bound))

    for step in range(ladder):
        tokens = int(budget_bytes / 4**step // value.bytes_per_token)
        held, bound = _pack_within(value, saving, value.supported, tokens)
        consider("deep" if step == 0 else f"shallow-{step}", "knapsack", held, bound)
        consider(f"greedy-{step}", "greedy", _expand_within(value, saving, tokens), None)
    tokens = int(budget_bytes // value.bytes_per_token)
    worth = np.bincount(
        forest.family[forest.family >= 0],
        weights=saving[forest.family >= 0],
        minlength=len(forest),
    )
    for rank, top in enumerate(np.argsort(-worth, kind="stable")[:families], 1):
        if worth[top] <= 0:
            break
        inside = value.supported & ((forest.family == top) | (forest.family < 0))
        held, bound = _pack_within(value, saving, inside, tokens)
        consider(f"family-{rank}", "family", held, bound)
    return found


def _expand_within(value: ForestValue, saving: np.ndarray, tokens: int) -> np.ndarray:
    keep, parent = _subforest(value, value.supported)
    held = np.zeros(len(saving), dtype=bool)
    held[keep[pack_greedily(parent, saving[keep], value.state_tokens[keep], tokens)]] = True
    return held


def _subforest(value: ForestValue, among: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Vertices of an ancestor-closed set and their parents, renumbered within it."""
    keep = np.flatnonzero(among)
    number = np.full(len(among) + 1, -1, dtype=np.int32)
    number[keep] = np.arange(len(keep), dtype=np.int32)
    return keep, number[value.requests.forest.parent[keep]]


def _pack_within(
    value: ForestValue, saving: np.ndarray, among: np.ndarray, tokens: int
) -> tuple[np.ndarray, float]:
    keep, parent = _subforest(value, among)
    unit = max(1, int(np.gcd.reduce(value.state_tokens[keep]))) if len(keep) else 1
    packing = pack(parent, saving[keep], value.state_tokens[keep] // unit, tokens // unit)
    held = np.zeros(len(among), dtype=bool)
    held[keep[packing.held]] = True
    return held, packing.upper_bound


def undominated(profiles: list[CandidateProfile]) -> list[CandidateProfile]:
    """Drop every profile that another one beats (Theory F1): no larger B, hence no lower
    concurrency, and no smaller h for any request. Of equal ones the first stays."""
    kept: list[CandidateProfile] = []
    for i, a in enumerate(profiles):
        beaten = any(
            b.persistent_bytes <= a.persistent_bytes
            and bool((b.reusable >= a.reusable).all())
            and (j < i or b.persistent_bytes < a.persistent_bytes
                 or bool((b.reusable > a.reusable).any()))
            for j, b in enumerate(profiles)
            if j != i
        )  # fmt: skip
        if not beaten:
            kept.append(a)
    return kept


def choose(profiles: list[CandidateProfile], count: int) -> list[CandidateProfile]:
    """``count`` profiles, the fallback first.

    First the two most valuable of the depth ladder (deep and shallow), then by turns the most
    valuable family and the next of the ladder, so that broad shallow reuse and selective deep
    reuse both stand to choice; the placement decides how much of each to deploy (Theory F2).

    Raises
    ------
    ScenarioError
        ``count`` is below 1.
    """
    if count < 1:
        raise ScenarioError(f"profiles: {count} is not a number of profiles >= 1")
    base = [p for p in profiles if p.name == FALLBACK]
    broad = sorted(
        (p for p in profiles if p.method in ("knapsack", "greedy")),
        key=lambda p: -p.saved_seconds,
    )
    families = sorted((p for p in profiles if p.method == "family"), key=lambda p: -p.saved_seconds)
    taken = base[:1]
    while len(taken) < count and (broad or families):
        ladder = broad and (len(taken) <= 2 or len(taken) % 2 == 0 or not families)
        turn = broad if ladder else families
        taken.append(turn.pop(0))
    return taken


def _savings(
    requests: ScaledRequests, prefill: Prefill
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per vertex (V,): seconds saved beyond its parent, by its whole prefix, and its requests."""
    forest = requests.forest
    saving, whole = np.zeros(len(forest)), np.zeros(len(forest))
    support = np.zeros(len(forest), dtype=np.int64)
    full_prefill = residual_prefill(prefill, requests.input_tokens, 0.0)
    for start in range(0, len(requests), _TOGETHER):
        part = np.arange(start, min(start + _TOGETHER, len(requests)))
        begin, end = forest.offsets[requests.rows[part]], forest.offsets[requests.rows[part] + 1]
        count = end - begin
        ends = np.cumsum(count)
        # Every request's path, one after another: (request, vertex) pairs from root to leaf.
        request = np.repeat(part, count)
        vertex = forest.path[np.arange(len(request)) - np.repeat(ends - count - begin, count)]
        depth = np.minimum(requests.reusable_depth[vertex], requests.longest_hit[request])
        after = residual_prefill(prefill, requests.input_tokens[request], depth)
        full = full_prefill[request]
        before = np.roll(after, 1)
        first = (ends - count)[count > 0]
        before[first] = full[first]
        np.add.at(saving, vertex, before - after)
        np.add.at(whole, vertex, full - after)
        np.add.at(support, vertex, 1)
    return saving, whole, support
