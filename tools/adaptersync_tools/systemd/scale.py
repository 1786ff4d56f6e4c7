"""How a host below systemd comes to run more or fewer services: which units to start and stop. No shell."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from adaptersync.coordinator.hosts import Placed
from adaptersync_core.errors import ConfigError, ControlError
from adaptersync_core.scaling import Scale
from adaptersync_tools.instance import host_word

STOP_S = 900.0  # what one command may take: a unit's own bounds are below that
ASK_S = 10.0
PATTERN = "adaptersync-*.service"

_UNIT = re.compile(r"adaptersync-(agent|replica|router|worker)(?:@(\d+))?\.service")


def running_units() -> frozenset[str]:
    """Of this host: those that run, or are about to."""
    tool = _systemctl()
    listed = subprocess.run(  # noqa: S603
        [tool, "list-units", "--plain", "--no-legend", "--no-pager", "--state=active,activating,reloading", PATTERN],
        capture_output=True,
        text=True,
        timeout=ASK_S,
        check=False,
    )
    if listed.returncode:
        raise ControlError(f"systemctl failed: {listed.stderr.strip()[:200]}")
    return frozenset(line.split()[0] for line in listed.stdout.splitlines() if line.split())


def units_of(replicas: Iterable[Placed], host: str) -> frozenset[str]:
    """Units of another host, as far as its replicas' names tell."""
    head = f"{host_word(host)}-"
    numbers = [each.replica.removeprefix(head) for each in replicas if each.replica.startswith(head)]
    return frozenset(f"adaptersync-agent@{number}.service" for number in numbers if number.isdecimal())


def commands(asked: Scale, units: frozenset[str], *, engines: bool) -> list[tuple[str, ...]]:
    """What brings a host from the units that run to what is asked for: what is wanted first, then one stop at a time.

    A stop waits until the replica has drained. `engines`: whether engines are units of ours.
    """
    return [
        *_start("agent", asked.replicas, units, engines=engines),
        *_start("router", asked.routers, units),
        *_start("worker", asked.workers, units),
        *_stop("agent", asked.replicas, units, engines=engines),
        *_stop("router", asked.routers, units),
        *_stop("worker", asked.workers, units),
    ]


def _start(kind: str, count: int, units: frozenset[str], *, engines: bool = False) -> list[tuple[str, ...]]:
    missing = sorted(set(range(count)) - _numbers(kind, units))
    return [("systemctl", "enable", "--now", *_names(kind, number, engines)) for number in missing]


def _stop(kind: str, count: int, units: frozenset[str], *, engines: bool = False) -> list[tuple[str, ...]]:
    surplus = sorted((number for number in _numbers(kind, units) if number >= count), reverse=True)
    return [("systemctl", "disable", "--now", *_names(kind, number, engines)) for number in surplus]


def _names(kind: str, number: int, engines: bool) -> Sequence[str]:
    if kind == "agent":
        agent = f"adaptersync-agent@{number}.service"
        return (f"adaptersync-replica@{number}.service", agent) if engines else (agent,)
    # the first of a host has no number
    return (f"adaptersync-{kind}@{number}.service" if number else f"adaptersync-{kind}.service",)


def _numbers(kind: str, units: frozenset[str]) -> set[int]:
    found = (_UNIT.fullmatch(unit) for unit in units)
    return {int(match[2] or 0) for match in found if match and match[1] == kind}


def run(command: tuple[str, ...]) -> None:
    """ControlError where it fails, with what it said."""
    done = subprocess.run(  # noqa: S603
        [_systemctl(), *command[1:]], capture_output=True, text=True, timeout=STOP_S, check=False
    )
    if done.returncode:
        raise ControlError(
            f"{' '.join(command)} failed: {done.stderr.strip()[:300]}", next_step="run it as root, or see journalctl"
        )


def _systemctl() -> str:
    tool = shutil.which("systemctl")
    if tool is None:
        raise ConfigError("no systemctl here", next_step="run it on the host, or keep the fleet with adaptersync up")
    return tool
