"""Named scenarios that ship with the package.

>>> preset("paper-baseline").profiles[2].name
'deep'
"""

from __future__ import annotations

from importlib import resources

from testbed.errors import ScenarioError
from testbed.scenario import Scenario


def preset_names() -> tuple[str, ...]:
    """Names of the scenarios in the package, sorted."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files if f.name.endswith(".yaml")))


def preset(name: str) -> Scenario:
    """The named scenario.

    Raises
    ------
    ScenarioError
        There is no such preset; the message lists those that there are.
    """
    if name not in preset_names():
        raise ScenarioError(f"preset: {name!r} is not one of {', '.join(preset_names())}")
    with resources.as_file(resources.files(__package__) / f"{name}.yaml") as path:
        return Scenario.load(path)
