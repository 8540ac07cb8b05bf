"""OpenAI chat JSONL: text, tokenised by the deployed tokeniser with its chat template.

Each line is a request ``{"messages": [...], ...}`` or a line of OpenAI's batch format, with the
request under ``body``. What is read beside it: a time in seconds (``timestamp``, ``created`` or
``arrival``), the answer's length (``usage.completion_tokens``, ``output_tokens``, the recorded
answer, or ``max_tokens``), ``tools``, ``model``, ``user`` and a session (``session_id``,
``conversation_id`` or ``session``). A last message of the assistant is the recorded answer, text
or tool calls, and no part of the prompt. Where ``usage.prompt_tokens`` stands as well, the notes
say how many tokens it counts and how many this tokeniser finds in the same prompts.
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
from testbed.workload.tokenizers import ChatTokenizer, chat_tokenizer, plain
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
    prompts: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    timed: bool | None = None
    for number, row in json_rows(source, builder):
        body = row["body"] if isinstance(row.get("body"), dict) else row
        try:
            messages = _messages(body)
            time = _first(row, body, TIMES)
            if timed is not None and timed != (time is not None):
                raise BadRow("times on some rows only", "bad time")
            answer = messages[-1] if messages[-1]["role"] == "assistant" else None
            output, kind = _output(row, body, answer, tokenizer)
            if answer is not None:
                messages = messages[:-1]
            tokens = array("i", _tokenised(tokenizer, messages, body.get("tools")))
        except BadRow as error:
            builder.bad(number, error)
            continue
        timed = time is not None
        session = _first(row, body, SESSIONS)
        name = None if session is None else str(session)
        if name is not None:
            turns[name] += 1
        lengths[kind] += 1
        counted = row["usage"].get("prompt_tokens") if isinstance(row.get("usage"), dict) else None
        if type(counted) is int:
            prompts.update(recorded=counted, found=len(tokens))
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
    if prompts:
        builder.notes["prompt_tokens"] = dict(prompts)
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
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        if not isinstance(content, str | list | None) or not all(
            isinstance(part, dict) and isinstance(part.get("type"), str) for part in parts
        ):
            raise BadRow("a message's content is neither text nor a list of typed parts")
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
    answer: dict[str, Any] | None,
    tokenizer: ChatTokenizer,
) -> tuple[int, str]:
    usage = row.get("usage")
    if isinstance(usage, dict) and "completion_tokens" in usage:
        return usage["completion_tokens"], "usage"
    if (given := _first(row, body, ("output_tokens",))) is not None:
        return given, "output_tokens"
    if answer is not None and (text := plain(answer.get("content"), answer.get("tool_calls"))):
        return max(1, len(tokenizer.text(text))), "the recorded answer"
    if (limit := _first(row, body, ("max_completion_tokens", "max_tokens"))) is not None:
        return limit, "the limit max_tokens"
    raise BadRow("nothing says how long the answer was", "no output length")


def _first(row: dict[str, Any], body: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        for place in (row, body):
            if place.get(name) is not None:
                return place[name]
    return None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


READER = Reader("chat", "OpenAI chat JSONL, text (needs a tokenizer)", matches, read)
