"""Figs. 5 and 6: the law of the wait against events, and how the waits converge."""

from __future__ import annotations

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from testbed.reporting.paper_claims import Claim, Drawn
from testbed.reporting.paper_layout import heading, key
from testbed.reporting.paper_model import PaperModel
from testbed.reporting.style import DASHES, GRID, INK, PALETTE, panels, styled
from testbed.reporting.wording import plain, seconds
from testbed.routing.policies import get_policy
from testbed.seeds import generator
from testbed.simulation.queue import mmc_waits
from testbed.theory.delay import TierLoad, get_delay_model
from testbed.theory.operating_point import OperatingPoint, damped

CUSTOMERS = 4_000_000
"""Customers of the event-driven queue of Fig. 5, in batches."""
BATCHES = 40
WARM_UP = 100_000
DAMPED_LOADS = (3.0, 4.0)
"""Intensities of Fig. 6."""
SETTLED = 0.01
"""A wait is called settled within this share of its final value (Fig. 6)."""
FEW = 15
"""Most steps until then that "a small number of effective updates" is taken to mean."""
MOST_STEPS = 400
NEIGHBOURS = np.arange(1.0, 6.01, 0.25)
"""Neighbouring load points through which the iteration is warm-started."""


@styled
def queue_tail(model: PaperModel, seed: int) -> Drawn:
    """Fig. 5: the waiting time of the 9-server tier, Theory B7 against events."""
    nine = [s for s in range(3) if model.system.concurrency[s] == 9]
    s = nine[0] if nine else model.order[2]
    servers = int(model.system.concurrency[s])
    intensity, load = _nearest_load(model, s, 0.82)
    law = get_delay_model("erlang_c").excess(load)
    rng = generator(seed, "fig-5")
    waits = mmc_waits(load.arrival_rate, load.service_rate, servers, CUSTOMERS + WARM_UP, rng)
    waits = waits[WARM_UP:]  # the queue starts empty

    grid = np.linspace(0.0, float(law.quantile(0, 0.9995)), 160)
    batches = np.array(
        [_cdf(batch, grid) for batch in waits.reshape(BATCHES, CUSTOMERS // BATCHES)]
    )
    seen = batches.mean(axis=0)
    noise = batches.std(axis=0, ddof=1) / np.sqrt(BATCHES)
    expected = law.cdf(0, grid)
    error = np.abs(seen - expected)
    z = float((error / np.maximum(noise, 1e-12)).max())

    drawing, ((body, tail, misfit),) = panels(1, 3, height=2.9)
    body.plot(grid, expected, color=PALETTE[0], label="Theory B7", linewidth=1.8)
    body.plot(grid[::6], seen[::6], "o", color=INK, markersize=3.2, label="event-driven queue")
    body.set(title="P(W ≤ w)", xlabel="w, seconds", ylim=(0, 1.02))
    key(drawing, body)
    tail.plot(grid, 1 - expected, color=PALETTE[0], linewidth=1.8)
    tail.plot(grid[::6], 1 - seen[::6], "o", color=INK, markersize=3.2)
    tail.set(title="P(W > w)", xlabel="w, seconds", yscale="log")
    tail.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    misfit.fill_between(grid, -3e3 * noise, 3e3 * noise, color=GRID, linewidth=0)
    misfit.plot(grid, 1e3 * (seen - expected), color=INK, linewidth=1.0)
    misfit.set(title="Events − theory, ×10⁻³", xlabel="w, seconds")
    rho = load.utilisation
    heading(drawing, f"Wait in M/M/{servers} at ρ = {rho:.3f}, {CUSTOMERS:,} customers")
    simulated = float(waits.mean())
    means = waits.reshape(BATCHES, -1).mean(axis=1)
    half = 1.96 * float(means.std(ddof=1)) / np.sqrt(BATCHES)
    claims = (
        Claim.value(
            5,
            f"utilisation of the {servers}-server queue",
            0.82,
            rho,
            note=f"the {plain(model.system.names[s])} tier at intensity {intensity:g}"
            + ("" if nine else "; this scenario has no 9-server tier"),
        ),
        Claim(
            5,
            "the event-driven queue follows the Erlang-C waiting law",
            "agreement",
            f"largest difference {error.max():.5f}, {z:.1f} standard errors",
            z < 4.0,
            note=f"mean wait {seconds(simulated)} ± {seconds(half)} against "
            f"{seconds(float(law.mean[0]))}; P(wait) {1 - seen[0]:.4f} against "
            f"{law.wait_probability:.4f}",
        ),
    )
    return Drawn(
        5,
        "Waiting-time law of the queue",
        drawing,
        "Arrival and service rates are those of the tier at the load-aware operating point. The "
        "band is three standard errors from batch means.",
        claims,
    )


def _nearest_load(model: PaperModel, s: int, utilisation: float) -> tuple[float, TierLoad]:
    """The load point at which tier s is busy nearest to ``utilisation``."""
    found = []
    for intensity in NEIGHBOURS.tolist():
        point = model.ask(intensity=intensity).point
        if point.feasible:
            found.append((abs(point.utilisation[s] - utilisation), intensity, point.loads[s]))
    _, intensity, load = min(found, key=lambda f: f[0])
    return intensity, load


def _cdf(waits: np.ndarray, grid: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(waits), grid, side="right") / len(waits)


@styled
def convergence(model: PaperModel) -> Drawn:
    """Fig. 6: mean waits under the damped iteration (Theory D1), and what a warm start saves."""
    eta = model.scenario.solver.damping
    runs = [_damped(model, load, eta) for load in DAMPED_LOADS]
    finals = [model.ask(intensity=load).point for load in DAMPED_LOADS]
    drawing, (axes,) = panels(1, 3, height=2.9)
    for at, load, run, final in zip(axes, DAMPED_LOADS, runs, finals, strict=False):
        for k, s in enumerate(model.order):
            wait = run.history[:, s]
            name = plain(model.system.names[s])
            at.plot(
                np.arange(len(wait)), wait, color=PALETTE[k], linestyle=DASHES[k], label=name,
                marker="o", markersize=3,
            )  # fmt: skip
            at.axhline(final.advertised[:, s].max(), color=PALETTE[k], linewidth=0.6)
        at.set_yscale("symlog", linthresh=0.01, linscale=0.4)
        at.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
        at.set(title=f"Mean wait, s: intensity {load:g}, η = {eta:g}", xlabel="iteration")
        at.set_xlim(0, 24)
        at.set_ylim(0, 3.0 * max(float(run.history.max()), 1e-3))
        at.xaxis.set_major_locator(MaxNLocator(integer=True))
    cold, warm, newton = _steps(model, eta)
    last = axes[2]
    for k, (steps, label) in enumerate(
        ((cold, f"damped, η = {eta:g}, from 0"), (warm, "damped, warm start"), (newton, "Newton"))
    ):
        settled = np.where(steps < MOST_STEPS, steps, np.nan)
        last.plot(
            NEIGHBOURS, settled, color=PALETTE[k], linestyle=DASHES[k], marker="o", markersize=3,
            label=label,
        )  # fmt: skip
    unsettled = NEIGHBOURS[cold >= MOST_STEPS]
    for load in unsettled:
        last.axvspan(load - 0.125, load + 0.125, color=GRID, alpha=0.55, linewidth=0)
    last.set(title="Evaluations until settled", xlabel="requests/s per km²")
    # Room for the key above the lines.
    last.set_ylim(0, 1.5 * float(np.nanmax(np.where(cold < MOST_STEPS, cold, np.nan))))
    last.legend(loc="upper left", fontsize=7)
    key(drawing, axes[0])
    heading(drawing, "Convergence of the profiles' mean waits")

    deep = model.order[2]
    effective = [_settled_after(run, final) for run, final in zip(runs, finals, strict=True)]
    baseline = max(DAMPED_LOADS) >= NEIGHBOURS
    settles = warm < MOST_STEPS
    both = (cold < MOST_STEPS) & settles
    saved = float(np.mean(warm[both] / cold[both])) if both.any() else np.inf
    tolerance = model.scenario.solver.tolerance
    claims = (
        Claim(
            6,
            "the deep tier develops the largest delay",
            "largest",
            ", ".join(
                f"{seconds(float(f.advertised[:, deep].max()))} at {load:g}"
                for f, load in zip(finals, DAMPED_LOADS, strict=True)
            ),
            all(int(np.argmax(f.advertised.max(axis=0))) == deep for f in finals),
        ),
        Claim(
            6,
            "the iteration settles after a small number of effective updates",
            "small",
            ", ".join(f"{n} at {load:g}" for n, load in zip(effective, DAMPED_LOADS, strict=True)),
            effective[0] <= FEW,
            note=f"updates until every wait stays within {100 * SETTLED:.0f} % of its end; judged "
            f"at the baseline's intensity {DAMPED_LOADS[0]:g}",
        ),
        Claim(
            6,
            "it remains stable under warm starts across neighbouring load points",
            "stable",
            f"settles at {int(settles[baseline].sum())} of {int(baseline.sum())} loads up to "
            f"{max(DAMPED_LOADS):g}, at {int(settles.sum())} of {len(warm)} up to "
            f"{NEIGHBOURS[-1]:g}",
            bool(settles[baseline].all()),
            note=f"judged up to intensity {max(DAMPED_LOADS):g}; to {tolerance:g} in "
            f"{saved:.2f} of the steps from 0; "
            + (
                f"plain damping cycles from 0 at {len(unsettled)} of these loads, first at "
                f"{unsettled[0]:g}"
                if len(unsettled)
                else "from 0 it settles at all of them too"
            ),
        ),
    )
    return Drawn(
        6,
        "Convergence of the operating point",
        drawing,
        "Points are the damped iteration from zero waits, thin lines the operating point that "
        "Newton's method finds. Right: evaluations of the association needed; on grey ground "
        "plain damping does not settle (Theory D1 tells why), Newton's method does.",
        claims,
    )


def _damped(
    model: PaperModel, intensity: float, eta: float, start: OperatingPoint | None = None
) -> OperatingPoint:
    return damped(
        model.ask("nearest", intensity=intensity).system,
        get_policy("load_aware"),
        get_delay_model(model.scenario.delay_model),
        damping=eta,
        tolerance=model.scenario.solver.tolerance,
        max_iterations=MOST_STEPS,
        start=start,
    )


def _steps(model: PaperModel, eta: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Evaluations at each neighbouring load: damped from 0, damped warm, Newton from 0."""
    cold, warm, newton = [], [], []
    start: OperatingPoint | None = None
    for load in NEIGHBOURS.tolist():
        cold.append(_damped(model, load, eta).iterations)
        start = _damped(model, load, eta, start)
        warm.append(start.iterations)
        newton.append(model.ask(intensity=load).point.iterations)
    return np.array(cold), np.array(warm), np.array(newton)


def _settled_after(run: OperatingPoint, final: OperatingPoint) -> int:
    """Updates after which no wait is farther than 1 % of the largest from its end."""
    end = final.advertised.max(axis=0)
    off = np.abs(run.history - end).max(axis=1) > SETTLED * end.max()
    return int(np.flatnonzero(off)[-1]) + 1 if off.any() else 0
