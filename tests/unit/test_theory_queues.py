"""Delay models: Erlang-C, M/G/c, M/PH/c and tables against closed forms and simulations
(Theory B, H2, H3)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ciw
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammaincc, gammaln

from testbed.errors import ScenarioError
from testbed.simulation.queue import waits
from testbed.theory.delay.base import (
    DELAY_MODELS,
    DelayModel,
    ExcessDelay,
    TierLoad,
    get_delay_model,
    register,
)
from testbed.theory.delay.delay_map import DelayMap, DelayMapFile, DelayTable
from testbed.theory.delay.erlang_c import ErlangC, erlang_c, mean_wait, scaled_wait
from testbed.theory.delay.mgc import MGc
from testbed.theory.delay.phase_type import PhaseType, phase_type
from testbed.theory.delay.service import ServiceVariability
from tests.unit.significance import student_sigma

MODEST = settings(max_examples=40, deadline=None)


def load(rate: float, service: float | list[float], servers: int, **more: object) -> TierLoad:
    """A node's load; equal shares of types with these occupancies, s."""
    occupancy = np.atleast_1d(np.asarray(service, dtype=float))
    types = len(occupancy)
    fields: dict[str, object] = {
        "weights": np.full(types, 1.0 / types),
        "residual_prefill": 0.5 * occupancy,
        "new_tokens": np.ones(types),
        "cached_tokens": np.zeros(types),
        "occupancy": occupancy,
        "output_tokens": np.ones(types),
        "concurrency": servers,
    }
    return TierLoad(arrival_rate=rate, **{**fields, **more})  # type: ignore[arg-type]


# --- Erlang-C --------------------------------------------------------------------------------


@MODEST
@given(st.floats(1e-6, 0.999999))
def test_one_and_two_servers_have_closed_forms(rho: float) -> None:
    assert erlang_c(1, rho) == pytest.approx(rho, rel=1e-13)
    assert erlang_c(2, 2 * rho) == pytest.approx(2 * rho**2 / (1 + rho), rel=1e-13)


@MODEST
@given(st.integers(1, 100_000), st.floats(0.5, 1 - 1e-9))
def test_erlang_c_agrees_with_the_incomplete_gamma_function(servers: int, rho: float) -> None:
    """B = a^c e^−a/(c!·Q(c + 1, a)), in logarithms."""
    a = servers * rho
    log_b = servers * np.log(a) - a - gammaln(servers + 1) - np.log(gammaincc(servers + 1, a))
    c = 1.0 / (rho + (1.0 - rho) * np.exp(min(-log_b, 700.0)))
    # The logarithms themselves lose about c·10⁻¹⁶.
    assert erlang_c(servers, a) == pytest.approx(c, rel=1e-11 + 1e-14 * servers, abs=1e-290)


@MODEST
@given(st.integers(1, 5000), st.floats(0.01, 0.99), st.floats(1.0001, 1.01))
def test_waiting_rises_with_load_and_falls_with_servers(
    servers: int, rho: float, more: float
) -> None:
    a = servers * rho
    assert erlang_c(servers, min(a * more, servers * 0.9999)) >= erlang_c(servers, a)
    assert erlang_c(servers + 1, a) <= erlang_c(servers, a)


@pytest.mark.parametrize("servers", [1, 9, 1000, 100_000])
def test_saturation(servers: int) -> None:
    assert erlang_c(servers, float(servers)) == 1.0
    assert mean_wait(servers, float(servers), 0.3) == np.inf
    for gap in (1e-6, 1e-9, 1e-12):
        a = servers * (1 - gap)
        waiting = erlang_c(servers, a)
        assert 0 < 1 - waiting < 3 * gap * np.sqrt(servers) + 1e-12 * servers
        assert mean_wait(servers, a, 0.3) * (servers - a) / 0.3 == pytest.approx(waiting)
    assert erlang_c(servers, 0.0) == 0.0


@MODEST
@given(st.integers(1, 2000), st.floats(0.3, 0.999))
def test_the_scaled_wait_has_its_slope(servers: int, rho: float) -> None:
    value, slope = scaled_wait(servers, rho)
    if value < 1e-200:
        return
    step = 1e-6 * (1 - rho)
    numeric = (scaled_wait(servers, rho + step)[0] - scaled_wait(servers, rho - step)[0]) / step / 2
    assert slope == pytest.approx(numeric, rel=1e-5)


