"""Trace readers: round trips, wrappings, refusals with file and line, and fuzz."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testbed.errors import TraceError
from testbed.workload.blocks import TokenBlocks
from testbed.workload.forest import PrefixForest
from testbed.workload.readers import readers
from testbed.workload.readers.azure import nanoseconds
from testbed.workload.readers.own import write_trace
from testbed.workload.synthetic import SyntheticSpec, synthetic_trace
from testbed.workload.trace import Trace, read_trace
from tests.unit.workload_traces import prefix_tokens, published

TEXT = "a b c d e f g h"


def words(text: str) -> list[int]:
    """A tokenizer for tests: one id for every word, the same everywhere."""
    return [sum(w.encode()) % 1000 for w in text.split()]


def jsonl(rows: list[dict[str, Any]]) -> bytes:
    return "\n".join(json.dumps(r) for r in rows).encode() + b"\n"


def mooncake_row(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **changes}


MOONCAKE = jsonl(
    [
        mooncake_row(),
        mooncake_row(timestamp=1500, input_length=1024, hash_ids=[1, 3]),
        mooncake_row(timestamp=3000, input_length=512, output_length=7, hash_ids=[1]),
    ]
)
BAILIAN = jsonl(
    [
        {"chat_id": 8, "parent_chat_id": -1, "timestamp": 0.5, "input_length": 20,
         "output_length": 3, "type": "text", "turn": 1, "hash_ids": [11, 12]},
        {"chat_id": 9, "parent_chat_id": 8, "timestamp": 2.0, "input_length": 40,
         "output_length": 4, "type": "file", "turn": 2, "hash_ids": [11, 13, 14]},
        {"chat_id": 10, "parent_chat_id": 9, "timestamp": 9.0, "input_length": 48,
         "output_length": 4, "type": "text", "turn": 3, "hash_ids": [11, 13, 15]},
    ]
)  # fmt: skip
AZURE = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    b"2023-11-16 18:15:50.9951690,396,109\n"
)
BURSTGPT = (
    b"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,"
    b"Log Type\n5.0,abc,4,GPT-4,100,10,110,Conversation log\n"
    b"8.0,,2,ChatGPT,200,20,220,API log\n9.5,abc,2,GPT-4,130,5,135,Conversation log\n"
)
SERVEGEN = b"request_id,timestamp,input_tokens,output_tokens\n0,0.25,100,10\n1,0.75,50,20\n"
TRACELAB = (
    b"id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len\n"
    b"0,40,8,0.0,0,250.0,0\n0,16,4,0.0,1,0.0,48\n0,10,4,0.0,2,0.0,20\n1,20,2,100.0,0,0.0,0\n"
)
TOKEN_IDS = jsonl(
    [
        {"input_toks": 18, "output_toks": 2, "arrival_time_ns": 10, "input_tok_ids": [*range(18)]},
        {"input_toks": 16, "output_toks": 3, "arrival_time_ns": 40, "input_tok_ids": [*range(16)]},
    ]
)
CHAT = jsonl(
    [
        {"timestamp": 1.0, "session_id": "s", "user": "u", "model": "m", "output_tokens": 4,
         "messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": "hi"}]},
        {"timestamp": 4.0, "session_id": "s",
         "messages": [{"role": "system", "content": TEXT}, {"role": "user", "content": "hi"},
                      {"role": "assistant", "content": "one two three"}]},
        {"timestamp": 5.0, "body": {"max_tokens": 9, "messages": [{"role": "user",
         "content": [{"type": "text", "text": "look"}, {"type": "image_url"}]}]}},
    ]
)  # fmt: skip
OWN = jsonl(
    [
        {"format": "edge-serving-trace", "version": 1, "block_size": 8},
        {"arrival": 0.0, "input_tokens": 20, "output_tokens": 2, "blocks": [5, 6, 7],
         "session": "a", "type": "agents", "tenant": "t", "adapter": "l", "turn": 1},
        {"arrival": 0.125, "input_tokens": 30, "output_tokens": 2, "blocks": [5, 8]},
    ]
)  # fmt: skip
SAMPLES = {
    "mooncake": MOONCAKE,
    "bailian": BAILIAN,
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "servegen": SERVEGEN,
    "tracelab": TRACELAB,
    "token_ids": TOKEN_IDS,
    "chat": CHAT,
    "own": OWN,
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Trace]:
    def run(data: bytes, name: str = "trace.jsonl", **options: Any) -> Trace:
        path = tmp_path / name
        path.write_bytes(data)
        options.setdefault("tokenizer", words)
        return read_trace(path, **options)

    return run


def same(a: Trace, b: Trace) -> None:
    for column in ("arrival", "input_tokens", "output_tokens", "blocks", "block_offsets", "turn"):
        assert np.array_equal(getattr(a, column), getattr(b, column)), column
    for column in ("session", "type", "tenant", "adapter"):
        one, two = getattr(a, column), getattr(b, column)
        assert [one[i] for i in range(len(a))] == [two[i] for i in range(len(b))], column
    assert (a.token_ids is None) == (b.token_ids is None)
    for i in range(len(a)):
        if a.token_ids is not None:
            assert np.array_equal(a.tokens(i), b.tokens(i))
    assert a.block_size == b.block_size


def test_every_reader_has_a_sample() -> None:
    assert set(SAMPLES) == set(readers())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_formats_are_found_by_content_and_survive_a_round_trip(
    name: str, read: Callable[..., Trace], tmp_path: Path
) -> None:
    trace = read(SAMPLES[name], "no-telling-name")
    assert trace.facts.format == name
    assert len(trace.facts.sha256) == 64 and not trace.facts.dropped
    write_trace(trace, tmp_path / "again.jsonl.zst")
    same(trace, read_trace(tmp_path / "again.jsonl.zst"))


@pytest.mark.parametrize("name", sorted(SAMPLES))
@pytest.mark.parametrize(
    "wrap",
    [
        gzip.compress,
        zstandard.ZstdCompressor().compress,
        lambda d: d.replace(b"\n", b"\r\n"),
        lambda d: b"\xef\xbb\xbf" + d,
        lambda d: d.decode().encode("utf-16"),
        lambda d: b"\n \n" + d.replace(b"\n", b"\n\n"),
        lambda d: d.rstrip(b"\n"),
    ],
    ids=["gzip", "zstd", "crlf", "bom", "utf-16", "blank lines", "no last newline"],
)
def test_wrappings_change_nothing(
    name: str, wrap: Callable[[bytes], bytes], read: Callable[..., Trace]
) -> None:
    same(read(SAMPLES[name]), read(wrap(SAMPLES[name])))


def test_mooncake_columns(read: Callable[..., Trace]) -> None:
    trace = read(MOONCAKE)
    assert trace.arrival.tolist() == [0.0, 1.5, 3.0] and trace.block_size == 512
    assert trace.chain(1).tolist() == [1, 3] and trace.output_tokens.tolist() == [5, 5, 7]


def test_bailian_sessions_follow_parents(read: Callable[..., Trace]) -> None:
    trace = read(BAILIAN)
    assert [trace.session[i] for i in range(3)] == ["8", "8", "8"]
    assert trace.turn.tolist() == [1, 2, 3] and trace.block_size == 16
    assert trace.type.names == ("text", "file") and trace.arrival.tolist() == [0.0, 1.5, 8.5]


def test_bailian_turns_may_stand_before_what_they_follow(read: Callable[..., Trace]) -> None:
    rows = [json.loads(line) for line in BAILIAN.splitlines()]
    trace = read(jsonl(rows[::-1]))
    assert [trace.session[i] for i in range(3)] == ["8", "8", "8"]
    orphan = {**rows[2], "chat_id": 70, "parent_chat_id": 60}
    ring = [{**rows[2], "chat_id": a, "parent_chat_id": b} for a, b in ((20, 21), (21, 20))]
    trace = read(jsonl([*rows, orphan, *ring]))
    names = [trace.session[i] for i in range(6)]
    assert names[:3] == ["8"] * 3 and names[3] == "60" and names[4] == names[5]
    with pytest.raises(TraceError, match=r":4: chat 9 has two parents, 8 and 10"):
        read(jsonl([*rows, {**rows[1], "parent_chat_id": 10}]))


def test_own_token_ids_must_agree_with_the_chains(read: Callable[..., Trace]) -> None:
    head = {"format": "edge-serving-trace", "version": 1, "block_size": 2}
    row = {"arrival": 0, "input_tokens": 3, "output_tokens": 1, "blocks": [5, 6]}
    rows = [{**row, "tokens": [1, 2, 3]}, {**row, "blocks": [5], "tokens": [1, 2, 4]}]
    assert len(read(jsonl([head, *rows]))) == 2
    with pytest.raises(TraceError, match=r":4: block 6 stood for other tokens before"):
        read(jsonl([head, *rows, {**row, "tokens": [1, 2, 4]}]))


def test_tracelab_without_arrivals_says_so(read: Callable[..., Trace]) -> None:
    data = b"session_id,round_idx,input_len,output_len,prefix_len,tool_wait_after_ms\n"
    trace = read(data + b"a,0,40,8,0,100\na,1,16,4,48,0\n")
    assert trace.facts.notes["arrivals"] == "none recorded"
    assert trace.arrival.tolist() == [0.0, 0.1]


def test_azure_dates_keep_a_tenth_of_a_microsecond(read: Callable[..., Trace]) -> None:
    trace = read(AZURE)
    assert trace.arrival[1] == pytest.approx(4.314579, abs=1e-12)
    assert trace.block_size == 0 and len(trace.blocks) == 0
    whole, zoned = "2024-05-12 00:00:01", "2024-05-12 02:00:01.0000001+02:00"
    assert nanoseconds(zoned) - nanoseconds(whole) == 100
    assert nanoseconds("2000-03-01 00:00:00") - nanoseconds("2000-02-28 00:00:00") == 2 * 86400e9


def test_burstgpt_counts_failed_requests(read: Callable[..., Trace]) -> None:
    failed = BURSTGPT + b"11,,0,GPT-4,0,0,0,API log\n"
    with pytest.raises(TraceError, match=r":5: no response tokens: a failed request"):
        read(failed)
    trace = read(failed, skip_bad=True)
    assert trace.facts.dropped == {"failed": 1} and trace.facts.rows == 4
    assert [trace.session[i] for i in range(3)] == ["abc", None, "abc"]
    assert trace.turn.tolist() == [1, 0, 2] and trace.adapter[1] == "ChatGPT"


def test_tracelab_rounds_grow_a_path_and_compaction_branches_it(
    read: Callable[..., Trace],
) -> None:
    trace = read(TRACELAB)
    rounds = [i for i in range(4) if trace.session[i] == "0"]
    first, second, third = (trace.chain(i).tolist() for i in rounds)
    assert [trace.input_tokens[i] for i in rounds] == [40, 64, 30]
    assert second[:2] == first[:2]  # whole blocks of 16 of the first prompt
    assert second[2] != first[2]  # which ended in a part-full block, then the answer followed
    assert third[0] == first[0] and third[1] not in second  # 20 tokens kept: one whole block
    assert trace.arrival[rounds[1]] == 0.25
    other = trace.chain(next(i for i in range(4) if trace.session[i] == "1"))
    assert not set(other.tolist()) & {*first, *second, *third}
    assert "round_times" in trace.facts.notes


def test_token_blocks_are_prefixes(read: Callable[..., Trace]) -> None:
    trace = read(TOKEN_IDS)
    assert trace.chain(0).tolist() == [0, 1] and trace.chain(1).tolist() == [0]
    assert trace.arrival[1] == 3e-8 and trace.tokens(1).tolist() == [*range(16)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=8), st.integers(1, 4))
def test_token_blocks_are_equal_exactly_for_equal_prefixes(
    prompts: list[list[int]], size: int
) -> None:
    blocks = TokenBlocks(size)
    seen: dict[int, tuple[int, ...]] = {}
    for prompt in prompts:
        for k, block in enumerate(blocks.chain(prompt)):
            prefix = tuple(prompt[: (k + 1) * size])
            assert seen.setdefault(block, prefix) == prefix
    assert len(set(seen.values())) == len(seen)


def test_chat_is_tokenised_with_a_template(read: Callable[..., Trace]) -> None:
    trace = read(CHAT, block_size=2)
    notes = trace.facts.notes
    assert notes["chat_template"] == "chatml"
    assert notes["output_lengths_from"] == {
        "output_tokens": 1,
        "the recorded answer": 1,
        "the limit max_tokens": 1,
    }
    assert trace.output_tokens.tolist() == [4, 3, 9]
    assert np.array_equal(trace.tokens(0), trace.tokens(1))  # the answer is no prompt
    assert trace.chain(0).tolist() == trace.chain(1).tolist()
    assert [trace.turn[i] for i in range(3)] == [1, 2, 0] and trace.tenant[0] == "u"


def test_chat_answers_in_parts_and_tool_calls_are_counted_and_no_prompt(
    read: Callable[..., Trace],
) -> None:
    ask = {"role": "user", "content": "hi"}
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    parts = {"role": "assistant", "content": [{"type": "text", "text": "one two three"}]}
    tool = {"role": "tool", "tool_call_id": "a", "content": "42"}
    spoken = {"role": "assistant", "content": "two words"}
    rows = [
        {"messages": [ask, call]},
        {"messages": [ask, parts]},
        {"messages": [ask, call, tool, parts]},
        {"messages": [ask, spoken], "usage": {"prompt_tokens": 9, "completion_tokens": 7}},
        {"messages": [ask], "output_tokens": 1},
    ]  # fmt: skip
    trace = read(jsonl([{"timestamp": i, **r} for i, r in enumerate(rows)]))
    prompts = [trace.tokens(i).tolist() for i in range(5)]
    assert prompts[0] == prompts[1] == prompts[3] == prompts[4]
    assert len(prompts[2]) > len(prompts[0])
    assert trace.output_tokens.tolist() == [1, 3, 3, 7, 1]
    assert trace.facts.notes["prompt_tokens"] == {"recorded": 9, "found": len(prompts[3])}


def test_chat_needs_a_tokenizer(read: Callable[..., Trace]) -> None:
    with pytest.raises(TraceError, match="a tokenizer is needed"):
        read(CHAT, tokenizer=None)
    with pytest.raises(TraceError, match="not a tokenizer"):
        read(CHAT, tokenizer="no/such/tokenizer.json")


def test_chat_without_times_says_so(read: Callable[..., Trace]) -> None:
    rows = [json.loads(line) for line in CHAT.splitlines()]
    untimed = jsonl([{k: v for k, v in r.items() if k != "timestamp"} for r in rows])
    trace = read(untimed)
    assert trace.facts.notes["arrivals"] == "none recorded" and trace.rate == 0
    mixed = untimed + jsonl(rows[:1])
    with pytest.raises(TraceError, match=r":4: times on some rows only"):
        read(mixed)


def test_real_tokenizers_count_and_share(read: Callable[..., Trace], tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not there")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=sorted(alphabet))
    tokenizer.train_from_iterator([TEXT, "<|im_start|>system user"], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    trace = read(CHAT, tokenizer=tmp_path / "tokenizer.json", block_size=4)
    assert trace.facts.notes["tokenizer"] == "tokenizer.json"
    same(trace, read(CHAT, tokenizer=tokenizer, block_size=4))
    text = tokenizer.decode(trace.tokens(0).tolist(), skip_special_tokens=False)
    assert TEXT.replace(" ", "") in text.replace(" ", "").replace("Ġ", "")
    assert trace.output_tokens[1] == len(tokenizer.encode("one two three").ids)


def test_a_tokenizer_that_ships_in_a_package_reads_tools_and_parts(
    read: Callable[..., Trace],
) -> None:
    package = pytest.importorskip("mistral_common", reason="mistral_common is not there")
    file = Path(package.__file__).parent / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    if not file.exists():
        pytest.skip(f"{file.name} is not in the package")
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    ask = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what time is it there?"}]},
    ]
    done = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "noon"},
    ]
    answer = {"role": "assistant", "content": "one two three"}
    rows = [
        {"timestamp": 0, "tools": tools, "output_tokens": 9, "messages": ask},
        {"timestamp": 1, "tools": tools, "messages": [*ask, *done, answer]},
        {"timestamp": 2, "output_tokens": 1, "messages": [{"role": "nobody", "content": "?"}]},
    ]  # fmt: skip
    with pytest.raises(TraceError, match=r":3: the chat template refuses the messages"):
        read(jsonl(rows), tokenizer=file)
    trace = read(jsonl(rows), tokenizer=file, skip_bad=True, block_size=8)
    assert trace.facts.notes["tokenizer"] == file.name
    assert trace.facts.notes["chat_template"] == "own"
    assert trace.output_tokens.tolist() == [9, 3]
    first, second = trace.tokens(0), trace.tokens(1)
    assert first[0] == second[0] == 1 and len(second) > len(first)


# --- order, identity, refusal ------------------------------------------------------------------


def test_rows_out_of_order_are_sorted_stably_and_counted(read: Callable[..., Trace]) -> None:
    rows = [
        mooncake_row(timestamp=t, hash_ids=[1, 10 + i], output_length=i + 1)
        for i, t in enumerate([20, 10, 10, 30])
    ]
    trace = read(jsonl(rows))
    assert trace.arrival.tolist() == [0.0, 0.0, 0.01, 0.02]
    assert trace.output_tokens.tolist() == [2, 3, 1, 4] and trace.facts.out_of_order == 1
    assert [int(trace.chain(i)[1]) for i in range(4)] == [11, 12, 10, 13]


WIDE = [0, 2**32, 2**53 + 1, 2**53 + 2, 2**63, 2**64 - 1]


def test_64_bit_ids_are_never_cut(read: Callable[..., Trace]) -> None:
    chain = mooncake_row(input_length=512 * len(WIDE), hash_ids=WIDE)
    trace = read(jsonl([chain]))
    assert trace.blocks.dtype == np.uint64 and [int(b) for b in trace.blocks] == WIDE
    forest = PrefixForest.of(trace)
    assert len(forest) == len(WIDE) and [forest.vertex(b) for b in WIDE] == [*range(len(WIDE))]


@pytest.mark.parametrize(
    "ids",
    [["a", "b", "a" * 64], [-1, 2**64 - 1, 5], [2**64, 2**64 + 1, 2**200], ["1", 1, 2]],
    ids=["strings", "negative", "wider than 64 bits", "mixed"],
)
def test_other_ids_are_numbered_without_meeting(ids: list[Any], read: Callable[..., Trace]) -> None:
    trace = read(jsonl([mooncake_row(input_length=512 * 3, hash_ids=ids), mooncake_row(
        input_length=512 * 2, hash_ids=ids[:2])]))  # fmt: skip
    assert [int(b) for b in trace.blocks] == [0, 1, 2, 0, 1]
    assert trace.facts.notes["block_ids"] == "numbered in order of appearance"


def test_ids_of_content_alone_are_renamed_by_their_prefix(read: Callable[..., Trace]) -> None:
    rows = [mooncake_row(hash_ids=[1, 9]), mooncake_row(hash_ids=[2, 9]),
            mooncake_row(hash_ids=[1, 9])]  # fmt: skip
    trace = read(jsonl(rows))
    assert trace.facts.relabelled
    assert len(PrefixForest.of(trace)) == len(np.unique(trace.blocks)) == 4
    assert trace.chain(0).tolist() == trace.chain(2).tolist() != trace.chain(1).tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [1]}, "1 block ids do not fit 600 input tokens"),
        ({"hash_ids": [1, 2, 3]}, "3 block ids do not fit"),
        ({"hash_ids": "1 2"}, "hash_ids is not a list"),
        ({"hash_ids": [1, 2.5]}, "the block id 2.5"),
        ({"hash_ids": [1, True]}, "the block id True"),
        ({"hash_ids": [1, None]}, "the block id None"),
        ({"input_length": 0, "hash_ids": []}, r"the input length 0 is not in \[1"),
        ({"input_length": -600}, "the input length -600"),
        ({"input_length": 600.0}, "the input length 600.0 is not a whole number"),
        ({"input_length": "600"}, "the input length '600'"),
        ({"input_length": 2**40}, "the input length 1099511627776"),
        ({"output_length": 0}, "the output length 0"),
        ({"output_length": None}, "the output length None"),
        ({"timestamp": "noon"}, "the time 'noon' is not a number"),
        ({"timestamp": True}, "the time True is not a number"),
        ({"timestamp": 1e30}, "the time 1e[+]30 is out of range"),
    ],
)
def test_bad_rows_are_refused_with_file_and_line_or_counted(
    change: dict[str, Any], message: str, read: Callable[..., Trace]
) -> None:
    data = jsonl([mooncake_row(), mooncake_row(**change), mooncake_row()])
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: " + message):
        read(data)
    trace = read(data, skip_bad=True)
    assert len(trace) == 2 and sum(trace.facts.dropped.values()) == 1 and trace.facts.rows == 3
    assert trace.facts.notes["first_dropped"].startswith("line 2: ")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"\n\n", "the file is empty"),
        (b"hello\n", ":1: no known trace format has the fields 'hello'"),
        (b'{"a": 1}\n', ":1: no known trace format has the fields 'a'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "a Git LFS pointer"),
        (b"\x1f\x8b broken", "broken compression"),
        (b"\x28\xb5\x2f\xfd broken", "broken compression"),
        (b"[" + MOONCAKE.splitlines()[0] + b"]", ":1: JSON, but not one request a line"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        (AZURE + b"yesterday,1,2\n", r":4: the time 'yesterday' is not a date"),
        (AZURE + b"2023-02-30 00:00:00,1,2\n", r":4: the time '2023-02-30 00:00:00' is not"),
        (AZURE + b"2023-11-16 18:15:46,1\n", r":4: 2 cells, but the header has 3"),
        (AZURE + b"2023-11-16 18:15:46,1.5,2\n", r":4: the ContextTokens '1.5'"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens,TIMESTAMP\n", "a column name stands twice"),
        (b'{"format": "edge-serving-trace", "version": 2}\n', ":1: version 2 is not 1"),
        (MOONCAKE + b"{not json}\n", ":4: not JSON"),
        (MOONCAKE + b"[1]\n", ":4: not a JSON object"),
        (MOONCAKE + b'{"timestamp": 1}\n', ":4: no field 'input_length'"),
        (MOONCAKE + MOONCAKE[:-2] + b', "timestamp": 9}\n', ":6: the field 'timestamp' stands"),
        (
            CHAT + CHAT.splitlines()[2].replace(b'{"max', b'{"messages": [], "max'),
            ":4: the field 'messages' stands twice",
        ),
        (AZURE + b"2023-11-16 18:15:46+00:00,1,2\n", ":4: an offset from UTC on some rows only"),
        (AZURE + b"2023-11-16 18:15:46+99:00,1,2\n", ":4: the time .* is not a date"),
        (SERVEGEN + b"2,1_0.5,1,2\n", ":4: the time '1_0.5' is not a number"),
        (SERVEGEN + b"2,nan,1,2\n", ":4: the time 'nan' is not a number"),
        (SERVEGEN + "2,\uff11,1,2\n".encode(), ":4: the time '\uff11' is not a number"),
        (SERVEGEN + b"2,1700000000000,1,2\n", ":4: .* is out of range in seconds"),
        (
            OWN + b'{"arrival": 1, "input_tokens": 8, "output_tokens": 1, "sesion": "a"}\n',
            ":4: unknown field 'sesion'",
        ),
        (
            CHAT
            + b'{"timestamp": 9, "output_tokens": 1, "messages": [{"role": "user", "content": 5}]}',
            ":4: a message's content is neither text nor a list",
        ),
    ],
)
def test_files_that_are_no_trace(data: bytes, message: str, read: Callable[..., Trace]) -> None:
    with pytest.raises(TraceError, match=message):
        read(data)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.ZstdCompressor().compress])
@pytest.mark.parametrize("kept", [0.3, 0.7, 0.999])
def test_a_file_cut_off_in_its_compression_is_no_shorter_trace(
    compress: Callable[[bytes], bytes], kept: float, read: Callable[..., Trace]
) -> None:
    rows = [mooncake_row(timestamp=i, hash_ids=[i, (i * 0x9E3779B97F4A7C15) % 2**64])
            for i in range(2000)]  # fmt: skip
    whole = compress(jsonl(rows))
    assert len(read(whole + whole)) == 4000  # frames and members follow one another
    with pytest.raises(TraceError, match="broken compression"):
        read(whole[: int(kept * len(whole))], skip_bad=True)


def test_a_broken_first_line_does_not_hide_the_format(read: Callable[..., Trace]) -> None:
    with pytest.raises(TraceError, match=r":1: not JSON"):
        read(b"{half a li\n" + MOONCAKE)
    trace = read(b"{half a li\n" + MOONCAKE, skip_bad=True)
    assert trace.facts.format == "mooncake" and trace.facts.dropped == {"malformed": 1}


def test_rows_are_counted_by_what_is_wrong_with_them(read: Callable[..., Trace]) -> None:
    wrong = [{"hash_ids": [1]}, {"input_length": -1}, {"output_length": 0}, {"timestamp": None}]
    data = jsonl([mooncake_row(**change) for change in wrong])
    trace = read(MOONCAKE + data + b"?\n", skip_bad=True)
    assert trace.facts.dropped == {
        "block ids do not fit": 1, "bad length": 2, "bad time": 1, "malformed": 1
    }  # fmt: skip
    with pytest.raises(TraceError, match=r"no requests \(4 rows dropped; line 1: 1 block ids"):
        read(data, skip_bad=True)


def test_nanoseconds_since_1970_keep_every_digit_beside_a_float(
    read: Callable[..., Trace],
) -> None:
    rows = [json.loads(line) for line in TOKEN_IDS.splitlines()]
    start = 1_700_000_000_000_000_000
    times = [start, start + 1, float(start + 1024)]
    data = jsonl([{**rows[1], "arrival_time_ns": t} for t in times])
    assert read(data).arrival.tolist() == [0.0, 1e-9, 1.024e-6]


def test_missing_files_and_unknown_formats_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nothing\.jsonl: No such file"):
        read_trace(tmp_path / "nothing.jsonl")
    (tmp_path / "t.jsonl").write_bytes(MOONCAKE)
    with pytest.raises(TraceError, match="format 'csv' is not one of own, bailian"):
        read_trace(tmp_path / "t.jsonl", format="csv")


# --- fuzz --------------------------------------------------------------------------------------

fuzz = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=6)
)
values = st.one_of(
    scalars,
    st.lists(scalars, max_size=4),
    st.dictionaries(st.text(max_size=3), scalars, max_size=2),
)


def never_but_trace_error(path: Path, data: bytes, name: str) -> None:
    path.write_bytes(data)
    for skip in (False, True):
        try:
            trace = read_trace(path, format=name, skip_bad=skip, tokenizer=words)
        except TraceError as error:
            assert str(path) in str(error) or "tokenizer" in str(error)
        else:
            assert (np.diff(trace.arrival) >= 0).all() and trace.arrival[0] == 0
            assert (trace.input_tokens > 0).all() and (trace.output_tokens > 0).all()
            assert len(PrefixForest.of(trace)) == len(np.unique(trace.blocks))


@pytest.mark.parametrize("name", sorted(SAMPLES))
@fuzz
@given(data=st.data())
def test_fuzzed_fields_give_a_trace_or_a_trace_error(
    name: str, data: st.DataObject, tmp_path: Path
) -> None:
    lines = SAMPLES[name].splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    if lines[at].startswith(b"{"):
        row = json.loads(lines[at])
        field = data.draw(st.sampled_from([*row, "messages", "body", "blocks", "tokens"]))
        row[field] = data.draw(values)
        lines[at] = json.dumps(row).encode()
    else:
        cells = lines[at].decode().split(",")
        column = data.draw(st.integers(0, len(cells) - 1))
        cells[column] = data.draw(st.text(max_size=8) | st.integers().map(str))
        lines[at] = ",".join(cells).encode("utf-8", "surrogatepass")
    never_but_trace_error(tmp_path / "fuzzed", b"\n".join(lines), name)


@pytest.mark.parametrize("name", sorted(SAMPLES))
@settings(fuzz, max_examples=20)
@given(data=st.data())
def test_fuzzed_bytes_give_a_trace_or_a_trace_error(
    name: str, data: st.DataObject, tmp_path: Path
) -> None:
    sample = SAMPLES[name]
    start = data.draw(st.integers(0, len(sample)))
    stop = data.draw(st.integers(start, min(len(sample), start + 8)))
    noise = data.draw(st.binary(max_size=6))
    never_but_trace_error(tmp_path / "fuzzed", sample[:start] + noise + sample[stop:], name)


@dataclass(frozen=True)
class Request:
    """What a log says of one request, whatever its format: milliseconds, words, lengths."""

    time: int
    words: list[int]  # the prompt, a number a token; equal beginnings are equal prefixes
    output: int
    session: int


logs = st.lists(
    st.builds(
        Request,
        st.integers(0, 10**7),
        st.lists(st.integers(0, 1), min_size=1, max_size=70),
        st.integers(1, 99),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


def csv_of(head: str, rows: list[list[object]]) -> bytes:
    return "\n".join([head, *(",".join(map(str, r)) for r in rows)]).encode()


def chains_of(log: list[Request]) -> list[list[int]]:
    blocks = TokenBlocks(16)
    return [[2**63 + b for b in blocks.chain(r.words)] for r in log]


def date_of(milliseconds: int) -> str:
    then = datetime(2024, 5, 10, 23, 59) + timedelta(milliseconds=milliseconds)
    return then.strftime("%Y-%m-%d %H:%M:%S.%f") + "0"


WRITERS: dict[str, Callable[[list[Request]], bytes]] = {
    "mooncake": lambda log: jsonl(
        [{"timestamp": r.time, "input_length": len(r.words), "output_length": r.output,
          "hash_ids": ids} for r, ids in zip(log, chains_of(log), strict=True)]
    ),
    "bailian": lambda log: jsonl(
        [{"chat_id": 100 + i, "parent_chat_id": -1, "timestamp": r.time / 1000,
          "input_length": len(r.words), "output_length": r.output, "hash_ids": ids}
         for i, (r, ids) in enumerate(zip(log, chains_of(log), strict=True))]
    ),
    "token_ids": lambda log: jsonl(
        [{"input_toks": len(r.words), "output_toks": r.output, "arrival_time_ns": r.time * 10**6,
          "input_tok_ids": r.words} for r in log]
    ),
    "chat": lambda log: jsonl(
        [{"timestamp": r.time / 1000, "session_id": str(r.session), "output_tokens": r.output,
          "messages": [{"role": "user", "content": " ".join(map(str, r.words))}]} for r in log]
    ),
    "own": lambda log: jsonl(
        [{"format": "edge-serving-trace", "version": 1, "block_size": 16},
         *({"arrival": r.time / 1000, "input_tokens": len(r.words), "output_tokens": r.output,
            "blocks": ids, "tokens": r.words, "session": str(r.session)}
           for r, ids in zip(log, chains_of(log), strict=True))]
    ),
    "azure": lambda log: csv_of(
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        [[date_of(r.time), len(r.words), r.output] for r in log],
    ),
    "burstgpt": lambda log: csv_of(
        "Timestamp,Session ID,Model,Request tokens,Response tokens,Total tokens,Log Type",
        [[r.time / 1000, r.session, "m", len(r.words), r.output, 0, "API log"] for r in log],
    ),
    "servegen": lambda log: csv_of(
        "request_id,timestamp,input_tokens,output_tokens",
        [[i, r.time / 1000, len(r.words), r.output] for i, r in enumerate(log)],
    ),
    "tracelab": lambda log: csv_of(
        "id,input_len,output_len,arrival_time,round_idx,tool_wait_after_ms,prefix_len",
        [[i, len(r.words), r.output, r.time, 0, 0.0, 0] for i, r in enumerate(log)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(SAMPLES))
@settings(fuzz, max_examples=20)
@given(log=logs)
def test_what_is_written_in_a_format_is_read_from_it(
    name: str, log: list[Request], tmp_path: Path
) -> None:
    path = tmp_path / "written"
    path.write_bytes(WRITERS[name](log))
    wrapped = 2 if name == "chat" else 0  # words of the template that cling to none of the text
    size = {"chat": 1, "mooncake": 16}.get(name)
    trace = read_trace(path, tokenizer=words, block_size=size)
    assert trace.facts.format == name and not trace.facts.dropped
    order = sorted(range(len(log)), key=lambda i: log[i].time)
    mine = [log[i] for i in order]
    first = mine[0].time
    assert trace.arrival == pytest.approx([(r.time - first) / 1000 for r in mine], abs=1e-9)
    assert trace.input_tokens.tolist() == [len(r.words) + wrapped for r in mine]
    assert trace.output_tokens.tolist() == [r.output for r in mine]
    if name in ("chat", "own", "burstgpt"):
        assert [trace.session[i] for i in range(len(mine))] == [str(r.session) for r in mine]
    if name in ("mooncake", "bailian", "token_ids", "own"):
        for i, a in enumerate(mine):
            for j, b in enumerate(mine[:i]):
                both = min(len(trace.chain(i)), len(trace.chain(j)))
                same = sum(a.words[: 16 * k] == b.words[: 16 * k] for k in range(1, both + 1))
                assert prefix_tokens(trace.chain(i), trace.chain(j)) == same


# --- published files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "format", "requests"),
    [
        ("azure/AzureLLMInferenceTrace_code.csv", "azure", 8819),
        ("azure/AzureLLMInferenceTrace_conv.csv", "azure", 19366),
        ("sharegpt/sharegpt-llama-3.1-8b-300-sps10.jsonl", "token_ids", 300),
    ],
)
def test_published_traces(name: str, format: str, requests: int) -> None:
    trace = read_trace(published(name))
    assert (trace.facts.format, len(trace), trace.facts.dropped) == (format, requests, {})


def test_published_mooncake_files_are_consistent() -> None:
    """Every chain covers its prompt and every id has one parent, so nothing is renamed."""
    for name in ("conversation", "synthetic"):
        trace = read_trace(published(f"mooncake/{name}_trace.jsonl"))
        covered = np.diff(trace.block_offsets)
        assert np.array_equal(covered, -(-trace.input_tokens // 512))
        assert not trace.facts.relabelled and trace.facts.out_of_order == 0


def test_synthetic_traces_survive_a_round_trip(tmp_path: Path) -> None:
    trace = synthetic_trace(SyntheticSpec(requests=60))
    write_trace(trace, tmp_path / "t.jsonl.gz")
    again = read_trace(tmp_path / "t.jsonl.gz")
    same(trace, again)
    assert again.facts.notes["knobs"]["requests"] == 60
