"""Whether the ids of a stream are told by the clock.

Redis gives ids by its clock, above the last one; whoever may add to a stream may choose a later one. The streams follow
from there: what is added then has no time of its own, and above the highest id nothing is added at all.
"""

from __future__ import annotations

from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient, unless_refused

AHEAD_S = 3600.0  # more than a clock is set back by


async def ahead(client: RedisClient, keys: Keys) -> list[str]:
    """Streams whose last id is later than now; without those that are not there, or that this user may not see."""
    now_ms = (await client.command("TIME"))[0] * 1000
    found = []
    for name, stream in (("events", keys.events), ("rollouts", keys.rollouts), ("fates", keys.fates)):
        told = await unless_refused(client.command("XINFO", "STREAM", stream), [])
        last = dict(zip(told[::2], told[1::2], strict=True)).get("last-generated-id", "0")
        if int(last.partition("-")[0]) > now_ms + AHEAD_S * 1000:
            found.append(name)
    return found
