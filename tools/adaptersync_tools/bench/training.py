"""The quickstart's training on a fleet, beside TRL's own trainer and sync on one vLLM: same cores, same seeds.

One run after the other, each with servers of its own, so that nothing of the other way is on the machine meanwhile.
What was trained is told by TRL's own metrics, what was paused by the servers' logs, who answered by the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal

import msgspec
from msgspec import Struct

from adaptersync_core.config import variable
from adaptersync_core.errors import ConfigError, NameInvalid
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import SERVED, Row, read_rollouts
from adaptersync_tools.bench.equivalence import Difference, difference, thirds
from adaptersync_tools.bench.result import Figure, Machine, Result, Target, now
from adaptersync_tools.cli.common import visit
from adaptersync_tools.curves import Curve, mean_curve
from adaptersync_tools.demo.lessons import CARRY
from adaptersync_tools.demo.patience import Patience
from adaptersync_tools.engines import HOST, EngineSettings, gpu_count, plain_spec
from adaptersync_tools.evidence import pauses_in_logs
from adaptersync_tools.quickstart import read_lines, to_the_end
from adaptersync_tools.summary import CHANCE_ERRORS, Spread, spread_of
from adaptersync_tools.supervisor import Service, Spec, StackFailed, Supervisor, python
from adaptersync_tools.up import CLIENT_TIER, ENGINE_READY_S, Progress, Stack, StackSettings, answers, free_ports

Way = Literal["adaptersync", "TRL"]
WAYS: tuple[Way, Way] = ("adaptersync", "TRL")
TRAINER = "adaptersync_tools.demo.train"
RUN = "bench"
BY_NUMBER = "@v"  # in a name that asks for one version of a run
SAVE_SHARE = 1.1  # of the save: what a sync of ours may hold a step up for
VISIBLE_SHARE = 0.5  # of what is learnt: a difference this large must not pass as noise


class Settings(Struct, frozen=True, kw_only=True):
    """`repeats` runs of each way, with seeds from `seed` on; the fleet has `replicas`, TRL one vLLM. As many
    `prompts` a step that it takes longer than a promotion by engines that share the trainer's cores."""

    steps: int = 40
    repeats: int = 2
    replicas: int = 2
    seed: int = 0
    max_staleness: int = 2
    sync_steps: int = 1
    prompts: int = 64


class Ran(Struct, frozen=True, kw_only=True):
    """One training. `steps` are its lines of steps.jsonl. Of answers, where somebody looks: `wrong_version` came from
    another version than was asked for, `substituted` stand for another one by rule, `unnumbered` are of requests that
    asked for no version by number, and so for whatever was current."""

    way: Way
    seed: int
    steps: tuple[dict[str, Any], ...]
    pauses: int
    wrong_version: int | None = None
    substituted: int | None = None
    unnumbered: int | None = None
    answers: int | None = None

    def of(self, name: str) -> list[float]:
        return [step[name] for step in self.steps if name in step]

    def of_syncs(self, name: str) -> list[float]:
        """Of the steps after the first, if there are any: TRL counts the sync before training as that one's, too."""
        return [step[name] for step in self.steps[1:] or self.steps if name in step]

    def of_own(self) -> list[float]:
        """Of the same steps, what the sync took without its wait for the fleet, if it has one."""
        return [
            step["sync_s"] - step.get("promotion_wait_s", 0.0)
            for step in self.steps[1:] or self.steps
            if "sync_s" in step  # not every step is followed by one
        ]

    def of_saves(self) -> list[float]:
        """How many of its own saves each of those syncs took: saves differ among themselves by more than the rest."""
        return [sync / save for sync, save in zip(self.of_syncs("sync_s"), self.of_syncs("save_s"), strict=True)]


class Told(Struct, frozen=True, kw_only=True):
    """What one way came to over all its runs. Seconds are means of a step, or of a sync; `paused_s` is for how long its
    servers answered nobody; `other_s` is what a sync takes beside its save, `own_s` all of it but its wait for the
    fleet. `saves` is the median sync, in saves of its own, `staleness` how many syncs old samples were."""

    reward: list[float]
    ratio: Spread
    step_s: float
    sync_s: float
    save_s: float
    other_s: float
    own_s: float
    saves: float
    staleness: float | None
    promotion_wait_s: float | None
    paused_s: float
    pauses: int
    syncs: int
    dropped: int
    wrong_version: int | None
    substituted: int | None
    unnumbered: int | None
    answers: int | None


