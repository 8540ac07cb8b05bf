"""The page stands alone: no network, no script, everything escaped, every figure there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
import pytest

from testbed.reporting import figures
from testbed.reporting.compare import compare
from testbed.reporting.page import Code, Section, write_page
from testbed.reporting.report import write_report
from tests.unit.reporting_factory import outcome, scenario, study

VOID = {"meta", "link", "br", "img", "hr"}
HOSTILE = "<script>alert(1)</script>&\"'$x_1$"


class Strict(HTMLParser):
    """Every tag closed in order; every attribute and text collected."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), f"{tag} has a handler {name}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "srcset", "xlink:href"):
                self.references.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    calibration = {"prefill": {"coefficients": {"linear": 4e-5}, "standard_errors": {}}}
    write_report(
        path,
        compare(study()[:8]),
        title="Two tiers",
        sections=[Section.of("More to say", "A paragraph.", Code("copy me", "a < b"))],
        calibration=calibration,
    )
    return path.read_text()


def test_the_page_is_well_formed_and_needs_nothing_from_outside(page: str) -> None:
    parsed = Strict(page)
    assert "script" not in parsed.seen and "iframe" not in parsed.seen
    assert all(r.startswith("#") or r == "data:," for r in parsed.references)
    assert not re.search(r"https?:|//\w|url\((?!#)|@import", page)
    assert len(parsed.ids) == len(set(parsed.ids))
    inside = {r[1:] for r in parsed.references if r.startswith("#")}
    inside |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert inside <= set(parsed.ids)
    assert len(page) < 1_500_000


def test_every_part_and_every_figure_is_there(page: str) -> None:
    parsed = Strict(page)
    text = " ".join(parsed.text)
    assert parsed.seen.count("svg") == 5 == parsed.seen.count("figure")
    for heading in (
        "Time to first token",
        "Tail of the time to first token",
        "TTFT error against the reference",
        "Association by request type",
        "TTFT and coverage against load",
    ):
        assert f"{heading} (measured: wall clock; simulated: virtual time; predicted)" in text
    for part in (
        "At a glance",
        "Verdicts",
        "The question",
        "Validity and drift",
        "Calibration",
        "More to say",
        "Reproduction and environment",
        "Glossary",
    ):
        assert part in text
    assert text.index("misses in 2 of 2") < text.index("At a glance")  # verdicts come first
    for figure in ("TTFT p95", "coverage at 200", "reused prefix", "deep: mean wait", "lag p99"):
        assert figure in text
    assert "--seed 7" in text and "tiny-llama" in text and "9f2c" in text


def test_every_table_of_figures_says_its_clock(page: str) -> None:
    captions = re.findall(r'class="caption"[^>]*>([^<]*)<', page)
    of_figures = [c for c in captions if "requests/s per km²" in c or "Every answer" in c]
    assert of_figures and all("measured: wall clock" in caption for caption in of_figures)


def test_the_same_comparison_gives_the_same_bytes(tmp_path: Path) -> None:
    outcomes = [outcome(), outcome("predicted")]
    with matplotlib.rc_context({"font.size": 20, "svg.fonttype": "path"}):
        first = write_report(tmp_path / "a.html", compare(outcomes), title="t").read_bytes()
    assert first == write_report(tmp_path / "b.html", compare(outcomes), title="t").read_bytes()


def test_hostile_names_are_text_wherever_they_stand(tmp_path: Path) -> None:
    asked = scenario(
        requests=[{"name": HOSTILE, "probability": 1.0, "tokens": 10}],
        profiles=[
            {"name": HOSTILE, "fraction": 1.0, "persistent_bytes": 0, "reusable": {HOSTILE: 0}}
        ],
    )
    measured = outcome(
        asked=asked,
        policy=HOSTILE,
        scenario_name=HOSTILE,
        association={HOSTILE: {HOSTILE: 1.0}},
        valid=False,
        invalid_reason=HOSTILE,
        warnings=(HOSTILE,),
        environment={HOSTILE: HOSTILE, "command": HOSTILE},
    )
    predicted = measured.model_copy(
        update={"kind": "predicted", "clock": "none", "delay_model": HOSTILE}
    )
    path = write_report(
        tmp_path / "r.html",
        compare([measured, predicted]),
        title=HOSTILE,
        sections=[Section.of(HOSTILE, HOSTILE, Code(HOSTILE, HOSTILE))],
        calibration={"engine": {"name": HOSTILE}},
    )
    html = path.read_text()
    parsed = Strict(html)
    assert "script" not in parsed.seen
    assert any(HOSTILE in text for text in parsed.text)
    assert "INVALID" in html


def test_different_questions_get_parts_of_their_own(tmp_path: Path) -> None:
    denser = scenario(nodes={"density": 2.0}, name="denser")
    comparison = compare([outcome(), outcome("predicted", asked=denser)])
    text = write_report(tmp_path / "r.html", comparison, title="t").read_text()
    Strict(text)
    assert "The question: two tiers" in text and "The question: denser" in text
    assert "nodes.density" in text


@pytest.mark.parametrize(
    "draw",
    [
        figures.ttft_cdf,
        figures.ttft_tail,
        figures.error_bars,
        figures.association_bars,
        figures.load_curves,
    ],
)
def test_a_figure_is_the_same_each_time_and_names_its_clock(draw: object) -> None:
    outcomes = study()[:2]
    figure = draw(outcomes)  # type: ignore[operator]
    text = figures.svg(figure)
    assert text == figures.svg(figure) == figures.svg(draw(outcomes))  # type: ignore[operator]
    assert "measured: wall clock" in text and "http" not in text


def test_figures_do_without_curves_intervals_and_bounds(tmp_path: Path) -> None:
    measured = outcome(curve=None, confidence={})
    quantiles = {z: float("inf") for z in measured.ttft.quantiles}
    ttft = measured.ttft.model_copy(update={"mean": float("inf"), "quantiles": quantiles})
    predicted = outcome("predicted", curve=None, feasible=False, reason="full")
    predicted = predicted.model_copy(update={"ttft": ttft})
    wide = measured.confidence | {"ttft.quantiles.0.99": (0.1, float("inf"))}
    measured = measured.model_copy(update={"confidence": wide})
    Strict(write_report(tmp_path / "r.html", compare([measured, predicted]), title="t").read_text())


def test_a_figure_is_saved_as_both_kinds(tmp_path: Path) -> None:
    for name in ("a", "a.svg", "a.b.png"):
        vector, raster = figures.save(figures.ttft_cdf([outcome()]), tmp_path / name)
        assert vector.read_text().startswith("<?xml") and raster.read_bytes()[:4] == b"\x89PNG"
    assert {p.name for p in tmp_path.iterdir()} == {"a.svg", "a.png", "a.b.svg", "a.b.png"}


def test_a_page_can_be_made_of_anything(tmp_path: Path) -> None:
    sections = [Section.of("One", "text", figures.ttft_cdf([outcome()]))]
    Strict(write_page(tmp_path / "p.html", "Page", sections, lead=["first"]).read_text())
