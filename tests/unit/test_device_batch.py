"""Batch: the sums of a step that a device's time depends on, from what a scheduler hands over."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engines.device_time_batch import Batch


def new(name: str, prompt: int, computed: int = 0, again: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        req_id=name,
        prompt_token_ids=[0] * prompt,
        prefill_token_ids=None if again is None else [0] * again,
        num_computed_tokens=computed,
    )


def step(scheduled, fresh=(), cached=(), resumed=(), finished=()) -> SimpleNamespace:
    """``cached``: (name, computed, generated) of requests seen before."""
    return SimpleNamespace(
        scheduled_new_reqs=list(fresh),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[c[0] for c in cached],
            num_computed_tokens=[c[1] for c in cached],
            num_output_tokens=[c[2] for c in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=dict(scheduled),
        finished_req_ids=set(finished),
    )


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 400),
    hit=st.integers(0, 399),
    budget=st.integers(1, 150),
    outputs=st.integers(1, 6),
)
def test_chunks_cover_a_prompt_once_and_then_every_step_decodes(prompt, hit, budget, outputs):
    """Σn over the chunks is what was not cached, Σn·h + Σn²/2 the work it stands for; one token
    comes with the last chunk and one with each decode."""
    hit = min(hit, prompt - 1)
    batch = Batch()
    computed, generated = hit, 0
    new_tokens = work = tokens = 0.0
    contexts = []
    first = True
    while generated < outputs:
        n = min(budget, prompt - computed) if computed < prompt else 1
        if first:
            given = step({"a": n}, fresh=[new("a", prompt, hit)])
        else:
            given = step({"a": n}, cached=[("a", computed, generated)])
        first = False
        (prefills, chunk, squared, crossed, decodes, context), produced = batch.take(given)
        assert prefills + decodes == 1
        new_tokens += chunk
        work += crossed + squared / 2
        if decodes:
            contexts.append(context)
        computed += n
        assert len(produced[0]) == (computed >= prompt)
        generated += len(produced[0])
        tokens += len(produced[0])
    assert new_tokens == prompt - hit
    assert work == (prompt**2 - hit**2) / 2
    assert tokens == outputs
    assert contexts == list(range(prompt, prompt + outputs - 1))


def test_scheduling_ahead_counts_tokens_that_are_still_under_way():
    """With a step under way the scheduler counts its token as generated: the next one decodes."""
    batch = Batch()
    batch.take(step({"a": 8}, fresh=[new("a", 8)]))
    sums, produced = batch.take(step({"a": 1}, cached=[("a", 8, 1)]))
    assert sums == (0, 0.0, 0.0, 0.0, 1, 8.0)
    assert produced == [[0]]


def test_what_a_preempted_request_had_generated_is_prefilled_again():
    batch = Batch()
    batch.take(step({"a": 10}, fresh=[new("a", 10)]))
    batch.take(step({"a": 1}, cached=[("a", 10, 1)]))
    sums, produced = batch.take(step({"a": 8}, cached=[("a", 4, 2)], resumed=["a"]))
    assert sums == (1, 8.0, 64.0, 32.0, 0, 0.0)
    assert produced == [[0]]
    sums, _ = batch.take(step({"a": 1}, cached=[("a", 12, 3)]))
    assert sums[4:] == (1, 12.0)


def test_a_resumed_request_may_come_as_a_new_one():
    batch = Batch()
    batch.take(step({"a": 10}, fresh=[new("a", 10)]))
    sums, produced = batch.take(step({"a": 9}, fresh=[new("a", 10, computed=4, again=13)]))
    assert sums[:4] == (1, 9.0, 81.0, 36.0)
    assert produced == [[0]]


def test_a_mixed_step_adds_up_and_keeps_the_order_of_its_requests():
    batch = Batch()
    batch.take(step({"a": 5}, fresh=[new("a", 5)]))
    sums, produced = batch.take(
        step({"a": 1, "b": 6, "c": 3}, fresh=[new("b", 9), new("c", 4, 1)], cached=[("a", 5, 1)])
    )
    assert sums == (2, 9.0, 45.0, 3.0, 1, 5.0)
    assert produced == [[0], [], [0]]


def test_an_empty_step_has_no_time_and_finished_requests_are_forgotten():
    batch = Batch()
    batch.take(step({"a": 5}, fresh=[new("a", 5)]))
    sums, produced = batch.take(step({}, finished=["a"]))
    assert not produced and not any(sums)
    assert not batch._goal and not batch._prompt
