"""The demo: calibrate, predict, run and compare on this machine, from one trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from testbed.cli.common import Json, Seed, emit, log, page
from testbed.errors import ScenarioError

if TYPE_CHECKING:
    from calibration.record import Calibration
    from cluster.deployment import Deployment
    from testbed.scenario import EngineSpec, Scenario
    from testbed.workload.trace import Trace

POLICIES = ("nearest", "prefix_only", "load_aware")
LOADS = (0.35, 0.65)
"""Share of time that the busiest node would compute, one request at a time, under ``nearest``."""
RADIO = {"model": "power_law", "xi": 0.05, "alpha": 2.0}
DEEP = 1
"""Place of the profile that pins something, behind the fallback."""
POOL_BLOCKS = 384
PINNED_SHARE = 0.4
"""Most of the pool that a profile may pin."""
MEAN_PROMPT_TOKENS = 700
"""A trace is scaled down to about this mean prompt, so that a small machine can prefill it."""
OUTPUT_TOKENS = 8


def demo(
    trace: Annotated[
        Path | None, typer.Option("--trace", help="trace file; absent: a seeded workload")
    ] = None,
    engine: Annotated[str, typer.Option("--engine", help="vllm, sglang or emulated")] = "vllm",
    deep_engine: Annotated[
        str | None,
        typer.Option("--deep-engine", help="engine of the replicas with the deep profile"),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="preset, directory or hub name")
    ] = "tiny-llama",
    device: Annotated[
        str | None, typer.Option("--device", help="device-time profile (real scheduler, no GPU)")
    ] = None,
    token_scale: Annotated[
        float | None, typer.Option("--token-scale", help="tokens kept of each trace token")
    ] = None,
    arrivals: Annotated[
        str, typer.Option("--arrivals", help="verbatim, jitter, poisson or gamma")
    ] = "poisson",
    output_tokens: Annotated[
        int | None,
        typer.Option("--output-tokens", min=0, help="fix generated tokens; 0: the trace's own"),
    ] = OUTPUT_TOKENS,
    seconds: Annotated[
        float, typer.Option("--seconds", min=5, help="length of each of the six runs")
    ] = 24.0,
    gpus_per_replica: Annotated[float, typer.Option("--gpus-per-replica", min=0)] = 0.0,
    replicas: Annotated[int, typer.Option("--replicas", min=2)] = 2,
    seed: Seed = 1,
    out: Annotated[
        Path | None, typer.Option("--out", help="new folder; default out/demo-TIME")
    ] = None,
    as_json: Json = False,
) -> None:
    """Everything on this machine: calibrate, predict, run, compare; ends with report.html.

    Two replicas of a real engine stand for an area with one profile each; three policies at two
    loads are predicted before they are measured. Takes about seven minutes on two cores.
    """
    from cluster.devices import engine_on_device
    from cluster.session import ray_session
    from testbed.scenario import EngineSpec, WorkloadSpec

    console = log()
    folder = _new_folder(out)
    try:
        options: dict[str, Any] = {
            "arrivals": arrivals,
            "output_tokens": output_tokens or None,
            "seed": seed,
        }
        if token_scale is not None:
            options["token_scale"] = token_scale
        spec = EngineSpec.model_validate(
            {
                "name": engine,
                "model": model,
                "replicas": replicas,
                "device": device,
                "gpus_per_replica": gpus_per_replica,
                **({} if device is not None else _limits(model)),
            }
        )
        workload = WorkloadSpec.model_validate(options)
        EngineSpec.model_validate({"name": deep_engine or engine})
    except ValueError as error:
        raise ScenarioError(f"demo: {error}") from None
    spec = engine_on_device(spec)
    source, workload = _workload(trace, workload, spec, folder, seed)
    console.print(f"[bold]demo[/] in {folder}: {len(source)} requests of {workload.trace}")
    with ray_session() as cluster:
        console.print(f"using {cluster}", style="dim")
        comparison = Demo(spec, source, workload, folder, seed, seconds, console, deep_engine).run()
    console.print(f"[bold]report:[/] {folder / 'report.html'}")
    if as_json:
        emit(comparison.to_dict())
        return
    from testbed.reporting.tables import render_comparison

    render_comparison(page(), comparison)


class Demo:
    """One demo from started replicas to report; ``run`` once."""

    def __init__(
        self,
        engine: EngineSpec,
        trace: Trace,
        workload: Any,
        folder: Path,
        seed: int,
        seconds: float,
        console: Any,
        deep_engine: str | None = None,
    ) -> None:
        self._engine = engine
        self._trace = trace
        self._workload = workload
        self._folder = folder
        self._seed = seed
        self._seconds = seconds
        self._console = console
        self._deep_engine = None if deep_engine == engine.name else deep_engine
        self._outcomes: list[Any] = []
        self._speeds: list[dict[str, Any]] = []

    def run(self) -> Any:
        """Calibrate, predict, run, check the machine's speed, compare, report."""
        from cluster.deployment import deployed
        from cluster.experiment import stream_of
        from testbed.outcome import dump_json, write_atomically
        from testbed.reporting.compare import compare
        from testbed.reporting.report import write_report

        with deployed(
            self._bootstrap(),
            progress=lambda line: self._console.print(f"{line} …", style="dim"),
            log_dir=self._folder,
            seed=self._seed,
        ) as nodes:
            calibrations = self._calibrate(nodes, "before")
            scenario = self._scenario(calibrations[0])
            replica = next(n.id for n in nodes.nodes if n.profile == DEEP)
            if self._deep_engine is not None:
                scenario = self._with_deep_engine(scenario, calibrations[replica], replica)
            nodes.adopt(scenario)
            nodes.pin(stream_of(scenario, 1.0, 10, self._seed))
            self._check_speed(nodes, calibrations, "before")
            questions = self._questions(scenario)
            self._predict(questions)
            for k, (load, question) in enumerate(questions):
                self._measure(nodes, load, question)
                if k == len(questions) // 2 - 1:
                    self._check_speed(nodes, calibrations, "between")
            self._check_speed(nodes, calibrations, "after")
            # A device's own time does not drift.
            drifts = self._engine.device is None
            again = self._calibrate(nodes, "after") if drifts else calibrations
        self._state_drift()
        comparison = compare(self._outcomes)
        write_atomically(self._folder / "comparison.json", dump_json(comparison.to_dict()))
        write_report(
            self._folder / "report.html",
            comparison,
            title=f"Demo: {self._engines()} serving {self._engine.model}{self._clock()}",
            calibration=calibrations[0].model_dump(mode="json", exclude_none=True),
            calibration_after=again[0].model_dump(mode="json", exclude_none=True)
            if drifts
            else None,
            sections=self._of_deep_engine(calibrations[replica], again[replica]),
        )
        return comparison

    # -- before anything is known of the engine --

    def _bootstrap(self) -> Scenario:
        """The engine alone, with placeholders that :meth:`_scenario` replaces."""
        from cluster.experiment import unmeasured

        return unmeasured("demo", self._engine, {"fallback": None, "deep": self._deep_engine})

    # -- steps --

    def _calibrate(self, nodes: Deployment, when: str) -> list[Calibration]:
        reference = (int(self._lengths().mean()), int(self._outputs().mean()))
        if self._engine.device is None:
            records = self._measured(nodes, when, reference)
        else:
            records = [self._of_device(self._engine.device, reference)] * len(nodes.nodes)
        for i, record in enumerate(records):
            name = "calibration" if when == "before" else f"calibration-{when}"
            record.save(self._folder / (f"{name}.json" if i == 0 else f"{name}-replica-{i}.json"))
        return records

    def _of_device(self, device: str, reference: tuple[int, int]) -> Calibration:
        """The record whose pace the engine keeps; m_run is that of this workload (Theory H12)."""
        from calibration.record import Calibration, Estimate
        from cluster.devices import device_path

        record = Calibration.load(device_path(device))
        return record.model_copy(
            update={"m_run": Estimate(value=record.sequence_bytes(*reference))}
        )

    def _measured(
        self, nodes: Deployment, when: str, reference: tuple[int, int]
    ) -> list[Calibration]:
        from rich.progress import Progress

        from calibration.measure import calibrate

        longest = int(self._lengths().max())
        with Progress(console=self._console, transient=True) as bar:
            task = bar.add_task("calibrating", total=None)

            def show(stage: str, done: int, total: int) -> None:
                bar.update(task, description=f"calibrating: {stage}", completed=done, total=total)

            return nodes.measure(
                calibrate,
                progress=show,
                each=lambda i: {
                    "seed": self._seed + 1000 * (i + 1) + (500 if when == "after" else 0)
                },
                effort="quick",
                max_prompt=min(longest, self._engine.max_model_len - 64),
                reference=reference,
            )

    def _scenario(self, calibration: Calibration) -> Scenario:
        """Profiles and types from the trace, coefficients from the calibration."""
        from testbed.scenario import Memory
        from testbed.workload.derivation import derive

        record = calibration.memory
        if calibration.prefill is None or record.kappa is None or record.pool_bytes is None:
            raise ScenarioError("calibration: without prefill, κ or pool there is no scenario")
        sequence = calibration.m_run
        if sequence is None:
            raise ScenarioError("calibration: without m_run there is no scenario")
        memory = Memory(
            capacity=record.pool_bytes, per_sequence=sequence.value, per_token=record.kappa
        )
        room = memory.capacity - memory.per_sequence
        derivation = derive(
            self._trace,
            prefill=calibration.prefill.coefficients,
            memory=memory,
            radio=RADIO,
            budget=min(PINNED_SHARE * memory.capacity, room),
            profiles=2,
            types=4,
            name="demo",
            engine=self._engine.model_copy(
                update={"calibration": str(self._folder / "calibration.json")}
            ),
            workload=self._workload,
            decode_seconds=lambda n: calibration.occupancy(max(n, 1.0)),
            intensity=1.0,
            seed=self._seed,
        )
        self._loss = derivation.clusters.loss
        scenario = derivation.scenario
        if len(scenario.profiles) != 2:
            raise ScenarioError(
                f"{self._workload.trace}: no shared prefix fits in "
                f"{PINNED_SHARE * memory.capacity:.3g} bytes: there is no deep profile to place"
            )
        return scenario

    def _with_deep_engine(
        self, scenario: Scenario, calibration: Calibration, replica: int
    ) -> Scenario:
        """The deep profile on its own engine, with what was measured of that one."""
        if calibration.prefill is None:
            raise ScenarioError(f"calibration of {self._deep_engine}: it has no prefill")
        profiles = list(scenario.profiles)
        profiles[DEEP] = profiles[DEEP].model_copy(
            update={
                "engine": self._deep_engine,
                "calibration": str(self._folder / f"calibration-replica-{replica}.json"),
                "prefill": calibration.prefill.coefficients,
                "decode_occupancy": {
                    q.name: calibration.occupancy(max(q.output_tokens, 1.0))
                    for q in scenario.requests
                },
            }
        )
        return scenario.replace(profiles=profiles)

    def _of_deep_engine(self, before: Calibration, after: Calibration) -> list[Any]:
        from testbed.reporting.calibration_tables import calibration_tables
        from testbed.reporting.page import Section

        if self._deep_engine is None:
            return []
        documents = (x.model_dump(mode="json", exclude_none=True) for x in (before, after))
        title = f"Calibration of {self._deep_engine}, under the deep profile"
        return [Section.of(title, *calibration_tables(*documents))]

    def _clock(self) -> str:
        device = self._engine.device
        return "" if device is None else f" in the device time of {device}"

    def _engines(self) -> str:
        other = self._deep_engine
        return self._engine.name + (f" (deep profile: {other})" if other else "")

    def _questions(self, scenario: Scenario) -> list[tuple[float, Scenario]]:
        """Three policies at each load, the intensity set by the busiest node under ``nearest``."""
        from testbed.theory import predict

        nearest = predict(scenario.replace(policy="nearest"))
        busy = [tier.arrival_rate / tier.service_rate for tier in nearest.tiers.values()]
        per_intensity = max(busy) / scenario.demand.intensity
        questions = []
        for load in LOADS:
            for policy in POLICIES:
                asked = scenario.replace(policy=policy, name=f"demo at load {load:g}")
                questions.append((load, asked.with_field("demand.intensity", load / per_intensity)))
        return questions

    def _predict(self, questions: list[tuple[float, Scenario]]) -> None:
        """Every prediction is on disk before the first measurement starts."""
        from testbed.theory import predict

        for load, question in questions:
            path = self._folder / f"scenario-{load:g}-{question.policy}.yaml"
            path.write_text(question.to_yaml(), encoding="utf-8")
            for model in DEMO_MODELS:
                outcome = predict(question, delay_model=model)
                self._keep(outcome, f"predicted-{model}", load)
            self._simulate(question, load)

    def _simulate(self, question: Scenario, load: float) -> None:
        """The engine's step loop in virtual time, on the same arrivals that will be measured."""
        from testbed.simulation import simulate

        asked = question.replace(
            simulation={"node_model": "engine", "nodes": self._engine.replicas, "waits": "node"}
        )
        outcome = simulate(asked, requests=self._requests(question), seed=self._seed)
        self._keep(outcome, "simulated-steps", load)

    def _requests(self, question: Scenario) -> int:
        """Requests of one run: what arrives at all replicas in its seconds."""
        rate = question.demand.intensity * self._engine.replicas / question.nodes.density
        return max(20, round(rate * self._seconds))

    def _measure(self, nodes: Deployment, load: float, question: Scenario) -> None:
        from cluster.experiment import stream_of
        from cluster.progress import replay_progress
        from cluster.run import run

        nodes.adopt(question)
        with replay_progress(self._console, f"load {load:g} {question.policy:12}") as bar:
            outcome = run(
                question,
                nodes,
                stream_of,
                requests=self._requests(question),
                seed=self._seed,
                records_path=self._folder / f"records-{load:g}-{question.policy}.jsonl",
                progress=bar,
            )
        self._keep(outcome, "measured", load)
        self._console.print(
            f"load {load:g} {question.policy:12} TTFT p50 "
            f"{outcome.ttft.quantiles['0.5'] * 1e3:6.0f} ms, mean {outcome.ttft.mean * 1e3:6.0f} ms"
        )

    def _check_speed(self, nodes: Deployment, records: list[Calibration], when: str) -> None:
        checks = nodes.measure(_speed, each=lambda i: {"calibration": records[i]})
        self._speeds.append({"when": when, "replicas": checks})

    def _state_drift(self) -> None:
        """Put the machine's speed before and after beside every measured outcome."""
        from testbed.outcome import dump_json, write_atomically

        def speed(check: dict[str, Any]) -> float:
            replicas = check["replicas"]
            return sum(r["relative_speed"] for r in replicas) / len(replicas)

        first, last = speed(self._speeds[0]), speed(self._speeds[-1])
        stated = {
            "before": first,
            "after": last,
            "drift_percent": 100 * (last / first - 1),
            "relative_to": "calibration",
            "checks": self._speeds,
            "what": "engine speed relative to its calibration, mean over replicas; 1 is as then",
        }
        write_atomically(self._folder / "machine-speed.json", dump_json(stated, indent=True))
        for k, outcome in enumerate(self._outcomes):
            if outcome.kind == "measured":
                extra = {**outcome.extra, "machine_speed": stated, "type_loss_tokens": self._loss}
                self._outcomes[k] = outcome.model_copy(update={"extra": extra})

    # -- small things --

    def _keep(self, outcome: Any, kind: str, load: float) -> None:
        outcome.save(self._folder / f"{kind}-{load:g}-{outcome.policy}.json")
        self._outcomes.append(outcome)

    def _scaled(self) -> Any:
        from testbed.workload.forest import PrefixForest
        from testbed.workload.scaling import scale_requests

        return scale_requests(
            self._trace, PrefixForest.of(self._trace), self._workload, self._engine
        )

    def _lengths(self) -> Any:
        return self._scaled().input_tokens

    def _outputs(self) -> Any:
        return self._scaled().output_tokens


