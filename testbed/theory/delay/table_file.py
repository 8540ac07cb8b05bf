"""TableFile: a delay model that lives in a JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from testbed.errors import ScenarioError
from testbed.outcome import write_atomically
from testbed.scenario import first_problem


class TableFile(BaseModel):
    """What is read from and written to one file; ``model`` is the delay model's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    model: ClassVar[str]

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a JSON file; :class:`ScenarioError` names the file and the field."""
        try:
            return cls.model_validate(orjson.loads(Path(path).read_bytes()))
        except OSError as error:
            raise ScenarioError(f"delay_model: {cls.model}:{path}: {error.strerror}") from None
        except orjson.JSONDecodeError as error:
            raise ScenarioError(f"{path}:{error.lineno}: {error.msg}") from None
        except ValidationError as error:
            raise ScenarioError(f"{path}: {first_problem(error)}") from None

    def save(self, path: str | Path) -> None:
        write_atomically(path, orjson.dumps(self.model_dump(mode="json")) + b"\n")
