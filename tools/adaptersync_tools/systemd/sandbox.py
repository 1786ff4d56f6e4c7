"""What a service of ours is not allowed, whatever happens in it: everything that it does not need.

`systemd-analyze security` weighs it; a test holds each unit to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

GROUP = "adaptersync"  # of those who write to the store, trainers among them
ROLES = ("coordinator", "router", "worker", "agent")


def user(role: str) -> str:
    """Each role is a user of its own: a file of secrets that belongs to one is no other's to read."""
    return f"adaptersync-{role}"


ENGINE_USER = user("engine")


def service(role: str, *, zmq: bool = False, groups: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """For Python that speaks to the network and writes to some directories.

    ZeroMQ asks for the interfaces there are, and sets its threads' scheduling to what it is; refused, it aborts.
    """
    yield from _as(user(role), *groups)
    yield from _shared()
    yield "PrivateDevices", "yes"
    yield "DevicePolicy", "closed"
    yield "ProcSubset", "pid"
    yield "MemoryDenyWriteExecute", "yes"
    yield "RestrictAddressFamilies", f"AF_UNIX AF_INET AF_INET6{' AF_NETLINK' if zmq else ''}"
    yield "SystemCallFilter", "@system-service"
    yield "SystemCallFilter", "~@privileged @resources"
    if zmq:
        yield "SystemCallFilter", "sched_setscheduler"


def engine() -> Iterator[tuple[str, str]]:
    """For vLLM, which compiles code as it runs, binds itself to cores and drives GPUs. It is given no secret."""
    yield from _as(ENGINE_USER, user("agent"))  # staged versions, and its agent's token
    yield from _shared()
    yield "DevicePolicy", "closed"
    yield "DeviceAllow", "char-nvidia* rw"
    yield "RestrictAddressFamilies", "AF_UNIX AF_INET AF_INET6 AF_NETLINK"
    yield "SystemCallFilter", "@system-service"
    yield "SystemCallFilter", "~@privileged"


def _as(name: str, *groups: str) -> Iterator[tuple[str, str]]:
    yield "User", name
    yield "Group", name
    yield from (("SupplementaryGroups", group) for group in groups)


def _shared() -> Iterator[tuple[str, str]]:
    for key in (
        "NoNewPrivileges",
        "PrivateTmp",
        "PrivateIPC",
        "ProtectHome",
        "ProtectHostname",
        "ProtectClock",
        "ProtectKernelTunables",
        "ProtectKernelModules",
        "ProtectKernelLogs",
        "ProtectControlGroups",
        "RestrictNamespaces",
        "RestrictRealtime",
        "RestrictSUIDSGID",
        "LockPersonality",
        "RemoveIPC",
    ):
        yield key, "yes"
    yield "CapabilityBoundingSet", ""
    yield "AmbientCapabilities", ""
    yield "ProtectSystem", "strict"
    yield "ProtectProc", "invisible"
    yield "KeyringMode", "private"
    yield "SystemCallArchitectures", "native"
    yield "SystemCallErrorNumber", "EPERM"
    yield "LimitCORE", "0"  # settings and prompts are in memory


def network(*allowed: str) -> Iterator[tuple[str, str]]:
    """Only the loopback and these."""
    yield "IPAddressDeny", "any"
    yield "IPAddressAllow", " ".join(("localhost", *allowed))


def literal_hosts(urls: Sequence[str]) -> list[str] | None:
    """Addresses of servers, those on the loopback left out; None where one is a name, which a unit cannot allow."""
    found = []
    for url in urls:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme == "unix" or host == "localhost":
            continue
        try:
            address = ip_address(host.partition("%")[0])  # its zone would be a specifier, and is no part of a packet
        except ValueError:
            return None
        if not address.is_loopback:
            found.append(str(address))
    return sorted(set(found))