DEMO_MODELS = ("erlang_c", "token_server", "step_chain")
"""The paper's baseline first, then two that know the engine's steps."""


async def _speed(engine: Any, facts: Any, *, progress: Any, calibration: Calibration) -> Any:
    """A speed check as a job of :meth:`cluster.deployment.Deployment.measure`."""
    from calibration.speed import speed_check

    del facts, progress
    return await speed_check(engine, calibration)


def _new_folder(out: Path | None) -> Path:
    from datetime import datetime

    folder = out or Path("out") / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    if folder.exists() and any(folder.iterdir()):
        raise ScenarioError(f"--out: {folder} is not empty; nothing there is overwritten")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _limits(model: str) -> dict[str, Any]:
    """Longest request and pool of an engine that computes here; a device brings its own."""
    if model == "tiny-llama":
        return {"max_model_len": 4096, "num_blocks": POOL_BLOCKS}
    return {"max_model_len": 32768}


def _workload(
    path: Path | None, workload: Any, engine: EngineSpec, folder: Path, seed: int
) -> tuple[Trace, Any]:
    """The trace and the workload section that names it, scaled for the machine unless told."""
    from testbed.workload.readers.own import write_trace
    from testbed.workload.synthetic import SyntheticSpec, synthetic_trace
    from testbed.workload.tokenizers import deployed_tokenizer
    from testbed.workload.trace import read_trace

    if path is None:
        path = folder / "workload.jsonl"
        write_trace(synthetic_trace(SyntheticSpec(seed=seed)), path)
    trace = read_trace(path, tokenizer=deployed_tokenizer(engine.model))
    changes: dict[str, Any] = {"trace": str(path)}
    if workload.token_scale == 1.0 and engine.device is None and engine.gpus_per_replica == 0:
        mean = float(trace.input_tokens.mean())
        if mean > MEAN_PROMPT_TOKENS:
            # Whole engine blocks where that is near: a trace block then fills whole KV blocks.
            block = trace.block_size or 1
            kept = max(1, round(block * MEAN_PROMPT_TOKENS / mean / engine.block_size))
            changes["token_scale"] = min(1.0, kept * engine.block_size / block)
    if workload.max_tokens is None:
        changes["max_tokens"] = engine.max_model_len - 64
        if engine.device is not None and engine.num_blocks is not None:
            # A device's pool is what it is: prompts that do not fit beside a profile are dropped.
            room = (1 - PINNED_SHARE) * engine.num_blocks * engine.block_size
            outputs = workload.output_tokens or int(trace.output_tokens.max())
            changes["max_tokens"] = min(changes["max_tokens"], int(room) - outputs)
    return trace, workload.model_copy(update=changes)


COMMANDS: dict[str, Callable[..., None]] = {"demo": demo}
