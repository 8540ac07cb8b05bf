"""SearchModel: what a fixed point asks in place of a costly delay model (Theory D1)."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from testbed.theory.delay.base import DelayModel
from testbed.theory.delay.step_chain import StepChain
from testbed.theory.delay.step_chain_mix import MixedStepChain

_INTERPOLATED: WeakKeyDictionary[DelayModel, MixedStepChain] = WeakKeyDictionary()


def search_model(model: DelayModel) -> DelayModel:
    """A model with about the same means that can be asked at many mixes; mostly the model itself.

    Every iterate of a fixed point has a mix of its own, and so would need a step chain of its own:
    the chain interpolated between mixes stands in for it. What it has solved is kept as long as the
    model, so that a search over placements goes on with it. At the point that is found the model
    itself is asked.
    """
    if not isinstance(model, StepChain):
        return model
    if model not in _INTERPOLATED:
        _INTERPOLATED[model] = MixedStepChain(model.output_scv)
    return _INTERPOLATED[model]
