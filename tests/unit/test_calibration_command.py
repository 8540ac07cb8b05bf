"""The command: bad input is one line and exit code 2; a record knows its engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from calibration import command
from calibration.job import Device, keep_samples, partial_folder, save_all, spec_of
from calibration.record import Calibration

RECORD = {
    "schema_version": 1,
    "source": {"kind": "emulated", "tool": "testbed"},
    "engine": {
        "name": "emulated",
        "block_size": 16,
        "num_blocks": 500,
        "max_sequences": 4,
        "dtype": "bfloat16",
    },
    "model": {"name": "tiny-llama"},
    "device": {"kind": "other", "name": "emulated"},
    "step_time": {"kind": "linear", "c_pre": 0.004, "c_dec": 0.003},
}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--quick", "--full", "--out", "x.json"], "--quick and --full: one or the other"),
        (["--engine", "vllm"], "--out: where shall the record go?"),
        (["--import", "llmservingsim"], "--import: needs a kind and a path"),
        (["--import", "x", "y"], "import: 'x' is not one of llmservingsim"),
        (["--check", "nowhere.json"], "nowhere.json: No such file or directory"),
        (["--engine", "gpt", "--out", "x.json"], "engine.name: input should be 'vllm', 'sglang'"),
        (["--scenario", "no.yaml", "--out", "x.json"], "no.yaml: No such file or directory"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_two(arguments, line, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["calibration", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"python -m calibration: {line}")


def test_nothing_heavy_is_imported_with_the_main_module():
    """Engines start processes that import it once more; some must not find Numba there."""
    code = (
        "import sys, calibration.__main__; print([m for m in ('numba', 'ray') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_record_knows_its_engine():
    spec = spec_of(Calibration.from_dict(RECORD), Path("/x/record.json"))
    assert (spec.name, spec.num_blocks, spec.block_size) == ("emulated", 500, 16)
    assert spec.max_sequences == 4 and spec.calibration == "/x/record.json"


def test_samples_take_their_lasting_name(tmp_path):
    out = tmp_path / "c.json"
    assert keep_samples(out) is None
    for text in ("first", "second"):
        partial_folder(out).mkdir()
        (partial_folder(out) / "points.jsonl").write_text(text)
        lasting = keep_samples(out)
        assert lasting == tmp_path / "c.samples" and not partial_folder(out).exists()
        assert (lasting / "points.jsonl").read_text() == text


def test_one_record_per_kind_of_device(tmp_path):
    record = Calibration.from_dict(RECORD)
    kinds = {"AMD EPYC 7763": record, "A100": record}
    written = save_all(tmp_path / "c.json", kinds, page=False)
    assert [p.name for p in written] == ["c-amd-epyc-7763.json", "c-a100.json"]
    assert [p.name for p in save_all(tmp_path / "c.json", {"x": record}, page=False)] == ["c.json"]
    assert Device("", "", False).slug == "device"
