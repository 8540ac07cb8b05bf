"""Validation against measured runs: one made up, whose truth is known, and one real."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from testbed.errors import CalibrationError, TraceError
from testbed.measured_run import read_run
from testbed.model_facts import known_architecture
from testbed.operator_profile import read_profile
from testbed.outcome import dump_json
from testbed.simulation.validate import engine_blocks, render_validation, validate
from testbed.workload.trace import read_trace
from tests.unit.gpu_run import write_profile, write_run

SHARED = Path(__file__).parents[3] / "shared" / "data"
RTX4090 = SHARED / "gpu" / "rtx4090-llama-3.1-8b"
needs_data = pytest.mark.skipif(not RTX4090.is_dir(), reason=f"{RTX4090} is not there")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("gpu") / "run")


def rewrite(folder: Path, tmp_path: Path, **changes) -> Path:
    """A copy of a run with fields of meta.json replaced; None removes one."""
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    meta = json.loads((copy / "meta.json").read_text())
    for path, value in changes.items():
        at = meta
        *parents, last = path.split("__")
        for key in parents:
            at = at[key]
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    (copy / "meta.json").write_text(json.dumps(meta))
    return copy


def test_a_run_of_the_model_itself_has_no_error(run):
    result = validate(run)
    for errors in (
        result.ttft_error_percent,
        result.tpot_error_percent,
        result.latency_error_percent,
        result.ttft_from_arrival_error_percent,
    ):
        assert list(errors) == ["mean", "p50", "p90", "p95", "p99"]
        assert all(abs(e) < 1e-4 for e in errors.values())
    assert result.ttft_distance <= 2 / 60 + 1e-9  # stamps in seconds of another epoch are rounded
    assert result.compared == 60 and result.engine["layers"] == 6
    assert result.preemptions > 0
    document = json.loads(dump_json(result.to_dict()))
    assert set(document["measured"]["ttft"]) == {"mean", "p50", "p90", "p95", "p99"}
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render_validation(console, result)
    assert "time to first token" in console.export_text()


def test_the_figure_has_both_laws_and_both_series(run, tmp_path):
    from testbed.reporting.validate_figures import save_validation_figure

    vector, raster = save_validation_figure(validate(run), tmp_path / "figure")
    assert "measured" in vector.read_text() and raster.stat().st_size > 1000


def test_a_slower_device_is_seen_as_an_error(run, tmp_path):
    slow = tmp_path / "slow"
    write_profile(slow)
    text = (slow / "dense.csv").read_text().splitlines()
    rows = [line.rsplit(",", 1) for line in text[1:]]
    (slow / "dense.csv").write_text(
        "\n".join([text[0], *(f"{head},{float(time) * 1.2}" for head, time in rows)]) + "\n"
    )
    result = validate(run, profile=slow)
    assert result.ttft_error_percent["mean"] > 5
    assert result.tpot_error_percent["p50"] > 5


def test_a_missing_pool_size_is_derived_and_said(run, tmp_path):
    copy = rewrite(run, tmp_path, kv_cache__num_gpu_blocks=None)
    facts = read_run(copy)
    # 2 · 6 layers · 4 heads · 64 · 2 bytes a token, 16 tokens a block.
    room = 4e9 * 0.9 / (2 * 6 * 4 * 64 * 2 * 16)
    assert 0.5 * room < facts.engine.num_blocks < room
    assert any("num_gpu_blocks" in note and "derived" in note for note in facts.notes)


@pytest.mark.parametrize(
    ("layers", "heads", "kv_heads", "head_dim"),
    [(2, 16, 1, 64), (40, 40, 40, 128), (24, 14, 2, 96)],
)
def test_models_and_gpus_unseen(tmp_path, layers, heads, kv_heads, head_dim):
    """Any number of layers and heads, the pool stated or derived from the GPU's memory."""
    shape = {
        "num_hidden_layers": layers,
        "hidden_size": heads * 64,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
    }
    memory = 24e9
    meta = {"hardware": {"device_name": "another GPU", "device_total_memory_bytes": memory}}
    folder = write_run(tmp_path / "run", requests=30, model=shape, meta=meta, blocks=90)
    result = validate(folder)
    assert result.engine["layers"] == layers and result.engine["num_blocks"] == 90
    assert all(abs(e) < 1e-4 for e in result.ttft_error_percent.values())
    bare = read_run(rewrite(folder, tmp_path, kv_cache__num_gpu_blocks=None))
    block = 2 * layers * kv_heads * head_dim * 2 * 16
    weights = bare.engine.architecture.parameters * 2
    assert bare.engine.num_blocks <= (0.9 * memory - weights) / block
    assert bare.engine.num_blocks >= 0.8 * (0.9 * memory - weights) / block
    assert any("derived" in note for note in bare.notes)