class TrainingResult(Result, frozen=True, kw_only=True):
    """Figures are of the steps of all runs. `parts` compare rewards, beginning, middle and end; `ratio` compares how
    far TRL's ratio is from 1."""

    told: dict[Way, Told]
    parts: list[Difference]
    ratio: Difference
    runs: tuple[Ran, ...]

    def curves(self) -> list[Curve]:
        return [mean_curve(way, [run.of("reward") for run in self.runs if run.way == way]) for way in WAYS]


Training = Callable[[int, Path], Ran]


def run(settings: Settings, model: Path, directory: Path, progress: Progress) -> TrainingResult:
    """Train in `directory` by each way in turn; whoever is first is second the next time."""
    began_at, bench = now(), Bench(settings, model, progress)
    runs = alternated(settings, {"adaptersync": bench.ours, "TRL": bench.theirs}, directory)
    return compared(settings, runs, began_at=began_at)


def alternated(settings: Settings, ways: Mapping[Way, Training], directory: Path) -> list[Ran]:
    """All runs, in the order in which they were made."""
    made: list[Ran] = []
    for repeat in range(settings.repeats):
        for way in WAYS if repeat % 2 else WAYS[::-1]:
            place = directory / f"{way.lower()}-{repeat}"
            if place.exists():
                raise ConfigError(
                    "a training lies there already", next_step="choose another directory", path=str(place)
                )
            place.mkdir(parents=True)
            made.append(ways[way](settings.seed + repeat, place))
    return made


class Bench:
    """How one run of each way is made."""

    def __init__(self, settings: Settings, model: Path, progress: Progress) -> None:
        self._settings = settings
        self._model = model
        self._progress = progress

    def ours(self, seed: int, directory: Path) -> Ran:
        """Our trainer on a fleet."""
        wanted = StackSettings(
            model=self._model,
            state_dir=directory / "fleet",
            replicas=self._settings.replicas,
            engine=CARRY.engine,
            overrides={"trainer.run": RUN, "coordinator.min_ready": self._settings.replicas},
        )
        with Stack(wanted, self._progress) as stack:
            service = stack.run("train", TRAINER, *self._arguments(seed, directory))
            steps = self._watched(service, directory, stack.check, f"adaptersync, seed {seed}")
            rows = visit(stack.config, _ledger)
            logs = sorted(stack.logs.glob("engine-*.log"))
        # a trainer's rollouts ask for a version by number; nobody else asked this fleet
        good = [row for row in rows if row.outcome == SERVED and BY_NUMBER in row.asked]
        if not good:
            raise StackFailed(
                "no rollout asked for a version", next_step="read the trainer's log", log=str(service.log_path)
            )
        return Ran(
            way="adaptersync",
            seed=seed,
            steps=steps,
            pauses=_pauses(logs),
            wrong_version=wrong_version(good),
            substituted=sum(bool(row.substituted) for row in good),
            unnumbered=unnumbered(rows),
            answers=len(good),
        )

    def theirs(self, seed: int, directory: Path) -> Ran:
        """TRL's own trainer and its own sync, on one vLLM and nothing of ours."""
        (port,) = free_ports(1)
        url = f"http://{HOST}:{port}"
        engine = msgspec.convert({"model": self._model.absolute(), **CARRY.engine}, EngineSettings)
        with Supervisor(directory / "logs") as supervisor:
            server = supervisor.start(plain_spec(engine, port=port, gpus=gpu_count()))
            self._progress.waiting("one vLLM, for TRL alone")
            took = supervisor.wait_for("one vLLM", lambda: answers(f"{url}/health"), limit_s=ENGINE_READY_S)
            self._progress.done("one vLLM, for TRL alone", took)
            command = python(TRAINER, *self._arguments(seed, directory), "--plain", url)
            environment = {variable("trainer.router_url"): url}
            spec = Spec(name="train", command=command, environment=environment, tier=CLIENT_TIER, restart=False)
            steps = self._watched(supervisor.start(spec), directory, supervisor.check, f"TRL, seed {seed}")
        return Ran(way="TRL", seed=seed, steps=steps, pauses=_pauses([server.log_path]))

    def _arguments(self, seed: int, directory: Path) -> list[str]:
        given = {
            "--base": self._model.absolute(),
            "--run": RUN,
            "--steps": self._settings.steps,
            "--out": directory / "train",
            "--seed": seed,
            "--max-staleness": self._settings.max_staleness,
            "--sync-steps": self._settings.sync_steps,
            "--prompts": self._settings.prompts,
        }
        return [str(part) for pair in given.items() for part in pair]

    def _watched(
        self, service: Service, directory: Path, check: Callable[[], None], what: str
    ) -> tuple[dict[str, Any], ...]:
        """The lines of a training, once it has ended well."""
        lines = directory / "train" / "steps.jsonl"
        patience = Patience(CARRY.step_s, service.log_path, read="read its log with --keep")
        began = time.monotonic()
        self._progress.waiting(f"{what}: {self._settings.steps} steps")

        def look() -> None:
            check()
            if made := len(read_lines(lines)):
                self._progress.detail(f"{what}: step {made} of {self._settings.steps}")
            patience.look(made)

        to_the_end(service, float("inf"), look)
        self._progress.done(what, time.monotonic() - began)
        return tuple(read_lines(lines))


