"""The guided tour: `python -m adaptersync_tools.quickstart`.

Warms up a small base model, starts a fleet on this machine, trains an adapter on it with TRL, shows how it goes, stops
everything, and says what came of it. Each run has a directory of its own below `--out`; the base model is made once.
With `--simulated` the replicas are simulated and the trainer is synthetic: the same path, without torch or vLLM.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
import orjson

from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import Row, read_rollouts
from adaptersync_tools import evidence, summary
from adaptersync_tools.cli.common import run_command, visit
from adaptersync_tools.cli.local import interrupt_on_sigterm
from adaptersync_tools.curves import Curve, can_draw_pictures, write_picture
from adaptersync_tools.demo.lessons import CARRY, LESSONS, Lesson, LessonName
from adaptersync_tools.demo.patience import Patience
from adaptersync_tools.live import Live
from adaptersync_tools.output import Narrator, console
from adaptersync_tools.report import show
from adaptersync_tools.supervisor import Service, Spec, StackFailed, Supervisor, python
from adaptersync_tools.up import Stack, StackSettings

KEPT_RUNS = 3
WARM_UP_S = 900.0  # about 45 s of work on two free cores
SETTLE_S = 120.0
EVALUATE_S = 300.0
LOOK_S = 0.5
PAGE = 1000
RUN = "quickstart"
WHEN = ("before", "after")  # training: the base model and the run
T = TypeVar("T")


class Tour:
    """One run of the quickstart."""

    def __init__(
        self, *, steps: int, replicas: int, simulated: bool, lesson: Lesson, reward: str | None, out: Path
    ) -> None:
        self.steps = steps
        self.replicas = replicas
        self.simulated = simulated
        self.lesson = lesson
        self.reward = "synthetic" if simulated else reward or lesson.reward
        self.out = out.absolute()
        self.directory = self.out / datetime.now(tz=UTC).strftime("run-%Y%m%d-%H%M%S")
        self.durations: dict[str, float] = {}
        self.console = console()
        self.narrator = Narrator(self.console)

    def run(self) -> summary.Summary:
        """From nothing to a summary; leaves no process behind."""
        self.directory.mkdir(parents=True)
        self._forget_old_runs()
        try:
            base = self._timed("base model", self._base_model)
            stack = Stack(
                StackSettings(
                    model=base,
                    state_dir=self.directory / "fleet",
                    replicas=self.replicas,
                    simulated=self.simulated,
                    engine={} if self.simulated else self.lesson.engine,
                    overrides={"trainer.run": RUN, "coordinator.min_ready": self.replicas},
                ),
                self.narrator,
            )
            began = time.monotonic()
            with stack:
                self.durations["start of the fleet"] = time.monotonic() - began
                self._timed("training", lambda: self._train(stack, base))
                self._timed("last outcome", lambda: self._settle(stack))
                found = self._timed("evidence", lambda: self._collect(stack))
                if not self.simulated:
                    held_out = self._timed("held-out problems", lambda: self._held_out(stack, base))
                    found = msgspec.structs.replace(found, held_out=held_out)
                began = time.monotonic()
            self.durations["stop"] = time.monotonic() - began
        finally:
            self.narrator.quiet()
        found = msgspec.structs.replace(self._judged(found), durations=self.durations)
        self._draw(found)
        (self.directory / "summary.json").write_bytes(
            orjson.dumps(msgspec.to_builtins(found), option=orjson.OPT_INDENT_2)
        )
        return found

    def _forget_old_runs(self) -> None:
        for old in sorted(self.out.glob("run-*"))[:-KEPT_RUNS]:
            shutil.rmtree(old)
        latest = self.out / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(self.directory.name)

    def _base_model(self) -> Path:
        if self.simulated:
            from adaptersync_tools.demo.synthetic import write_base_model

            return write_base_model(self.out / "base-synthetic")
        return make_base_model(self.out, self.directory, self.narrator, self.lesson.base)

    def _train(self, stack: Stack, base: Path) -> None:
        out = self.directory / "train"
        arguments = ["--run", RUN, "--steps", str(self.steps), "--out", str(out)]
        module = "adaptersync_tools.demo.synthetic"
        if not self.simulated:
            module = "adaptersync_tools.demo.train"
            arguments += ["--base", str(base), "--reward", self.reward, "--lesson", self.lesson.name]
        service = stack.run("train", module, *arguments)
        with Live(self.console, stack.config, run=RUN, steps=self.steps, lines=out / "steps.jsonl") as live:
            patience = Patience(self.lesson.step_s, service.log_path)

            def look() -> None:
                stack.check()
                patience.look(live.look())

            to_the_end(service, float("inf"), look)
            live.look()

    def _settle(self, stack: Stack) -> None:
        """Until every published version has its outcome."""

        async def waiting(registry: Registry) -> list[str]:
            names = [name for name, _ in await registry.published(RUN)]
            records = await registry.records(names)
            done = ("current", "retained", "retiring", "retired", "superseded", "rolled_back", "voided")
            return [name for name, (_, record) in zip(names, records, strict=True) if record.get("state") not in done]

        stack.supervisor.wait_for(
            "the outcome of the last version",
            lambda: not visit(stack.config, waiting),
            limit_s=SETTLE_S,
            interval_s=LOOK_S,
        )

    def _held_out(self, stack: Stack, base: Path) -> list[summary.HeldOut]:
        """The base and the trained adapter on problems that training never saw, as the fleet serves them."""
        models = (stack.config.group.base_model, RUN)
        options = ("--lesson", self.lesson.name, "--base", str(base))
        service = stack.run("evaluate", "adaptersync_tools.demo.evaluate", *models, *options)
        to_the_end(service, EVALUATE_S, stack.check)
        return [msgspec.convert(line, summary.HeldOut) for line in read_lines(service.log_path) if "greedy" in line]

    def _collect(self, stack: Stack) -> summary.Summary:
        async def read(registry: Registry) -> tuple[list[dict[str, str]], list[Row], list[Any], list[str]]:
            events = await _whole_stream(registry, registry.keys.events)
            rows = await read_rollouts(registry)
            kept = await registry.records([name for name, _ in await registry.published(RUN)])
            table = await registry.table()
            return events, rows, [manifest.timings for manifest, _ in kept if manifest], table.window(RUN)

        events, rows, timings, window = visit(stack.config, read)
        steps = self._step_lines()
        cache = None
        if len(window) >= 2:  # before the first two promotions there is nothing to keep apart
            cache = evidence.prefix_cache(stack.router_url, (window[0], window[1]), seed=time.time_ns())
        if self.simulated:
            pauses: int | None = evidence.pauses_of_simulators(stack.engine_urls.values())
        else:
            pauses = evidence.pauses_in_logs(sorted(stack.logs.glob("engine-*.log")))
        return summary.Summary(
            run=RUN,
            mode="simulated" if self.simulated else "trl",
            reward_function=self.reward,
            replicas=self.replicas,
            steps=len(steps),
            sound=False,  # until it is judged
            objections=[],
            reward=summary.reward_of([step["reward"] for step in steps if "reward" in step]),
            right=summary.reward_of([step["right"] for step in steps if "right" in step]),
            ratio=summary.spread_of([step["ratio"] for step in steps if "ratio" in step]),
            versions=summary.versions_of(events),
            latency=summary.latency_of(events, timings),
            rollouts=summary.rollouts_of(rows),
            prefix_cache=cache,
            pauses=pauses,
            lesson=self.lesson.name,
            restarts={name: each.restarts for name, each in stack.supervisor.services.items() if each.restarts},
            durations={},
        )

    def _judged(self, found: summary.Summary) -> summary.Summary:
        objections = summary.judge(
            reward_function=self.reward,
            wanted_steps=self.steps,
            steps=self._step_lines(),
            versions=found.versions,
            rollouts=found.rollouts,
            prefix_cache=found.prefix_cache,
            pauses=found.pauses,
            held_out=found.held_out,
        )
        return msgspec.structs.replace(found, sound=not objections, objections=objections)

    def _draw(self, found: summary.Summary) -> None:
        """The picture beside the summary, where one can be drawn."""
        curves = self.curves()
        if not curves or not can_draw_pictures():
            return
        levels = {f"held out, {name}": each.sampled for name, each in zip(WHEN, found.held_out, strict=False)}
        control = ", a control: reward by coin" if self.reward == summary.CONTROL else ""
        title = f"{found.steps} steps of TRL on {found.replicas} replicas{control}"
        write_picture(self.directory / "curve.png", title, curves, unit="share of answers", levels=levels)

    def curves(self) -> list[Curve]:
        """What was rewarded, and of a control what was right besides; none without a reward."""
        names = {"reward": "rewarded", "right": "right"}
        if self.reward == "exact":
            names = {"right": "right answers"}
        steps = self._step_lines()
        told = {shown: tuple(step[name] for step in steps if name in step) for name, shown in names.items()}
        return [Curve(name=name, values=values) for name, values in told.items() if values]

    def _step_lines(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "train" / "steps.jsonl")

    def _timed(self, what: str, work: Callable[[], T]) -> T:
        began = time.monotonic()
        result = work()
        self.durations[what] = time.monotonic() - began
        self.narrator.done(what, self.durations[what])
        return result


def make_base_model(out: Path, logs: Path, narrator: Narrator, maker: str = CARRY.base) -> Path:
    """A lesson's base model below `out`, made by that module if it is not there yet."""
    with Supervisor(logs) as supervisor:
        command = python(maker, "--dir", str(out))
        service = supervisor.start(Spec(name="warmup", command=command, tier=0, restart=False))
        what = "the base model, made once"
        narrator.waiting(what)

        def look() -> None:
            if said := [line for line in read_lines(service.log_path) if line.get("event") == "step"]:
                narrator.detail(f"{what}: step {said[-1]['step']} of {said[-1]['steps']}")

        to_the_end(service, WARM_UP_S, look)
    for line in read_lines(service.log_path):
        if line.get("event") == "ready":
            return Path(line["base"])
    raise StackFailed("warm-up did not say where the base model is", log=str(service.log_path))


