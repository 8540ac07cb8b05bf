"""Engines: each behind the small surface of :class:`cluster.engines.base.Engine`, by name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from testbed.errors import EngineError
from testbed.scenario import EngineSpec

if TYPE_CHECKING:
    from cluster.engines.base import Engine, Placement

ENGINES = {
    "vllm": "cluster.engines.vllm:VllmEngine",
    "sglang": "cluster.engines.sglang:SglangEngine",
    "emulated": "cluster.engines.emulated:EmulatedEngine",
}
"""Name in a scenario -> ``module:class``; the module is imported when the engine is made."""


def make_engine(spec: EngineSpec, placement: Placement | None = None) -> Engine:
    """The engine that ``spec.name`` names, not started.

    Raises
    ------
    EngineError
        The name is unknown, the engine's module cannot be imported here, or the time of an engine
        that computes is to be scaled.
    """
    if spec.time_scale != 1 and spec.device is None and spec.name != "emulated":
        raise EngineError(
            f"engine.time_scale: {spec.time_scale:g}: {spec.name} computes, and only a device's "
            "time can be scaled (engine.device)"
        )
    try:
        module, _, name = ENGINES[spec.name].partition(":")
    except KeyError:
        raise EngineError(
            f"engine.name: {spec.name!r} is not one of {', '.join(sorted(ENGINES))}"
        ) from None
    try:
        engine = getattr(import_module(module), name)
    except ImportError as error:
        raise EngineError(f"engine.name: {spec.name}: cannot be imported ({error})") from None
    return engine(spec, placement)
