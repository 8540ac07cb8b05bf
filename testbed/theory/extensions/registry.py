"""Extensions by name: those that answer a scenario as the baseline does, with one part replaced.

A prediction asked with one of them (``testbed predict SCENARIO --extension NAME``) is an outcome
like any other. Extensions with answers of another shape stand in `testbed plan` (many periods,
memory nodes, mobility) and `testbed profiles` (privacy); those that follow from the scenario alone
(SINR radio, remote fetch, prefill with context) need no name.

Examples
--------
>>> from testbed.presets import preset
>>> from testbed.theory import predict
>>> asked = preset("paper-baseline").replace(policy="prefix_only")
>>> uneven = predict(asked, extension="cell_load")
>>> bool(uneven.ttft.coverage["0.8"] < predict(asked).ttft.coverage["0.8"])
True
"""

from __future__ import annotations

from collections.abc import Callable

from testbed.errors import ScenarioError
from testbed.routing.policies import Policy
from testbed.scenario import Scenario
from testbed.theory.delay.base import DelayModel
from testbed.theory.extensions import bandwidth
from testbed.theory.extensions.cell_load import CellLatency
from testbed.theory.extensions.shared_blocks import SharedBlocksLatency, solve_shared_blocks
from testbed.theory.geometry import radio_area
from testbed.theory.latency import Latency
from testbed.theory.predict import settle
from testbed.theory.system import System

Extension = Callable[[Scenario, System, Policy, DelayModel], Latency]


def _bandwidth(scenario: Scenario, system: System, policy: Policy, model: DelayModel) -> Latency:
    """H5."""
    shared = bandwidth.solve(system, policy, model)
    return bandwidth.SharedLatency.of(system, shared, model)


def _cell_load(scenario: Scenario, system: System, policy: Policy, model: DelayModel) -> Latency:
    """H8."""
    radio_area(system)  # Cells are those of a power law.
    point = settle(scenario, system, policy, model)
    return CellLatency.of(Latency(system, point, model), policy)


def _shared_blocks(
    scenario: Scenario, system: System, policy: Policy, model: DelayModel
) -> Latency:
    """H12."""
    system, point = solve_shared_blocks(scenario, system, policy, model)
    return SharedBlocksLatency(system, point, model)


EXTENSIONS: dict[str, Extension] = {
    "bandwidth": _bandwidth,
    "cell_load": _cell_load,
    "shared_blocks": _shared_blocks,
}


def get_extension(name: str) -> Extension:
    """The extension, or a :class:`ScenarioError` that lists the names."""
    try:
        return EXTENSIONS[name]
    except KeyError:
        known = ", ".join(sorted(EXTENSIONS))
        raise ScenarioError(f"extension: {name!r} is not one of {known}") from None
