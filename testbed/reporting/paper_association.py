"""Figs. 3 and 4: the pairwise boundary, and association against Monte Carlo."""

from __future__ import annotations

import numpy as np

from testbed.radio import nearest_distances
from testbed.reporting.paper_claims import Claim, Drawn
from testbed.reporting.paper_layout import heading, key, shares
from testbed.reporting.paper_model import PaperModel
from testbed.reporting.style import DASHES, FAINT, INK, PALETTE, panels, styled
from testbed.reporting.wording import plain, seconds
from testbed.seeds import generator
from testbed.theory.distance import equal_cost_radius

SAMPLES = 200_000
"""Requests of each type in Fig. 4 (the paper's 2·10⁵)."""
LUCK = 2_000
"""Repetitions of Fig. 4 by which the largest error is judged."""
REPORTED_ERROR = 1e-3
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Extra wait at the deep node in Fig. 3, as a share of the prefill that it saves."""
BEYOND = 1.25
"""One share more: there the deep node must be the nearer one."""


@styled
def pairwise_boundary(model: PaperModel) -> Drawn:
    """Fig. 3: at which distances a deep node beats an uncached one (Theory C6)."""
    system, radio = model.system, model.system.radio
    q, (fallback, _, deep) = model.long, model.order
    saving = float(system.residual[q, fallback] - system.residual[q, deep])
    # Axes that hold the whole boundary: the farthest that the saving can reach, and a half more.
    reach = float(radio.distance(np.array(saving)))
    near = np.linspace(0.0, reach, 321)
    curves = {
        share: equal_cost_radius(radio, near, (1.0 - share) * saving, 0.0)
        for share in (*SHARES, BEYOND)
    }
    drawing, ((plane, advantage),) = panels(1, 2, height=3.5)
    for i, (share, far) in enumerate(curves.items()):
        plane.plot(
            near, far, color=PALETTE[i], linestyle=DASHES[i % 5], label=f"{100 * share:.0f} %"
        )
    plane.fill_between(near, 0, curves[0.0], color=PALETTE[0], alpha=0.07, linewidth=0)
    plane.text(0.5 * reach, 0.2 * reach, "deep node", color=INK, fontsize=8)
    plane.text(0.08 * reach, 1.25 * reach, "uncached node", color=INK, fontsize=8)
    plane.set(
        xlabel="distance to the uncached node, km",
        ylabel="distance to the deep node, km",
        title=f"Which of two is chosen, {system.tokens[q]:,.0f}-token type",
        xlim=(0, reach),
        ylim=(0, 1.4 * reach),
    )
    waits = np.linspace(0.0, 1.2, 241)
    for i, part in enumerate((0.1, 0.25, 0.5, 0.75)):
        at = part * reach
        far = equal_cost_radius(radio, at, (1.0 - waits) * saving, 0.0)
        advantage.plot(100 * waits, far - at, color=INK, linestyle=DASHES[i], label=f"{at:.2f} km")
    advantage.axhline(0, color=FAINT, linewidth=0.8)
    advantage.set(
        xlabel="extra wait at the deep node, % of the prefill it saves",
        title="How much farther the deep node may be, km",
        xlim=(0, 120),
    )
    advantage.legend(title="uncached node at", title_fontsize=8, loc="upper right")
    key(drawing, plane, columns=6, title="extra wait at the deep node, % of the prefill it saves")
    heading(drawing, "When is the deeper node worth the longer path?")

    r = 0.2 * reach
    extra = [float(equal_cost_radius(radio, r, (1.0 - s) * saving, 0.0)) - r for s in SHARES]
    chord = np.linspace(curves[0.0][0], curves[0.0][-1], len(near))
    bend = float(np.abs(curves[0.0] - chord).max())
    claims = (
        Claim(
            3,
            "the boundary is curved: radio delay is superlinear in distance",
            "curved",
            f"up to {bend:.2f} km off a straight line",
            bend > 0.01,
        ),
        Claim(
            3,
            "a deep node can be preferable even substantially farther away",
            "yes",
            f"up to {extra[0] + r:.2f} km against {r:.2f} km",
            extra[0] > r,
            note=f"saves {seconds(saving)} of prefill on {system.tokens[q]:,.0f} tokens",
        ),
        Claim(
            3,
            "that advantage collapses as the queue delay there rises",
            "collapses",
            ", ".join(f"{x:.2f}" for x in extra) + " km at 0, 25, 50, 75, 100 % of the saving",
            bool((np.diff(extra) < 0).all()) and abs(extra[-1]) < 1e-9,
        ),
    )
    return Drawn(
        3,
        "Pairwise association boundary",
        drawing,
        "Left: below a curve the deep node is chosen, above it the uncached one. Each curve is one "
        "value of the extra wait at the deep node. Right: the height of the boundary above the "
        "diagonal.",
        claims,
    )


@styled
def association(model: PaperModel, seed: int) -> Drawn:
    """Fig. 4: association by Theory C3 and by Monte Carlo (Theory F4)."""
    latency = model.ask()
    point, system = latency.point, latency.system
    types, tiers = system.shape
    seen = np.zeros((types, tiers))
    for q in range(types):
        rng = generator(seed, "fig-4", q)
        distance = nearest_distances(system.density, SAMPLES, rng)
        chosen = np.argmin(point.costs[q] + system.radio.delay(distance), axis=1)
        seen[q] = np.bincount(chosen, minlength=tiers) / SAMPLES
    expected = point.association
    error = np.abs(seen - expected)
    noise = np.sqrt(expected * (1 - expected) / SAMPLES)
    worst = float(error.max())
    again = generator(seed, "fig-4", "luck")
    others = np.array([again.multinomial(SAMPLES, row, LUCK) / SAMPLES for row in expected])
    lucky = float((np.abs(others - expected[:, None, :]).max(axis=(0, 2)) < REPORTED_ERROR).mean())
    within = bool((error <= 3 * noise + 1e-12).all())

    drawing, ((bars, misfit),) = panels(1, 2, height=2.9)
    width = 0.8 / tiers
    for k, s in enumerate(model.order):
        x = np.arange(types) + (k - (tiers - 1) / 2) * width
        bars.bar(x, expected[:, s], width * 0.92, color=PALETTE[k], alpha=0.35)
        bars.plot(x, seen[:, s], linestyle="none", marker="o", color=PALETTE[k])
        bars.bar(0, 0, color=PALETTE[k], label=plain(system.names[s]))
        misfit.errorbar(
            x,
            1e3 * (seen - expected)[:, s],
            yerr=3e3 * noise[:, s],
            color=PALETTE[k],
            marker="o",
            linestyle="none",
            elinewidth=1,
        )
    names = [
        f"{plain(n)}\n{t:,.0f} tokens" for n, t in zip(system.types, system.tokens, strict=True)
    ]
    bars.set_xticks(range(types), names)
    bars.grid(axis="x", visible=False)
    shares(bars)
    bars.set_title("Share of requests: bars Theory C3, points Monte Carlo")
    key(drawing, bars)
    misfit.axhline(0, color=FAINT, linewidth=0.9)
    misfit.set_xticks(range(types), names)
    misfit.grid(axis="x", visible=False)
    misfit.set_title("Monte Carlo − theory, ×10⁻³, with 3 standard errors")
    heading(
        drawing,
        f"Association at intensity {system.intensity:g}, {SAMPLES:,} samples a type",
    )

    fallback, shallow, deep = model.order
    long_deep = float(expected[model.long, deep])
    elsewhere = expected[:, [fallback, shallow]].sum(axis=1)
    claims = (
        Claim(
            4,
            "maximum absolute error of 2·10⁵ samples",
            "below 0.001",
            f"{worst:.5f}",
            worst < REPORTED_ERROR,
            note=("all" if within else "not all")
            + f" within 3 standard errors (up to {3 * noise.max():.4f}); "
            f"one seed in {1 / max(lucky, 1 / LUCK):.0f} is below 0.001 at this sample size",
        ),
        Claim(
            4,
            f"the {system.tokens[model.long]:,.0f}-token type strongly prefers the deep profile",
            "strongly",
            f"{long_deep:.3f} of it, with {system.fraction[deep]:.2f} of the nodes",
            long_deep > 0.5 and long_deep == expected[:, deep].max(),
        ),
        Claim(
            4,
            f"the {system.tokens[model.short]:,.0f}-token type spreads over shallow and uncached",
            "more than the long type",
            f"{elsewhere[model.short]:.3f} against {elsewhere[model.long]:.3f}",
            elsewhere[model.short] > elsewhere[model.long],
        ),
    )
    return Drawn(
        4,
        "Association probabilities",
        drawing,
        "Each request draws the exact distance to the nearest node of every profile and takes the "
        "least cost, with the waits of the load-aware operating point advertised.",
        claims,
    )
