"""Chat tokenisers: text to token ids, by whatever tokeniser is deployed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import TraceError

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatTokenizer:
    """Token ids of a chat prompt and of plain text.

    ``template`` says how messages become one text: the tokeniser's own, or ``chatml``.
    """

    name: str
    template: str
    prompt: Callable[[Sequence[Message], Any], list[int]]
    text: Callable[[str], list[int]]


def chat_tokenizer(given: Any) -> ChatTokenizer:
    """From a callable of text, a tokeniser object, a ``tokenizer.json``, a model directory, or one
    of Mistral's files (``*.model.v3``, ``tekken*.json``).

    An object with ``apply_chat_template`` (transformers) and Mistral's files use their own
    template; anything else gets ChatML: ``<|im_start|>role``, content, ``<|im_end|>`` for every
    message, and the opening of the assistant's. Nothing is downloaded.

    Raises
    ------
    TraceError
        Nothing is given, or it cannot be loaded.
    """
    if given is None:
        raise TraceError("a chat trace holds text: a tokenizer is needed to count its tokens")
    if isinstance(given, str | Path):
        return _load(Path(given))
    template = getattr(given, "apply_chat_template", None)
    if template is not None and getattr(given, "chat_template", None) is not None:

        def prompt(messages: Sequence[Message], tools: Any) -> list[int]:
            ids = template(
                list(messages),
                tools=tools,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
            )
            return [int(t) for t in ids]

        name = str(getattr(given, "name_or_path", type(given).__name__))
        return ChatTokenizer(Path(name).name, "own", prompt, _encoder(given))
    encode = _encoder(given)
    return ChatTokenizer(
        getattr(given, "name", type(given).__name__),
        "chatml",
        lambda messages, tools: encode(chatml(messages, tools)),
        encode,
    )


def deployed_tokenizer(model: str) -> str | None:
    """The tokenizer of an engine's model where that is a local directory which has one."""
    path = Path(model)
    return model if path.is_dir() and any(path.glob("tokenizer*")) else None


def ordinary_tokens(model: str, first: int, count: int) -> int:
    """The first of ``count`` ids in a row, ``first`` or later, none of which is special to a
    model's tokenizer; ``first`` itself where the model is no local directory with one.

    Most vocabularies keep special tokens among their first 256 ids or at their end; Mistral's
    newer ones have a thousand at the start.

    Raises
    ------
    TraceError
        The directory's ``tokenizer.json`` cannot be read.
    """
    path = Path(model) / "tokenizer.json"
    if not path.is_file():
        return first
    try:
        added = json.loads(path.read_bytes()).get("added_tokens", [])
        special = sorted(int(t["id"]) for t in added if t.get("special"))
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        raise TraceError(f"{path}: not a tokenizer") from None
    for token in special:
        if first <= token < first + count:
            first = token + 1
    return first


def chatml(messages: Sequence[Message], tools: Any = None) -> str:
    """Messages as one ChatML text, tools first; content parts of other kinds than text are
    named, not shown."""
    parts = []
    if tools:
        parts.append(f"<|im_start|>tools\n{_plain(tools)}<|im_end|>\n")
    for message in messages:
        body = plain(message.get("content"), message.get("tool_calls"))
        parts.append(f"<|im_start|>{message.get('role')}\n{body}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def plain(content: Any, tool_calls: Any = None) -> str:
    """A message's content and tool calls as one text."""
    return _plain(content) + (_plain(tool_calls) if tool_calls else "")


def _plain(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(c, dict) and "type" in c for c in content):
        return "".join(
            str(c["text"]) if c["type"] == "text" and "text" in c else f"[{c['type']}]"
            for c in content
        )
    import orjson

    return orjson.dumps(content, option=orjson.OPT_SORT_KEYS).decode()


def _encoder(given: Any) -> Callable[[str], list[int]]:
    encode = getattr(given, "encode", None)
    if encode is None:
        if not callable(given):
            raise TraceError(f"{type(given).__name__} is not a tokenizer")
        return lambda text: [int(t) for t in given(text)]

    def run(text: str) -> list[int]:
        ids = encode(text)
        return [int(t) for t in getattr(ids, "ids", ids)]

    return run


def _load(path: Path) -> ChatTokenizer:
    try:
        if path.is_dir():
            from transformers import AutoTokenizer

            return chat_tokenizer(AutoTokenizer.from_pretrained(path, local_files_only=True))
        if ".model" in path.suffixes or path.name.startswith("tekken"):
            return _mistral(path)
        from tokenizers import Tokenizer

        loaded = chat_tokenizer(Tokenizer.from_file(str(path)))
    except ImportError as error:
        raise TraceError(f"{path}: loading a tokenizer needs {error.name}") from None
    except TraceError:
        raise
    except Exception as error:  # both libraries raise bare Exception for a broken file
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path}: not a tokenizer: {reason[:200]}") from None
    return ChatTokenizer(path.name, loaded.template, loaded.prompt, loaded.text)


def _mistral(path: Path) -> ChatTokenizer:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    loaded = MistralTokenizer.from_file(str(path))
    plain_text = loaded.instruct_tokenizer.tokenizer

    def prompt(messages: Sequence[Message], tools: Any) -> list[int]:
        request = ChatCompletionRequest.from_openai(list(messages), tools=tools)
        return list(loaded.encode_chat_completion(request).tokens)

    return ChatTokenizer(
        path.name, "own", prompt, lambda text: list(plain_text.encode(text, bos=False, eos=False))
    )
