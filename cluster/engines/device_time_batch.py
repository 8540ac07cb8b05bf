"""Batch: from what vLLM's scheduler hands a worker to the sums that a step's time depends on."""

from __future__ import annotations

from typing import Any

PLACEHOLDER = 0
"""Token id that stands for every generated token."""


class Batch:
    """What a worker must remember of requests between steps: the sums of a step need it.

    A request's chunk counts as prefill until everything known when it was admitted is computed:
    its prompt, and after a preemption what it had generated as well.
    """

    def __init__(self) -> None:
        self._goal: dict[str, int] = {}
        self._prompt: dict[str, int] = {}

    def take(self, step: Any) -> tuple[tuple[float, ...], list[list[int]]]:
        """Sums of a step, as :func:`testbed.step_time.step_seconds` takes them, and new tokens.

        ``step`` is vLLM's ``SchedulerOutput``; the tokens are one list for each of its scheduled
        requests, in their order, empty while a prompt is not complete.
        """
        for request in step.finished_req_ids:
            self._goal.pop(request, None)
            self._prompt.pop(request, None)
        known: dict[str, int] = {}
        before: dict[str, int] = {}
        for new in step.scheduled_new_reqs:
            tokens = new.prefill_token_ids or new.prompt_token_ids or ()
            self._prompt[new.req_id] = len(new.prompt_token_ids or ())
            self._goal[new.req_id] = known[new.req_id] = len(tokens)
            before[new.req_id] = new.num_computed_tokens
        cached = step.scheduled_cached_reqs
        for request, computed, generated in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            known[request] = self._prompt[request] + generated
            before[request] = computed
            if request in cached.resumed_req_ids:
                self._goal[request] = known[request]
        prefills = decodes = 0
        new_tokens = squared = crossed = context = 0.0
        produced: list[list[int]] = []
        for request, n in step.num_scheduled_tokens.items():
            h = before[request]
            if h < self._goal[request]:
                prefills += 1
                new_tokens += n
                squared += float(n) * n
                crossed += float(n) * h
            else:
                decodes += 1
                context += h
            produced.append([PLACEHOLDER] if h + n >= known[request] else [])
        return (prefills, new_tokens, squared, crossed, decodes, context), produced
