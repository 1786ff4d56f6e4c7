"""Hosts on one machine: network namespaces on a bridge of their own, or, without root, the loopback as the only one.

The bridge lies in a namespace, too: nothing of this machine's network is changed, and `close` leaves none of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from adaptersync_core.errors import AdapterSyncError

TOOL_S = 20.0
NETWORK = "10.213.7"  # within the namespaces only
MARK = "asd"
TOOLS = ("ip", "unshare", "sh", "hostname")
# what runs on a host has its name; the arguments are no part of the script
NAMED = ("unshare", "--uts", "--", "sh", "-c", 'hostname "$0" && exec "$@"')


class SiteFailed(AdapterSyncError):
    code = "site-failed"


def objection() -> str:
    """Why there can be no hosts of their own here; empty when there can."""
    if sys.platform != "linux":
        return "not Linux"
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no {' '.join(missing)} here"
    try:
        _tool("unshare", "--net", "--uts", "--", "true")
    except SiteFailed as error:
        return f"no namespaces for us: {error}"
    return ""


class Host:
    """`command` makes what is run on it of what it shall run."""

    def __init__(self, name: str, address: str, prefix: tuple[str, ...] = ()) -> None:
        self.name = name
        self.address = address
        self._prefix = prefix

    def command(self, *words: str) -> list[str]:
        return [*self._prefix, *words]


class Site:
    """Hosts by the names they were asked for; a context manager. With an objection, all names are one host."""

    def __init__(self, names: tuple[str, ...], *, loopback: bool) -> None:
        self._names = names
        self.mark = f"{MARK}{os.getpid()}"
        self._made: list[str] = []
        # where agents leave tokens: units want it below /run
        self.run = Path("/run" if os.geteuid() == 0 else f"/run/user/{os.geteuid()}") / f"adaptersync-{self.mark}"
        self.loopback = loopback
        self.hosts: dict[str, Host] = {}

    def __enter__(self) -> Self:
        if self.loopback:
            only = Host(socket.gethostname(), "127.0.0.1")
            self.hosts = dict.fromkeys(self._names, only)
            return self
        _clear()
        try:
            self._switch()
            for number, name in enumerate(self._names):
                self.hosts[name] = self._host(name, number + 1)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for namespace in reversed(self._made):
            with contextlib.suppress(SiteFailed):
                _tool("ip", "netns", "delete", namespace)
        self._made.clear()

    def _switch(self) -> None:
        self._namespace("switch")
        self._inside("switch", "ip", "link", "add", "bridge0", "type", "bridge")
        self._inside("switch", "ip", "link", "set", "bridge0", "up")

    def _host(self, name: str, number: int) -> Host:
        address = f"{NETWORK}.{number}"
        self._namespace(name)
        ours, theirs = self._space(name), self._space("switch")
        port = f"port{number}"
        _tool("ip", "-n", ours, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", theirs)
        self._inside("switch", "ip", "link", "set", port, "master", "bridge0", "up")
        self._inside(name, "ip", "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            self._inside(name, "ip", "link", "set", device, "up")
        return Host(name, address, ("ip", "netns", "exec", ours, *NAMED, name))

    def _namespace(self, name: str) -> None:
        _tool("ip", "netns", "add", self._space(name))
        self._made.append(self._space(name))

    def _space(self, name: str) -> str:
        return f"{self.mark}-{name}"

    def _inside(self, name: str, *words: str) -> None:
        _tool("ip", "netns", "exec", self._space(name), *words)


def _clear() -> None:
    """Remove what one that was killed has left."""
    for space in Path("/run/netns").glob(f"{MARK}*-*"):
        pid = space.name.removeprefix(MARK).partition("-")[0]
        if not Path("/proc", pid).exists():
            _tool("ip", "netns", "delete", space.name)


def _tool(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=TOOL_S, check=False)  # noqa: S603
    if done.returncode:
        raise SiteFailed(f"{' '.join(words)}: {done.stderr.strip()[:300]}")
