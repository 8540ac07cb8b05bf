"""Measured radio models: the law that is sampled is the law that was recorded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testbed.errors import ScenarioError
from testbed.radio import Histogram, PacketTrace, RadioModel, radio_model
from testbed.scenario import HistogramRadio, PowerLawRadio

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "radio"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"measured radio data not at {DATA}")


def agrees(model: RadioModel, tolerance: float = 5.0) -> None:
    """Sample mean within standard errors of the stated mean."""
    draws = model.sample(np.zeros(200_000), np.random.default_rng(1))
    error = draws.std() / np.sqrt(len(draws))
    assert abs(draws.mean() - model.delay(np.zeros(1))[0]) < tolerance * error


@needs_data
@pytest.mark.parametrize("name", sorted(p.name for p in DATA.glob("deterministic6g/*.csv")))
@pytest.mark.parametrize("packets", [1, 10])
def test_measured_histograms(name: str, packets: int) -> None:
    path = DATA / "deterministic6g" / name
    model = Histogram(path, packets)
    agrees(model)
    if packets == 1:
        bound, count = np.loadtxt(path).T
        middle = bound + (bound[1] - bound[0]) / 2
        assert model.mean == pytest.approx(1e-3 * (middle @ count) / count.sum(), rel=1e-3)
    else:
        assert model.mean > Histogram(path).mean


@needs_data
@pytest.mark.parametrize("name", ["Verizon-LTE-short.down", "Verizon-LTE-short.up"])
def test_recorded_link(name: str) -> None:
    path = DATA / "mahimahi" / name
    model = PacketTrace(path, payload=30_000)
    agrees(model)
    # Long payloads cross at the link's mean rate.
    times = np.loadtxt(path)
    long = PacketTrace(path, payload=1500 * len(times) * 3)
    assert long.mean == pytest.approx(3 * times[-1] * 1e-3, rel=0.02)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 30))
def test_link_delay_by_brute_force(gaps: list[int], packets: int) -> None:
    """The CDF equals that of a fine sweep over start times."""
    import tempfile

    times = np.cumsum(gaps)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "link")
        path.write_text("\n".join(map(str, times)))
        model = PacketTrace(path, payload=1500 * packets)
    steps = 200 * int(times[-1])
    start = (np.arange(steps) + 0.5) / 200
    many = np.concatenate([times + k * times[-1] for k in range(packets + 2)])
    first = np.searchsorted(many, start)
    delay = np.sort(many[first + packets - 1] - start) * 1e-3
    level = (np.arange(steps) + 0.5) / steps
    assert np.allclose(model.quantile(np.zeros(1), level), delay, atol=2e-5)
    assert model.mean == pytest.approx(delay.mean(), abs=1e-5)


def test_histogram_formats_and_errors(tmp_path: Path) -> None:
    good = tmp_path / "good.csv"
    good.write_text("1.0,0\n2.0,3\n\n3.0\t1\n")
    model = radio_model(HistogramRadio(model="histogram", file=str(good)))
    assert model.quantile(np.zeros(3), np.array([0.0, 0.75, 1.0])) == pytest.approx(
        [2e-3, 3e-3, 4e-3]
    )
    for text, message in (
        ("1.0\n", "not `milliseconds count`"),
        ("1 -2\n2 1", "negative"),
        ("2 1\n1 1", "does not lie above"),
        ("1 0\n2 0", "every count is 0"),
        ("", "0 bins"),
    ):
        bad = tmp_path / "bad.csv"
        bad.write_text(text)
        with pytest.raises(ScenarioError, match=message):
            Histogram(bad)
    with pytest.raises(ScenarioError, match="No such file"):
        Histogram(tmp_path / "absent")
    link = tmp_path / "link"
    link.write_text("5\n3\n")
    with pytest.raises(ScenarioError, match="link:2: time runs back"):
        PacketTrace(link, 1500)


def test_a_measured_delay_is_the_same_at_every_distance(tmp_path: Path) -> None:
    path = tmp_path / "h"
    path.write_text("1 1\n2 1\n")
    model = Histogram(path)
    assert (model.delay(np.array([0.0, 1.0, 9.0])) == model.mean).all()
    assert np.array_equal(model.distance(np.array([0.0, 1.0])), [0.0, np.inf])


def test_a_deterministic_radio_samples_its_mean() -> None:
    model = radio_model(PowerLawRadio(xi=0.1, alpha=2.0))
    r = np.linspace(0, 3, 7)
    assert np.array_equal(model.sample(r, np.random.default_rng(0)), model.delay(r))
