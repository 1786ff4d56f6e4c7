"""One command a service. Each runs until SIGTERM."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path

import click

from adaptersync_core.config import Config
from adaptersync_core.notify import Notifier
from adaptersync_core.telemetry import configure_logging
from adaptersync_tools.cli.common import config_option, settings
from adaptersync_tools.instance import LAST, ReplicaSlot

number_option = partial(click.option, type=click.IntRange(0, LAST))


def _default(name: str, otherwise: str = "") -> str:
    """What an option is where it is not given: the setting, which is this where nobody sets it."""
    section, _, key = name.partition(".")
    value = otherwise or getattr(getattr(Config(), section), key)
    return f"[default: {name}{f', else {value}' if value else ''}]"


@click.command()
@config_option
@click.option("--name", help="The replica this agent stands beside.")
@click.option("--engine-url", help="Its vLLM server, on this host's loopback.")
@click.option("--public-url", help="Where routers reach that server.")
@number_option("--number", "number", help="Stand beside replica N of this host: name, addresses and paths follow.")
def agent(
    config_path: Path | None, name: str | None, engine_url: str | None, public_url: str | None, number: int | None
) -> None:
    """Run the agent beside one vLLM server.

    \b
    Example:
      adaptersync agent --name replica-3 --engine-url http://127.0.0.1:8000
      adaptersync agent --number 0   # beside: adaptersync replica 0
    """
    from adaptersync.agent.app import run_agent

    given = {"agent__name": name, "agent__engine_url": engine_url, "agent__public_url": public_url}
    follows = {} if number is None else ReplicaSlot.of(settings(config_path), number).overrides()
    run_agent(settings(config_path, **follows | {key: value for key, value in given.items() if value is not None}))


@click.command()
@config_option
@click.argument("number", type=click.IntRange(0, LAST))
def replica(config_path: Path | None, number: int) -> int:
    """Run engine NUMBER of this host, by the settings [engine].

    It serves at engine.port plus NUMBER, on the GPU that CUDA_VISIBLE_DEVICES names, as its unit does. Its agent is
    another service: adaptersync agent --number NUMBER.

    \b
    Example:
      adaptersync replica 0
    """
    from adaptersync_tools.replica import keep, spec

    notifier = Notifier.take(os.environ)
    config = settings(config_path)
    at = ReplicaSlot.of(config, number)
    configure_logging("replica", at.name)
    command = spec(config, at, dict(os.environ))
    return asyncio.run(keep(command, at.engine_url, notifier, drain_s=config.engine.drain_s))


@click.command()
@config_option
@click.option("--name", help="This coordinator's name; several may run, one leads.")
def coordinator(config_path: Path | None, name: str | None) -> None:
    """Run a coordinator: promote versions, or roll them back.

    \b
    Example:
      adaptersync coordinator --name coordinator-1
    """
    from adaptersync.coordinator.app import run_coordinator

    run_coordinator(settings(config_path, coordinator__name=name))


@click.command()
@config_option
@click.option("--name", help="This router's name; any number may run, each at a port of its own.")
@click.option("--host", help="Address to listen on.")
@click.option("--port", type=int, help="Port to listen on.")
@click.option("--workers", type=int, help="Processes that share the port.")
@number_option("--number", "number", help="Router N of this host: N is added to its name and port.")
def router(
    config_path: Path | None,
    name: str | None,
    host: str | None,
    port: int | None,
    workers: int | None,
    number: int | None,
) -> None:
    """Run a router: OpenAI's API in front of all replicas.

    \b
    Example:
      adaptersync router --host 0.0.0.0 --port 8080
    """
    from adaptersync.router.app import run_router

    given = {"router__name": name, "router__host": host, "router__port": port, "router__workers": workers}
    config = settings(config_path, **given)
    if number:
        given |= {"router__name": f"{config.router.name}-{number}", "router__port": config.router.port + number}
        config = settings(config_path, **given)
    configure_logging("router", config.router.name)
    run_router(config)


@click.command()
@config_option
@click.option("--run", help=f"The run whose adapters TRL loads.  {_default('trainer.run')}")
@click.option("--router-url", help=f"The router that rollouts go to.  {_default('relay.router_url')}")
@click.option("--port", type=int, help=f"Port to listen on.  {_default('relay.port')}")
@click.option(
    "--allowed-root",
    help="Adapters are taken only from below this directory: name the trainer's output_dir.  "
    + _default("relay.allowed_root", "the working directory"),
)
def relay(
    config_path: Path | None, run: str | None, router_url: str | None, port: int | None, allowed_root: str | None
) -> None:
    """Run the relay beside an unmodified TRL.

    TRL takes it for its vLLM server.

    \b
    Example:
      adaptersync relay --run my-run --allowed-root /data/my-run
      # and in the trainer: vllm_server_base_url="http://127.0.0.1:8070"
    """
    from adaptersync.trainer.relay import run_relay

    config = settings(
        config_path,
        trainer__run=run,
        relay__router_url=router_url,
        relay__port=port,
        relay__allowed_root=allowed_root,
    )
    run_relay(config)


@click.command()
@config_option
@number_option("--number", "number", help="Worker N of this host: N is added to its port for metrics, if it has one.")
def worker(config_path: Path | None, number: int | None) -> None:
    """Run a worker for jobs off the critical path: what is asked for, and what the clock asks for.

    \b
    Example:
      adaptersync worker --config /etc/adaptersync.toml
    """
    from adaptersync.jobs.app import run_worker

    config = settings(config_path)
    if number and config.jobs.metrics_port:
        config = settings(config_path, jobs__metrics_port=config.jobs.metrics_port + number)
    run_worker(config, config_path)


COMMANDS = (agent, replica, coordinator, router, relay, worker)