def test_what_meta_leaves_out_is_taken_from_defaults_and_said(run, tmp_path):
    copy = rewrite(
        run,
        tmp_path,
        engine_kwargs={},
        resolved_config__scheduler_config=None,
        resolved_config__compilation_config=None,
        started_at=None,
        kv_cache__block_size=None,
    )
    facts = read_run(copy)
    assert facts.engine.token_budget == 2048 and facts.engine.block_size == 16
    assert facts.engine.async_scheduling
    for word in ("max_num_batched_tokens", "asynchronous", "graph sizes", "block_size"):
        assert any(word in note for note in facts.notes), word
    validate(copy)


def test_an_unknown_model_asks_for_its_config(run, tmp_path):
    copy = rewrite(run, tmp_path, resolved_config__model_config={"max_model_len": 2048})
    with pytest.raises(CalibrationError, match=r"config\.json"):
        read_run(copy)
    (copy / "config.json").write_text(
        json.dumps(
            {
                "num_hidden_layers": 3,
                "hidden_size": 512,
                "num_attention_heads": 8,
                "intermediate_size": 1024,
                "vocab_size": 1000,
            }
        )
    )
    assert read_run(copy).engine.architecture.layers == 3
    assert read_run(copy).engine.architecture.kv_heads == 8


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (3, "{", r"requests\.jsonl:3: "),
        (5, json.dumps({"input_toks": 4}), r"requests\.jsonl:5: output_toks"),
        (
            2,
            json.dumps({"input_toks": 4, "output_toks": 2, "queued_ts": "soon"}),
            r"requests\.jsonl:2: queued_ts",
        ),
        (4, json.dumps({"input_toks": 4, "output_toks": 2}), r"requests\.jsonl:4: neither"),
    ],
)
def test_a_bad_line_is_named(run, tmp_path, line, text, message):
    copy = rewrite(run, tmp_path)
    lines = (copy / "requests.jsonl").read_text().splitlines()
    lines[line - 1] = text
    (copy / "requests.jsonl").write_text("\n".join(lines))
    with pytest.raises(CalibrationError, match=message):
        validate(copy)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("dense.csv", "layer,tokens\n", r"dense\.csv:1: no column 'time_us'"),
        ("dense.csv", "layer,tokens,time_us\nqkv_proj,x,1\n", r"dense\.csv:2: tokens"),
        ("per_sequence.csv", "layer,sequences,time_us\n", r"per_sequence\.csv: no rows"),
        (
            "attention.csv",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,5\n",
            r"attention\.csv: no rows of decodes",
        ),
        (
            "attention.csv",
            "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n16,0,0,0,-5\n",
            r"attention\.csv:2: time_us",
        ),
    ],
)
def test_a_bad_profile_is_named(tmp_path, name, text, message):
    folder = tmp_path / "profile"
    write_profile(folder)
    (folder / name).write_text(text)
    with pytest.raises(CalibrationError, match=message):
        read_profile(folder, layers=6)