def to_the_end(service: Service, limit_s: float, look: Callable[[], None]) -> None:
    """Until the program ended well; `look` is called all the while. StackFailed when it failed, or is late."""
    deadline = time.monotonic() + limit_s
    while service.returncode is None:
        if time.monotonic() > deadline:
            raise StackFailed(
                f"{service.spec.name} takes too long", next_step="read its log", log=str(service.log_path)
            )
        look()
        time.sleep(LOOK_S)
    if service.returncode:
        raise StackFailed(
            f"{service.spec.name} failed with {service.returncode}: {service.last_words()}",
            next_step="read its log",
            log=str(service.log_path),
        )


async def _whole_stream(registry: Registry, key: str) -> list[dict[str, str]]:
    found: list[dict[str, str]] = []
    after = "-"
    while page := await registry.client.command("XRANGE", key, after, "+", "COUNT", PAGE):
        found += [fields for _, fields in page]
        after = f"({page[-1][0]}"
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole JSON objects, a line each; other lines, and one that is still on its way, are left out."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [orjson.loads(line) for line in lines if line.startswith(b"{") and line.endswith(b"}\n")]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", type=click.IntRange(1, 10_000), default=60, show_default=True, help="Optimizer steps.")
@click.option("--replicas", type=click.IntRange(1, 16), default=2, show_default=True, help="vLLM servers.")
@click.option("--simulated", is_flag=True, help="Simulated replicas and a synthetic trainer: no torch, no vLLM.")
@click.option("--reward", type=click.Choice(["exact", "digits", "coin"]),
              help="What answers are rewarded for: the right sum, or digits; coin is the control, from which nothing "
              "may be learnt.  [default: exact; digits for smollm2]")  # fmt: skip
@click.option("--model", type=click.Choice(["carry", "smollm2"]), default="carry", show_default=True,
              help="One made on the spot learns to carry; SmolLM2-135M, to answer with a number.")  # fmt: skip
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/quickstart"),
              show_default=True, help="Where runs are kept, the last few of them.")  # fmt: skip
def quickstart(steps: int, replicas: int, simulated: bool, reward: str | None, model: LessonName, out: Path) -> int:
    """Train a LoRA adapter on a fleet of vLLM servers, all on this machine.

    Exit status 0 when the run was sound, 1 when it was not; the reasons are in the summary.

    \b
    Examples:
      tools/quickstart --simulated
      tools/quickstart --steps 60
      tools/quickstart --reward coin
    """
    interrupt_on_sigterm()
    lesson = LESSONS[model]
    tour = Tour(steps=steps, replicas=replicas, simulated=simulated, lesson=lesson, reward=reward, out=out)
    found = tour.run()
    show(found, tour.directory, tour.console, tour.curves())
    return 0 if found.sound else 1


if __name__ == "__main__":
    sys.exit(run_command(quickstart, None, "quickstart"))
