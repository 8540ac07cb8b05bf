"""Figs. 10 and 11: the best mix of profiles against load, and what adapting it gains."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from testbed.reporting.layout import as_percent
from testbed.reporting.paper_claims import Claim, Drawn, signed
from testbed.reporting.paper_layout import heading, key, shares
from testbed.reporting.paper_model import PaperModel
from testbed.reporting.style import DASHES, INK, PALETTE, panels, styled
from testbed.reporting.table import Table, words
from testbed.reporting.table import figure as number
from testbed.reporting.wording import plain, share

STEP = 0.05
LEAST_FALLBACK = 0.35
MOST_DEEP = 0.20
"""The candidate set of Fig. 10 is not printed. With deep 15 % and shallow 50 % the fallback has
35 %; with deep never above 20 %: a least fallback and a most deep fraction (Theory F2)."""
MIX_LOADS = np.concatenate([np.arange(1.0, 10.1, 0.5), np.arange(11.0, 20.1, 1.0)])
LIGHT, MODERATE, HIGH = 1.0, 3.0, 8.0
"""Loads that the text names without numbers, requests/s per km²."""


@dataclass(frozen=True)
class MixSearch:
    """Coverage of every candidate mix at every load, and the best of each.

    Attributes
    ----------
    mixes : (N, S) candidate placements
    coverage : (L, N) at the loads of :data:`MIX_LOADS`
    """

    mixes: np.ndarray
    coverage: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """The best placement at each load, (L, S); without meaning where coverage is 0."""
        return self.mixes[self.coverage.argmax(axis=1)]


def search_mixes(model: PaperModel, mixes: np.ndarray) -> MixSearch:
    """Exhaustive search (Theory F2): each mix is followed through the loads with warm starts."""
    coverage = np.zeros((len(MIX_LOADS), len(mixes)))
    for n, pi in enumerate(mixes):
        start = None
        for i, load in enumerate(MIX_LOADS):
            latency = model.ask(intensity=float(load), fraction=pi, start=start)
            coverage[i, n] = latency.coverage(model.deadline)
            start = latency.point if latency.point.feasible else None
    return MixSearch(mixes, coverage)


def candidates(model: PaperModel) -> np.ndarray:
    """The candidate mixes of Fig. 10, (N, S)."""
    return model.mixes(STEP, LEAST_FALLBACK, MOST_DEEP)


def every_mix(model: PaperModel) -> np.ndarray:
    """All mixes of the same grid, (N, S)."""
    return model.mixes(STEP, 0.0, 1.0)


@styled
def best_mix(model: PaperModel, search: MixSearch, free: MixSearch) -> Drawn:
    """Fig. 10: the best mix of profiles against load, inside the candidate set and outside."""
    drawing, (axes,) = panels(1, 2, height=2.9, sharey=True)
    for at, found, title in zip(
        axes,
        (search, free),
        (
            f"Fallback at least {as_percent(LEAST_FALLBACK)}, deep at most {as_percent(MOST_DEEP)}",
            "Any mix",
        ),
        strict=True,
    ):
        served = found.coverage.max(axis=1) > 0
        for k, s in enumerate(model.order):
            at.plot(
                MIX_LOADS[served],
                found.best[served, s],
                color=PALETTE[k],
                linestyle=DASHES[k],
                marker="o",
                markersize=3.5,
                label=plain(model.system.names[s]),
            )
        at.set(title=title, xlabel="requests/s per km²")
        shares(at)
    key(drawing, axes[0])
    heading(drawing, "Best mix of profiles against load, share of the nodes")

    fallback, shallow, deep = model.order
    index = {load: int(np.argmin(np.abs(MIX_LOADS - load))) for load in (LIGHT, MODERATE, HIGH)}
    served = search.coverage.max(axis=1) > 0
    alike = MIX_LOADS[
        served & (np.abs(search.best - search.best[index[HIGH]]) < STEP / 2).all(axis=1)
    ]
    least = MIX_LOADS[served & (search.best[:, deep] < STEP / 2)]
    stays = f"this mix is best from intensity {alike[0]:g} to {alike[-1]:g}"
    beyond = f"; none is deep from {least[0]:g} on" if len(least) else ""
    claims = [
        Claim.value(
            10,
            f"deep fraction at {name} load",
            reported,
            float(search.best[index[load], deep]),
            tolerance=STEP / 2,
            note=f"intensity {load:g}"
            + _by_assumption(search.best[index[load], deep], MOST_DEEP, "most")
            + f"; {share(free.best[index[load], deep])} if any mix is allowed",
        )
        for name, reported, load in (
            ("light", 0.20, LIGHT),
            ("moderate", 0.20, MODERATE),
            ("high", 0.15, HIGH),
        )
    ]
    claims.append(
        Claim.value(
            10,
            "shallow fraction at high load",
            0.50,
            float(search.best[index[HIGH], shallow]),
            tolerance=STEP / 2,
            note=f"intensity {HIGH:g}"
            + _by_assumption(search.best[index[HIGH], fallback], LEAST_FALLBACK, "least fallback")
            + f"; {stays}{beyond}; {share(free.best[index[HIGH], shallow])} if any mix is allowed",
        )
    )
    rows = []
    for i in index.values():
        order = np.argsort(-search.coverage[i], kind="stable")[:4]
        for rank, n in enumerate(order):
            rows.append(
                (
                    words(f"{MIX_LOADS[i]:g}" if rank == 0 else "", "strong"),
                    *(number(share(search.mixes[n, s])) for s in model.order),
                    number(f"{search.coverage[i, n]:.4f}", "strong" if rank == 0 else ""),
                    number(f"{search.coverage[i, order[0]] - search.coverage[i, n]:.4f}", "faint"),
                )
            )
    table = Table(
        "The best four mixes",
        (
            "intensity",
            *(plain(model.system.names[s]) for s in model.order),
            "coverage",
            "behind the best",
        ),
        tuple(rows),
        starts=(0, 4, 8),
        note=f"{len(search.mixes)} candidates of {len(free.mixes)} mixes in steps of "
        f"{as_percent(STEP)}.",
    )
    return Drawn(
        10,
        "Best mix of profiles",
        drawing,
        "Exhaustive search of the simplex grid. The paper does not print its candidate set: "
        f"we take mixes with at least {share(LEAST_FALLBACK)} fallback and at most "
        f"{share(MOST_DEEP)} deep nodes, which its numbers suggest. On the right nothing is "
        "excluded, and these numbers are not found.",
        tuple(claims),
        (table,),
    )


def _by_assumption(found: float, bound: float, what: str) -> str:
    """Says that a value stands where an assumed bound stops it."""
    return f", at the {what} that we assume" if abs(found - bound) < STEP / 2 else ""


@styled
def adapted_mix(model: PaperModel, search: MixSearch) -> Drawn:
    """Fig. 11: the mix adapted to load against two that stay fixed."""
    adapted = search.coverage.max(axis=1)
    light = search.best[0]
    fixed = {
        "adapted": adapted,
        "fixed at its light-load best": _follow(model, light),
        "fixed, a third each": _follow(model, np.full(3, 1 / 3)),
    }
    drawing, ((at, loss),) = panels(1, 2, height=2.9)
    for i, (name, values) in enumerate(fixed.items()):
        look = {"color": PALETTE[i], "linestyle": DASHES[i], "label": name}
        at.plot(MIX_LOADS, values, **look)
        if i:
            loss.plot(MIX_LOADS, 100 * (values - adapted), **look)
    at.set(xlabel="requests/s per km²", title=f"Coverage at {model.deadline:g} s")
    shares(at)
    key(drawing, at)
    loss.axhline(0, color=INK, linewidth=0.8)
    loss.set(xlabel="requests/s per km²", title="Fixed − adapted, percentage points")
    heading(drawing, "Adapting the mix to load")

    third = fixed["fixed, a third each"]
    behind = third - adapted
    own = fixed["fixed at its light-load best"]
    last = int(np.flatnonzero(adapted > 0)[-1])
    claims = (
        Claim(
            11,
            "adapting the mix prevents the sharp degradation of a fixed one near heavy load",
            "prevents",
            f"{adapted[last]:.3f} against {own[last]:.3f} at intensity {MIX_LOADS[last]:g}, the "
            f"heaviest that any candidate survives",
            bool(adapted[last] - own[last] > 0.1 and abs(adapted[0] - own[0]) < 0.02),
            note="fixed at the mix that is best at light load: "
            + ", ".join(f"{share(light[s])} {model.role(s)}" for s in model.order),
        ),
        Claim(
            11,
            "a fixed uniform mix falls behind the adapted one as load grows",
            "falls behind",
            f"{signed(behind[0])} at intensity {MIX_LOADS[0]:g}, {signed(behind[last])} at "
            f"{MIX_LOADS[last]:g}",
            bool(
                third[last] < adapted[last] and third[last] - adapted[last] < third[0] - adapted[0]
            ),
            note="a third of the nodes each has more deep nodes than the candidate set allows, "
            "and is better at light load",
        ),
    )
    return Drawn(
        11,
        "Adapted against fixed mix",
        drawing,
        "The adapted mix is the best candidate of Fig. 10 at each load.",
        claims,
    )


def _follow(model: PaperModel, pi: np.ndarray) -> np.ndarray:
    """Coverage of one mix at every load of Fig. 11."""
    return search_mixes(model, pi[None, :]).coverage[:, 0]
