"""Calibration tables: what was measured on the engine, with its errors, before and after a run.

They read the plain data of a ``calibration.json``, so that nothing here depends on the package
that measures. What a record lacks is shown as a dash.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from testbed.reporting.table import Table, facts, figure, flat, words
from testbed.reporting.wording import asked, percent, plain, significant

Record = Mapping[str, Any]

PREFILL_UNITS = {
    "overhead": "s",
    "linear": "s/token",
    "quadratic": "s/token²",
    "context": "s/token²",
}
STEP_UNITS = {"a": "s/token", "b": "s/token²", "d": "s/token²", "e": "s/decode", "f": "s/token"}


@dataclass(frozen=True)
class _Figure:
    unit: str
    value: float
    error: float | None = None


def calibration_tables(before: Record, after: Record | None = None) -> list[Table]:
    """Source, figures (before, after and the change between them) and how well each form fits.

    Parameters
    ----------
    before, after : ``calibration.json`` as plain data; ``after`` where it was repeated
    """
    tables = [_source(before), _figures(before, after)]
    fits = [*_list(before.get("fits")), *_list(_part(before, "prefill").get("alternatives"))]
    return tables + ([_fits(fits)] if fits else [])


def _source(record: Record) -> Table:
    pairs: dict[str, str] = {}
    for part in ("source", "engine", "model", "device"):
        data = {k: v for k, v in _part(record, part).items() if v not in (None, {}, [])}
        if data:
            pairs[part] = ", ".join(f"{k} {v}" for k, v in flat(data).items())
    for key in ("measured_at", "created_at"):
        if record.get(key):
            pairs[key.replace("_", " ")] = str(record[key])
    return facts("Calibration: where it comes from", pairs)


def _figures(before: Record, after: Record | None) -> Table:
    first, second = dict(_read(before)), dict(_read(after)) if after is not None else {}
    head = ["", "unit", "before" if second else "value", "± standard error"]
    head += ["after", "± standard error", "change", "in standard errors"] if second else []
    rows = []
    for name in dict.fromkeys((*first, *second)):
        old, new = first.get(name), second.get(name)
        known = old or new
        cells = [words(name), words(known.unit if known else "", "faint")]
        for found in (old, new)[: 2 if second else 1]:
            cells += [
                figure(None if found is None else _number(found.value)),
                figure(None if found is None or found.error is None else f"± {_error(found)}"),
            ]
        if second:
            cells += list(_change(old, new))
        rows.append(tuple(cells))
    return Table(
        "Calibration: what was measured",
        tuple(head),
        tuple(rows),
        note="Change between the calibrations before and after the run: drift of the machine, and "
        "noise; beyond about 2 standard errors it is not noise."
        if second
        else "",
    )


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else significant(value, 4)


def _error(found: _Figure) -> str:
    error = found.error or 0.0
    relative = f" ({percent(100 * error / abs(found.value), signed=False)})" if found.value else ""
    return f"{significant(error, 2)}{relative}"


def _change(old: _Figure | None, new: _Figure | None) -> tuple[Any, Any]:
    if old is None or new is None or old.value == 0:
        return figure(None), figure(None)
    change = new.value - old.value
    text = percent(100 * change / abs(old.value))
    if old.error is None or new.error is None or old.error == new.error == 0:
        return figure(text), figure(None)
    ratio = change / math.hypot(old.error, new.error)
    return figure(text), figure(
        f"{ratio:+.1f}".replace("-", "−"), "unsure" if abs(ratio) > 2 else ""
    )


def _read(record: Record) -> Iterator[tuple[str, _Figure]]:
    """Every figure of a record with its unit and standard error, by name."""
    prefill = _part(record, "prefill")
    errors = _part(prefill, "standard_errors")
    for name, value in _part(prefill, "coefficients").items():
        yield f"prefill {name}", _Figure(PREFILL_UNITS.get(name, ""), value, errors.get(name))
    if prefill.get("relative_error") is not None:
        yield "prefill, held-out error", _Figure("%", 100 * prefill["relative_error"])
    step = {k: v for k, v in _part(record, "step_time").items() if isinstance(v, int | float)}
    for name, value in step.items():
        yield f"step time {plain(name)}", _Figure(STEP_UNITS.get(name, "s"), value)
    memory = _part(record, "memory")
    for key, name in (("pool_bytes", "KV pool, M"), ("kappa_nominal", "κ nominal")):
        if memory.get(key) is not None:
            yield name, _Figure("bytes" if key == "pool_bytes" else "bytes/token", memory[key])
    yield from _estimate("κ measured", "bytes/token", memory.get("kappa_measured"))
    yield from _estimate("m_run", "bytes/sequence", record.get("m_run"))
    for entry in _list(record.get("c_s")):
        for key in ("measured", "formula"):
            if entry.get(key) is not None:
                name = f"c_s on {plain(entry.get('profile'))}, {key}"
                yield name, _Figure("sequences", entry[key])
    for entry in _list(record.get("decode")):
        beside = asked(entry.get("concurrency", 1.0))
        spread = _part(entry, "standard_errors")
        for key, unit in (("base", "s"), ("per_token", "s/token")):
            if entry.get(key) is not None:
                name = f"decode {key.replace('_', ' ')}, {beside} running"
                yield name, _Figure(unit, entry[key], spread.get(key))


def _estimate(name: str, unit: str, data: Any) -> Iterator[tuple[str, _Figure]]:
    if isinstance(data, Mapping) and data.get("value") is not None:
        yield name, _Figure(unit, data["value"], data.get("standard_error"))


def _fits(fits: list[Record]) -> Table:
    rows = tuple(
        (
            words(fit.get("name", "–")),
            figure(None if fit.get("points") is None else f"{fit['points']:,}"),
            *(
                figure(None if fit.get(k) is None else percent(100 * fit[k], signed=False))
                for k in ("relative_error", "held_out_error")
            ),
            words(_coefficients(fit)),
        )
        for fit in fits
    )
    head = ("form", "points", "error, fitted", "error, held out", "coefficients")
    return Table(
        "Calibration: forms that were fitted",
        head,
        rows,
        note="Errors are root-mean-square and relative.",
    )


def _coefficients(fit: Record) -> str:
    errors = _part(fit, "standard_errors")
    return ", ".join(
        f"{k} {significant(v)}" + (f" ± {significant(errors[k], 2)}" if k in errors else "")
        for k, v in _part(fit, "coefficients").items()
    )


def _part(record: Record, key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Record]:
    return [v for v in value if isinstance(v, Mapping)] if isinstance(value, list | tuple) else []
