"""Paper figures: Figs. 3 to 12 as files and one page, what the paper reports beside ours.

Every number is computed when the page is drawn, from a named preset and a seed; nothing here
holds a result. The paper's own parameter table is lost, so the preset is a reconstruction, and
the page says of each reported value how near it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from testbed.environment import environment
from testbed.outcome import dump_json, write_atomically
from testbed.presets import preset as load_preset
from testbed.reporting.page import Block, Code, Finding, Picture, Section, write_page
from testbed.reporting.paper_association import association, pairwise_boundary
from testbed.reporting.paper_claims import Claim, Drawn, claim_table
from testbed.reporting.paper_design import long_popularity, node_density
from testbed.reporting.paper_mix import (
    adapted_mix,
    best_mix,
    candidates,
    every_mix,
    search_mixes,
)
from testbed.reporting.paper_model import PaperModel
from testbed.reporting.paper_routing import cached_depth, policies_against_load
from testbed.reporting.paper_waits import convergence, queue_tail
from testbed.reporting.style import save
from testbed.reporting.table import Table, Tone, facts
from testbed.reporting.wording import plain
from testbed.scenario import Scenario

PAGE = "figures.html"
VALUES = "figures.json"
LEVELS: dict[bool, tuple[str, Tone]] = {True: ("✓", "good"), False: ("!", "unsure")}
Progress = Callable[[int], None]
"""Called with the number of every figure that is finished."""


def draw_figures(
    out: str | Path,
    preset: str = "paper-reproduction",
    *,
    seed: int = 1,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Draw Figs. 3 to 12 into a folder: ``fig-N.svg``, ``fig-N.png``, a page and its values.

    Parameters
    ----------
    out : folder, made if need be; files of these names in it are replaced
    preset : named scenario with three profiles
    seed : of the Monte Carlo and event-driven parts

    Returns
    -------
    One mapping a claim: figure, statement, reported, ours, distance, reproduced, note. The same
    list is in ``figures.json``; ``figures.html`` shows it.

    Raises
    ------
    ScenarioError
        There is no such preset, or it has not three profiles.
    """
    scenario = load_preset(preset)
    folder = Path(out)
    drawn = list(compute_figures(scenario, seed=seed, progress=progress))
    for item in drawn:
        save(item.figure, folder / f"fig-{item.number}")
    claims = [claim.to_dict() for item in drawn for claim in item.claims]
    write_atomically(folder / VALUES, dump_json(claims, indent=True) + b"\n")
    write_figures_page(folder / PAGE, scenario, drawn, seed=seed)
    return claims


def compute_figures(
    scenario: Scenario, *, seed: int = 1, progress: Progress | None = None
) -> list[Drawn]:
    """Figs. 3 to 12 of a scenario with three profiles, in order."""
    model = PaperModel(scenario)
    drawn: list[Drawn] = []

    def keep(item: Drawn) -> None:
        drawn.append(item)
        if progress is not None:
            progress(item.number)

    keep(pairwise_boundary(model))
    keep(association(model, seed))
    keep(queue_tail(model, seed))
    keep(convergence(model))
    keep(cached_depth(model))
    keep(policies_against_load(model))
    keep(long_popularity(model))
    search = search_mixes(model, candidates(model))
    keep(best_mix(model, search, search_mixes(model, every_mix(model))))
    keep(adapted_mix(model, search))
    keep(node_density(model))
    return drawn


def write_figures_page(
    path: str | Path, scenario: Scenario, drawn: Sequence[Drawn], *, seed: int
) -> Path:
    """The page of :func:`draw_figures`: every claim first, then every figure."""
    claims = [claim for item in drawn for claim in item.claims]
    sections = [
        Section.of(
            "Reported and ours",
            claim_table(claims, "Every claim of the text about Figs. 3 to 12"),
        )
    ]
    for item in drawn:
        blocks: list[Block | Table] = [
            Picture(item.figure, item.reading),
            claim_table(item.claims, "Reported and ours", numbered=False),
            *item.tables,
        ]
        sections.append(Section.of(f"Fig. {item.number}: {item.title}", *blocks))
    sections.append(_method(scenario, seed))
    return write_page(
        path,
        "Spatial prefix caching: Figs. 3 to 12",
        sections,
        lead=[
            "The figures of “Spatial Prefix Caching for Wireless Edge LLM Inference”, computed "
            f"afresh from the preset “{plain(scenario.name)}”, with every value that the text "
            "reports beside the one computed here.",
            "The paper's parameter table is lost. The preset was searched for so that the model "
            "gives what the text reports, so that agreement with those values shows that the model "
            "can give them all at once, not that these were the paper's parameters.",
        ],
        findings=_findings(claims),
    )


def _findings(claims: Sequence[Claim]) -> list[Finding]:
    values = [c for c in claims if c.distance is not None]
    statements = [c for c in claims if c.distance is None]
    missed = [c for c in claims if not c.reproduced]
    found = [_counted("Statements", statements, "hold")]
    if values:
        what = "within one unit of their last digit or half a grid step"
        worst = max(values, key=lambda c: abs(c.distance or 0.0))
        found = [
            _counted("Reported values", values, what),
            *found,
            Finding("·", "", "Farthest value", f"Fig. {worst.figure}: {_both(worst)}."),
        ]
    if missed:
        found.append(
            Finding(
                "✗",
                "bad",
                "Not reproduced",
                f"{len(missed)} of {len(claims)}.",
                tuple(f"Fig. {c.figure}: {_both(c)}." for c in missed),
            )
        )
    return found


def _counted(name: str, claims: Sequence[Claim], what: str) -> Finding:
    good = sum(c.reproduced for c in claims)
    whole = good == len(claims)
    return Finding(
        "✓" if whole else "!",
        "good" if whole else "unsure",
        name,
        f"{good} of {len(claims)} {what}.",
    )


def _both(claim: Claim) -> str:
    ours = claim.ours if isinstance(claim.ours, str) else f"{claim.ours:.3f}"
    reported = claim.reported if isinstance(claim.reported, str) else f"{claim.reported:.2f}"
    return f"{claim.statement} (reported {reported}, ours {ours})"


def _method(scenario: Scenario, seed: int) -> Section:
    return Section.of(
        "How this was computed",
        "Nothing on this page was taken from the search for the preset: each value is computed "
        "anew from the scenario below. A value counts as reproduced within one unit of the last "
        "digit that the text gives, a fraction of nodes within half a grid step, a statement where "
        "it holds of the numbers beside it.",
        "Loads that the text calls light, moderate, heavy or high without a number, the candidate "
        "mixes of Fig. 10 and the depths of Fig. 7 are our choice and stand beside each claim.",
        facts("", {"seed": seed, **_made_with()}),
        Code("The scenario", scenario.to_yaml()),
    )


def _made_with() -> dict[str, str]:
    """What the numbers depend on; no date, so that the same code gives the same page."""
    made = environment()
    versions = {k: made["packages"][k] for k in ("numpy", "scipy", "numba")}
    return {
        "code": made["code"],
        "python": made["python"],
        **versions,
        "processor": made["machine"]["processor"],
    }
