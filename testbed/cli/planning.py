"""Planning: which profiles on how many nodes, and how many nodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from testbed.cli.common import Json, ScenarioFile, Seed, emit, load_scenario, log, page
from testbed.errors import ScenarioError


def plan(
    scenario: ScenarioFile,
    placement: Annotated[
        bool, typer.Option("--placement", help="fractions of the profiles of greatest coverage")
    ] = False,
    density: Annotated[
        bool, typer.Option("--density", help="fewest nodes per km² that reach --coverage")
    ] = False,
    coverage: Annotated[
        float | None, typer.Option("--coverage", help="wanted P(TTFT ≤ deadline), with --density")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option("--deadline", help="s; the scenario's last target if absent")
    ] = None,
    delay_model: Annotated[
        str | None, typer.Option("--delay-model", help="instead of the scenario's")
    ] = None,
    method: Annotated[
        str,
        typer.Option("--method", help="of --placement: spsa, gradient (smooth), grid (exhaustive)"),
    ] = "spsa",
    evaluations: Annotated[
        int,
        typer.Option(
            "--evaluations", min=10, help="operating points that spsa may solve (SINR: 1 s each)"
        ),
    ] = 2000,
    parts: Annotated[
        int, typer.Option("--parts", min=1, help="the grid's steps of a fraction: 1/parts")
    ] = 20,
    periods: Annotated[
        Path | None,
        typer.Option("--periods", help="placements over these periods (YAML list), with --budget"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="bytes a node may load per period: 2GB")
    ] = None,
    memory_nodes: Annotated[
        float | None,
        typer.Option("--memory-nodes", help="per km², holding the profiles in the nodes' stead"),
    ] = None,
    memory_path: Annotated[
        float | None,
        typer.Option("--memory-path", help="ξ between compute and memory node, s·km^-α"),
    ] = None,
    next_turn: Annotated[
        float | None,
        typer.Option("--next-turn", help="new tokens of a session's next turn: stay or follow?"),
    ] = None,
    after: Annotated[
        float, typer.Option("--after", help="s that users have moved until the next turn")
    ] = 60.0,
    memory_budget: Annotated[
        str | None, typer.Option("--memory-budget", help="mean pinned bytes per node: 8GB")
    ] = None,
    least_fallback: Annotated[
        float, typer.Option("--least-fallback", help="least fraction of the fallback")
    ] = 0.0,
    deep: Annotated[
        list[str] | None, typer.Option("--deep", help="a profile counted by --most-deep")
    ] = None,
    most_deep: Annotated[
        float, typer.Option("--most-deep", help="most of the --deep profiles together")
    ] = 1.0,
    out: Annotated[
        Path | None, typer.Option("--out", help="write the scenario with the plan in it (YAML)")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Plan a fleet: placement (Theory F2), density (F3), periods (H9), memory nodes (H7), handover.

    Examples: testbed plan paper-baseline --density --coverage 0.8;
    testbed plan paper-baseline --periods day.yaml --budget 100MB --parts 10
    """
    from testbed.cli.fleet import next_turns, over_periods, with_memory_nodes
    from testbed.outcome import write_atomically
    from testbed.theory.constraints import PlacementSet
    from testbed.theory.density import plan_density
    from testbed.theory.placement import plan_placement
    from testbed.workload.proposal import parse_bytes

    extended = (periods, memory_nodes, next_turn)
    if [placement, density, *(mode is not None for mode in extended)].count(True) != 1:
        raise ScenarioError(
            "plan: one of --placement, --density, --periods, --memory-nodes and --next-turn"
        )
    if density and coverage is None:
        raise ScenarioError("--density: needs --coverage, the share of requests in time")
    if periods is not None and budget is None:
        raise ScenarioError("--periods: needs --budget, the bytes a node may load per period")
    if out is not None and not (placement or density):
        raise ScenarioError("--out: goes with --placement or --density")
    question = load_scenario(scenario)
    planned = question
    allowed = PlacementSet.of(
        question,
        memory_budget=None if memory_budget is None else parse_bytes(memory_budget),
        least_fallback=least_fallback,
        deep=tuple(deep or ()),
        most_deep=most_deep,
    )
    if periods is not None:
        assert budget is not None
        with log().status("searching placements over the periods"):
            document, lines = over_periods(
                question,
                periods,
                allowed,
                budget=parse_bytes(budget),
                parts=parts,
                deadline=deadline,
            )
    elif memory_nodes is not None:
        document, lines = with_memory_nodes(question, memory_nodes, memory_path)
    elif next_turn is not None:
        document, lines = next_turns(question, next_turn, after)
    elif placement:
        with log().status("searching placements"):
            found = plan_placement(
                question,
                allowed,
                target=deadline,
                delay_model=delay_model,
                method=method,
                evaluations=evaluations,
                parts=parts,
                seed=seed,
            )
        profiles = [
            {**s.model_dump(mode="json", exclude_none=True), "fraction": found.fraction[s.name]}
            for s in question.profiles
        ]
        planned = question.replace(profiles=profiles)
        document = found.to_dict()
        lines = [f"{name}: {share:.4f}" for name, share in found.fraction.items()]
        lines.append(f"coverage {found.coverage:.4f}, {found.evaluations} operating points")
        if found.refused:
            lines.append(f"{found.refused} of them beyond what the delay model was fitted for")
        if not found.feasible:
            lines.append("no stable placement was found")
    else:
        assert coverage is not None
        with log().status("searching densities"):
            least = plan_density(question, coverage, deadline=deadline, delay_model=delay_model)
        document = least.to_dict()
        if least.density is not None:
            planned = question.with_field("nodes.density", least.density)
            lines = [f"{least.density:.6g} nodes per km²: coverage {least.coverage:.4f}"]
        else:
            lines = ["no density is enough"]
        if least.reason is not None:
            lines.append(least.reason)
    if out is not None:
        write_atomically(out, planned.to_yaml())
        log().print(f"scenario: {out}", style="dim")
    if as_json:
        emit(document)
        return
    for line in lines:
        page().print(line)


COMMANDS: dict[str, Callable[..., None]] = {"plan": plan}
