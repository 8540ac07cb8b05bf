"""Catalogue: what nodes advertise, and which of them a request may use (Theory G2, G5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class EngineIdentity:
    """What must agree between a request and the cached state that it would reuse."""

    model: str
    tokenizer: str
    adapter: str | None = None
    privacy_domain: str = "public"
    position_encoding: str = "rope"
    epoch: int = 0

    def serves(self, wanted: EngineIdentity) -> bool:
        """The node may serve the request at all (Theory G2): same model, adapter, tokenizer and
        privacy domain, and a catalogue epoch not older than the request's."""
        return (
            self.model == wanted.model
            and self.adapter == wanted.adapter
            and self.tokenizer == wanted.tokenizer
            and self.privacy_domain == wanted.privacy_domain
            and self.epoch >= wanted.epoch
        )

    def shares_state(self, wanted: EngineIdentity) -> bool:
        """Cached state is interchangeable (Theory G5): everything matches, the epoch exactly."""
        return self == wanted


@dataclass(frozen=True)
class CatalogueEntry:
    """One node as it advertises itself.

    Attributes
    ----------
    node : the node's number
    profile : name of the cache profile that it holds
    identity : of its engine and cached state
    position : (x, y) km, where nodes have places
    wait, wait_sigma : advertised mean excess delay and its standard deviation, s
    utilisation : advertised ρ, for admission
    stamped : when the advertisement was made, s on the catalogue's clock
    prefixes : hash of each pinned prefix -> its depth in tokens
    """

    node: int
    profile: str
    identity: EngineIdentity
    position: tuple[float, float] | None = None
    wait: float = 0.0
    wait_sigma: float = 0.0
    utilisation: float = 0.0
    stamped: float = 0.0
    prefixes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Catalogue:
    """All entries at one moment, in a fixed order; changes give a new catalogue."""

    entries: tuple[CatalogueEntry, ...] = ()

    def updated(self, entry: CatalogueEntry) -> Catalogue:
        """With ``entry`` in place of the same node's, or added."""
        kept = [entry if e.node == entry.node else e for e in self.entries]
        if all(e.node != entry.node for e in self.entries):
            kept.append(entry)
        return replace(self, entries=tuple(kept))

    def without(self, node: int) -> Catalogue:
        """Without a node that died or is drained."""
        return replace(self, entries=tuple(e for e in self.entries if e.node != node))


def candidates(
    entries: Sequence[CatalogueEntry],
    wanted: EngineIdentity,
    distances: np.ndarray,
    per_profile: int = 1,
    exclude: Iterable[int] = (),
) -> list[int]:
    """Indices of the nodes worth a cost: those that may serve, the nearest few per profile.

    A farther node of the same profile that advertises no smaller wait is dominated (Theory G2).

    Parameters
    ----------
    entries : the catalogue's
    wanted : the request's identity
    distances : (entries,) km
    per_profile : nodes kept of each profile
    exclude : nodes that were tried already

    Returns
    -------
    Indices into ``entries``, nearest first within a profile; profiles in catalogue order.
    """
    tried = set(exclude)
    groups: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        if entry.node not in tried and entry.identity.serves(wanted) and np.isfinite(distances[i]):
            groups.setdefault(entry.profile, []).append(i)
    return [
        i
        for group in groups.values()
        for i in sorted(group, key=lambda j: float(distances[j]))[:per_profile]
    ]


def usable_depth(
    entry: CatalogueEntry, wanted: EngineIdentity, chain: Sequence[tuple[str, int]]
) -> int:
    """Tokens of the prompt that this node's cache really serves (Theory G5).

    ``chain`` is the request's prefix as (hash, depth) pairs. A state counts only if every part of
    the identity and the hash and depth of the prefix match; otherwise the hit is the deepest
    smaller one that does, or 0: a full prefill.
    """
    if not entry.identity.shares_state(wanted):
        return 0
    return max((depth for key, depth in chain if entry.prefixes.get(key) == depth), default=0)
