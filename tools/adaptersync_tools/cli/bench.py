"""`adaptersync bench`: one command a bench. Each imports what it measures with when it is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from adaptersync_tools.bench.result import show
from adaptersync_tools.cli.common import json_option
from adaptersync_tools.cli.local import workplace
from adaptersync_tools.output import Narrator, console

if TYPE_CHECKING:
    from adaptersync.router.policy import Policy


PROGRAM = click.Path(exists=True, dir_okay=False, executable=True, path_type=Path)

keep_option = click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory for the fleet's settings, data and logs; kept.  [default: a scratch one]",
)


Command = TypeVar("Command", bound=Callable[..., int])


def engine_options(command: Command) -> Command:
    """For benches on real engines: which model, and how many."""
    for option in (
        click.option("--replicas", type=click.IntRange(1, 16), default=2, show_default=True, help="vLLM servers."),
        click.option(
            "--models",
            type=click.Path(file_okay=False, path_type=Path),
            default=Path("runs/quickstart"),
            show_default=True,
            help="Where the quickstart's base model is kept.",
        ),
        click.option(
            "--model",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            help="Directory of the base model.  [default: the quickstart's, made once below --models]",
        ),
    ):
        command = option(command)
    return command


def base_model(models: Path, directory: Path, narrator: Narrator) -> Path:
    """The quickstart's, made once."""
    from adaptersync_tools.quickstart import make_base_model

    models.mkdir(parents=True, exist_ok=True)
    return make_base_model(models.absolute(), directory, narrator)


@click.group()
def bench() -> None:
    """Measure what the project promises, on a fleet of its own.

    Each bench starts what it needs, ends by itself and leaves no process behind. Exit status 0 when all it measured
    keeps what is promised, else 1.

    \b
    Examples:
      adaptersync bench promotion
      adaptersync bench decision --json | jq .targets
      adaptersync bench engine
    """


@bench.command()
@json_option
@click.option(
    "--publications", type=click.IntRange(1, 1000), default=5, show_default=True, help="How many, by each way."
)
@click.option("--replicas", type=click.IntRange(1, 16), default=4, show_default=True, help="Simulated replicas.")
@click.option(
    "--visible",
    type=click.FloatRange(0, 60),
    default=3.0,
    show_default=True,
    help="Seconds until the mount shows a new directory.",
)
@click.option(
    "--blind",
    type=click.FloatRange(0, 120),
    multiple=True,
    default=(30.0, 1.0),
    show_default=True,
    help="Seconds for which the mount hides what was looked for too early; each given is measured.",
)
@keep_option
def promotion(
    as_json: bool, publications: int, replicas: int, visible: float, blind: tuple[float, ...], keep: Path | None
) -> int:
    """Measure from published to current on a mount that lags.

    An adapter of 8 MB goes to a fleet of simulated replicas by three ways, in turn: with the fast lane, by the mount
    alone, and as the published Hugging Face proxy does it (pause, try every 0.5 s until each replica loads, resume).

    \b
    Examples:
      adaptersync bench promotion                     # about five minutes
      adaptersync bench promotion --blind 1 --publications 20 --json
    """
    from adaptersync_tools.bench import promotion as measured

    settings = measured.Settings(publications=publications, replicas=replicas, visible_s=visible, blind_s=blind)
    with workplace("bench", keep) as (directory, narrator):
        result = measured.run(settings, directory, narrator)
    return show(result, as_json=as_json)


@bench.command()
@json_option
@click.option(
    "--replicas",
    type=click.IntRange(1, 512),
    multiple=True,
    default=(4, 16, 64, 256),
    show_default=True,
    help="Sizes of the fleet; each given is measured.",
)
@click.option("--promotions", type=click.IntRange(1, 1000), default=10, show_default=True, help="Per size and round.")
@click.option(
    "--rounds", type=click.IntRange(1, 100), default=2, show_default=True, help="How often all sizes are gone through."
)
@keep_option
def decision(as_json: bool, replicas: tuple[int, ...], promotions: int, rounds: int, keep: Path | None) -> int:
    """Measure from the last replica's ack to every router serving the version.

    A real coordinator, two real routers and real Redis servers decide for fleets of light replicas, which only say
    what agents say. The promise is about how that time grows with the fleet.

    \b
    Examples:
      adaptersync bench decision                      # about three minutes
      adaptersync bench decision --replicas 4 --replicas 64 --promotions 30 --json
    """
    from adaptersync_tools.bench import decision as measured

    settings = measured.Settings(replicas=replicas, promotions=promotions, rounds=rounds)
    with workplace("bench", keep) as (directory, narrator):
        result = measured.run(settings, directory, narrator)
    return show(result, as_json=as_json)


