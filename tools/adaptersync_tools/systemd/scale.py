"""How a host below systemd comes to run more or fewer services: which units to start and stop. No shell."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence

from adaptersync.coordinator.hosts import Placed
from adaptersync_core.config import Config
from adaptersync_core.errors import ConfigError, ControlError
from adaptersync_core.scaling import Scale
from adaptersync_tools.instance import host_word
from adaptersync_tools.systemd.units import longest_stop_s

START_S = 900.0  # what one command may take: an engine may load for minutes
KILL_S = 60.0  # beyond what a unit may take to stop: until what was ended by force is gone
ASK_S = 10.0
PATTERN = "adaptersync-*.service"

_UNIT = re.compile(r"adaptersync-(agent|replica|router|worker)(?:@(\d+))?\.service")


def running_units() -> frozenset[str]:
    """Of this host: those that run, or are about to."""
    arguments = ("list-units", "--plain", "--no-legend", "--no-pager", "--state=active,activating,reloading", PATTERN)
    listed = _systemctl(arguments, limit_s=ASK_S)
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


def _start(kind: str, count: int | None, units: frozenset[str], *, engines: bool = False) -> list[tuple[str, ...]]:
    missing = sorted(set(range(count or 0)) - _numbers(kind, units))
    return [("systemctl", "enable", "--now", *_names(kind, number, engines)) for number in missing]


def _stop(kind: str, count: int | None, units: frozenset[str], *, engines: bool = False) -> list[tuple[str, ...]]:
    if count is None:  # nobody has said how many
        return []
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


def patience_s(config: Config) -> float:
    """What one command may take."""
    return max(START_S, longest_stop_s(config) + KILL_S)


def run(command: tuple[str, ...], *, limit_s: float) -> None:
    """ControlError where it fails or lasts too long, with what it said."""
    done = _systemctl(command[1:], limit_s=limit_s)
    if done.returncode:
        raise ControlError(
            f"{' '.join(command)} failed: {done.stderr.strip()[:300]}", next_step="run it as root, or see journalctl"
        )


def _systemctl(arguments: Sequence[str], *, limit_s: float) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemctl")
    if tool is None:
        raise ConfigError("no systemctl here", next_step="run it on the host, or keep the fleet with adaptersync up")
    try:
        return subprocess.run(  # noqa: S603
            [tool, *arguments], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise ControlError(
            f"systemctl {' '.join(arguments)} did not end in time",
            next_step="systemd goes on with it: see systemctl list-jobs, then say it again",
            limit_s=limit_s,
        ) from None
