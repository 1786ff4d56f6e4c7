"""How many services each host is to run, as operators asked for it; followed by whoever keeps them running there.

A wish, not a decision: a replica serves when a coordinator has found it ready, whoever started it.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

from adaptersync_core.errors import ControlError, NameInvalid
from adaptersync_core.keys import Keys
from adaptersync_core.records import from_json
from adaptersync_core.redis import RedisClient
from adaptersync_core.scripts import Script

MOST = {"replicas": 64, "routers": 16, "workers": 16}  # of one host
HOSTS = 64  # that may be spoken of; more is a mistake, and status would not be read
UP = "up"  # `adaptersync up`, which follows by itself
SYSTEMD = "systemd"  # a command on the host, which starts and stops units

_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")


class Scale(Struct, frozen=True, kw_only=True):
    """What one host is to run; of what is None nobody has said how many, and nothing is touched.

    `keeper` follows it, and could run `most` replicas; 0: it does not say.
    """

    replicas: int | None = None
    routers: int | None = None
    workers: int | None = None
    keeper: str = SYSTEMD
    most: int = 0


def check(host: str, scale: Scale) -> None:
    """NameInvalid or ControlError for what cannot be asked for."""
    if not _HOST.fullmatch(host):
        raise NameInvalid("not the name of a host", next_step="as `hostname` prints it there", host=host[:96])
    for what, most in MOST.items():
        count = getattr(scale, what)
        if count is not None and not 0 <= count <= most:
            raise ControlError(f"a host runs 0 to {most} {what}", host=host, asked=count)
    if scale.keeper == UP and scale.routers == 0:
        raise ControlError("the first router of this host goes with the fleet itself", host=host)
    if scale.most and (scale.replicas or 0) > scale.most:
        raise ControlError(
            f"this host can run {scale.most} replicas",
            next_step="start it again with more, or ask another host",
            host=host,
            asked=scale.replicas,
        )


async def ask(client: RedisClient, keys: Keys, host: str, scale: Scale) -> None:
    check(host, scale)
    reply = await client.script(Script("request"), (keys.scale,), (host, msgspec.json.encode(scale), HOSTS))
    if reply[0] == "full":
        raise ControlError(
            "too many hosts were scaled", next_step="adaptersync scale --forget --host HOST", hosts=HOSTS
        )


async def asked(client: RedisClient, keys: Keys) -> dict[str, Scale]:
    """By host; what cannot be read is left out."""
    fields: dict[str, str] = await client.command("HGETALL", keys.scale)
    found = {host: from_json(f"scale of {host}", text, Scale) for host, text in sorted(fields.items())}
    return {host: scale for host, scale in found.items() if scale is not None}


async def forget(client: RedisClient, keys: Keys, host: str) -> bool:
    """Whether there was one."""
    return bool(await client.command("HDEL", keys.scale, host))
