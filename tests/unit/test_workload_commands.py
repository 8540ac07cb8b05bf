"""`testbed trace`, `profiles` and `synthesize` as a researcher types them."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from testbed.cli import main
from testbed.cli.app import build
from testbed.scenario import Scenario
from testbed.workload.readers.own import write_trace
from testbed.workload.synthetic import SyntheticSpec, synthetic_trace

APP = build(["trace", "profiles", "synthesize", "predict"])


def ask(*arguments: object) -> dict[str, Any]:
    done = CliRunner().invoke(APP, [*map(str, arguments), "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    return json.loads(done.stdout)


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object
) -> str:
    """The one line on stderr of a command that exits with 2."""
    monkeypatch.setattr(sys, "argv", ["testbed", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    assert left.value.code == 2 and said.out == ""
    lines = said.err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "made.jsonl.gz"
    write_trace(synthetic_trace(SyntheticSpec(requests=200, seed=3)), path)
    return path


def test_a_trace_is_described_scaled_and_cut(trace: Path, tmp_path: Path) -> None:
    whole = ask("trace", trace, "--token-scale", 0.5, "--engine-block", 16)
    assert whole["requests"] == 200 and whole["trace"]["format"] == "own"
    assert 0 < whole["scaled"]["hit_ratio_scaled"] < whole["scaled"]["hit_ratio_recorded"]
    assert whole["scaled"]["hit_ratio_recorded"] == whole["prefixes"]["hit_ratio_tokens"]
    table = tmp_path / "forest.csv"
    ask("trace", trace, "--forest", table)
    assert len(table.read_text().splitlines()) == 1 + whole["prefixes"]["radix_edges"]
    part = ask("trace", trace, "--window", f"0:{whole['duration'] / 2}")
    assert 0 < part["requests"] < 200


def test_bad_rows_are_named_or_counted(
    trace: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = gzip.decompress(trace.read_bytes()).splitlines()
    lines[7] = b'{"arrival": -1'
    lines[9] = lines[9].replace(b'"output_tokens":', b'"output_tokens":-')
    bad = tmp_path / "bad"
    bad.write_bytes(b"\r\n".join(lines))
    said = refused(capsys, monkeypatch, "trace", bad)
    assert said.startswith(f"testbed: {bad}:8: not JSON")
    found = ask("trace", bad, "--skip-bad")
    assert found["requests"] == 198
    assert found["trace"]["dropped"] == {"malformed": 1, "bad length": 1}
    for window in ("5:5", "a:b", "5"):
        said = refused(capsys, monkeypatch, "trace", trace, "--window", window)
        assert said == f"testbed: --window: {window!r} is not START:STOP in seconds"


def test_chat_text_is_read_through_a_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not there")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "hi": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    row = {"timestamp": 1, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    chat = tmp_path / "chat.jsonl"
    chat.write_text(json.dumps(row) + "\n" + json.dumps(row))
    found = ask("trace", chat, "--tokenizer", tmp_path / "tokenizer.json", "--block-size", 1)
    assert found["trace"]["notes"]["tokenizer"] == "tokenizer.json"
    assert found["prefixes"]["block_size"] == 1 and found["prefixes"]["hit_ratio_tokens"] == 0.5
    assert "a tokenizer is needed" in refused(capsys, monkeypatch, "trace", chat)


def test_profiles_become_a_scenario_that_predict_accepts(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "with-profiles.yaml"
    common = ("profiles", trace, "--budget", "100MB", "--count", 3, "--scenario", "paper-baseline")
    found = ask(*common, "--out", out, "--error-bound", 40, "--window", "0:1e6")
    assert found["profiles"][0]["name"] == "fallback"
    assert max(found["types_loss_tokens"].values()) <= 40
    scenario = Scenario.load(out)
    assert [p.name for p in scenario.profiles] == [p["name"] for p in found["profiles"]]
    assert [q.name for q in scenario.requests] == [q["name"] for q in found["types"]]
    assert scenario.workload is not None and scenario.workload.window == (0.0, 1e6)
    for p, q in zip(scenario.profiles, found["profiles"], strict=True):
        assert p.persistent_bytes == q["persistent_bytes"] <= 1e8
    predicted = ask("predict", out)
    assert set(predicted["tiers"]) == {p.name for p in scenario.profiles}
    strict = ask(*common, "--min-support", 20, "--support-of", "sessions", "--types", 2)
    assert strict["paths_with_enough_support"] < found["paths_with_enough_support"]
    assert len(strict["types"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.yaml"], "--out: needs --scenario"),
        (["--support-of", "people"], "--support-of: 'people' is not requests, sessions or tenants"),
        (["--supports", "2,x"], "--supports: '2,x' is not a list"),
        (["--format", "tape"], "format 'tape' is not one of own"),
    ],
)
def test_wrong_questions_are_one_line(
    arguments: list[str],
    message: str,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = refused(capsys, monkeypatch, "profiles", trace, "--budget", "1GB", *arguments)
    assert message in said


def test_traces_are_made_to_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    knobs = tmp_path / "knobs.yaml"
    knobs.write_text("agents: {share: 0}\nchat: {share: 0}\nretrieval: {documents: 3}\n")
    out = tmp_path / "made.jsonl.zst"
    made = ask("synthesize", "--out", out, "--knobs", knobs, "--requests", 50, "--seed", 4)
    assert made["requests"] == 50 and made["types"] == {"retrieval": 50}
    again = ask("trace", out)
    assert again["prefixes"] == made["prefixes"] and again["arrivals"] == made["arrivals"]
    knobs.write_text("agents: {tools: 3}\n")
    said = refused(capsys, monkeypatch, "synthesize", "--out", out, "--knobs", knobs)
    assert said == f"testbed: {knobs}: agents.tools: unknown key"
    inside = out / "made.jsonl"
    said = refused(capsys, monkeypatch, "synthesize", "--out", inside)
    assert said == f"testbed: {inside}: cannot be written: File exists"
