"""OpenAI chat JSONL: text, tokenised by the deployed tokeniser with its chat template.

Each line is a request ``{"messages": [...], ...}`` or a line of OpenAI's batch format, with the
request under ``body``. What is read beside it: a time in seconds (``timestamp``, ``created`` or
``arrival``), the answer's length (``usage.completion_tokens``, ``output_tokens``, a last message
of the assistant, or ``max_tokens``), ``tools``, ``model``, ``user`` and a session
(``session_id``, ``conversation_id`` or ``session``).
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

from testbed.workload.blocks import TokenBlocks
from testbed.workload.builder import BadRow, TraceBuilder
from testbed.workload.readers import Head, Reader, ReadOptions
from testbed.workload.readers.json_rows import json_rows
from testbed.workload.source import Source
from testbed.workload.tokenizers import ChatTokenizer, chat_tokenizer
from testbed.workload.trace import Trace

BLOCK_SIZE = 16
TIMES = ("timestamp", "created", "arrival")
SESSIONS = ("session_id", "conversation_id", "session")


def matches(head: Head) -> bool:
    body = head.fields.get("body")
    return "messages" in head.fields or (isinstance(body, dict) and "messages" in body)


def read(source: Source, options: ReadOptions) -> Trace:
    tokenizer = chat_tokenizer(options.tokenizer)
    builder = TraceBuilder(
        source.name,
        "chat",
        block_size=options.block_size or BLOCK_SIZE,
        skip_bad=options.skip_bad,
        sha256=source.sha256,
    )
    builder.notes.update(tokenizer=tokenizer.name, chat_template=tokenizer.template)
    blocks = TokenBlocks(builder.block_size)
    lengths: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    timed: bool | None = None
    for number, row in json_rows(source, builder):
        body = row["body"] if isinstance(row.get("body"), dict) else row
        try:
            messages = _messages(body)
            time = _first(row, body, TIMES)
            if timed is not None and timed != (time is not None):
                raise BadRow("times on some rows only")
            output, kind = _output(row, body, messages, tokenizer)
            if kind == "the recorded answer":
                messages = messages[:-1]
            tokens = array("i", _tokenised(tokenizer, messages, body.get("tools")))
        except BadRow as error:
            builder.bad(number, str(error))
            continue
        timed = time is not None
        session = _first(row, body, SESSIONS)
        name = None if session is None else str(session)
        if name is not None:
            turns[name] += 1
        lengths[kind] += 1
        builder.add(
            number,
            arrival=0.0 if time is None else time,
            input_tokens=len(tokens),
            output_tokens=output,
            ids=blocks.chain(tokens),
            tokens=tokens,
            session=name,
            tenant=_text(body.get("user")),
            adapter=_text(body.get("model")),
            turn=turns[name] if name is not None else 0,
        )
    builder.notes["output_lengths_from"] = dict(lengths)
    if timed is False:
        builder.notes["arrivals"] = "none recorded"
    return builder.finish()


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRow("no messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow("a message without a role")
    return messages


def _tokenised(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    if not messages:
        raise BadRow("no message before the answer")
    try:
        return tokenizer.prompt(messages, tools)
    except Exception as error:  # templates raise what they like about a conversation's form
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadRow(f"the chat template refuses the messages: {reason[:200]}") from None


def _output(
    row: dict[str, Any],
    body: dict[str, Any],
    messages: list[dict[str, Any]],
    tokenizer: ChatTokenizer,
) -> tuple[int, str]:
    usage = row.get("usage")
    if isinstance(usage, dict) and "completion_tokens" in usage:
        return usage["completion_tokens"], "usage"
    if (given := _first(row, body, ("output_tokens",))) is not None:
        return given, "output_tokens"
    last = messages[-1]
    if last["role"] == "assistant" and isinstance(last.get("content"), str):
        return max(1, len(tokenizer.text(last["content"]))), "the recorded answer"
    if (limit := _first(row, body, ("max_completion_tokens", "max_tokens"))) is not None:
        return limit, "the limit max_tokens"
    raise BadRow("nothing says how long the answer was")


def _first(row: dict[str, Any], body: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        for place in (row, body):
            if place.get(name) is not None:
                return place[name]
    return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


READER = Reader("chat", "OpenAI chat JSONL, text (needs a tokenizer)", matches, read)
