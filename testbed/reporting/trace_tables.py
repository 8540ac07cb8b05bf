"""Trace tables: statistics of a trace and proposed profiles on a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from testbed.workload.proposal import ProfileProposal
from testbed.workload.statistics import TraceStatistics

_UNITS = ("B", "kB", "MB", "GB", "TB")


def render_statistics(console: Console, statistics: TraceStatistics) -> None:
    """Print everything that :class:`TraceStatistics` holds."""
    facts = statistics.trace
    console.print(Text(f"{facts['name']} ({facts['format']})", style="bold"))
    dropped = ", ".join(f"{n:,} {why}" for why, n in facts["dropped"].items()) or "none"
    arrivals = statistics.arrivals
    rows = [
        ("rows", f"{facts['rows']:,}, dropped: {dropped}"),
        ("requests", f"{statistics.requests:,} in {statistics.duration:,.1f} s"),
        ("rate", f"{arrivals.rate:.4g} requests/s"),
        ("gaps", f"CV² {_number(arrivals.cv2)}, lag-1 correlation {_number(arrivals.lag1)}"),
        (
            "dispersion",
            ", ".join(f"{d:.3g} in {w} s" for w, d in arrivals.dispersion.items()) or "—",
        ),
        (
            "recorded times",
            f"{arrivals.distinct_times:,} distinct on a grid of {arrivals.time_grid:g} s, "
            f"{arrivals.most_at_once} at once at most",
        ),
    ]
    if facts["out_of_order"]:
        rows.append(("order", f"{facts['out_of_order']:,} rows were out of order; sorted"))
    if facts["relabelled"]:
        rows.append(("block ids", "named a block's own content; renamed by their prefixes"))
    if statistics.sessions:
        rows.append(("sessions", f"{statistics.sessions:,}"))
    if statistics.types:
        rows.append(("types", ", ".join(f"{n} {c:,}" for n, c in statistics.types.items())))
    notes = "; ".join(
        f"{k.replace('_', ' ')}: {_noted(v)}" for k, v in facts["notes"].items() if k != "knobs"
    )
    if notes:
        rows.append(("notes", notes))
    _pairs(console, rows)
    lengths = {"input tokens": statistics.input_tokens, "output tokens": statistics.output_tokens}
    prefixes = statistics.prefixes
    if prefixes is not None:
        lengths["shared with an earlier prompt"] = prefixes.overlap_tokens
        lengths["lifetime of a shared block, s"] = prefixes.lifetime
        lengths["time between reuses, s"] = prefixes.reuse_interval
    _quantiles(console, lengths)
    if statistics.scaled is not None:
        scaled = statistics.scaled
        _pairs(
            console,
            [
                (
                    "token scale",
                    f"{scaled.token_scale:g} into engine blocks of {scaled.engine_block_size}: "
                    f"mean prompt {scaled.input_tokens['mean']:,.0f} tokens, infinite-cache hits "
                    f"{scaled.hit_ratio_recorded:.2%} → {scaled.hit_ratio_scaled:.2%} of tokens",
                )
            ],
        )
    if prefixes is None:
        console.print("The format records no prefixes.")
        return
    _pairs(
        console,
        [
            (
                "blocks",
                f"{prefixes.block_accesses:,} of {prefixes.block_size} tokens, "
                f"{prefixes.unique_blocks:,} unique, {prefixes.shared_blocks:,} shared",
            ),
            (
                "forest",
                f"roots {prefixes.roots:,}, radix edges {prefixes.radix_edges:,}, "
                f"families {prefixes.families:,}",
            ),
            (
                "common to all",
                f"blocks {prefixes.common_blocks:,}, tokens {prefixes.common_tokens:,}",
            ),
            (
                "infinite cache",
                f"{prefixes.hit_ratio_blocks:.2%} of blocks, {prefixes.hit_ratio_tokens:.2%} of "
                f"tokens; {prefixes.overlap_share:.2%} of requests share something",
            ),
        ],
    )
    table = Table("LRU cache, blocks", "hits, blocks", "hits, tokens", box=SIMPLE_HEAD)
    for column in table.columns:
        column.justify = "right"
    for size, (blocks, tokens) in prefixes.hit_curve.items():
        table.add_row(f"{int(size):,}", f"{blocks:.2%}", f"{tokens:.2%}")
    console.print(table)


def render_profiles(console: Console, proposal: ProfileProposal, assumed: bool = False) -> None:
    """Print proposed profiles; ``assumed`` says that no calibration stands behind the seconds."""
    name = proposal.trace["name"]
    console.print(Text(f"Profiles of {name} within {bytes_text(proposal.budget)}", style="bold"))
    dropped = "".join(f", {n:,} {why} dropped" for why, n in proposal.dropped.items())
    console.print(
        f"{proposal.requests:,} requests{dropped}; {proposal.paths:,} paths, "
        f"{proposal.supported_paths:,} after those of fewer than {proposal.min_support} "
        f"{proposal.support_of} merge upward"
    )
    table = Table(
        "profile", "from", "bytes", "slots", "blocks", "coverage", "beyond", "mean h", "saved",
        "share", "bound", box=SIMPLE_HEAD,
    )  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    for profile, slots in zip(proposal.profiles, proposal.concurrency, strict=True):
        bound = profile.upper_bound
        table.add_row(
            profile.name,
            profile.method,
            bytes_text(profile.persistent_bytes),
            str(slots),
            f"{profile.vertices:,}",
            f"{profile.coverage:.1%}",
            f"{profile.selective:.1%}",
            f"{profile.reusable.mean():,.0f}",
            f"{profile.saved_seconds:.4g} s",
            f"{profile.saved_seconds / proposal.full_prefill:.1%}",
            "—" if bound is None else f"{bound:.4g} s",
        )
    console.print(table)
    console.print(
        f"{proposal.considered} candidates, {proposal.dominated} dominated, "
        f"{proposal.infeasible} without room for one sequence. Saved: prefill seconds of a mean "
        f"request of {proposal.full_prefill:.4g} s; bound: no profile of that kind saves more; "
        "coverage: requests that reuse anything; beyond: more than what all requests share."
    )
    if assumed:
        console.print("Seconds and bytes follow example coefficients; nothing was calibrated.")
    _types(console, proposal)
    if proposal.leading:
        top = Table("block", "score, s/GB", "depth, tokens", "requests", "share", box=SIMPLE_HEAD)
        for column in top.columns:
            column.justify = "right"
        for v in proposal.leading:
            top.add_row(
                str(v["block"]),
                f"{1e9 * v['score_seconds_per_byte']:.4g}",
                f"{v['depth_tokens']:,}",
                f"{v['requests']:,}",
                f"{v['share']:.2%}",
            )
        console.print(top)


def _types(console: Console, proposal: ProfileProposal) -> None:
    """Request types: share, length and mean reuse against each profile, and the loss."""
    clusters = proposal.clusters
    table = Table("type", "share", "tokens", *(f"h {p.name}" for p in proposal.profiles))
    table.box = SIMPLE_HEAD
    for column in table.columns[1:]:
        column.justify = "right"
    for q, name in enumerate(proposal.type_names):
        table.add_row(
            name,
            f"{clusters.probability[q]:.1%}",
            f"{clusters.tokens[q]:,.0f}",
            *(f"{h:,.0f}" for h in clusters.reusable[q]),
        )
    lost = [f"{x:,.1f}" for x in clusters.loss]
    table.add_row("loss Σ p|h − ĥ|", "", f"{clusters.length_loss:,.0f}", *lost, style="dim")
    console.print(table)


def bytes_text(count: float) -> str:
    """Bytes in decimal units, three digits.

    >>> bytes_text(8e9)
    '8 GB'
    """
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {_UNITS[-1]}"


def _noted(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k} {_noted(v)}" for k, v in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)


def _number(value: float | None) -> str:
    return "—" if value is None else f"{value:.4g}"


def _pairs(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for label, text in rows:
        table.add_row(label, text)
    console.print(table)


def _quantiles(console: Console, values: dict[str, dict[str, float]]) -> None:
    heads = next((list(v) for v in values.values() if "mean" in v), [])
    names = {"mean": "mean", "0": "least", "1": "most"}
    shown = [names[h] if h in names else f"p{100 * float(h):g}" for h in heads]
    table = Table("", *shown, box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for label, spread in values.items():
        if spread:
            table.add_row(label, *(_plain(spread.get(h)) for h in heads))
    console.print(table)


def _plain(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3g}"