def test_the_wait_of_m_m_9_agrees_with_ciw() -> None:
    """Fig. 5's queue, ρ = 0.82, in an independent package."""
    servers, service, rho = 9, 0.9, 0.82
    rate = rho * servers / service
    network = ciw.create_network(
        arrival_distributions=[ciw.dists.Exponential(rate)],
        service_distributions=[ciw.dists.Exponential(1 / service)],
        number_of_servers=[servers],
    )
    means, waiting = [], []
    for seed in range(8):
        ciw.seed(seed)
        run = ciw.Simulation(network)
        run.simulate_until_max_customers(3000, method="Finish")
        seen = np.array([r.waiting_time for r in run.get_all_records()])[500:]
        means.append(seen.mean())
        waiting.append((seen > 0).mean())
    law = ErlangC().excess(load(rate, service, servers))
    for values, expected in ((means, law.mean[0]), (waiting, law.wait_probability)):
        # Few runs: their own scatter is uncertain too.
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        assert abs(np.mean(values) - expected) < student_sigma(len(values), 2) * error


# --- every law -------------------------------------------------------------------------------


AT = load(5.0, [0.9, 1.5], 9)


def tabulated() -> ExcessDelay:
    table = DelayTable.from_samples(
        "",
        {"a": 0.5, "b": 0.5},
        9,
        7.5,
        {
            r: {q: np.random.default_rng(i).exponential(r / 10, 4000) for i, q in enumerate("ab")}
            for r in (2.0, 6.0)
        },
    )
    named = load(5.0, [0.9, 1.5], 9, types=("a", "b"))
    return DelayMap(DelayMapFile(tables=(table,))).excess(named)


LAWS: dict[str, Callable[[], ExcessDelay]] = {
    "erlang_c": lambda: ErlangC().excess(AT),
    "mgc": lambda: MGc(ServiceVariability(0.3)).excess(AT),
    "mgc heavy": lambda: MGc(ServiceVariability(3.0)).excess(AT),
    "phase_type": lambda: PhaseType(ServiceVariability(0.6)).excess(AT),
    "phase_type heavy": lambda: PhaseType(ServiceVariability(2.0)).excess(AT),
    "delay_map": tabulated,
}


@pytest.mark.parametrize("name", LAWS)
def test_a_law_is_a_law(name: str) -> None:
    law = LAWS[name]()
    for q in range(2):
        w = np.concatenate([[-1.0, -1e-9, 0.0], np.geomspace(1e-4, 60.0, 300)])
        cdf = law.cdf(q, w)
        assert (cdf[:2] == 0).all()
        assert ((cdf >= 0) & (cdf <= 1)).all()
        assert (np.diff(cdf[2:]) >= -1e-13).all()
        assert cdf[-1] > 1 - 1e-6
        fine = np.linspace(0.0, 60.0, 300_001)
        assert law.mean[q] == pytest.approx(np.trapezoid(1 - law.cdf(q, fine), fine), rel=1e-4)
        for level in (0.1, 0.7, 0.99):
            at = law.quantile(q, level)
            assert float(law.cdf(q, np.array(at))) >= level - 1e-9
            if at > 0:
                assert float(law.cdf(q, np.array(at * 0.999))) < level + 1e-9
        assert law.decay(q) > 0
    if name != "delay_map":
        assert float(law.cdf(0, np.array(0.0))) == pytest.approx(1 - law.wait_probability, abs=1e-9)
    with pytest.raises(ValueError, match="not in"):
        law.quantile(0, 1.0)


# --- M/G/c and M/PH/c ------------------------------------------------------------------------


@MODEST
@given(st.integers(1, 40), st.floats(0.05, 0.97), st.floats(0.1, 5.0))
def test_exponential_service_is_erlang_c(servers: int, rho: float, service: float) -> None:
    at = load(rho * servers / service, service, servers)
    exact = ErlangC().excess(at)
    unit = ServiceVariability(1.0)
    for law in (MGc(unit).excess(at), PhaseType(unit).excess(at)):
        assert law.mean == pytest.approx(exact.mean, rel=1e-8, abs=1e-14)
        w = np.array([0.0, 0.1, 1.0]) * service / servers
        assert law.cdf(0, w) == pytest.approx(exact.cdf(0, w), abs=1e-8)


@MODEST
@given(st.floats(0.05, 0.95), st.sampled_from([0.2, 0.35, 0.5, 0.8, 1.0, 2.0, 4.0]))
def test_one_server_is_pollaczek_khinchine(rho: float, scv: float) -> None:
    at = load(rho / 1.3, 1.3, 1)
    exact = rho / (1 - rho) * 1.3 * (1 + scv) / 2
    v = ServiceVariability(scv)
    assert MGc(v).excess(at).mean[0] == pytest.approx(exact, rel=1e-9)
    assert PhaseType(v).excess(at).mean[0] == pytest.approx(exact, rel=1e-8)


