"""Figs. 9 to 12: popularity of the long type, the best mix of profiles, and node density."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from matplotlib.ticker import FuncFormatter

from testbed.reporting.layout import as_percent
from testbed.reporting.paper_claims import Claim, Drawn, signed
from testbed.reporting.paper_layout import heading, key, reported_points, shares
from testbed.reporting.paper_model import POLICIES, PaperModel
from testbed.reporting.style import DASHES, INK, PALETTE, panels, styled
from testbed.reporting.table import Table, words
from testbed.reporting.table import figure as number
from testbed.reporting.wording import plain, share

LONG_SHARES = np.linspace(0.1, 0.6, 21)
LONG_LOADS = (3.0, 4.0, 5.0)
"""Requests/s per km² of Fig. 9, which the text does not name."""
REPORTED_LOAD = 4.0
"""The one of them that Fig. 9's claims are judged at."""
STEP = 0.05
LEAST_FALLBACK = 0.35
MOST_DEEP = 0.20
"""The candidate set of Fig. 10 is not printed. With deep 15 % and shallow 50 % the fallback has
35 %; with deep never above 20 %: a least fallback and a most deep fraction (Theory F2)."""
MIX_LOADS = np.concatenate([np.arange(1.0, 10.1, 0.5), np.arange(11.0, 20.1, 1.0)])
LIGHT, MODERATE, HIGH = 1.0, 3.0, 8.0
"""Loads that the text names without numbers, requests/s per km²."""
DENSITIES = np.arange(0.5, 4.01, 0.25)


@styled
def long_popularity(model: PaperModel) -> Drawn:
    """Fig. 9: a growing probability of the long type under a fixed mix (Theory E4, C4)."""
    found = {
        load: [
            model.ask(intensity=load, probability=model.with_probability(model.long, float(p)))
            for p in LONG_SHARES
        ]
        for load in LONG_LOADS
    }
    offloading = {k: np.array([x.offloading_ratio for x in v]) for k, v in found.items()}
    distance = {k: np.array([x.mean_distance for x in v]) for k, v in found.items()}
    profile_share = np.array(
        [x.system.probability @ x.point.association for x in found[REPORTED_LOAD]]
    )
    drawing, ((ratio, far, served),) = panels(1, 3, height=2.9)
    for i, load in enumerate(LONG_LOADS):
        look = {"color": PALETTE[i], "linestyle": DASHES[i], "label": f"intensity {load:g}"}
        ratio.plot(LONG_SHARES, offloading[load], **look)
        far.plot(LONG_SHARES, distance[load], **look)
    ratio.set(title="Offloading ratio")
    far.set(title="Mean serving distance, km")
    for k, s in enumerate(model.order):
        served.plot(
            LONG_SHARES, profile_share[:, s], color=PALETTE[k], linestyle=DASHES[k],
            label=plain(model.system.names[s]),
        )  # fmt: skip
    served.set(title=f"Who serves, at intensity {REPORTED_LOAD:g}")
    served.legend(loc="upper right")
    key(drawing, ratio)
    for axes in (ratio, far, served):
        axes.set_xlabel("probability of the long type")
        axes.xaxis.set_major_formatter(FuncFormatter(as_percent))
    for axes in (ratio, served):
        shares(axes)
    heading(drawing, "The long type becomes more popular")

    falling = {load: bool((np.diff(v) < 0).all()) for load, v in offloading.items()}
    first, last = offloading[REPORTED_LOAD][[0, -1]]
    fallback = profile_share[:, model.order[0]]
    km = distance[REPORTED_LOAD]
    claims = (
        Claim(
            9,
            "the offloading ratio falls as the long type becomes more popular",
            "falls",
            f"{first:.3f} → {last:.3f}"
            + (", at every step" if falling[REPORTED_LOAD] else ", not at every step"),
            falling[REPORTED_LOAD],
            note=f"intensity {REPORTED_LOAD:g}; "
            + ", ".join(
                f"{'falls throughout' if ok else 'rises somewhere'} at {k:g}"
                for k, ok in falling.items()
                if k != REPORTED_LOAD
            ),
        ),
        Claim(
            9,
            "the router expands its use of high-concurrency fallback profiles",
            "expands",
            f"fallback {fallback[0]:.3f} → {fallback[-1]:.3f} of the requests",
            fallback[-1] > fallback[0],
        ),
        Claim(
            9,
            "the mean serving distance changes",
            "changes",
            f"{km[0]:.3f} → {km[-1]:.3f} km, between {km.min():.3f} and {km.max():.3f}",
            float(np.ptp(km)) > 0.005,
        ),
    )
    return Drawn(
        9,
        "Popularity of the long type",
        drawing,
        "The other types keep their proportions, the mix of profiles its fractions.",
        claims,
    )


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

    _, shallow, deep = model.order
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
            note=f"intensity {load:g}",
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
            note=f"intensity {HIGH:g}; {stays}{beyond}",
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
        f"we take mixes with at least {as_percent(LEAST_FALLBACK)} fallback and at most "
        f"{as_percent(MOST_DEEP)} "
        "deep nodes, which its numbers suggest. On the right nothing is excluded.",
        tuple(claims),
        (table,),
    )


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


@styled
def node_density(model: PaperModel) -> Drawn:
    """Fig. 12: coverage of the three policies against node density at fixed demand."""
    curves = {
        policy: np.array([model.coverage(policy, density=float(x)) for x in DENSITIES])
        for policy in POLICIES
    }
    reported = {"load_aware": {0.5: 0.48, 3.0: 0.94}, "nearest": {3.0: 0.52}}
    needed = _density_for(model, 0.9)
    drawing, ((at,),) = panels(1, 1, height=3.0)
    for i, (policy, label) in enumerate(POLICIES.items()):
        at.plot(DENSITIES, curves[policy], color=PALETTE[i], linestyle=DASHES[i], label=label)
    at.set(
        xlabel="nodes per km²",
        title=f"Coverage at {model.deadline:g} s, {model.system.intensity:g} requests/s per km²",
    )
    for i, points in enumerate(reported.values()):
        reported_points(at, points, None if i else "reported in the text")
    shares(at)
    key(drawing, at)
    heading(drawing, "Node density")
    nearest = curves["nearest"]
    top = model.coverage("nearest", density=1000.0)
    claims = (
        Claim.value(12, "load-aware, density 0.5", 0.48, model.coverage(density=0.5)),
        Claim.value(12, "load-aware, density 3", 0.94, model.coverage(density=3.0)),
        Claim.value(12, "nearest node, density 3", 0.52, model.coverage("nearest", density=3.0)),
        Claim(
            12,
            "the nearest-node baseline saturates: density alone does not bring a useful match",
            "near 0.52",
            f"{nearest[-1]:.3f} at density {DENSITIES[-1]:g}, {top:.3f} without end",
            abs(top - 0.52) <= 0.02,
            note=f"load-aware routing reaches 0.9 at density {needed:.2f}",
        ),
    )
    return Drawn(
        12,
        "Node density",
        drawing,
        "Demand stays fixed, so that more nodes mean shorter paths, nearer caches and less load.",
        claims,
    )


def _density_for(model: PaperModel, target: float) -> float:
    """Least density with load-aware coverage ``target`` (Theory F3), by bisection."""
    low, high = 0.1, 100.0
    for _ in range(30):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if model.coverage(density=middle) >= target else (middle, high)
    return high
