"""Speed and accuracy of the analytical model beside a straightforward NumPy/SciPy version.

Run: python tests/bench/bench_theory.py [--quick]

Every ratio is of two times taken in this one run. Times are CPU times of one thread, after
compilation, the least of several repeats where a call is short. The straightforward version is
what one writes first: the radial integral of Theory C3 on a fixed grid for every pair of
profiles, Erlang's recursion in a loop, the damped iteration of D1, and the coverage integral of
E2 on the same grid.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from dataclasses import replace

import numba
import numpy as np
from scipy.stats import kstwobign, norm

from testbed.environment import code_version, processor
from testbed.presets import preset
from testbed.radio import PowerLaw, nearest_distances
from testbed.routing.policies import get_policy
from testbed.theory.constraints import PlacementSet
from testbed.theory.delay.erlang_c import ErlangC
from testbed.theory.geometry import associate, radio_area
from testbed.theory.latency import Latency
from testbed.theory.operating_point import damped, solve
from testbed.theory.placement import Objective, spsa
from testbed.theory.predict import locate
from testbed.theory.quadrature import cost_nodes
from testbed.theory.system import System

clock = time.process_time
"""CPU seconds of this one-threaded process: wall time on a quiet machine, and still comparable
where others share the cores."""

LOAD_AWARE = get_policy("load_aware")
RADII = 400


def synthetic(types: int, tiers: int, load: float, seed: int = 0) -> System:
    """A random system of this size whose tiers carry about ``load`` of their capacity."""
    rng = np.random.default_rng(seed)
    tokens = rng.uniform(500, 4000, types)
    reusable = tokens[:, None] * rng.uniform(0, 0.9, (types, tiers))
    reusable[:, 0] = 0.0
    linear = 4.6e-4
    residual = linear * (tokens[:, None] - reusable)
    system = System(
        types=tuple(f"q{i}" for i in range(types)),
        names=tuple(f"s{i}" for i in range(tiers)),
        probability=rng.dirichlet(np.full(types, 4.0)),
        tokens=tokens,
        output_tokens=np.ones(types),
        reusable=reusable,
        residual=residual,
        saving=linear * reusable,
        occupancy=residual + 0.4,
        fraction=rng.dirichlet(np.full(tiers, 4.0)),
        persistent=np.linspace(0, 4e8, tiers),
        concurrency=np.linspace(24, 9, tiers).astype(int),
        node_density=1.0,
        intensity=1.0,
        radio=PowerLaw(0.16, 3.5),
    )
    return replace(system, intensity=load * system.capacity / system.least_demand)


# --- The straightforward version -------------------------------------------------------------


def plain_erlang_c(servers: int, offered: float) -> float:
    if offered >= servers:
        return 1.0
    blocking = 1.0
    for n in range(1, servers + 1):
        blocking = offered * blocking / (n + offered * blocking)
    return blocking / (1.0 - offered / servers * (1.0 - blocking))


def plain_joint(system: System, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Radii (S, R), weights (S, R) and joint densities (Q, S, R) of Theory C3 on a fixed grid."""
    xi, alpha = system.radio.xi, system.radio.alpha  # type: ignore[attr-defined]
    x, w = np.polynomial.legendre.leggauss(RADII)
    end = 6.0 / np.sqrt(np.pi * system.density)
    r = 0.5 * end[:, None] * (x + 1.0)
    weight = 0.5 * end[:, None] * w
    delta = (costs[:, :, None] - costs[:, None, :]) / xi
    reach = np.maximum(r[None, :, None, :] ** alpha + delta[:, :, :, None], 0.0) ** (2.0 / alpha)
    exposure = np.pi * (system.density[None, None, :, None] * reach).sum(axis=2)
    joint = 2.0 * np.pi * system.density[None, :, None] * r[None] * np.exp(-exposure)
    return r, weight, joint


def plain_coverage(system: System, target: float, steps: int = 300) -> tuple[float, int, bool]:
    """P(τ₀) by damped iteration; also the steps taken and whether it settled."""
    tiers = system.shape[1]
    wait = np.zeros(tiers)
    settled = False
    step = 0
    for step in range(1, steps + 1):  # noqa: B007 - its last value is reported
        r, weight, joint = plain_joint(system, system.residual + wait)
        association = (joint * weight[None]).sum(axis=2)
        goal = np.zeros(tiers)
        waiting, rate = np.ones(tiers), np.zeros(tiers)
        for s in range(tiers):
            flow = system.probability * association[:, s]
            arrivals = system.intensity * flow.sum() / system.density[s]
            mean = float(flow @ system.occupancy[:, s] / flow.sum())
            c = int(system.concurrency[s])
            a = arrivals * mean
            ceiling = c - 0.1
            b = min(a, ceiling)
            waiting[s] = plain_erlang_c(c, b)
            rate[s] = (c - b) / mean
            goal[s] = waiting[s] / rate[s] * (1.0 + max(a - ceiling, 0.0) / 0.1)
        change = np.abs(goal - wait) / np.maximum(np.maximum(goal, wait), 1e-6)
        if change.max() < 1e-8:
            settled = True
            break
        wait = 0.5 * wait + 0.5 * goal
    xi, alpha = system.radio.xi, system.radio.alpha  # type: ignore[attr-defined]
    left = target - xi * r[None] ** alpha - system.residual[:, :, None]
    covered = 1.0 - waiting[None, :, None] * np.exp(-rate[None, :, None] * np.maximum(left, 0.0))
    served = joint * weight[None] * np.where(left >= 0, covered, 0.0)
    return float(system.probability @ served.sum(axis=(1, 2))), step, settled