def test_requests_without_stamps_load_the_engine_and_are_not_compared(run, tmp_path):
    copy = rewrite(run, tmp_path)
    lines = [json.loads(x) for x in (copy / "requests.jsonl").read_text().splitlines()]
    lines[7]["first_token_ts"] = lines[7]["last_token_ts"] = None
    (copy / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    result = validate(copy)
    assert result.compared == 59 and result.requests == 60
    assert abs(result.ttft_error_percent["mean"]) < 1e-4


def test_another_trace_is_refused(run, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "input_toks": 3,
            "output_toks": 1,
            "arrival_time_ns": i,
            "input_tok_ids": [1, 2, 3],
            "output_tok_ids": [4],
        }
        for i in range(60)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(TraceError, match=r"request 1 has 3 input tokens"):
        validate(run, trace)


# --- Profiles ---------------------------------------------------------------------------------


def test_a_step_at_grid_points_is_the_sum_of_its_operators(tmp_path):
    folder = tmp_path / "profile"
    write_profile(folder)
    step = read_profile(folder, layers=6).step_time
    dense = lambda n: (2 + 0.01 * n) * 2 + 6 * (2 * (2 + 0.01 * n) + 415 + 2.36 * n)  # noqa: E731
    head = lambda n: 420 + 3 * n  # noqa: E731
    prefill = dense(256) + head(1) + 6 * (9 + 1e-4 * 256 * (1024 + 128))
    assert step.seconds([(256, 1024)]) == pytest.approx(prefill * 1e-6)
    decode = dense(8) + head(4) + 6 * (9 + 0.01 * 4 * 128)
    assert step.seconds(decodes=4, decode_context=4 * 128) == pytest.approx(
        (decode - dense(8) + dense(4)) * 1e-6
    )
    mixed = dense(68) + head(5) + 6 * (9 + 1e-4 * 64 * 32 + 0.015 * 4 * 128)
    assert step.seconds([(64, 0)], 4, 4 * 128) == pytest.approx(mixed * 1e-6)
    # Two equal chunks pay the kernel's floor once.
    two = dense(128) + head(2) + 6 * (9 + 2 * 1e-4 * 64 * 32)
    floor = 6 * 1e-6 * (9 + 1e-4 * 16 * 8)
    assert step.seconds([(64, 0), (64, 0)]) == pytest.approx(
        (two - 6 * 9) * 1e-6 + 2 * 6 * 9e-6 - floor
    )


def test_points_that_were_not_measured_follow_a_line(tmp_path):
    whole, holed, bare = (tmp_path / n for n in ("whole", "holed", "bare"))
    write_profile(whole)
    write_profile(holed, skip=(16,))
    write_profile(bare, mixed=False)
    full, filled = (read_profile(f, layers=6) for f in (whole, holed))
    assert filled.step_time.seconds([(64, 128)], 16, 16 * 128) == pytest.approx(
        full.step_time.seconds([(64, 128)], 16, 16 * 128)
    )
    assert any("not measured" in note for note in filled.notes)
    added = read_profile(bare, layers=6)
    assert any("added" in note for note in added.notes)


def test_tensor_parallel_profiles(tmp_path):
    folder = tmp_path / "profile"
    write_profile(folder)
    one = read_profile(folder, layers=6)
    two = read_profile(folder, layers=6, tensor_parallel=2)
    assert any("divided by 2" in note for note in two.notes)
    ratio = two.step_time.seconds([(512, 0)]) / one.step_time.seconds([(512, 0)])
    assert 0.5 < ratio < 0.6
    write_profile(folder / "tp2")
    assert read_profile(folder, layers=6, tensor_parallel=2).step_time == one.step_time


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 32, 8.03),
        ("/data/model/Qwen3-32B", 64, 32.76),
        ("Qwen/Qwen2.5-0.5B-Instruct", 24, 0.494),
        ("facebook/opt-13b", 40, 12.85),
    ],
)
def test_known_models_have_their_published_size(name, layers, billions):
    architecture = known_architecture(name)
    assert architecture is not None and architecture.layers == layers
    assert architecture.parameters == pytest.approx(billions * 1e9, rel=0.005)


# --- The real run -----------------------------------------------------------------------------


@needs_data
def test_rtx_4090_from_its_profile_alone():
    result = validate(RTX4090)
    assert result.compared == 300
    assert result.measured["ttft"]["mean"] == pytest.approx(65.4566, abs=1e-3)
    # The goal for a run in deep overload; nothing here is fitted to it.
    assert all(abs(e) < 1.0 for e in result.ttft_error_percent.values())
    assert result.time_series["running"]["mean_absolute_error"] < 2


@needs_data
def test_shared_prefixes_are_found_by_engine_block():
    trace = read_trace(
        SHARED / "traces" / "sharegpt" / "sharegpt-llama-3.1-8b-300-sps10.jsonl", block_size=16
    )
    blocks, offsets = engine_blocks(trace, 16)
    assert np.array_equal(np.diff(offsets), trace.input_tokens // 16)
    # The same prompts in blocks of 32 spell the same prefixes at twice the length.
    wide, wide_offsets = engine_blocks(trace, 32)
    for a, b in ((3, 7), (10, 200), (0, 1)):
        shared = _common(blocks, offsets, a, b)
        assert _common(wide, wide_offsets, a, b) == shared // 2


def _common(blocks, offsets, a, b):
    left, right = (blocks[offsets[i] : offsets[i + 1]] for i in (a, b))
    count = 0
    for x, y in zip(left, right, strict=False):
        if x != y:
            break
        count += 1
    return count
