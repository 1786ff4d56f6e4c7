"""`adaptersync up`: a whole fleet on this machine, until Ctrl-C."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import click
from rich.console import Console
from rich.text import Text

from adaptersync_core.address import where
from adaptersync_core.errors import ConfigError
from adaptersync_core.keys import Keys
from adaptersync_tools.keeper import Keeper
from adaptersync_tools.output import Narrator, console
from adaptersync_tools.up import Stack, StackSettings

LOOK_S = 0.5
MEMORY = Path("/dev/shm")  # noqa: S108 - below it, in a directory of our own


@click.command()
@click.option("--replicas", type=click.IntRange(1, 64), default=2, show_default=True, help="How many vLLM servers.")
@click.option("--simulated", is_flag=True, help="Simulated replicas: no vLLM, no model, ready in seconds.")
@click.option(
    "--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Directory of the base model."
)
@click.option(
    "--state-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/up"),
    show_default=True,
    help="Settings, store, data and logs; kept, and used again by the next start.",
)
@click.option(
    "--router-port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="0 takes a free one."
)
@click.option(
    "--secured", multiple=True, metavar="RUN",
    help="Let nobody do more than it needs: users of Redis, keys of the router. Names a run to be trained; repeat it.",
)  # fmt: skip
@click.option("--engine-arguments", default="", help="More of each engine's own, as in a shell; they win over ours.")
def up(
    replicas: int,
    simulated: bool,
    model: Path | None,
    state_dir: Path,
    router_port: int,
    secured: tuple[str, ...],
    engine_arguments: str,
) -> None:
    """Run a whole fleet on this machine.

    Two Redis servers, replicas with their agents, coordinator, router and worker.

    Ends with Ctrl-C, and leaves no process behind. Other commands find the fleet by the settings file it writes.

    \b
    Examples:
      adaptersync up --simulated
      adaptersync up --model ~/models/qwen --replicas 2
    """
    if model is None and not simulated:
        raise ConfigError("no model to serve", next_step="give --model DIRECTORY, or --simulated")
    out = console(stderr=True)
    narrator = Narrator(out)
    interrupt_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="adaptersync-") as scratch:
        if model is None:
            from adaptersync_tools.demo.synthetic import write_base_model

            model = write_base_model(Path(scratch) / "base")
        chosen = StackSettings(
            model=model,
            state_dir=state_dir,
            replicas=replicas,
            simulated=simulated,
            router_port=router_port,
            secured=secured,
            pages=True,
            engine={"arguments": tuple(shlex.split(engine_arguments))},
        )
        try:
            with Stack(chosen, narrator) as stack:
                _introduce(stack)
                _stay(stack, Keeper(stack, socket.gethostname()))
        finally:
            narrator.quiet()
    out.print("stopped")


def _introduce(stack: Stack) -> None:
    out = console(stderr=True)
    out.print(Text.assemble("\nrouter      ", (stack.router_url, "bold green")))
    for url in stack.page_urls:
        out.print(Text.assemble("page        ", (url, "bold green")))
    out.print(Text.assemble("settings    ", (f"export ADAPTERSYNC_CONFIG={stack.config_path}", "bold")))
    scheme, server = stack.config.redis.control_url.partition(":")[0], where(stack.config.redis.control_url)
    stream = Keys(stack.config.group.name).events
    events = f"redis-cli -u {scheme}://{server.rpartition('//')[2]} XRANGE '{stream}' - +"
    out.print(Text.assemble("events      ", events), soft_wrap=True)
    out.print(f"logs        {stack.logs}")
    out.print(Text("grow        adaptersync scale N", "dim"))
    out.print(Text("look        adaptersync top · status · versions · events --follow", "dim"))
    out.print(Text("stop        Ctrl-C", "dim"), end="\n\n")


def _stay(stack: Stack, keeper: Keeper) -> None:
    """Until an interrupt, which is how this is meant to end; an error when a service is given up."""
    pause = threading.Event()
    try:
        keeper.follow()
        while not pause.wait(LOOK_S):
            stack.check()
            keeper.follow()
    except KeyboardInterrupt:
        console(stderr=True).print("stopping (Ctrl-C again: at once)")
        keeper.leave()


@contextlib.contextmanager
def workplace(
    purpose: str, keep: Path | None = None, *, in_memory: bool = False, screen: Console | None = None
) -> Iterator[tuple[Path, Narrator]]:
    """Where a program works and how it tells how far it is; SIGTERM ends it as Ctrl-C does."""
    interrupt_on_sigterm()
    narrator = Narrator(screen or console(stderr=True))
    parent = MEMORY if in_memory and MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix=f"adaptersync-{purpose}-", dir=parent) as scratch:
        directory = (keep or Path(scratch)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            yield directory, narrator
        finally:
            narrator.quiet()


def interrupt_on_sigterm() -> None:
    """SIGTERM and SIGHUP unwind the program as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)


COMMANDS = (up,)
