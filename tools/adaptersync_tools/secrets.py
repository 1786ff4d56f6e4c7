"""Secrets in files: made once, kept, readable by their owner only; and what Redis and routers know of them.

A password that is there already is used as it is: that is how one is given, and how adding a user changes no other.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable
from pathlib import Path

from adaptersync_core import access, api_keys
from adaptersync_core.access import RedisUser
from adaptersync_core.api_keys import ApiKey, read_secret
from adaptersync_core.config import variable
from adaptersync_core.errors import ConfigError
from adaptersync_core.keys import Server

PRIVATE, PRIVATE_DIRECTORY = 0o600, 0o700
SUFFIX = ".password"
ADMIN = "admin"


class Passwords:
    """Of a group's users, in one directory. ConfigError where others may read one."""

    def __init__(self, directory: Path, group: str) -> None:
        self._directory = directory
        self._group = group

    def path(self, instance: RedisUser | None = None) -> Path:
        """None: of the server's own administrator."""
        return self._directory / f"{instance.file if instance else ADMIN}{SUFFIX}"

    def settings(self, instance: RedisUser) -> dict[str, str]:
        """What makes a service this user, as variables of its environment; they hold no secret."""
        who = {"redis.user": instance.user(self._group), "redis.password_file": str(self.path(instance))}
        return {variable(name): value for name, value in who.items()}

    def write_acl(self, file: Path, instances: Iterable[RedisUser], server: Server | None = None) -> None:
        """The file that a server loads; it has hashes only."""
        self._directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        passwords = {instance: self._kept(self.path(instance)) for instance in sorted(set(instances))}
        admin = self._kept(self.path())
        write_private(file, access.acl_file(self._group, passwords, admin=admin, server=server))

    def _kept(self, path: Path) -> str:
        if not path.exists():
            write_private(path, secrets.token_urlsafe(32) + "\n")
        if path.stat().st_mode & 0o077:
            raise ConfigError("others may read a password", next_step=f"chmod 600 {path}", file=str(path))
        return read_secret(path)


def add_key(file: Path, name: str, scopes: Iterable[str]) -> str:
    """A new key, in place of the one of that name; only its hash is written."""
    text, key = api_keys.new_key(name, tuple(scopes))
    _rewrite(file, [known for known in known_keys(file) if known.name != name] + [key])
    return text


def revoke_key(file: Path, name: str) -> bool:
    """Whether there was one."""
    known = known_keys(file)
    left = [key for key in known if key.name != name]
    if len(left) < len(known):
        _rewrite(file, left)
    return len(left) < len(known)


def known_keys(file: Path) -> tuple[ApiKey, ...]:
    return api_keys.parse(file.read_text(encoding="utf-8")) if file.exists() else ()


def _rewrite(file: Path, keys: Iterable[ApiKey]) -> None:
    write_private(file, "".join(key.line() for key in keys))


def write_private(path: Path, text: str) -> None:
    """Whole or not at all; whose the file is, and who may read it, stays as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # readable by us only
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            with contextlib.suppress(FileNotFoundError):
                before = path.stat()
                os.fchown(file.fileno(), before.st_uid, before.st_gid)
                os.fchmod(file.fileno(), before.st_mode & 0o777)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
