"""How far the ledger's streams are archived, and since when something waits for that: told in Redis, not by the store.

Workers note it with each drain. So whoever leads, or looks, sees that none is at it, be it that none runs.
"""

from __future__ import annotations

from adaptersync_core.config import Config
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient

DRAIN_LATE_S = 900.0  # beyond jobs.ledger_s: a worker may have another job in hand, or begin again


def late_s(config: Config) -> float:
    """The age from which an entry that is not archived is a problem."""
    return config.jobs.ledger_s + DRAIN_LATE_S


async def note(client: RedisClient, keys: Keys, table: str, entry: str) -> None:
    """All up to this entry is archived."""
    await client.command("HSET", keys.archived, table, entry)


async def unarchived_s(client: RedisClient, keys: Keys, config: Config) -> float | None:
    """Age of the oldest entry that is not archived, by the server's clock; 0: there is none.

    None where nothing is to be archived. ControlError for who may not look: agents and routers.
    """
    if not config.jobs.ledger_s:
        return None
    streams = {"rollouts": keys.rollouts, "fates": keys.fates, "events": keys.events}
    time, done = await client.pipeline([("TIME",), ("HGETALL", keys.archived)])
    first = await client.pipeline(
        [("XRANGE", stream, f"({done.get(name, '0-0')}", "+", "COUNT", 1) for name, stream in streams.items()]
    )
    began = [int(entries[0][0].partition("-")[0]) / 1000 for entries in first if entries]
    return max(0.0, time[0] + time[1] / 1e6 - min(began)) if began else 0.0