async def _ledger(registry: Registry) -> list[Row]:
    return await read_rollouts(registry)


def _pauses(logs: Sequence[Path]) -> int:
    count = pauses_in_logs(logs)
    if count is None:
        raise StackFailed("an engine's log shows no request", next_step="read it", logs=", ".join(map(str, logs)))
    return count


def wrong_version(rows: Iterable[Row]) -> int:
    """Answers of another version than was asked for by number, but for those that stand for it by rule."""
    return sum(not _answers_what_was_asked(row) for row in rows if BY_NUMBER in row.asked and not row.substituted)


def unnumbered(rows: Iterable[Row]) -> int:
    """Requests for no version by number, however they ended: what they are answered by cannot be told to be wrong."""
    return sum(BY_NUMBER not in row.asked for row in rows)


def _answers_what_was_asked(row: Row) -> bool:
    run, _, number = row.asked.rpartition(BY_NUMBER)
    try:
        served = parse_adapter_id(row.version)
    except NameInvalid:
        return False
    return (served.run, str(served.seq)) == (run, number)


def compared(settings: Settings, runs: Sequence[Ran], *, began_at: str = "") -> TrainingResult:
    """What is promised of two ways, and whether it was kept. StackFailed when a run made too few steps."""
    for each in runs:
        if len(each.of("reward")) < settings.steps:
            made = f"{len(each.of('reward'))} of {settings.steps} steps"
            raise StackFailed("a training ended early", next_step="read its log with --keep", way=each.way, made=made)
    ours, theirs = ([each for each in runs if each.way == way] for way in WAYS)
    told: dict[Way, Told] = {"adaptersync": _told(ours), "TRL": _told(theirs)}
    mine, other = told["adaptersync"], told["TRL"]
    parts = thirds([each.of("reward") for each in ours], [each.of("reward") for each in theirs])
    off, their_off = ([[abs(ratio - 1) for ratio in each.of("ratio")] for each in side] for side in (ours, theirs))
    ratio = difference(off, their_off, 1, settings.steps)
    figures = _figures(ours, theirs)
    learnt = parts[-1].theirs - parts[0].theirs
    targets = [
        Target.at_most(
            f"reward, ours beside theirs, steps {part.first} to {part.last}",
            abs(part.errors),
            CHANCE_ERRORS,
            unit="standard errors apart",
        )
        for part in parts
    ]
    if len(parts) > 1:
        visible = parts[-1].visible / learnt if learnt > 0 else float("inf")
        name = "difference at the end that would have been seen"
        targets.append(Target.at_most(name, visible, VISIBLE_SHARE, unit="of what was learnt"))
    targets += [
        Target.at_most(
            "distance of the ratio from 1, ours over theirs", ratio.errors, CHANCE_ERRORS, unit="standard errors"
        ),
        Target.at_most("median sync of ours, each over its save", mine.saves, SAVE_SHARE),
        Target.at_most("mean sync of ours, its waits left out, over its save", mine.own_s / mine.save_s, SAVE_SHARE),
        Target.at_most("mean sync of ours beside its save, TRL's the bound", mine.other_s, other.other_s, unit="s"),
        Target.at_most("mean sync, waits included, ours over TRL's", mine.sync_s / other.sync_s, 1.0),
        Target.at_most("pauses of our fleet", mine.pauses, 0, unit="calls"),
        _none("answers of another version than was asked", mine.wrong_version, "answers"),
        _none("answers that stand for another version", mine.substituted, "answers"),
        _none("requests that asked for no version by number", mine.unnumbered, "requests"),
    ]
    return TrainingResult(
        bench="training",
        began_at=began_at or now(),
        machine=Machine.here(),
        settings={name: getattr(settings, name) for name in settings.__struct_fields__},
        figures=tuple(figures),
        targets=tuple(targets),
        told=told,
        parts=parts,
        ratio=ratio,
        runs=tuple(runs),
    )