@MODEST
@given(st.floats(0.05, 6.0), st.floats(0.1, 10.0))
def test_the_phase_type_fit_has_its_moments(scv: float, mean: float) -> None:
    start, generator = phase_type(mean, scv)
    ones = np.ones(len(start))
    inverse = np.linalg.inv(-generator)
    first = start @ inverse @ ones
    second = 2 * start @ inverse @ inverse @ ones
    assert start.sum() == pytest.approx(1.0)
    assert first == pytest.approx(mean)
    assert second / first**2 - 1 == pytest.approx(scv, rel=1e-7)


def _service(scv: float, mean: float, count: int, rng: np.random.Generator) -> np.ndarray:
    if scv == 0:
        return np.full(count, mean)
    start, generator = phase_type(mean, scv)
    if scv > 1:
        return rng.exponential(1.0, count) / -np.diag(generator)[rng.choice(2, count, p=start)]
    stages = len(start) - rng.choice(len(start), count, p=start)
    return rng.gamma(stages, -1.0 / generator[0, 0])


@pytest.mark.parametrize(
    ("servers", "rho", "scv"), [(4, 0.8, 0.5), (9, 0.75, 0.34), (4, 0.7, 2.5), (9, 0.82, 0.0)]
)
def test_waits_agree_with_simulation(servers: int, rho: float, scv: float) -> None:
    """M/PH/c is exact and must lie within the error of ten runs; M/G/c within 8 %."""
    service, runs, count = 1.3, 10, 40_000
    rate = rho * servers / service
    grid = np.array([0.0, 0.2, 0.8])
    seen = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        arrival = np.cumsum(rng.exponential(1 / rate, count))
        w = waits(arrival, _service(scv, service, count, rng), servers)[4000:]
        seen.append([w.mean(), *(float((w <= x + 1e-12).mean()) for x in grid)])
    seen = np.array(seen)
    centre, error = seen.mean(axis=0), seen.std(axis=0, ddof=1) / np.sqrt(runs)
    at = load(rate, service, servers)
    variability = ServiceVariability(scv)
    approximate = MGc(variability).excess(at)
    assert approximate.mean[0] == pytest.approx(centre[0], rel=0.08)
    assert approximate.cdf(0, grid) == pytest.approx(centre[1:], abs=0.03)
    if scv > 0:
        exact = PhaseType(variability).excess(at)
        assert np.abs(np.array([exact.mean[0], *exact.cdf(0, grid)]) - centre).max() < 0.02
        off = np.abs(np.array([exact.mean[0], *exact.cdf(0, grid)]) - centre)
        assert (off < student_sigma(runs, 16) * error).all()


def test_a_mixture_of_types_varies_more_than_each() -> None:
    at = load(2.0, [0.5, 2.5], 9)
    mean, scv = ServiceVariability(0.0).moments(at)
    assert (mean, scv) == pytest.approx((1.5, 1.0 / 1.5**2))
    assert ServiceVariability(1.0).moments(at)[1] == pytest.approx(2 * 6.5 / 2 / 2.25 - 1 + 0.0)
    # Prefill is fixed and half of the occupancy: the decode's variance is (S/2)².
    assert ServiceVariability().moments(at)[1] == pytest.approx(1.25 * 3.25 / 2.25 - 1)


def test_too_many_phases_are_refused() -> None:
    with pytest.raises(ScenarioError, match=r"phase_type needs \d+ states for 64 servers.*use mgc"):
        PhaseType(ServiceVariability(0.2)).excess(load(40.0, 1.0, 64))


# --- tables ----------------------------------------------------------------------------------


def _exact_table(rhos: tuple[float, ...], servers: int = 9, service: float = 0.9) -> DelayTable:
    capacity = servers / service
    seconds = np.concatenate([[0.0], np.geomspace(1e-3, 30.0, 250)])
    cdf = tuple(
        (tuple(ErlangC().excess(load(r * capacity, service, servers)).cdf(0, seconds).tolist()),)
        for r in rhos
    )
    return DelayTable(
        profile="deep",
        types=("q",),
        mix=(1.0,),
        concurrency=servers,
        capacity=capacity,
        rates=tuple(r * capacity for r in rhos),
        seconds=tuple(seconds.tolist()),
        cdf=cdf,
    )


def _at(rho: float) -> TierLoad:
    return load(rho * 10.0, 0.9, 9, profile="deep", types=("q",))


