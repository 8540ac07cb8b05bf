"""Streams from traces: what profiles hold, what tokens share, and scenarios derived from traces."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from testbed.errors import ScenarioError, TraceError
from testbed.outcome import dump_json
from testbed.presets import preset
from testbed.reporting.trace_figures import trace_figures, windowed_counts
from testbed.reporting.trace_tables import render_profiles, render_statistics
from testbed.scenario import EngineSpec, Memory, Prefill, Scenario, SimulationSpec, WorkloadSpec
from testbed.simulation import requests as simulated
from testbed.simulation.simulate import _independent_tiers
from testbed.workload.derivation import Derivation, derive
from testbed.workload.forest import PrefixForest
from testbed.workload.proposal import profiles_into, propose
from testbed.workload.readers.own import write_trace
from testbed.workload.realisation import TokenRealisation
from testbed.workload.scaling import scale_requests
from testbed.workload.statistics import scale_statistics, statistics
from testbed.workload.stream import FIRST_TOKEN_ID
from testbed.workload.synthetic import SyntheticSpec, synthetic_trace
from testbed.workload.trace import Trace, read_trace
from testbed.workload.trace_stream import build_stream, recorded_stream, trace_stream
from tests.unit.workload_traces import prefix_tokens, published, short_for, texts, trace_of

few = settings(max_examples=40, deadline=None)
PREFILL = Prefill(overhead=4e-3, linear=4e-5, quadratic=3e-8, context=6e-8)
MEMORY = Memory(capacity=400 * 32 * 2048, per_sequence=40 * 32 * 2048, per_token=2048)


def derived(trace: Trace, **changes: object) -> Derivation:
    inputs: dict[str, object] = {
        "prefill": PREFILL,
        "memory": MEMORY,
        "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
        "budget": 150 * 32 * 2048.0,
        "profiles": 4,
        "types": 5,
        "engine": EngineSpec(),
        "decode_seconds": lambda n: 0.002 * n,
        **changes,
    }
    return derive(trace, **inputs)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def synthetic() -> Trace:
    return synthetic_trace(SyntheticSpec(requests=300, seed=4))


# --- tokens ------------------------------------------------------------------------------------


def realised(trace: Trace, scale: float, vocabulary: int, salt: int = 0) -> TokenRealisation:
    requests = scale_requests(trace, PrefixForest.of(trace), WorkloadSpec(token_scale=scale))
    nothing = np.zeros(len(requests.forest), dtype=bool)
    return TokenRealisation.of(requests, vocabulary, fixed=nothing, salt=salt)


@few
@given(texts(), st.sampled_from([0.5, 1.0, 1.3, 3.0]), st.sampled_from([258, 259, 300, 4096]))
def test_prompts_share_what_the_trace_says_and_no_more(
    prompts: list[list[int]], scale: float, vocabulary: int
) -> None:
    trace = trace_of(prompts, size=8, short=short_for(prompts, 8))
    real = realised(trace, scale, vocabulary)
    requests = real.requests
    made = [real.prompt(i) for i in range(len(trace))]
    assert real.too_short == 0 or vocabulary == 258
    for i, a in enumerate(made):
        assert len(a) == requests.input_tokens[i] and a.dtype == np.int32
        assert a.min() >= FIRST_TOKEN_ID and a.max() < vocabulary
        for j in range(i):
            one, two = trace.chain(i), trace.chain(j)
            same = prefix_tokens(one, two)
            shared = int(requests.depth[requests.forest.path[trace.block_offsets[i] + same - 1]])
            shared = shared if same else 0
            common = prefix_tokens(a, made[j])
            assert common >= shared
            if same < min(len(one), len(two)) and real.too_short == 0:
                assert common <= shared + real.digits - 1


def test_more_continuations_than_tokens_are_told_apart_by_two() -> None:
    trace = trace_of([[1, 100 + k] for k in range(50)], size=8)
    real = realised(trace, 1.0, FIRST_TOKEN_ID + 8)
    assert real.digits == 2
    second = {tuple(real.prompt(i)[8:10].tolist()) for i in range(50)}
    assert len(second) == 50
    narrow = realised(trace_of([[k] for k in range(5)], size=8), 1.0, FIRST_TOKEN_ID + 8)
    assert narrow.digits == 1 and len({int(narrow.prompt(i)[0]) for i in range(5)}) == 5


def test_prompts_without_prefixes_differ_from_their_first_tokens() -> None:
    trace = read_trace(published("azure/AzureLLMInferenceTrace_code.csv")).take(np.arange(600))
    real = realised(trace, 1.0, FIRST_TOKEN_ID + 100)
    firsts = {tuple(real.prompt(i)[: real.digits].tolist()) for i in range(600)}
    assert len(firsts) == 600


def test_another_seed_shares_nothing_but_what_is_fixed() -> None:
    trace = trace_of([[1, 2, 3], [1, 2, 4]], size=32)
    forest = PrefixForest.of(trace)
    requests = scale_requests(trace, forest)
    fixed = forest.closure(np.array([1]))
    one, two = (TokenRealisation.of(requests, 4096, fixed=fixed, salt=s) for s in (1, 2))
    assert prefix_tokens(one.prompt(0), two.prompt(0)) in (64, 65)
    assert prefix_tokens(one.prompt(0, lap=0), one.prompt(0, lap=1)) in (64, 65)
    assert np.array_equal(one.chain(1), two.chain(1))


def test_tokens_are_the_same_in_every_process_and_version() -> None:
    real = realised(trace_of([[1, 2], [1, 3]], size=4), 1.0, 4096, salt=7)
    known = [
        [3000, 1253, 2082, 2145, 1340, 1205, 1007, 2571],
        [3000, 1253, 2082, 2145, 1341, 1864, 2163, 2478],
    ]
    assert [real.prompt(i).tolist() for i in (0, 1)] == known


# --- streams and what profiles hold ------------------------------------------------------------


@few
@given(texts(), st.sampled_from([1, 3, 8]), st.sampled_from([0.6, 1.0]), st.data())
def test_reusable_is_what_pinned_tokens_and_prompts_share(
    prompts: list[list[int]], block: int, scale: float, data: st.DataObject
) -> None:
    trace = trace_of(prompts, size=8, short=short_for(prompts, 8))
    forest = PrefixForest.of(trace)
    pins = data.draw(st.lists(st.integers(0, len(forest) - 1), min_size=1, max_size=3))
    blocks = [int(forest.block_id[v]) for v in pins]
    scenario = Scenario.from_dict(
        {
            "name": "pinned",
            "radio": {"model": "power_law", "xi": 0.05, "alpha": 2.0},
            "nodes": {"density": 1.0},
            "demand": {"intensity": 1.0},
            "prefill": PREFILL.model_dump(),
            "memory": MEMORY.model_dump(),
            "requests": [{"name": "all", "probability": 1.0, "tokens": 20}],
            "profiles": [
                {"name": "none", "fraction": 0.5, "persistent_bytes": 0, "reusable": {"all": 0}},
                {"name": "some", "fraction": 0.5, "persistent_bytes": 0,
                 "reusable": {"all": 4}, "pinned_blocks": blocks},
            ],
            "workload": {"token_scale": scale},
            "engine": {"block_size": block},
        }
    )  # fmt: skip
    stream = trace_stream(scenario, trace, rate=1.0, seed=3)
    assert stream.pinned(0) == [] and (stream.reusable[:, 0] == 0).all()
    chains = stream.pinned(1)
    for i in range(len(stream)):
        tokens = stream.tokens(i)
        longest = max(prefix_tokens(tokens, chain) for chain in chains)
        expected = min(longest, len(tokens) - 1) // block * block
        assert stream.reusable[i, 1] == expected


def test_a_derived_scenario_is_consistent_with_its_stream(synthetic: Trace) -> None:
    found = derived(synthetic)
    scenario, requests = found.scenario, found.requests
    stream = trace_stream(scenario, synthetic, rate=5.0, seed=1)
    assert len(stream) == len(requests) == 300
    assert np.array_equal(stream.type_index, found.clusters.type_index)
    for q, kind in enumerate(scenario.requests):
        mine = stream.type_index == q
        assert kind.probability == pytest.approx(mine.mean())
        assert kind.tokens == pytest.approx(stream.input_tokens[mine].mean())
        assert kind.output_tokens == pytest.approx(stream.output_tokens[mine].mean())
        assert kind.decode_occupancy == pytest.approx(0.002 * stream.output_tokens[mine].mean())
        for s, profile in enumerate(scenario.profiles):
            assert profile.reusable[kind.name] == pytest.approx(stream.reusable[mine, s].mean())
    for s, profile in enumerate(scenario.profiles):
        blocks = {tuple(c[: k + 32]) for c in stream.pinned(s) for k in range(0, len(c) - 31, 32)}
        assert profile.persistent_bytes == len(blocks) * 32 * MEMORY.per_token
        assert profile.persistent_bytes <= 150 * 32 * 2048
    assert scenario.profiles[0].name == "fallback" and not scenario.profiles[0].pinned_blocks
    assert found.clusters.loss == pytest.approx(
        np.abs(stream.reusable - found.clusters.reusable[stream.type_index]).mean(axis=0)
    )


@pytest.mark.parametrize("scale", [0.5, 0.23])
def test_blocks_that_do_not_divide_the_engines(synthetic: Trace, scale: float) -> None:
    found = derived(synthetic, workload=WorkloadSpec(token_scale=scale), profiles=3)
    stream = trace_stream(found.scenario, synthetic, rate=5.0, seed=1)
    assert (stream.reusable % 32 == 0).all()
    chains = [stream.pinned(s) for s in range(len(found.scenario.profiles))]
    for i in range(0, len(stream), 17):
        tokens = stream.tokens(i)
        for s, held in enumerate(chains):
            longest = max((prefix_tokens(tokens, c) for c in held), default=0)
            assert stream.reusable[i, s] == min(longest, len(tokens) - 1) // 32 * 32
    effect = stream.facts["infinite_cache_hit_ratio"]
    assert 0 < effect["scaled"] <= effect["trace"] < 1


def test_a_scenario_file_gives_the_same_stream(synthetic: Trace, tmp_path: Path) -> None:
    write_trace(synthetic, tmp_path / "t.jsonl")
    spec = WorkloadSpec(trace=str(tmp_path / "t.jsonl"), arrivals="verbatim", max_tokens=1200)
    scenario = derived(synthetic, workload=spec).scenario
    (tmp_path / "s.yaml").write_text(scenario.to_yaml())
    again = Scenario.load(tmp_path / "s.yaml")
    assert again == scenario
    one = trace_stream(scenario, synthetic, rate=3.0, count=250, seed=5)
    two = build_stream(again, rate=3.0, count=250, seed=5)
    for column in ("arrival", "type_index", "input_tokens", "output_tokens", "reusable"):
        assert np.array_equal(getattr(one, column), getattr(two, column))
    for i in range(0, 250, 25):
        assert np.array_equal(one.tokens(i), two.tokens(i))
    dropped = one.facts["dropped"]["longer than max_tokens"]
    assert dropped == int((synthetic.input_tokens > 1200).sum()) > 0
    assert one.facts["passes"] == 1 + (300 - dropped < 250)
    dump_json(two.facts)


def test_another_pass_has_the_same_sharing_and_other_words(synthetic: Trace) -> None:
    scenario = derived(synthetic).scenario
    stream = trace_stream(scenario, synthetic, rate=3.0, count=600, seed=5)
    assert stream.facts["passes"] == 2
    assert np.array_equal(stream.reusable[:300], stream.reusable[300:])
    assert np.array_equal(stream.input_tokens[:300], stream.input_tokens[300:])
    deepest = stream.reusable.max(axis=1)
    for i in range(0, 300, 23):
        common = prefix_tokens(stream.tokens(i), stream.tokens(300 + i))
        assert deepest[i] <= common < deepest[i] + 64


def test_a_duration_is_filled_at_the_rate_asked_for(synthetic: Trace) -> None:
    scenario = derived(synthetic).scenario
    stream = trace_stream(scenario, synthetic, rate=10.0, duration=100.0, seed=2)
    assert stream.arrival[-1] < 100.0
    assert len(stream) == pytest.approx(1000, abs=5 * np.sqrt(1000))


def test_types_without_a_trace_are_drawn_as_before() -> None:
    plain = derived(synthetic_trace(SyntheticSpec(requests=60))).scenario.replace(workload=None)
    stream = build_stream(plain, rate=3.0, count=20, seed=1)
    assert stream.facts["workload"] == "request types as Poisson streams"


def test_recorded_tokens_are_the_traces_own() -> None:
    trace = read_trace(published("sharegpt/sharegpt-llama-3.1-8b-300-sps10.jsonl"))
    memory = Memory(capacity=1e9, per_sequence=1e6, per_token=2048)
    scenario = derived(trace, memory=memory, engine=EngineSpec(block_size=16)).scenario
    stream = recorded_stream(scenario, trace, rate=5.0, seed=0, vocabulary=128256)
    assert np.array_equal(stream.tokens(3), trace.tokens(3))
    for s in range(len(scenario.profiles)):
        chains = stream.pinned(s)
        for i in range(0, 300, 7):
            longest = max((prefix_tokens(stream.tokens(i), c) for c in chains), default=0)
            longest = min(longest, int(stream.input_tokens[i]) - 1)
            assert stream.reusable[i, s] == longest // 16 * 16
    with pytest.raises(TraceError, match="beyond a vocabulary of 4096"):
        recorded_stream(scenario, trace, rate=5.0, seed=0, vocabulary=4096)
    with pytest.raises(TraceError, match="neither scaled nor repeated"):
        recorded_stream(scenario, trace, rate=5.0, count=301, seed=0, vocabulary=128256)


# --- refusals ----------------------------------------------------------------------------------


def test_pins_that_the_trace_lacks_are_named(synthetic: Trace) -> None:
    scenario = derived(synthetic).scenario
    with pytest.raises(ScenarioError, match=r"profiles\[1\]\.pinned_blocks: block 999999 is not"):
        trace_stream(scenario.with_field("profiles[1].pinned_blocks", [999999]), synthetic, seed=0)
    with pytest.raises(ScenarioError, match=r"profiles\[1\]\.pinned_blocks: none, although"):
        trace_stream(scenario.with_field("profiles[1].pinned_blocks", []), synthetic, seed=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 1e12}, "budget: 1e[+]12 bytes is not in"),
        ({"profiles": 0}, "0 is not a number of profiles"),
        ({"fractions": [1.0]}, "fractions: 1 given for 4 profiles"),
        ({"fractions": [0.5, 0.5, 0.5, 0.5]}, "the sum is 2, not 1"),
        ({"workload": WorkloadSpec(max_tokens=2)}, "no request is short enough"),
    ],
)
def test_impossible_derivations_are_refused(
    changes: dict[str, object], message: str, synthetic: Trace
) -> None:
    with pytest.raises((ScenarioError, TraceError), match=message):
        derived(synthetic, **changes)


def test_an_error_bound_chooses_the_number_of_types(synthetic: Trace) -> None:
    for bound in (20.0, 100.0):
        found = derived(synthetic, error_bound=bound)
        assert found.clusters.loss.max() <= bound
    assert len(derived(synthetic, error_bound=100.0).clusters) < 40


# --- synthetic traces, tables, figures ---------------------------------------------------------


def test_synthetic_traces_share_what_their_kinds_share(synthetic: Trace) -> None:
    again = synthetic_trace(SyntheticSpec(requests=300, seed=4))
    assert np.array_equal(synthetic.blocks, again.blocks)
    assert np.array_equal(synthetic.arrival, again.arrival)
    assert not np.array_equal(
        synthetic.input_tokens, synthetic_trace(SyntheticSpec(requests=300)).input_tokens
    )
    assert not synthetic.facts.relabelled
    forest = PrefixForest.of(synthetic)
    spec = SyntheticSpec()
    for agent, tokens in enumerate(spec.agents.prefix_tokens):
        rows = [i for i in range(300) if synthetic.tenant[i] == f"agent-{agent}"]
        shared = forest.path[synthetic.block_offsets[rows[0]] + tokens // 32 - 1]
        assert forest.count[shared] == len(rows) and forest.depth[shared] == tokens
    sessions: dict[str, list[int]] = {}
    for i in range(300):
        if synthetic.type[i] in ("agents", "chat"):
            sessions.setdefault(str(synthetic.session[i]), []).append(i)
    for rows in sessions.values():
        for a, b in pairwise(rows):
            whole = int(synthetic.input_tokens[a]) // 32
            assert np.array_equal(synthetic.chain(a)[:whole], synthetic.chain(b)[:whole])
            assert synthetic.turn[b] == synthetic.turn[a] + 1
    assert synthetic.input_tokens.max() <= spec.max_tokens
    assert synthetic.input_tokens.min() >= spec.min_tokens


def test_profiles_go_into_a_scenario(synthetic: Trace) -> None:
    base = derived(synthetic).scenario
    derivation = profiles_into(base, synthetic, budget=64 * 32 * 2048, count=3, types=3)
    made = derivation.scenario
    assert len(derivation.clusters.loss) == len(made.profiles)
    assert [p.name for p in made.profiles][:2] == ["fallback", "deep"] and len(made.requests) == 3
    assert made.memory == base.memory and made.radio == base.radio and made.engine == base.engine
    old, new = (sum(q.probability * q.decode_occupancy for q in s.requests) for s in (base, made))
    assert new == pytest.approx(old)


def test_windows_of_the_figure_hold_whole_steps_of_the_recorded_grid() -> None:
    steady = trace_of([[1]] * 1200, arrival=[3.0 * (i // 4) for i in range(1200)])
    window, counts = windowed_counts(steady)
    assert steady.time_grid == 3.0 and window % 3.0 == 0
    assert set(counts.tolist()) == {round(4 * window / 3)}  # four every step: no artefact


def test_tables_and_figures_of_any_trace(synthetic: Trace) -> None:
    plain = read_trace(published("azure/AzureLLMInferenceTrace_code.csv")).take(np.arange(50))
    for trace in (synthetic, plain, trace_of([[1]])):
        found = statistics(trace)
        dump_json(found.to_dict())
        console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        render_statistics(console, found)
        text = console.export_text()
        assert f"{len(trace):,} in " in text
        if len(trace.blocks):
            assert f"{len(PrefixForest.of(trace)):,} unique" in text
        assert set(trace_figures(trace)) >= {"arrivals", "lengths"}
    proposal = propose(synthetic, budget=64 * 131072 * 32, count=3)
    dump_json(proposal.to_dict())
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    render_profiles(console, proposal, assumed=True)
    text = console.export_text()
    assert "fallback" in text and "nothing was calibrated" in text


# --- what a workload section asks for ----------------------------------------------------------


def test_a_window_is_the_traces_requests_of_those_seconds(synthetic: Trace) -> None:
    half = float(synthetic.arrival[150])
    spec = WorkloadSpec(arrivals="verbatim", window=(half, 2 * half), requests=40)
    scenario = derived(synthetic, workload=spec).scenario
    stream = trace_stream(scenario, synthetic, seed=1)
    rows = np.arange(150, min(190, np.searchsorted(synthetic.arrival, 2 * half)))
    assert np.array_equal(stream.input_tokens, synthetic.input_tokens[rows])
    assert stream.arrival == pytest.approx(synthetic.arrival[rows] - synthetic.arrival[150])
    assert stream.facts["window"] == [half, 2 * half]
    with pytest.raises(TraceError, match=r"no request in \[1e\+09, 2e\+09\) s"):
        derived(synthetic, workload=WorkloadSpec(window=(1e9, 2e9)))


def test_streams_per_type_keep_each_types_order_and_share(synthetic: Trace) -> None:
    spec = WorkloadSpec(arrivals="per_type", cv2=2.0)
    scenario = derived(synthetic, workload=spec).scenario
    plain = trace_stream(scenario.replace(workload=None), synthetic, rate=5.0, count=300, seed=1)
    stream = trace_stream(scenario, synthetic, rate=5.0, count=3000, seed=1)
    assert len(stream) == 3000 and (np.diff(stream.arrival) >= 0).all()
    assert not np.array_equal(stream.type_index[:300], plain.type_index)
    for q in range(len(scenario.requests)):
        mine, own = stream.type_index == q, plain.type_index == q
        repeated = np.resize(plain.input_tokens[own], mine.sum())
        assert np.array_equal(stream.input_tokens[mine], repeated)
        expected = 3000 * own.mean()
        assert mine.sum() == pytest.approx(expected, abs=5 * np.sqrt(2.0 * expected))
    first = np.flatnonzero(stream.type_index == stream.type_index[0])
    again = first[(plain.type_index == stream.type_index[0]).sum()]
    assert not np.array_equal(stream.tokens(int(first[0])), stream.tokens(int(again)))


@pytest.mark.parametrize(
    ("section", "cv2"),
    [
        ({"arrivals": "gamma", "cv2": 4.0}, 4.0),
        ({"arrivals": "per_type", "cv2": 4.0}, None),
        ({"arrivals": "diurnal", "course": [[30.0, 1.0], [30.0, 0.0]]}, None),
    ],
)
def test_types_without_a_trace_arrive_as_the_workload_says(
    section: dict[str, object], cv2: float | None, synthetic: Trace
) -> None:
    base = derived(synthetic).scenario.replace(workload=None)
    poisson = build_stream(base, rate=3.0, count=4000, seed=1)
    stream = build_stream(base.replace(workload=section), rate=3.0, count=4000, seed=1)
    assert not np.array_equal(stream.arrival, poisson.arrival)
    assert len(stream) / stream.arrival[-1] == pytest.approx(3.0, rel=0.15)
    if cv2 is not None:
        found = statistics_of(stream.arrival)
        assert found == pytest.approx(cv2, rel=0.3)
    if "course" in section:
        assert (stream.arrival % 60.0 < 30.0).all()
    assert stream.facts["workload"] != poisson.facts["workload"]


def statistics_of(arrival: np.ndarray) -> float:
    gaps = np.diff(arrival)
    return float(gaps.var() / gaps.mean() ** 2)


def test_recorded_times_without_a_trace_are_refused(synthetic: Trace) -> None:
    base = derived(synthetic).scenario.replace(workload={"arrivals": "verbatim"})
    with pytest.raises(ScenarioError, match="verbatim needs a trace"):
        build_stream(base, rate=3.0, count=20, seed=1)


def test_a_scenario_replays_recorded_text_through_its_own_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers package is not there")
    words = {w: i for i, w in enumerate(["?", "be", "brief", "hi", "you", "now"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model = tmp_path / "tokenizer.json"
    tokenizer.save(str(model))
    system = {"role": "system", "content": "be brief be brief be brief"}
    rows = [
        {"timestamp": i, "output_tokens": 2,
         "messages": [system, {"role": "user", "content": f"{w} now now now now now"}]}
        for i, w in enumerate(["hi", "you", "hi"])
    ]  # fmt: skip
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    trace = read_trace(path, tokenizer=model, block_size=4)
    spec = WorkloadSpec(trace=str(path), tokenizer=str(model), block_size=4, tokens="recorded")
    found = derived(trace, workload=spec, engine=EngineSpec(block_size=4), profiles=2)
    stream = build_stream(found.scenario, rate=2.0, count=3, seed=1)
    assert stream.facts["tokens"] == "as recorded"
    for i in range(3):
        assert np.array_equal(stream.tokens(i), trace.tokens(i))
    deep = stream.pinned(1)[0]
    assert stream.reusable[:, 1].min() >= 4
    assert prefix_tokens(deep, stream.tokens(0)) >= stream.reusable[0, 1]
    with pytest.raises(ScenarioError, match=r"they need engine\.reuse: pinned"):
        again = found.scenario.with_field("engine.reuse", "any")
        build_stream(again, rate=2.0, count=3, seed=1)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"rate": 0}, "rate"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens 9 is above max_tokens 8"),
        ({"agents": {"share": 0}, "retrieval": {"share": 0}, "chat": {"share": 0}}, "all 0"),
        ({"retrieval": {"document_tokens": [9, 3]}}, "9 to 3 is not a range"),
        ({"agents": {"prefix_tokens": []}}, r"agents\.prefix_tokens"),
        ({"agent": {}}, "agent: unknown key"),
    ],
)
def test_impossible_knobs_are_named(knobs: dict[str, object], message: str, tmp_path: Path) -> None:
    (tmp_path / "knobs.yaml").write_text(json.dumps(knobs))
    with pytest.raises(ScenarioError, match=rf"knobs\.yaml: .*{message}"):
        SyntheticSpec.load(tmp_path / "knobs.yaml")


def test_knobs_shape_what_is_shared() -> None:
    """Zipf popularity, documents and turns move the sharing the way they say."""
    base = SyntheticSpec(requests=250, agents={"share": 0}, chat={"share": 0})

    def hits(**knobs: float) -> float:
        made = synthetic_trace(base.changed({"retrieval": {**knobs, "share": 1.0}}))
        found = statistics(made).prefixes
        assert found is not None
        return found.hit_ratio_tokens

    assert hits(documents=5) > hits(documents=40) > hits(documents=4000)
    assert hits(documents=400, popularity=2.0) > hits(documents=400, popularity=0.0)
    talk = SyntheticSpec(requests=250, retrieval={"share": 0}, chat={"share": 0})
    long = synthetic_trace(talk.changed({"agents": {"turns": 8.0, "share": 1.0}}))
    short = synthetic_trace(talk.changed({"agents": {"turns": 1.0, "share": 1.0}}))
    assert long.turn.max() > 2 and short.turn.max() == 1


def test_a_token_scale_says_what_it_does_to_the_hits(synthetic: Trace) -> None:
    same = scale_statistics(synthetic, 1.0, 1)
    # Only the last token, which an engine always computes, is lost.
    assert same.hit_ratio_scaled == pytest.approx(same.hit_ratio_recorded, abs=2e-3)
    coarse = scale_statistics(synthetic, 0.25, 64)
    assert coarse.hit_ratio_scaled < scale_statistics(synthetic, 0.25, 8).hit_ratio_scaled
    assert coarse.hit_ratio_recorded == same.hit_ratio_recorded
    for scale, block in ((0.0, 16), (float("nan"), 16), (1.0, 0)):
        with pytest.raises(ScenarioError, match="is not a number"):
            scale_statistics(synthetic, scale, block)


def test_drawn_tokens_keep_clear_of_the_models_special_ones(
    synthetic: Trace, tmp_path: Path
) -> None:
    specials = [{"id": i, "special": True} for i in (0, 1, 300, 999, 90_000)]
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps({"added_tokens": [*specials, {"id": 2000, "special": False}]}))
    write_trace(synthetic, tmp_path / "t.jsonl")
    spec = WorkloadSpec(trace=str(tmp_path / "t.jsonl"))
    plain = derived(synthetic, workload=spec).scenario
    there = plain.with_field("engine.model", str(tmp_path / "model"))
    for scenario, same in ((plain, there), (plain.replace(workload=None), None)):
        same = same or there.replace(workload=None)
        a = build_stream(scenario, rate=3.0, count=40, seed=5)
        b = build_stream(same, rate=3.0, count=40, seed=5)
        for i in range(40):
            assert np.array_equal(b.tokens(i), a.tokens(i) + 744)
            assert b.tokens(i).min() >= 1000 and b.tokens(i).max() < 90_000
        for x, y in zip(a.pinned(1), b.pinned(1), strict=True):
            assert np.array_equal(y, x + 744)
    file.write_text("{}}")
    with pytest.raises(TraceError, match=r"tokenizer\.json: not a tokenizer"):
        build_stream(there, rate=3.0, count=2, seed=5)


@pytest.mark.parametrize("arrivals", ["gamma", "per_type"])
def test_simulate_serves_the_arrivals_that_the_workload_asks_for(arrivals: str) -> None:
    """Poisson tiers that are simulated one by one would not see them."""
    plain = preset("paper-baseline")
    assert simulated.trace_of(plain, 3.0, 10, 1) is None and simulated.poisson_types(plain)
    asked = plain.replace(workload={"arrivals": arrivals, "cv2": 6.0})
    waits = np.zeros(len(asked.profiles))
    assert _independent_tiers(plain, SimulationSpec(), waits)
    assert not _independent_tiers(asked, SimulationSpec(), waits)
    stream = simulated.trace_of(asked, 3.0, 20_000, 1)
    assert stream is not None and stream.facts["cv2"] == 6.0
    if arrivals == "gamma":
        assert statistics_of(stream.arrival) == pytest.approx(6.0, rel=0.2)
    for q in range(len(asked.requests)):
        own = statistics_of(stream.arrival[stream.type_index == q])
        # Marked at random, bursts are thinned; streams of their own keep them.
        expected = 6.0 if arrivals == "per_type" else 1 + 5.0 * asked.requests[q].probability
        assert own == pytest.approx(expected, rel=0.25)
