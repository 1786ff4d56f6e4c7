"""Directories: who may do what in them, what lies under them, and how much room there is."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from adaptersync_core.config import Config
from adaptersync_core.store import ARCHIVE, JOURNAL
from adaptersync_core.store_identity import PREFIX
from adaptersync_tools.doctor.finding import Role, Verdict

GIB = 1 << 30
STORE_ROOM = 4 * GIB
STAGE_ROOM = 2 * GIB
KEPT: dict[Role, str] = {"coordinator": JOURNAL, "worker": ARCHIVE}
OTHERS_MACHINES = ("nfs", "nfs4", "cifs", "smb3", "ceph", "9p", "glusterfs", "lustre")  # and whatever FUSE mounts
MOUNTS = Path("/proc/self/mountinfo")


def examine(verdict: Verdict, config: Config, roles: frozenset[Role]) -> None:
    store = Path(config.store.path)
    _secrets(verdict, config)
    if roles & {"trainer", "agent", "coordinator", "worker"}:
        _store(verdict, store, roles)
        for role, name in KEPT.items():
            if role in roles:
                _kept(verdict, store / name / config.group.name)
    if "agent" in roles:
        stage = Path(config.agent.stage_path)
        if _own(verdict, "stage", stage, "agent.stage_path"):
            _room(verdict, "stage", stage, STAGE_ROOM)
            kind = file_system(stage)
            verdict.check(
                "stage",
                kind not in OTHERS_MACHINES and not kind.startswith("fuse"),
                f"{stage} is on {kind}: engines would read adapters over the network, and each load waits for it",
                "set agent.stage_path to a disk of this host, or its memory (/dev/shm)",
                level="warning",
            )
        _token(verdict, config.agent.token_file)
    if "router" in roles:
        spool = Path(config.router.spool_path)
        if _own(verdict, "spool", spool, "router.spool_path"):
            _room(
                verdict, "spool", spool, (config.router.spool_bytes + config.router.kept_bytes) * config.router.workers
            )


def _store(verdict: Verdict, store: Path, roles: frozenset[Role]) -> None:
    if not verdict.check("store", store.is_dir(), f"{store} is no directory", "mount the store, or set store.path"):
        return
    if not verdict.check(
        "store", os.access(store, os.R_OK | os.X_OK), f"{store} cannot be read", "give this user the right to read it"
    ):
        return
    identity = any(path.name.startswith(PREFIX) for path in store.iterdir())
    verdict.check(
        "store",
        identity or not any(path.name not in KEPT.values() for path in store.iterdir()),
        f"{store} holds files and is no store: perhaps another directory is mounted there",
        "mount the group's store, or set store.path",
    )
    _not_everyones(verdict, "store", store)
    writers = roles & {"trainer", "coordinator", "worker"}
    if writers:
        may = _writable(store)
        fix = f"mount it read-write where {' and '.join(sorted(writers))} run, and give their user the right"
        if verdict.check("store", may, f"{store} cannot be written to", fix):
            _room(verdict, "store", store, STORE_ROOM)
    elif "agent" in roles:
        verdict.check(
            "store",
            not _writable(store),
            f"{store} can be written to, where adapters are only read",
            "mount it read-only on hosts that serve",
            level="warning",
        )


def _kept(verdict: Verdict, directory: Path) -> None:
    """What one role writes in the store, wherever its service runs: as another user than elsewhere it could not."""
    there = next((path for path in (directory, directory.parent) if os.path.isdir(path)), None)
    if there is not None:
        fix = "give the users of services, and their group, the same numbers on all hosts of the store (SYSTEMD.md)"
        verdict.check("store", _writable(there), f"{there} cannot be written to", fix)


def _own(verdict: Verdict, about: str, directory: Path, setting: str) -> bool:
    """A directory that a service makes for itself."""
    there = next((path for path in (directory, *directory.parents) if path.exists()), Path("/"))
    may = there.is_dir() and _writable(there)
    fix = f"make it for this user (install -d -m 750 {directory}), or set {setting}"
    if verdict.check(about, may, f"{directory} cannot be written to", fix) and there == directory:
        _not_everyones(verdict, about, directory)
    return may


def _not_everyones(verdict: Verdict, about: str, directory: Path) -> None:
    mode = stat.S_IMODE(directory.stat().st_mode)
    what = f"everybody on this host may write to {directory} (mode {mode:o}), and so say what is served"
    verdict.check(about, not mode & stat.S_IWOTH, what, f"chmod o-w {directory}")


def _token(verdict: Verdict, file: str) -> None:
    path = Path(file)
    if file and path.exists():
        mode = stat.S_IMODE(path.stat().st_mode)
        what = f"everybody on this host may read {path} (mode {mode:o}), and so command the engine"
        verdict.check("token", not mode & 0o007, what, f"chmod 640 {path}")


def _secrets(verdict: Verdict, config: Config) -> None:
    """Files that let their reader do what this service may."""
    for setting, file in (
        ("redis.password_file", config.redis.password_file),
        ("redis.key_file", config.redis.key_file),
        ("agent.engine_key_file", config.agent.engine_key_file),
        ("router.gate_token_file", config.router.gate_token_file),
        ("trainer.router_key_file", config.trainer.router_key_file),
    ):
        if file and Path(file).exists():
            mode = stat.S_IMODE(Path(file).stat().st_mode)
            what = f"everybody on this host may read {file} (mode {mode:o}), the secret of {setting}"
            verdict.check("secret", not mode & 0o007, what, f"chmod 600 {file}")


def _room(verdict: Verdict, about: str, directory: Path, wanted: int) -> None:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    found = os.statvfs(there)
    free = found.f_bavail * found.f_frsize
    what = f"{free / GIB:.1f} GiB are free under {directory}, {wanted / GIB:.1f} should be"
    verdict.check(about, free >= wanted, what, "make room: adaptersync plan says how much is needed", level="warning")
    nodes = found.f_favail > 1000 or not found.f_files
    verdict.check(about, nodes, f"no inodes are left under {directory}", "remove files there")


def _writable(directory: Path) -> bool:
    """Tried: what a mount or a security module thinks of it, no mode tells."""
    probe = directory / f".adaptersync-doctor-{secrets.token_hex(4)}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        probe.unlink()
    except OSError:
        return False
    return True


def file_system(directory: Path) -> str:
    """What kind of file system it is on, as the kernel calls it; empty where it does not say."""
    there = next(path for path in (directory, *directory.parents) if path.exists()).resolve()
    best, kind = "", ""
    try:
        lines = MOUNTS.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        head, _, tail = line.partition(" - ")
        place = head.split(" ")[4].replace("\\040", " ")
        if there.is_relative_to(place) and len(place) >= len(best):
            best, kind = place, tail.split(" ")[0]
    return kind
