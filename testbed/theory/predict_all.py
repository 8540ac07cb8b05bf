"""PredictAll: one scenario by every delay model, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from testbed.errors import CalibrationError, ScenarioError
from testbed.outcome import Outcome
from testbed.scenario import Scenario, first_problem
from testbed.step_time import AnyStepTime
from testbed.theory.delay.base import DELAY_MODELS
from testbed.theory.predict import predict


def engine_step_time(scenario: Scenario) -> AnyStepTime | None:
    """The step time in the scenario's ``engine.calibration``; None where it names none.

    Only the record's ``step_time`` is read; the path is taken as it stands in the scenario.

    Raises
    ------
    CalibrationError
        The file is missing or holds no step time.
    """
    if scenario.engine is None or scenario.engine.calibration is None:
        return None
    path = Path(scenario.engine.calibration)
    try:
        record: Any = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CalibrationError(f"{path}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise CalibrationError(f"{path}:{error.lineno}: {error.msg}") from None
    if not isinstance(record, dict) or record.get("step_time") is None:
        raise CalibrationError(f"{path}: step_time: this record has none")
    adapter: TypeAdapter[AnyStepTime] = TypeAdapter(AnyStepTime)
    try:
        return adapter.validate_python(record["step_time"])
    except ValidationError as error:
        raise CalibrationError(f"{path}: step_time: {first_problem(error)}") from None


def predict_all(
    scenario: Scenario, *, step_time: AnyStepTime | None = None
) -> tuple[list[Outcome], dict[str, str]]:
    """Outcomes of all delay models that apply, and why each of the others does not.

    ``step_time`` is the engine's; default: the one of ``engine.calibration``. The order is that of
    the registry, the scenario's own model first.
    """
    known = step_time if step_time is not None else engine_step_time(scenario)
    own = scenario.delay_model
    names = [own, *(name for name in DELAY_MODELS if name != own.partition(":")[0])]
    outcomes, left_out = [], {}
    for name in names:
        try:
            outcomes.append(predict(scenario, delay_model=name, step_time=known))
        except ScenarioError as error:
            left_out[name] = str(error).removeprefix("delay_model: ")
    return outcomes, left_out
