"""PredictAll: one scenario by every delay model, side by side."""

from __future__ import annotations

from testbed.errors import ScenarioError
from testbed.outcome import Outcome
from testbed.scenario import Scenario
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import DELAY_MODELS
from testbed.theory.predict import predict


def predict_all(
    scenario: Scenario, *, extension: str | None = None, step_time: AnyStepTime | None = None
) -> tuple[list[Outcome], dict[str, str]]:
    """Outcomes of all delay models that apply, and why each of the others does not.

    ``extension`` and ``step_time`` as in :func:`~testbed.theory.predict.predict`. The order is that
    of the registry, the scenario's own model first.
    """
    own = scenario.delay_model
    names = [own, *(name for name in DELAY_MODELS if name != own.partition(":")[0])]
    outcomes, left_out = [], {}
    for name in names:
        try:
            outcomes.append(
                predict(scenario, delay_model=name, extension=extension, step_time=step_time)
            )
        except ScenarioError as error:
            left_out[name] = str(error).removeprefix("delay_model: ")
    return outcomes, left_out
