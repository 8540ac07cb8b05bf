"""Whether two calibrations of one engine agree within their own error bars.

    python tests/bench/bench_calibration_agreement.py first.json second.json

Prints the change of level of the unloaded prefill with its interval, how many grid points differ
by more than 1.96 of their joint standard errors (5 % would by chance), before and after the level
is taken out, and the same for every coefficient that carries an error.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from calibration.check import Z, compare
from calibration.record import Calibration


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    asked = parser.parse_args()
    first, second = Calibration.load(asked.first), Calibration.load(asked.second)
    found = compare(first.prefill_points, second.prefill_points)
    low, high = found["interval"]
    moved = [100 * (r.extra["drift"]["standard_deviation"] or 0.0) for r in (first, second)]
    z = np.array([p["z"] for p in found["points"] if p["z"] is not None])
    level = math.log(found["relative_time"])
    ratio = np.log([p["relative_time"] for p in found["points"] if p["z"] is not None])
    apart = (ratio - level) / (ratio / z)
    print(
        f"unloaded prefill: second / first {found['relative_time']:.4f} "
        f"(95 %: {low:.4f} to {high:.4f}); the speed moved within the runs by "
        f"{moved[0]:.1f} and {moved[1]:.1f} % (standard deviation over passes)"
    )
    print(
        f"  {len(z)} points: {(abs(z) > Z).sum()} differ by more than {Z:.2f} standard errors, "
        f"{(abs(apart) > Z).sum()} with the level taken out"
    )
    for name, a, b, error in _figures(first, second):
        score = (b - a) / error if error > 0 else 0.0
        mark = "  <- apart" if abs(score) > Z else ""
        change = 100 * (b / a - 1) if a else math.inf
        print(f"  {name:<28} {a:>12.5g} {b:>12.5g} {change:>+8.1f} %  z {score:>+6.2f}{mark}")


def _figures(first: Calibration, second: Calibration) -> Iterator[tuple[str, float, float, float]]:
    """(name, first, second, joint standard error) of everything with an error."""
    if first.prefill and second.prefill:
        a, b = first.prefill, second.prefill
        for name in sorted(set(a.standard_errors) & set(b.standard_errors)):
            error = math.hypot(a.standard_errors[name], b.standard_errors[name])
            yield (
                f"prefill {name}",
                getattr(a.coefficients, name),
                getattr(b.coefficients, name),
                error,
            )
    fits = [next((f for f in r.fits if f.name == "step_time"), None) for r in (first, second)]
    if fits[0] and fits[1]:
        for name in fits[0].standard_errors:
            error = math.hypot(fits[0].standard_errors[name], fits[1].standard_errors[name])
            yield f"step {name}", fits[0].coefficients[name], fits[1].coefficients[name], error
    other = {d.concurrency: d for d in second.decode}
    for d in first.decode:
        if d.concurrency in other:
            e = other[d.concurrency]
            error = math.hypot(d.standard_errors["per_token"], e.standard_errors["per_token"])
            yield f"decode, {d.concurrency:g} running", d.per_token, e.per_token, error
    for name, x, y in (
        ("κ", first.memory.kappa_measured, second.memory.kappa_measured),
        ("m_run", first.m_run, second.m_run),
    ):
        if x and y:
            error = math.hypot(x.standard_error or 0.0, y.standard_error or 0.0)
            yield name, x.value, y.value, error
    seats = {c.profile: c for c in second.c_s}
    for c in first.c_s:
        if c.profile in seats and c.measured and seats[c.profile].measured:
            yield f"c_s, {c.profile}", c.measured, seats[c.profile].measured, 0.0


if __name__ == "__main__":
    main()