def test_a_table_gives_back_what_it_was_made_of() -> None:
    rhos = (0.3, 0.5, 0.7, 0.8, 0.9)
    model = DelayMap(DelayMapFile(tables=(_exact_table(rhos),)))
    w = np.array([0.0, 0.05, 0.3, 2.0])
    for rho in rhos:
        exact = ErlangC().excess(load(rho * 10.0, 0.9, 9))
        law = model.excess(_at(rho))
        assert law.cdf(0, w) == pytest.approx(exact.cdf(0, w), abs=1e-5)
        assert law.mean == pytest.approx(exact.mean, rel=1e-3, abs=1e-9)
    # Between rates it interpolates; beyond the last it stretches, and falls short of the exact
    # law because the share that waits stays that of the last rate.
    assert model.excess(_at(0.75)).mean == pytest.approx(
        ErlangC().excess(load(7.5, 0.9, 9)).mean, rel=0.1
    )
    assert model.excess(_at(0.95)).mean == pytest.approx(
        ErlangC().excess(load(9.5, 0.9, 9)).mean, rel=0.25
    )


@MODEST
@given(st.floats(0.05, 0.98), st.floats(0.05, 0.98), st.floats(0, 10))
def test_a_table_is_monotone_in_the_rate(a: float, b: float, w: float) -> None:
    model = DelayMap(DelayMapFile(tables=(_exact_table((0.3, 0.6, 0.9)),)))
    low, high = sorted((a, b))
    at = np.array(w)
    assert model.excess(_at(high)).cdf(0, at) <= model.excess(_at(low)).cdf(0, at) + 1e-12


def test_a_table_says_where_it_does_not_fit(tmp_path: Path) -> None:
    file = DelayMapFile(tables=(_exact_table((0.3, 0.6, 0.9)),))
    path = tmp_path / "map.json"
    file.save(path)
    model = get_delay_model(f"delay_map:{path}")
    assert model.caveat(_at(0.5)) is None
    assert "below the table's first" in str(model.caveat(_at(0.1)))
    assert "above the table's last" in str(model.caveat(_at(0.95)))
    with pytest.raises(ScenarioError, match="no table for profile 'shallow'"):
        model.excess(load(1.0, 0.9, 9, profile="shallow", types=("q",)))
    with pytest.raises(ScenarioError, match="is for 9 sequences, the scenario has 8"):
        model.excess(load(1.0, 0.9, 8, profile="deep", types=("q",)))
    with pytest.raises(ScenarioError, match="no request type 'r'"):
        model.excess(load(1.0, 0.9, 9, profile="deep", types=("r",)))
    path.write_text('{"tables": []}')
    with pytest.raises(ScenarioError, match=r"map\.json: tables"):
        get_delay_model(f"delay_map:{path}")
    path.write_text("{")
    with pytest.raises(ScenarioError, match=r"map\.json:1"):
        get_delay_model(f"delay_map:{path}")
    with pytest.raises(ScenarioError, match="absent"):
        get_delay_model("delay_map:absent")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": (3.0, 2.0, 9.0)}, "rates: not rising"),
        ({"mix": (0.5,)}, "mix"),
        ({"capacity": 5.0}, "capacity"),
        ({"concurrency": 0}, "concurrency"),
    ],
)
def test_a_malformed_table_is_refused(change: dict[str, object], message: str) -> None:
    table = _exact_table((0.3, 0.6, 0.9))
    with pytest.raises(ValueError, match=message):
        DelayTable.model_validate({**table.model_dump(), **change})


# --- registry --------------------------------------------------------------------------------


def test_the_registry_names_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"'oracle' is not one of .*erlang_c"):
        get_delay_model("oracle")
    with pytest.raises(ScenarioError, match="takes no argument"):
        get_delay_model("erlang_c:fast")
    with pytest.raises(ScenarioError, match="needs its table"):
        get_delay_model("delay_map")
    with pytest.raises(ScenarioError, match="an SCV is a number"):
        get_delay_model("mgc:-1")
    with pytest.raises(ScenarioError, match="registered already"):
        register("erlang_c", lambda argument: ErlangC())
    path = tmp_path / "seconds.txt"
    path.write_text("1.0\n3.0  # slow\n\n")
    measured = get_delay_model(f"mgc:{path}")
    assert isinstance(measured, MGc)
    assert measured.variability.scv == pytest.approx(0.5)
    path.write_text("1.0\nfast\n")
    with pytest.raises(ScenarioError, match=r"seconds\.txt:2: 'fast'"):
        get_delay_model(f"phase_type:{path}")
    for name in DELAY_MODELS:
        if name not in ("delay_map", "learned_map"):
            assert isinstance(get_delay_model(name), DelayModel)
