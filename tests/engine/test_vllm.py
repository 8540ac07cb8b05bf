"""vLLM behind the Engine surface: pinned prefixes hold, cost their bytes, and change no output."""

from __future__ import annotations

import numpy as np
import pytest

from cluster.engines import make_engine
from cluster.engines.base import Placement
from cluster.engines.step_log import read_steps
from testbed.errors import EngineError
from testbed.scenario import EngineSpec
from tests.engine.random_model import VOCABULARY, greedy, make_random_llama

pytest.importorskip("vllm", reason="vLLM is not installed (pip install '.[cpu]')")
pytestmark = pytest.mark.engine

BLOCK, POOL = 32, 80
PREFIX = 12 * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def model(folder):
    return make_random_llama(folder / "model")


@pytest.fixture(scope="module")
async def engine(folder, model):
    spec = EngineSpec(
        name="vllm",
        model=str(model),
        dtype="float32",
        num_blocks=POOL,
        block_size=BLOCK,
        max_sequences=8,
        max_model_len=1024,
        token_budget=512,
        reuse="any",
    )
    started = make_engine(spec, Placement(core=0, step_log=str(folder / "steps.bin")))
    facts = await started.start()
    assert facts.num_blocks == POOL
    assert facts.bytes_per_token == 2 * 2 * 2 * 32 * 4
    assert not facts.extra["random_weights"]
    yield started
    await started.stop()
    await started.stop()  # twice is safe


