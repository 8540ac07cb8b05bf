"""Pace: how well the replicas of a run kept their device's time, and whether that will do."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from cluster.deployment import Deployment
from cluster.engines.device_time_clock import LATE, LATE_LIMIT, Pace
from cluster.wire import ReplicaLost


def read_pace(deployment: Deployment) -> dict[int, Pace]:
    """Pace by node since it last forgot; empty where no engine runs in device time.

    A node that is lost takes its count with it.
    """
    found: dict[int, Pace] = {}
    for node in deployment.nodes:
        if not node.alive or node.facts.clock != "device time":
            continue
        with suppress(ReplicaLost):
            pace = node.link.ask({"do": "status"}).get("pace")
            if pace is not None:
                found[node.id] = Pace(**pace)
    return found


def together(paces: Iterable[Pace]) -> Pace:
    """Counts of several devices added up; the worst of their worst."""
    paces = list(paces)
    return Pace(
        steps=sum(p.steps for p in paces),
        late_steps=sum(p.late_steps for p in paces),
        device_seconds=sum(p.device_seconds for p in paces),
        late_seconds=sum(p.late_seconds for p in paces),
        worst_late=max((p.worst_late for p in paces), default=0.0),
    )


def pace_facts(paces: dict[int, Pace], time_scale: float) -> dict[str, Any]:
    """What an outcome says: all nodes together, and the share of late steps of each."""
    total = together(paces.values())
    return {
        "steps": total.steps,
        "late_steps": total.late_steps,
        "late_share": total.late_share,
        "worst_late": total.worst_late,
        "mean_late": total.late_seconds / total.steps if total.steps else 0.0,
        "device_seconds": total.device_seconds,
        "late_share_by_node": {node: pace.late_share for node, pace in paces.items()},
        "time_scale": time_scale,
        "what": f"late: handed over more than {LATE:.0%} of the step after its end; seconds are "
        "the device's; no arithmetic was done",
    }


def pace_problem(paces: dict[int, Pace]) -> str | None:
    """Why an outcome is not to be trusted; None when its steps were punctual."""
    total = together(paces.values())
    if total.late_share <= LATE_LIMIT:
        return None
    return (
        f"device time: {total.late_share:.1%} of {total.steps} steps were late by more than "
        f"{LATE:.0%} (limit {LATE_LIMIT:.0%}): fewer replicas or a larger time scale are needed"
    )
