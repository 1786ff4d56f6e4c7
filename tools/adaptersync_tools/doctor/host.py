"""Ports, open files, and settings that do not go together."""

from __future__ import annotations

import re
import resource
import socket
import urllib.error
import urllib.request

import orjson

from adaptersync.router.open_files import OTHERS
from adaptersync_core.archive import installed
from adaptersync_core.config import Config
from adaptersync_tools.doctor.finding import Role, Verdict

ANSWER_S = 2.0


def examine(verdict: Verdict, config: Config, roles: frozenset[Role]) -> None:
    if "router" in roles:
        _router(verdict, config)
    if "worker" in roles:
        verdict.check(
            "ledger",
            not config.jobs.ledger_s or installed(),
            "pyarrow is not installed, and without it a worker cannot archive the ledger: it does not start",
            "pip install 'adaptersync[ledger]', or leave it in Redis with jobs.ledger_s = 0",
        )
    _metrics(verdict, config, roles)
    _settings(verdict, config)


def _router(verdict: Verdict, config: Config) -> None:
    settings = config.router
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * settings.connections + OTHERS
    verdict.check(
        "open files",
        hard == resource.RLIM_INFINITY or hard >= needed,
        f"{hard} are allowed, and router.connections = {settings.connections} needs {needed}",
        f"set LimitNOFILE={needed} for the router's unit (ulimit -Hn elsewhere), or lower router.connections",
    )
    who = _at(settings.host, settings.port)
    fix = "stop what listens there, or set router.port"
    ours = re.fullmatch(rf"{re.escape(settings.name)}(-[0-9a-f]{{6}})?", who)  # each process adds to its name
    verdict.check("router", not who or ours is not None, f"port {settings.port} is taken by {who or 'nobody'}", fix)


def _at(host: str, port: int) -> str:
    """Who listens there: a router by its name, another program by what it is not; nobody is no name."""
    if not port or _free(host, port):
        return ""
    where = "127.0.0.1" if host in ("0.0.0.0", "::") else host  # noqa: S104 (not listened on)
    try:
        with urllib.request.urlopen(f"http://{where}:{port}/health", timeout=ANSWER_S) as answer:
            body = answer.read(1 << 20)
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(1 << 20)
    except (OSError, ValueError):
        return "another program"
    try:
        return f"{orjson.loads(body)['router']}"
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return "another program"


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            return False
    return True


def _metrics(verdict: Verdict, config: Config, roles: frozenset[Role]) -> None:
    ports = {
        name: port
        for name, role, port in (
            ("agent.metrics_port", "agent", config.agent.metrics_port),
            ("coordinator.metrics_port", "coordinator", config.coordinator.metrics_port),
            ("jobs.metrics_port", "worker", config.jobs.metrics_port),
        )
        if port and role in roles
    }
    if "router" in roles:
        ports["router.port"] = config.router.port
    for name, port in ports.items():
        others = [other for other, its in ports.items() if its == port and other > name]
        fix = "give each service of a host its own"
        verdict.check("ports", not others, f"{name} and {' and '.join(others)} are both {port}", fix)


def _settings(verdict: Verdict, config: Config) -> None:
    agent, coordinator, router = config.agent, config.coordinator, config.router
    verdict.check(
        "settings",
        coordinator.alive_s >= 3 * agent.heartbeat_s,
        f"a replica is silent after coordinator.alive_s = {coordinator.alive_s:g} and speaks every"
        f" agent.heartbeat_s = {agent.heartbeat_s:g}: one lost word ejects it",
        "make coordinator.alive_s at least three times as long",
        level="warning",
    )
    verdict.check(
        "settings",
        agent.keep_s >= router.request_timeout_s,
        f"staged files go after agent.keep_s = {agent.keep_s:g}, and a request may last"
        f" router.request_timeout_s = {router.request_timeout_s:g}",
        "make agent.keep_s at least as long",
        level="warning",
    )
    verdict.check(
        "settings",
        coordinator.deadline_s >= agent.visible_timeout_s + agent.load_timeout_s,
        f"coordinator.deadline_s = {coordinator.deadline_s:g} ends before agent.visible_timeout_s and"
        " agent.load_timeout_s together",
        "make it at least as long: slow replicas are ejected otherwise",
        level="warning",
    )
