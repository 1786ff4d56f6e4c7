"""Desired minus observed: what an agent has to do now. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from adaptersync_core.records import Ack


class Plan(Struct, frozen=True, kw_only=True):
    """What to do, each in the order given; `cancel` is work on versions that are no longer wanted.

    `retract` is what was said of versions that this life of the engine has lost: taken back before they are brought.
    """

    retract: tuple[str, ...] = ()
    bring: tuple[str, ...] = ()
    confirm: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    cancel: tuple[str, ...] = ()
    forget: tuple[str, ...] = ()


def plan(
    *,
    wanted: Sequence[str],
    loaded: Collection[str],
    acks: Mapping[str, Ack],
    engine_epoch: str,
    busy: Collection[str],
    resting: Collection[str],
) -> Plan:
    """`busy` versions are being brought in already; `resting` ones were refused a moment ago and are left alone."""
    said = {name for name, ack in acks.items() if ack.accepted and ack.engine_epoch == engine_epoch}
    idle = {*busy, *resting}
    return Plan(
        retract=tuple(name for name in wanted if name in said and name not in loaded and name not in idle),
        bring=tuple(name for name in wanted if name not in loaded and name not in idle),
        confirm=tuple(name for name in wanted if name in loaded and name not in said | idle),
        unload=tuple(sorted(name for name in loaded if name not in wanted)),
        cancel=tuple(sorted(name for name in busy if name not in wanted)),
        forget=tuple(sorted(name for name in acks if name not in wanted)),
    )
