"""RemoteFetch: the state a node lacks, fetched over the backhaul or computed again (Theory H6).

A request of L tokens at a node that holds h of its prefix may use them, may fetch the state of a
deeper prefix h' that some other profile holds, or may compute everything:

    local      g(L − h | h)
    fetch      T_fetch(h' − h) + g(L − h' | h')
    recompute  g(L | 0)

with T_fetch = latency + size/rate + size·decompression·(1 + interference), size = κ·(h' − h); the
last factor is the foreground inference that decompression holds up. The least of them is taken.
Theory and simulation share :func:`retrieve`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.scenario import Backhaul, Prefill
from testbed.theory.prefill import prefill_time
from testbed.tier_engine import TierPrefill

LOCAL, FETCH, RECOMPUTE = range(3)


@dataclass(frozen=True)
class Retrieval:
    """What each type does at each profile's node, all (Q, S).

    Attributes
    ----------
    mode : :data:`LOCAL`, :data:`FETCH` or :data:`RECOMPUTE`
    residual : s until the prompt is processed, the fetch included
    fetch : s of it that are the fetch
    reusable : tokens that are not computed
    size : bytes fetched
    """

    mode: np.ndarray
    residual: np.ndarray
    fetch: np.ndarray
    reusable: np.ndarray
    size: np.ndarray


def fetch_time(backhaul: Backhaul, size: np.ndarray) -> np.ndarray:
    """T_fetch of ``size`` bytes, s; 0 for nothing."""
    size = np.asarray(size, dtype=float)
    unpacking = size * backhaul.decompression * (1.0 + backhaul.interference)
    return np.where(size > 0, backhaul.latency + size / backhaul.rate + unpacking, 0.0)


def retrieve(
    prefill: Prefill | TierPrefill,
    tokens: np.ndarray,
    hits: np.ndarray,
    present: np.ndarray,
    per_token: float,
    backhaul: Backhaul,
) -> Retrieval:
    """The least of local, fetch and recompute (Theory H6).

    Parameters
    ----------
    tokens : (Q,) L_q
    hits : (Q, S) h_sq of the local state
    present : (S,) whether a profile has any node to fetch from
    per_token : κ, bytes
    """
    tokens, hits = np.asarray(tokens, dtype=float), np.asarray(hits, dtype=float)
    length = tokens[:, None]
    best = prefill_time(prefill, length - hits, hits)
    mode = np.full(hits.shape, LOCAL)
    fetch = np.zeros(hits.shape)
    reusable = hits.copy()
    size = np.zeros(hits.shape)
    whole = np.broadcast_to(prefill_time(prefill, length, 0.0), hits.shape)
    again = whole < best
    mode[again], reusable[again] = RECOMPUTE, 0.0
    best = np.where(again, whole, best)
    for source in np.flatnonzero(present):
        there = np.broadcast_to(hits[:, [source]], hits.shape)
        moved = np.maximum(there - hits, 0.0) * per_token
        wait = fetch_time(backhaul, moved)
        total = wait + prefill_time(prefill, length - there, there)
        better = (moved > 0) & (total < best)
        mode[better] = FETCH
        best = np.where(better, total, best)
        fetch = np.where(better, wait, fetch)
        reusable = np.where(better, there, reusable)
        size = np.where(better, moved, size)
    return Retrieval(mode=mode, residual=best, fetch=fetch, reusable=reusable, size=size)
