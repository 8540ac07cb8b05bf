"""Outcome and records: JSON without NaN, infinities as words, conservation, cut files."""

from __future__ import annotations

import math

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import OutcomeError
from testbed.outcome import (
    Counts,
    Outcome,
    RecordWriter,
    RequestRecord,
    dump_json,
    read_records,
    write_atomically,
)
from testbed.theory import predict
from tests.unit.scenarios import small


def test_round_trip_keeps_every_figure(tmp_path):
    outcome = predict(small())
    outcome.save(tmp_path / "o.json")
    assert Outcome.load(tmp_path / "o.json") == outcome


def test_infinite_is_a_word_and_comes_back():
    overloaded = predict(small(policy="prefix_only", demand={"intensity": 3000.0}))
    assert overloaded.ttft.mean == math.inf
    document = orjson.loads(overloaded.to_json())
    assert document["ttft"]["mean"] == "inf"
    assert document["feasible"] is False
    assert Outcome.from_json(overloaded.to_json()).ttft.mean == math.inf


def test_nan_is_refused():
    outcome = predict(small())
    data = outcome.model_dump()
    data["mean_distance"] = math.nan
    with pytest.raises(ValueError, match="mean_distance is not a number"):
        Outcome.model_validate(data)
    with pytest.raises(OutcomeError):
        dump_json({"x": math.nan})


def test_figures_by_dotted_path():
    outcome = predict(small())
    assert outcome.figure("ttft.quantiles.0.99") == outcome.ttft.quantiles["0.99"]
    assert outcome.figure("tiers.deep.utilisation") == outcome.tiers["deep"].utilisation
    with pytest.raises(OutcomeError, match=r"no figure 'ttft\.median'"):
        outcome.figure("ttft.median")


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.integers(-3, 3))
def test_counts_are_conserved(completed, rejected, failed, off):
    sent = completed + rejected + failed + off
    if off == 0:
        Counts(sent=sent, completed=completed, rejected=rejected, failed=failed)
    else:
        with pytest.raises(ValueError, match="sent"):
            Counts(sent=sent, completed=completed, rejected=rejected, failed=failed)


@settings(max_examples=30)
@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**53), 2**53)
        | st.floats(allow_nan=False)
        | st.text(max_size=6).filter(lambda s: s not in ("inf", "-inf")),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=10,
    )
)
def test_json_is_strict_for_any_value(value):
    orjson.loads(dump_json(value))


def record(i: int, **changes) -> RequestRecord:
    values = {
        "index": i,
        "type": "chat",
        "ending": "completed",
        "intended": float(i),
        "radio": 0.1,
        "sent": i + 0.001,
        "dispatched": i + 0.103,
        "first_token": i + 0.4,
    }
    return RequestRecord(**{**values, **changes})


def test_ttft_counts_from_the_intended_time_and_lag_leaves_radio_out():
    r = record(3)
    assert r.ttft == pytest.approx(0.4)
    assert r.ttft_from_send == pytest.approx(0.399)
    assert r.dispatch_lag == pytest.approx(0.003)
    unanswered = record(3, ending="failed", first_token=None)
    assert unanswered.ttft is None


def test_a_killed_writer_loses_at_most_the_line_it_was_writing(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordWriter(path) as writer:
        for i in range(5):
            writer.write(record(i))
    whole = path.read_bytes()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        kept = list(read_records(path))
        assert [r.index for r in kept] == list(range(len(kept)))
        assert len(kept) >= whole[:cut].count(b"\n")


def test_a_broken_line_inside_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "r.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record(0))
    path.write_bytes(path.read_bytes() + b"{broken\n" + path.read_bytes())
    with pytest.raises(OutcomeError, match=r"r\.jsonl:2: "):
        list(read_records(path))


def test_atomic_write_replaces_whole_or_not_at_all(tmp_path):
    path = tmp_path / "f"
    write_atomically(path, "one")
    with pytest.raises(TypeError):
        write_atomically(path, 3)  # type: ignore[arg-type]
    assert path.read_text() == "one"
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
