"""Figs. 9 and 12: popularity of the long type, and node density."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import FuncFormatter

from testbed.reporting.layout import as_percent
from testbed.reporting.paper_claims import Claim, Drawn
from testbed.reporting.paper_layout import heading, key, reported_points, shares
from testbed.reporting.paper_model import POLICIES, PaperModel
from testbed.reporting.style import DASHES, PALETTE, panels, styled
from testbed.reporting.wording import plain

LONG_SHARES = np.linspace(0.1, 0.6, 21)
LONG_LOADS = (3.0, 4.0, 5.0)
"""Requests/s per km² of Fig. 9, which the text does not name."""
REPORTED_LOAD = 4.0
"""The one of them that Fig. 9's claims are judged at."""
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