@bench.command()
@json_option
@engine_options
@click.option(
    "--concurrency", type=click.IntRange(1, 256), default=8, show_default=True, help="Answers in flight, by replica."
)
@click.option("--tokens", type=click.IntRange(16, 4096), default=128, show_default=True, help="Tokens of an answer.")
@click.option(
    "--repeats",
    type=click.IntRange(2, 1000),
    default=8,
    show_default=True,
    help="Loads, proofs and unloads on each engine.",
)
@click.option("--rounds", type=click.IntRange(1, 1000), default=4, show_default=True, help="Of four windows each.")
@click.option(
    "--step",
    type=click.FloatRange(1, 600),
    default=8.0,
    show_default=True,
    help="Seconds of a window: one training step, with one version.",
)
@keep_option
def engine(
    as_json: bool,
    model: Path | None,
    models: Path,
    replicas: int,
    concurrency: int,
    tokens: int,
    repeats: int,
    rounds: int,
    step: float,
    keep: Path | None,
) -> int:
    """Measure what adapters cost real engines while they generate.

    vLLM servers as `adaptersync up` starts them, all their files in memory (/dev/shm), under continuous streaming load
    through the router; an answer that ends is followed by the next one.

    First the longest gap between two tokens, on one engine after the other, while a version is loaded, proved or
    unloaded, beside the longest gap in as long a time just before. Then tokens a second, in windows of one training
    step each: steady, one publication, steady, publications back to back, and again. Each is compared with the steady
    windows beside it, so a drift of the machine cancels: over the whole step, and while a promotion is under way. The
    promise, 95 % of steady, is about a whole step.

    On a small machine trainer, agents and router share the engines' cores, which no real fleet does, and other
    programs spoil the figures: a note says so.

    \b
    Examples:
      adaptersync bench engine                        # about five minutes; the first time, one more for the model
      adaptersync bench engine --step 30 --rounds 2 --json | jq .promotions
      adaptersync bench engine --model ~/models/qwen --concurrency 32
    """
    from adaptersync_tools.bench import engine as measured
    from adaptersync_tools.bench.engine_report import show_more

    settings = measured.Settings(
        replicas=replicas,
        concurrency=concurrency,
        answer_tokens=tokens,
        repeats=repeats,
        rounds=rounds,
        step_s=step,
    )
    with workplace("bench", keep, in_memory=True) as (directory, narrator):
        result = measured.run(settings, model or base_model(models, directory, narrator), directory, narrator)
    status = show(result, as_json=as_json)
    if not as_json:
        show_more(result)
    return status


