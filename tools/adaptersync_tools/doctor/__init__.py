"""What is wrong with this host, or would be once it is under load: looked for by `adaptersync doctor`.

It changes nothing but empty files that it makes to see whether it may, and removes.
"""

from __future__ import annotations

from adaptersync_core.config import Config
from adaptersync_tools.doctor import directories, engine, host, reach, servers
from adaptersync_tools.doctor.finding import ROLES, Finding, Role, Verdict


async def examine(config: Config, roles: frozenset[Role] = frozenset(ROLES)) -> Verdict:
    """Everything that can be looked at from here, for a host on which the services of these roles run."""
    verdict = Verdict()
    await servers.examine(verdict, config)
    directories.examine(verdict, config, roles)
    if "agent" in roles:
        await engine.examine(verdict, config)
    await reach.examine(verdict, config, roles)
    host.examine(verdict, config, roles)
    return verdict


__all__ = ["ROLES", "Finding", "Role", "Verdict", "examine"]
