"""What makes a fleet on one machine a secured one: users of Redis for its parts, keys for its routers."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from adaptersync_core.access import RedisUser
from adaptersync_core.keys import Role
from adaptersync_tools import servers
from adaptersync_tools.secrets import Passwords, add_key, write_private

OPERATOR, READER, WORKER = (
    RedisUser("operator", "operator-0"),
    RedisUser("reader", "reader-0"),
    RedisUser("worker", "worker-0"),
)
KEYS = {"trainer": "rollout", "admin": "admin"}  # of the routers, with the scope of each


class Secured:
    """Nothing is made before `make`."""

    def __init__(self, directory: Path, group: str) -> None:
        self._directory = directory
        self._passwords = Passwords(directory, group)
        self._group = group

    def make(
        self, *, agents: Iterable[str], coordinators: Iterable[str], routers: Iterable[str], trainers: Iterable[str]
    ) -> dict[str, str]:
        """Users and keys; returns the settings of whoever operates the fleet. Passwords that are there stay."""
        users = [OPERATOR, READER, WORKER]
        named: tuple[tuple[Role, Iterable[str]], ...] = (
            ("agent", agents),
            ("coordinator", coordinators),
            ("router", routers),
            ("trainer", trainers),
        )
        users += [RedisUser(role, name) for role, names in named for name in names]
        for server in servers.Role:
            self._passwords.write_acl(self.acl_file(server), users, server.value)
        for name, scope in KEYS.items():
            write_private(self.key_file(name), add_key(self._directory / "api-keys", name, (scope,)) + "\n")
        return {
            "redis.user": OPERATOR.user(self._group),
            "redis.password_file": str(self._passwords.path(OPERATOR)),
            "router.keys_file": str(self._directory / "api-keys"),
            "page.keys_file": str(self._directory / "api-keys"),
            "trainer.router_key_file": str(self.key_file("trainer")),
        }

    def acl_file(self, server: servers.Role) -> Path:
        return self._directory / f"{server}.acl"

    def key_file(self, name: str) -> Path:
        """A key that the routers know, as a client shows it."""
        return self._directory / f"{name}.key"

    def user(self, role: Role, name: str) -> dict[str, str]:
        """The variables that make a process this user."""
        return self._passwords.settings(RedisUser(role, name))