def _none(name: str, counted: int | None, unit: str) -> Target:
    """That there were none; what nobody counted is not known to be none."""
    return Target.at_most(name, float("inf") if counted is None else counted, 0, unit=unit)


def _figures(ours: Sequence[Ran], theirs: Sequence[Ran]) -> list[Figure]:
    """Sync and save of each way first, ours before theirs."""

    def all_of(runs: Sequence[Ran], name: str) -> list[float]:
        return [value for each in runs for value in each.of_syncs(name)]

    save, their_save = (Figure.of(f"save, {w}", all_of(r, "save_s")) for w, r in zip(WAYS, (ours, theirs), strict=True))
    sync = Figure.of("sync, adaptersync", all_of(ours, "sync_s"))
    their_sync = Figure.of("sync, TRL", all_of(theirs, "sync_s"))
    found = [sync, save, their_sync, their_save]
    if waits := all_of(ours, "promotion_wait_s"):
        found.append(Figure.of("of the sync, for the fleet, adaptersync", waits))
    for way, runs in zip(WAYS, (ours, theirs), strict=True):
        found.append(Figure.of(f"step, {way}", all_of(runs, "step_s")))
    return found


def _told(runs: Sequence[Ran]) -> Told:
    def mean(name: str) -> float:
        return fmean(value for each in runs for value in each.of_syncs(name))

    def total(name: str) -> int | None:
        known = [value for each in runs if (value := getattr(each, name)) is not None]
        return sum(known) if known else None

    ratio = spread_of([value for each in runs for value in each.of("ratio")])
    if ratio is None:
        raise StackFailed("no step says its ratio", next_step="read the trainer's log with --keep", way=runs[0].way)
    pauses = sum(each.pauses for each in runs)
    waits = [value for each in runs for value in each.of_syncs("promotion_wait_s")]
    return Told(
        reward=[fmean(step) for step in zip(*(each.of("reward") for each in runs), strict=True)],
        ratio=ratio,
        step_s=mean("step_s"),
        sync_s=mean("sync_s"),
        save_s=mean("save_s"),
        other_s=mean("sync_s") - mean("save_s"),
        own_s=fmean(value for each in runs for value in each.of_own()),
        saves=median(value for each in runs for value in each.of_saves()),
        staleness=fmean(ages) if (ages := [age for each in runs for age in each.of_syncs("staleness_mean")]) else None,
        promotion_wait_s=fmean(waits) if waits else None,
        paused_s=mean("sync_s") - mean("pause_s") if pauses else 0.0,  # from the answer to /pause on
        pauses=pauses,
        syncs=sum(len(each.steps) + 1 for each in runs),  # the first is before the first step
        dropped=sum(int(value) for each in runs for value in each.of("dropped_stale")),
        wrong_version=total("wrong_version"),
        substituted=total("substituted"),
        unnumbered=total("unnumbered"),
        answers=total("answers"),
    )
