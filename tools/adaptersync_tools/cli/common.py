"""What commands share: options, settings, and a bounded visit to the control server."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from adaptersync_core.address import where
from adaptersync_core.config import CONFIG, Config, RedisSection, load_config
from adaptersync_core.errors import AdapterSyncError, ControlUnavailable, StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.output import OneLine, one_line

INTERRUPTED = 130  # as a shell reports SIGINT
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
VISIT_S = 15.0  # for reading or asking; what waits for an outcome has its own --timeout

T = TypeVar("T")
Decorated = Callable[..., Any]

config_option = click.option(
    "--config",
    "config_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Settings file.  [default: $ADAPTERSYNC_CONFIG, else built-in defaults and the environment]",
)
json_option = click.option("--json", "as_json", is_flag=True, help="For programs: JSON instead of a table.")


def timeout_option(default: float) -> Callable[[Decorated], Decorated]:
    return click.option(
        "--timeout", "timeout_s", type=click.FloatRange(min=0.1), default=default, show_default=True,
        help="How many seconds to wait for the outcome.",
    )  # fmt: skip


def reason_option(text: str) -> Callable[[Decorated], Decorated]:
    """A reason that must be given, and say something."""

    def said(_context: click.Context, _option: click.Parameter, value: str) -> str:
        if not value.strip():
            raise click.BadParameter("say why, in some words")
        return value

    return click.option("--reason", required=True, callback=said, help=text)


def visit(config: Config, call: Callable[[Registry], Awaitable[T]], *, timeout_s: float = VISIT_S) -> T:
    """Run `call` with the group's registry, in a time that is bounded."""

    async def run() -> T:
        client = RedisClient(config.redis.control_url, name="cli")
        try:
            async with asyncio.timeout(timeout_s):
                return await call(Registry(client, Keys(config.group.name)))
        except TimeoutError:
            raise ControlUnavailable(
                "no answer in time", next_step="try again, or look at the server", redis=where(config.redis.control_url)
            ) from None
        finally:
            await client.close()

    return asyncio.run(run())


def settings(config_path: Path | None, **overrides: Any) -> Config:
    """The settings, with options of the command on top ("router__port"=8080)."""
    return load_config(config_path, overrides={name.replace("__", ".", 1): value for name, value in overrides.items()})


def settings_named(config_path: Path | None = None) -> bool:
    """Whether somebody has said which fleet this is about."""
    return config_path is not None or bool(os.environ.get(CONFIG))


def _unnamed(error: AdapterSyncError) -> str:
    """What to do besides where a server is away that perhaps is not the fleet's: in a new terminal nothing names it."""
    built_in = error.ids.get("redis") == where(RedisSection().control_url)
    if not isinstance(error, ControlUnavailable) or not built_in or settings_named():
        return ""
    return f"; {CONFIG} is not set, and this is the built-in address: name the fleet's settings by it, or by --config"


def run_command(command: click.Command, arguments: list[str] | None, name: str) -> int:
    """Run `command`, with every failure as one line on standard error; returns the exit status."""
    if logging.lastResort is not None:  # by which warnings are told where nobody has set logging up
        logging.lastResort.setFormatter(OneLine())
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except AdapterSyncError as error:
        return _fail(name, f"{error}{_unnamed(error)}", error.exit_code)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        return _fail(name, f"{error.format_message().rstrip('.')}{hint}", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe had enough
        _give_up_output()
        return 0
    except OSError as error:
        _give_up_output()
        what = error.filename or ("output cannot be written" if error.errno in NO_ROOM else "system refused")
        return _fail(name, f"{what}: {error.strerror or error}", StoreError.exit_code)


def _give_up_output() -> None:
    """So that what is still buffered is no second failure when the program ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(name: str, line: str, status: int) -> int:
    print(f"{name}: error: {one_line(' '.join(line.split()))}", file=sys.stderr)
    return status