@bench.command()
@json_option
@click.option("--steps", type=click.IntRange(1, 10_000), default=40, show_default=True, help="Of each training.")
@click.option("--repeats", type=click.IntRange(1, 100), default=2, show_default=True, help="Trainings by each way.")
@click.option("--replicas", type=click.IntRange(1, 16), default=2, show_default=True, help="vLLM servers of ours.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the first; then one more each.")
@click.option("--max-staleness", type=click.IntRange(0, 16), default=2, show_default=True, help="As TRL's setting.")
@click.option("--sync-steps", type=click.IntRange(1, 100), default=1, show_default=True, help="From sync to sync.")
@click.option(
    "--prompts", type=click.IntRange(1, 1024), default=64, show_default=True, help="Of a step, 8 answers each."
)
@click.option(
    "--models",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/quickstart"),
    show_default=True,
    help="Where the quickstart's base model is kept, made once.",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("runs/training.png"),
    show_default=True,
    help="Picture of the curves, where matplotlib is installed.",
)
@keep_option
def training(
    as_json: bool,
    steps: int,
    repeats: int,
    replicas: int,
    seed: int,
    max_staleness: int,
    sync_steps: int,
    prompts: int,
    models: Path,
    png: Path,
    keep: Path | None,
) -> int:
    """Train the same by TRL alone and by TRL with a fleet.

    The quickstart's task. TRL's own trainer with its own sync (pause, load, resume) on one vLLM, then
    AdapterSyncGRPOTrainer on a fleet, and so on in turn: the same cores, seeds and settings, each with servers of its
    own. Promised: the reward is the same within noise in each third of the steps, TRL's ratio as close to 1, a sync
    blocks the trainer for the save alone, no server is paused, and no answer comes from another version than was asked
    for.

    Noise is a standard error, the larger of what steps and what runs scatter; three of them may lie between. Where that
    would hide half of what was learnt, the comparison says nothing, and fails.

    \b
    Examples:
      adaptersync bench training                      # about a quarter of an hour on two cores
      adaptersync bench training --repeats 4 --json | jq .parts
    """
    from adaptersync_tools.bench import training as measured
    from adaptersync_tools.bench.training_report import draw, show_more

    settings = measured.Settings(
        steps=steps,
        repeats=repeats,
        replicas=replicas,
        seed=seed,
        max_staleness=max_staleness,
        sync_steps=sync_steps,
        prompts=prompts,
    )
    with workplace("bench", keep, in_memory=True) as (directory, narrator):
        result = measured.run(settings, base_model(models, directory, narrator), directory, narrator)
    drawn = draw(result, png)
    status = show(result, as_json=as_json)
    if not as_json:
        show_more(result)
        if drawn:
            console().print(f"curves  {png}")
    return status


@bench.command()
@json_option
@engine_options
@click.option("--prompts", type=click.IntRange(1, 100_000), default=64, show_default=True, help="Different ones.")
@click.option("--completions", type=click.IntRange(1, 256), default=8, show_default=True, help="Of each prompt.")
@click.option("--clients", type=click.IntRange(1, 1024), default=32, show_default=True, help="Requests in flight.")
@click.option(
    "--window",
    type=click.IntRange(1, 1024),
    default=1,
    show_default=True,
    help="Prompts whose completions come in shuffled order.",
)
@keep_option
def prefixes(
    as_json: bool,
    model: Path | None,
    models: Path,
    replicas: int,
    prompts: int,
    completions: int,
    clients: int,
    window: int,
    keep: Path | None,
) -> int:
    """Measure how much of a trainer's prompts real engines compute.

    vLLM servers as `adaptersync up` starts them, behind the router; groups of completions follow each other, as
    trainers ask. What the engines' own counters say is compared with what one engine that evicts nothing would
    compute. Where completions of many prompts come in shuffled order, and the engines are unequally fast, more of them
    are sent where there is less to do, and computed again.

    \b
    Examples:
      adaptersync bench prefixes                      # about two minutes; the first time, one more for the model
      adaptersync bench prefixes --prompts 256 --json | jq '.computed / .ideal'
    """
    from adaptersync_tools.bench import prefixes as measured

    settings = measured.Settings(
        replicas=replicas, prompts=prompts, completions=completions, clients=clients, window=window
    )
    with workplace("bench", keep, in_memory=True) as (directory, narrator):
        result = measured.run(settings, model or base_model(models, directory, narrator), directory, narrator)
    status = show(result, as_json=as_json)
    if not as_json:
        measured.show_more(result)
    return status


@bench.command()
@json_option
@click.option(
    "--requests", type=click.IntRange(1000, 1_000_000), default=12_000, show_default=True, help="Of each load."
)
@click.option("--rounds", type=click.IntRange(1, 100), default=3, show_default=True, help="Seeds of each load.")
@click.option(
    "--spill", type=click.IntRange(0, 4096), default=8, show_default=True, help="As the setting router.spill."
)
def policy(as_json: bool, requests: int, rounds: int, spill: int) -> int:
    """Compare what the routing policies make of a trainer's load.

    The router's own decision is simulated with 4 replicas and 8 completions of each prompt: in shuffled order, through
    two routers, one prompt after the other, with a long template in common, with groups that never become complete, and
    while a replica leaves and comes back. How many requests find their prompt in the cache, and how many are in flight
    at one replica at most, are the same on every machine.

    \b
    Examples:
      adaptersync bench policy                        # about ten seconds
      adaptersync bench policy --spill 16 --json | jq .outcomes
    """
    from adaptersync_tools.bench import policy as simulated

    settings = simulated.Settings(requests=requests, rounds=rounds, spill=spill)
    return simulated.show(simulated.run(settings), as_json=as_json)


