"""Synthetic traces: agents, retrieval and chat, with the sharing that each of them brings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from testbed.errors import ScenarioError
from testbed.scenario import first_problem
from testbed.seeds import generator
from testbed.workload.builder import TraceBuilder
from testbed.workload.trace import Trace


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Agents(_Part):
    """Sessions of an agent: system prompt and tools, then turns that grow one path."""

    share: float = Field(default=0.5, ge=0, description="weight among the requests")
    prefix_tokens: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        default=(1024, 768, 512),
        min_length=1,
        description="system prompt and tools of each agent, tokens",
    )
    popularity: float = Field(default=1.0, ge=0, description="Zipf exponent over the agents")
    turns: float = Field(default=3.0, ge=1, description="mean turns of a session (geometric)")
    turn_tokens: float = Field(default=64.0, ge=1, description="mean new input tokens per turn")
    think_seconds: float = Field(default=15.0, gt=0, description="mean time between turns")


class Retrieval(_Part):
    """Single requests: a template, one of many documents, a question."""

    share: float = Field(default=0.3, ge=0)
    template_tokens: int = Field(default=128, ge=1)
    documents: int = Field(default=40, ge=1)
    document_tokens: tuple[int, int] = Field(default=(256, 768), description="uniform range")
    popularity: float = Field(default=1.1, ge=0, description="Zipf exponent over the documents")
    question_tokens: float = Field(default=48.0, ge=1, description="mean")

    @field_validator("document_tokens")
    @classmethod
    def _range(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 1 <= value[0] <= value[1]:
            raise ValueError(f"{value[0]} to {value[1]} is not a range of lengths >= 1")
        return value


class Chat(_Part):
    """Conversations after a short common system prompt."""

    share: float = Field(default=0.2, ge=0)
    system_tokens: int = Field(default=96, ge=1)
    turns: float = Field(default=3.0, ge=1)
    turn_tokens: float = Field(default=128.0, ge=1)
    think_seconds: float = Field(default=20.0, gt=0)


class SyntheticSpec(_Part):
    """Knobs of :func:`synthetic_trace`, by default for a small machine.

    >>> SyntheticSpec(chat=Chat(share=0.0)).retrieval.documents
    40
    """

    requests: int = Field(default=600, ge=1)
    rate: float = Field(
        default=4.0, gt=0, description="requests/s, before sessions are cut at max_tokens"
    )
    block_size: int = Field(default=32, ge=1, description="tokens per block")
    output_tokens: float = Field(default=16.0, ge=1, description="mean, geometric")
    min_tokens: int = Field(default=192, ge=1, description="shorter prompts get a longer turn")
    max_tokens: int = Field(default=1536, ge=2, description="a session ends before it is longer")
    agents: Agents = Agents()
    retrieval: Retrieval = Retrieval()
    chat: Chat = Chat()
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.agents.share + self.retrieval.share + self.chat.share <= 0:
            raise ValueError("the shares of agents, retrieval and chat are all 0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Knobs from YAML.

        Raises
        ------
        ScenarioError
            The file cannot be read, or a knob is unknown or out of range; it is named.
        """
        try:
            given = yaml.safe_load(Path(path).read_text(encoding="utf-8-sig"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise ScenarioError(f"{path}: {reason}") from None
        if not isinstance(given, dict):
            raise ScenarioError(f"{path}: not a mapping of knobs")
        return cls().changed(given, str(path))

    def changed(self, knobs: dict[str, Any], source: str = "synthetic") -> Self:
        """A validated copy with some knobs given anew; raises :class:`ScenarioError`."""
        try:
            return type(self).model_validate({**self.model_dump(), **knobs})
        except ValidationError as error:
            raise ScenarioError(f"{source}: {first_problem(error)}") from None


@dataclass(frozen=True)
class _Request:
    time: float
    kind: str
    session: str
    tenant: str
    turn: int
    levels: tuple[tuple[str, int], ...]  # (text shared up to here, tokens), shallow to deep
    tokens: int
    output: int


def synthetic_trace(spec: SyntheticSpec | None = None) -> Trace:
    """A trace of the three kinds of request, the same for the same knobs and seed.

    Sessions start as a Poisson process well before the trace begins, so that long sessions are
    as common at its start as at its end; turns follow after exponential pauses. Two prompts
    share exactly the blocks that lie wholly within what they have in common: a system prompt, a
    template and document, or the earlier turns of their own session.
    """
    spec = spec or SyntheticSpec()
    requests: list[_Request] = []
    horizon = 1.5 * spec.requests / spec.rate + 60.0
    while True:
        requests = sorted(_all(spec, horizon), key=lambda r: (r.time, r.session, r.turn))
        if len(requests) >= spec.requests:
            break
        horizon *= 1.5
    builder = TraceBuilder("synthetic", "synthetic", block_size=spec.block_size)
    builder.notes["knobs"] = spec.model_dump(mode="json")
    number: dict[tuple[str, int], int] = {}
    for i, request in enumerate(requests[: spec.requests]):
        builder.add(
            i + 1,
            arrival=request.time,
            input_tokens=request.tokens,
            output_tokens=request.output,
            ids=_chain(request, spec.block_size, number),
            session=request.session,
            type=request.kind,
            tenant=request.tenant,
            turn=request.turn,
        )
    return builder.finish()


def _chain(request: _Request, size: int, number: dict[tuple[str, int], int]) -> list[int]:
    """Block ids: a block belongs to the shallowest text that covers it whole."""
    ids = []
    for b in range(-(-request.tokens // size)):
        end = (b + 1) * size
        whole = end <= request.tokens
        text = next((name for name, upto in request.levels if end <= upto), None)
        if text is None or not whole:
            text = f"{request.session}#{request.turn}"
        ids.append(number.setdefault((text, b), len(number)))
    return ids


def _all(spec: SyntheticSpec, horizon: float) -> Iterator[_Request]:
    total = spec.agents.share + spec.retrieval.share + spec.chat.share
    for requests in (
        _agents(spec, spec.rate * spec.agents.share / total, horizon),
        _retrieval(spec, spec.rate * spec.retrieval.share / total, horizon),
        _chat(spec, spec.rate * spec.chat.share / total, horizon),
    ):
        yield from requests


def _agents(spec: SyntheticSpec, rate: float, horizon: float) -> Iterator[_Request]:
    knobs = spec.agents
    weights = _zipf(len(knobs.prefix_tokens), knobs.popularity)
    for k, draw, start in _sessions(spec, "agents", rate / knobs.turns, horizon, knobs):
        agent = int(draw.choice(len(weights), p=weights))
        root = (f"agent {agent}", knobs.prefix_tokens[agent])
        yield from _turns(spec, "agents", f"agents-{k}", f"agent-{agent}", root, knobs, draw, start)


def _chat(spec: SyntheticSpec, rate: float, horizon: float) -> Iterator[_Request]:
    knobs = spec.chat
    for k, draw, start in _sessions(spec, "chat", rate / knobs.turns, horizon, knobs):
        root = ("chat", knobs.system_tokens)
        yield from _turns(spec, "chat", f"chat-{k}", "chat", root, knobs, draw, start)


def _retrieval(spec: SyntheticSpec, rate: float, horizon: float) -> Iterator[_Request]:
    knobs = spec.retrieval
    weights = _zipf(knobs.documents, knobs.popularity)
    low, high = knobs.document_tokens
    lengths = generator(spec.seed, "documents").integers(low, high + 1, knobs.documents)
    draw = generator(spec.seed, "retrieval")
    for k in range(int(draw.poisson(rate * horizon))):
        time = horizon * draw.random()
        document = int(draw.choice(knobs.documents, p=weights))
        template = knobs.template_tokens
        deep = template + int(lengths[document])
        question = _geometric(draw, knobs.question_tokens)
        tokens = min(max(deep + question, spec.min_tokens), max(spec.max_tokens, deep + 1))
        yield _Request(
            time,
            "retrieval",
            f"retrieval-{k}",
            "retrieval",
            1,
            (("template", template), (f"document {document}", deep)),
            tokens,
            _geometric(draw, spec.output_tokens),
        )


def _sessions(
    spec: SyntheticSpec, kind: str, rate: float, horizon: float, knobs: Agents | Chat
) -> Iterator[tuple[int, np.random.Generator, float]]:
    lead = 6.0 * knobs.turns * knobs.think_seconds
    draw = generator(spec.seed, kind, "starts")
    starts = np.sort(draw.random(draw.poisson(rate * (horizon + lead)))) * (horizon + lead) - lead
    for k, start in enumerate(starts.tolist()):
        yield k, generator(spec.seed, kind, k), start


def _turns(
    spec: SyntheticSpec,
    kind: str,
    session: str,
    tenant: str,
    root: tuple[str, int],
    knobs: Agents | Chat,
    draw: np.random.Generator,
    time: float,
) -> Iterator[_Request]:
    context = root[1]
    for turn in range(1, _geometric(draw, knobs.turns) + 1):
        tokens = max(context + _geometric(draw, knobs.turn_tokens), spec.min_tokens)
        output = _geometric(draw, spec.output_tokens)
        if tokens > spec.max_tokens and turn > 1:
            return
        if time >= 0:
            # What earlier turns left and what later ones keep is one growing text, the session's.
            levels = (root, (session, tokens))
            yield _Request(time, kind, session, tenant, turn, levels, tokens, output)
        context = tokens + output
        time += draw.exponential(knobs.think_seconds)


def _zipf(count: int, exponent: float) -> np.ndarray:
    weights = 1.0 / np.arange(1, count + 1) ** exponent
    return weights / weights.sum()


def _geometric(draw: np.random.Generator, mean: float) -> int:
    return int(draw.geometric(1.0 / mean))