def prompt(seed: int, length: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(3, VOCABULARY, length).astype(np.int32)


def with_suffix(prefix: np.ndarray, seed: int, length: int = 20) -> np.ndarray:
    return np.concatenate([prefix, prompt(1000 + seed, length)])


async def evict_everything(engine, tag: str) -> None:
    """Prompts of three times the pool: plain LRU keeps nothing that was there before."""
    for i in range(3 * POOL * BLOCK // 480):
        await engine.generate(
            f"evict-{tag}-{i}", prompt(10_000 + 97 * i + sum(tag.encode()), 480), 1
        )


async def test_an_unpinned_prefix_is_evicted_by_that_load(engine):
    prefix = prompt(1, PREFIX)
    await engine.generate("plain", with_suffix(prefix, 0), 1)
    assert (await engine.generate("plain-hit", with_suffix(prefix, 1), 1)).cached_tokens == PREFIX
    await evict_everything(engine, "plain")
    assert (await engine.generate("plain-miss", with_suffix(prefix, 2), 1)).cached_tokens == 0


async def test_a_pinned_prefix_survives_costs_its_blocks_and_gives_them_back(engine):
    prefix = prompt(2, PREFIX)
    before = (await engine.load()).kv_usage
    assert await engine.pin("deep", prefix) == PREFIX
    held = (await engine.load()).kv_usage - before
    # One block of the pool is the engine's own.
    assert held == pytest.approx(PREFIX / BLOCK / (POOL - 1), abs=1e-9)
    await evict_everything(engine, "pinned")
    assert (await engine.load()).kv_usage - before == pytest.approx(held, abs=1e-9)
    hit = await engine.generate("deep-hit", with_suffix(prefix, 3), 1)
    assert hit.cached_tokens == PREFIX
    await engine.unpin("deep")
    assert (await engine.load()).kv_usage == pytest.approx(before, abs=1e-9)
    await evict_everything(engine, "unpinned")
    assert (await engine.generate("deep-miss", with_suffix(prefix, 4), 1)).cached_tokens == 0


async def test_pinned_bytes_are_gone_from_what_requests_can_use(engine):
    """Requests that just fit the empty pool together have to take turns beside a pinned prefix."""
    import asyncio

    async def most_running(tag: str) -> int:
        size = (POOL - 1) // 4 * BLOCK - 24
        tasks = [
            asyncio.create_task(engine.generate(f"{tag}-{i}", prompt(50 + i, size), 24))
            for i in range(4)
        ]
        most = 0
        while not all(t.done() for t in tasks):
            most = max(most, (await engine.load()).running)
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        return most

    await engine.forget()
    assert await most_running("free") == 4
    await engine.pin("heavy", prompt(3, PREFIX))
    await engine.forget()
    assert await most_running("beside") < 4
    await engine.unpin("heavy")


async def test_shared_ancestors_are_stored_once(engine):
    await engine.forget()
    root = prompt(4, 4 * BLOCK)
    chains = [np.concatenate([root, prompt(40 + i, 2 * BLOCK)]) for i in range(3)]
    before = (await engine.load()).kv_usage
    for i, chain in enumerate(chains):
        await engine.pin(f"chain-{i}", chain)
    held = ((await engine.load()).kv_usage - before) * (POOL - 1)
    assert round(held) == 4 + 3 * 2  # Theory A4: each unique token once
    await engine.unpin("chain-0")
    # The root stays as long as one chain holds it.
    assert round(((await engine.load()).kv_usage - before) * (POOL - 1)) == 4 + 2 * 2
    await engine.unpin("chain-1")
    await engine.unpin("chain-2")


async def test_forgetting_keeps_pins_and_drops_the_rest(engine):
    pinned, plain = prompt(5, PREFIX), prompt(6, PREFIX)
    await engine.pin("kept", pinned)
    await engine.generate("to-forget", with_suffix(plain, 0), 1)
    await engine.forget()
    assert (await engine.generate("f1", with_suffix(pinned, 5), 1)).cached_tokens == PREFIX
    assert (await engine.generate("f2", with_suffix(plain, 6), 1)).cached_tokens == 0
    await engine.unpin("kept")


@pytest.mark.parametrize("depth", [0, 2 * BLOCK, PREFIX])
async def test_greedy_output_is_the_same_with_and_without_the_cached_prefix(engine, model, depth):
    tokens = with_suffix(prompt(7, PREFIX), 7)
    expected = greedy(model, tokens.tolist(), 16)
    assert len(set(expected)) > 4  # the text says something about the prompt
    await engine.forget()
    cold = await engine.generate(f"cold-{depth}", tokens, 16)
    assert cold.cached_tokens == 0
    await engine.forget()
    if depth:
        await engine.pin("answer", tokens[:depth])
    warm = await engine.generate(f"warm-{depth}", tokens, 16)
    assert warm.cached_tokens == depth
    assert list(cold.token_ids) == expected
    assert list(warm.token_ids) == expected
    if depth:
        await engine.unpin("answer")


async def test_stamps_are_in_order_on_one_clock(engine):
    g = await engine.generate("stamps", prompt(8, 300), 5)
    stamps = [g.received, g.queued, g.scheduled, g.engine_first_token, g.first_token, g.finished]
    assert stamps == sorted(stamps)
    assert len(g.token_ids) == len(g.token_times) == 5
    assert g.token_times[0] == g.first_token


async def test_the_step_log_accounts_for_every_token(engine, folder):
    rows = len(read_steps(folder / "steps.bin")["started"])
    await engine.forget()
    g = await engine.generate("logged", prompt(9, 700), 6)
    assert g.cached_tokens == 0
    steps = {k: v[rows:] for k, v in read_steps(folder / "steps.bin").items()}
    assert steps["new_tokens"].sum() == 700
    assert steps["prefills"].sum() == 2  # a budget of 512: two chunks
    assert steps["decodes"].sum() == 5  # the first token comes out of the prefill
    # Σ n² + 2 Σ n·h is the square of the prompt, however it was cut.
    assert (steps["new_squared"] + 2 * steps["new_context"]).sum() == 700**2
    assert (steps["decode_context"][-5:] == 700 + np.arange(5)).all()
    for before, after in (("started", "scheduled"), ("scheduled", "computed")):
        assert (steps[before] <= steps[after]).all()


async def test_bad_requests_are_one_line(engine):
    with pytest.raises(EngineError, match=r"longer than the engine's limit of 1024"):
        await engine.generate("long", prompt(10, 1020), 10)
    with pytest.raises(EngineError, match="do not fill one block"):
        await engine.pin("tiny", prompt(11, BLOCK - 1))
    with pytest.raises(EngineError, match="nothing is pinned under this name"):
        await engine.unpin("nobody")
    assert (await engine.load()).running == 0


async def test_a_model_that_is_not_there_is_one_line():
    for name, said in (("no-such-preset", "neither a preset"), ("/no/such/dir", "no such dir")):
        with pytest.raises(EngineError, match=said):
            await make_engine(EngineSpec(model=name)).start()
    with pytest.raises(EngineError, match=r"engine\.block_size: 16: .* multiples of 32"):
        await make_engine(EngineSpec(block_size=16, num_blocks=64)).start()