@bench.command()
@json_option
@click.option(
    "--blocks",
    type=click.IntRange(1000, 100_000_000),
    default=10_000_000,
    show_default=True,
    help="In the tables beside which it is measured; about 100 bytes each.",
)
@click.option("--prompts", type=click.IntRange(1, 10_000), default=40, show_default=True, help="Of each kind.")
@click.option(
    "--policy",
    type=click.Choice(("promise", "expected", "threshold")),
    default="promise",
    show_default=True,
    help="As the setting group.policy.",
)
@keep_option
def choice(as_json: bool, blocks: int, prompts: int, policy: Policy, keep: Path | None) -> int:
    """Measure what one choice of a replica costs.

    The cache server's time for the script that decides, by its own slow log: for prompts of 128 to 32k tokens, 2 to 256
    replicas, prompts that are new and that come again, and beside millions of blocks. Then the router's time for
    reading a prompt and hashing its blocks.

    \b
    Examples:
      adaptersync bench choice                        # about a minute, 1 GB of memory
      adaptersync bench choice --blocks 1000000 --json | jq .figures
    """
    from adaptersync_tools.bench import choice as measured

    settings = measured.Settings(blocks=blocks, prompts=prompts, policy=policy)
    with workplace("bench", keep) as (directory, narrator):
        result = measured.run(settings, directory, narrator)
    return show(result, as_json=as_json)


@bench.command()
@json_option
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice(("warmth", "two-routers", "template", "restarted", "killed", "throughput", "added")),
    help="What to measure; may be given several times.  [default: all]",
)
@click.option(
    "--router",
    "routers",
    multiple=True,
    type=click.Choice(("adaptersync", "vllm-router", "sglang-router", "hf-rule")),
    help="Whom to measure; may be given several times.  [default: all]",
)
@click.option("--seconds", type=click.FloatRange(1, 600), default=8.0, show_default=True, help="Of each load, rounded.")
@click.option("--repeat", type=click.IntRange(1, 100), default=3, show_default=True, help="How often all is done.")
@click.option("--vllm-router", type=PROGRAM, help="Program of vllm-router.  [default: on PATH]")
@click.option("--sglang-router", type=PROGRAM, help="Program of sglang-router.  [default: on PATH]")
@keep_option
def router(
    as_json: bool,
    cases: tuple[str, ...],
    routers: tuple[str, ...],
    seconds: float,
    repeat: int,
    vllm_router: Path | None,
    sglang_router: Path | None,
    keep: Path | None,
) -> int:
    """Measure our router beside others, in one run.

    Real routers before light replicas of this host: ours with its fleet (Redis servers, coordinator, ledger), with one
    process and with two; vllm-router 0.1.17 and sglang-router 0.3.2 as they are shipped; and the rule that Hugging Face
    published. Where requests went, what failed when a replica died, how fast it is and what it costs. All are measured
    in turn, and repetitions have medians. Needs wrk (Debian package wrk). Others are installed by you, each in an
    environment of its own; who is missing is reported as missing.

    \b
    Examples:
      python3 -m venv peers/vllm-router && peers/vllm-router/bin/pip install vllm-router==0.1.17
      python3 -m venv peers/sglang-router && peers/sglang-router/bin/pip install sglang-router==0.3.2
      adaptersync bench router --vllm-router peers/vllm-router/bin/vllm-router \\
        --sglang-router peers/sglang-router/bin/sglang-router    # about half an hour
      adaptersync bench router --case throughput --router adaptersync --json
    """
    from adaptersync_tools.bench.routers import run as measured
    from adaptersync_tools.bench.routers.report import show as show_routers

    programs = {"vllm-router": vllm_router, "sglang-router": sglang_router}
    settings = measured.Settings(
        seconds=seconds,
        repeat=repeat,
        cases=cases,
        routers=routers,
        programs={name: path for name, path in programs.items() if path is not None},
        keep=keep is not None,
    )
    with workplace("bench", keep) as (directory, narrator):
        result = measured.run(settings, directory, narrator)
    return show_routers(result, as_json=as_json)


COMMANDS = (bench,)