# --- Measurements ----------------------------------------------------------------------------


def least_time(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` calls."""
    best = np.inf
    for _ in range(repeats):
        begin = clock()
        call()
        best = min(best, clock() - begin)
    return float(best)


def fixed_point(quick: bool) -> None:
    print("\nOne fixed-point solve, tolerance 1e-8 (all of `solve`, from W = 0)")
    print(f"{'types x profiles':>18} {'ms':>9} {'iterations':>11} {'target ms':>10}")
    model = ErlangC()
    sizes = [
        (3, 4, 1.0), (3, 10, None), (10, 10, None), (20, 10, None), (10, 20, None), (20, 20, 50.0)
    ]  # fmt: skip
    costs, radii = {}, {}
    for types, tiers, goal in sizes:
        system = synthetic(types, tiers, 0.55)

        def call(system: System = system) -> object:
            return solve(system, LOAD_AWARE, model, tolerance=1e-8)

        point = solve(system, LOAD_AWARE, model, tolerance=1e-8)
        seconds = least_time(call, 20 if quick else 100)
        costs[types, tiers] = seconds / point.iterations
        radii[types, tiers] = nodes_of(system, point.costs)
        wanted = "" if goal is None else f"{goal:g}"
        name = f"{types} x {tiers}"
        print(f"{name:>18} {1e3 * seconds:9.3f} {point.iterations:11d} {wanted:>10}")
    base = (10, 10)
    for size in ((20, 10), (10, 20), (20, 20)):
        grown = costs[size] / costs[base]
        bound = size[0] * size[1] ** 2 * radii[size] / (base[0] * base[1] ** 2 * radii[base])
        print(
            f"one iteration at {size[0]} x {size[1]}: {grown:.1f} times that at 10 x 10; "
            f"types x profiles^2 x radii grew {bound:.1f} times ({radii[size]:.0f} radii a type "
            f"against {radii[base]:.0f})"
        )


def nodes_of(system: System, costs: np.ndarray) -> float:
    """Mean number of quadrature nodes a type: the radii at which densities are taken."""
    area, power, _ = radio_area(system)
    none = np.empty(0)
    counts = [cost_nodes(k, area, power, none, none)[3].size for k in np.ascontiguousarray(costs)]
    return float(np.mean(counts))


def against_damping() -> None:
    print("\nNewton against the paper's damped iteration (eta 0.5, at most 300), preset baseline")
    print(f"{'intensity':>10} {'newton':>7} {'damped':>7} {'settled':>8} {'difference of A':>16}")
    model = ErlangC()
    base = System.from_scenario(preset("paper-baseline"))
    for intensity in (1.0, 2.0, 3.0, 4.0, 5.0, 8.0, 12.0, 16.0, 17.0):
        system = replace(base, intensity=intensity)
        fast = solve(system, LOAD_AWARE, model)
        slow = damped(system, LOAD_AWARE, model, max_iterations=300)
        gap = np.abs(fast.association - slow.association).max()
        print(
            f"{intensity:10g} {fast.iterations:7d} {slow.iterations:7d} "
            f"{slow.converged!s:>8} {gap:16.1e}"
        )


def placement(quick: bool) -> None:
    evaluations = 400 if quick else 2000
    print(f"\nPlacement over 10 profiles, 4 types, {evaluations} evaluations (SPSA and polish)")
    system = synthetic(4, 10, 0.45, seed=5)
    allowed = PlacementSet(np.zeros(10), np.zeros((0, 10)), np.zeros(0))
    value = Objective(system, LOAD_AWARE, ErlangC(), 0.8)
    spsa(value, allowed, evaluations=20)
    value = Objective(system, LOAD_AWARE, ErlangC(), 0.8)
    begin = clock()
    best, worth = spsa(value, allowed, evaluations=evaluations)
    seconds = clock() - begin
    print(
        f"{seconds:.2f} s ({1e3 * seconds / value.evaluations:.2f} ms each); target for 2,000: 5 s"
    )
    print(f"coverage {value(np.full(10, 0.1)):.4f} at the uniform mix -> {worth:.4f}; "
          f"profiles used: {(best > 1e-3).sum()}")  # fmt: skip

    print("\nBeside the straightforward version, on placements where its damping settles")
    light = replace(system, intensity=0.3 * system.intensity)
    rng = np.random.default_rng(1)
    places = rng.dirichlet(np.full(10, 3.0), 3 if quick else 8)
    begin = clock()
    slow = [plain_coverage(light.with_fraction(p), 0.8) for p in places]
    slow_each = (clock() - begin) / len(places)
    begin = clock()
    # A new objective for each: no warm start, as the straightforward version has none.
    fast = [Objective(light, LOAD_AWARE, ErlangC(), 0.8)(p) for p in places]
    fast_each = (clock() - begin) / len(places)
    settled = sum(ok for _, _, ok in slow)
    gap = max(abs(a - b) for a, (b, _, ok) in zip(fast, slow, strict=True) if ok)
    steps = float(np.mean([n for _, n, _ in slow]))
    print(
        f"NumPy, {RADII} radii: {1e3 * slow_each:.0f} ms each, {steps:.0f} steps on average, "
        f"{settled} of {len(places)} settled; here: {1e3 * fast_each:.2f} ms each"
    )
    costs = np.ascontiguousarray(light.residual)
    alone = least_time(lambda: associate(light, costs), 50)
    plain_alone = least_time(lambda: plain_joint(light, costs), 5)
    exact = associate(light, costs)
    _, weight, joint = plain_joint(light, costs)
    plain_error = np.abs((joint * weight[None]).sum(axis=2) - exact).max()
    print(f"ratio {slow_each / fast_each:.0f} (target: at least 20); coverage differs by {gap:.1e}")
    print(
        f"one association alone: {1e3 * plain_alone:.2f} ms against {1e3 * alone:.3f} ms, ratio "
        f"{plain_alone / alone:.0f}; the fixed grid errs by {plain_error:.1e}"
    )


def accuracy() -> None:
    count = 200_000
    latency = locate(preset("paper-baseline"))
    system, point = latency.system, latency.point
    cells = point.association.size
    one = norm.sf(3.0)
    bound = norm.isf(one / cells)
    everywhere = kstwobign.isf(2.0 * one) / np.sqrt(count)
    print(
        f"\nMonte Carlo, {count:,} exact nearest-distance samples a type (Theory F4), preset at "
        f"intensity {system.intensity:g}.\nAt the level of three standard errors of one "
        f"comparison: {cells} associations within {bound:.2f}, the TTFT CDF within "
        f"{everywhere:.1e} everywhere"
    )
    print(f"{'seed':>5} {'association, largest error':>27} {'standard errors':>16} {'TTFT CDF':>9}")
    laws = [latency.model.excess(load) for load in point.loads]
    waiting = np.array([law.wait_probability for law in laws])
    rate = np.array([law.decay(0) or 1.0 for law in laws])
    deviation = np.sqrt(point.association * (1.0 - point.association) / count)
    for seed in range(8):
        rng = np.random.default_rng(seed)
        seen = np.zeros_like(point.association)
        kind = rng.choice(len(system.types), count, p=system.probability)
        ttft = np.empty(count)
        for q in range(len(system.types)):
            distance = nearest_distances(system.density, count, rng)
            radio = system.radio.delay(distance)
            chosen = (radio + point.costs[q]).argmin(axis=1)
            seen[q] = np.bincount(chosen, minlength=len(system.names)) / count
            waits = rng.random(count) < waiting[chosen]
            wait = waits * rng.exponential(1.0, count) / rate[chosen]
            drawn = radio[np.arange(count), chosen] + system.residual[q, chosen] + wait
            ttft[kind == q] = drawn[kind == q]
        ttft.sort()
        at = np.linspace(0, count - 1, 400).astype(int)
        law = np.array([latency.coverage(t) for t in ttft[at]])
        gap = np.abs((at + 0.5) / count - law).max()
        off = np.abs(seen - point.association)
        print(f"{seed:5d} {off.max():27.2e} {(off / deviation).max():16.2f} {gap:9.2e}")


def outcome(quick: bool) -> None:
    print("\nOne whole outcome (mean, coverage, quantiles, 200-point curve), preset baseline")
    scenario = preset("paper-baseline")
    found = locate(scenario)
    seconds = least_time(lambda: Latency(found.system, found.point, found.model).coverage(0.8), 50)
    print(f"coverage at one deadline: {1e3 * seconds:.3f} ms")
    seconds = least_time(
        lambda: Latency(found.system, found.point, found.model).curve(), 3 if quick else 10
    )
    print(f"curve of 200 points: {1e3 * seconds:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    quick = parser.parse_args().quick
    print(f"{processor()}, {platform.system()} {platform.machine()}, Python "
          f"{platform.python_version()}, NumPy {np.__version__}, Numba {numba.__version__}, code "
          f"{code_version()}; CPU time of one thread")  # fmt: skip
    fixed_point(quick)
    against_damping()
    placement(quick)
    outcome(quick)
    accuracy()


if __name__ == "__main__":
    main()
