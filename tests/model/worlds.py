"""The worlds that are searched: each has what its question needs and a budget of faults; the window is one."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from model.machine import start
from model.state import State


class World(Struct, frozen=True, kw_only=True):
    """`depth` is the bound in steps in the suite, `deep` that of tools/model."""

    about: str
    make: Callable[[], State]
    depth: int
    deep: int


def _with_joiner() -> State:
    state = start(engines=3, publish=2, join=1, silence=1, drain=1, restart=1, wait=1)
    table = replace(state.redis.table, members={n: m for n, m in state.redis.table.members.items() if n != "r3"})
    redis = replace(state.redis, table=table, reports={n: said for n, said in state.redis.reports.items() if n != "r3"})
    me = state.coordinators["A"]
    assert me.known is not None
    known = replace(me.known, table=table)
    return replace(
        state,
        engines=state.engines | {"r3": replace(state.engines["r3"], absent=True)},
        redis=redis,
        journal=replace(state.journal, known=known),
        coordinators={"A": replace(me, known=known)},
    )


WORLDS = {
    "promotion": World(
        about="three replicas accept, refuse, restart or keep silent about two versions",
        make=lambda: start(engines=3, publish=2, restart=1, refuse=1, wait=1),
        depth=13,
        deep=20,
    ),
    "faults": World(
        about="of three replicas, some refuse a version and some cannot take it by their own fault; one restarts",
        make=lambda: start(engines=3, publish=2, restart=1, refuse=1, fail=2, wait=1),
        depth=10,
        deep=16,
    ),
    "membership": World(
        about="a third replica joins while versions come; one drains, one falls silent, one restarts",
        make=_with_joiner,
        depth=7,
        deep=14,
    ),
    "frozen": World(
        about="an agent freezes with a load, an unload or an ack in hand and goes on late; three versions",
        make=lambda: start(engines=2, publish=3, freeze=1, restart=1, wait=1),
        depth=13,
        deep=18,
    ),
    "window": World(
        about="three versions, an operator who voids, a newer trainer, a replica that restarts",
        make=lambda: start(engines=1, publish=3, ask=1, begin=1, restart=1, wait=1),
        depth=10,
        deep=30,
    ),
    "routers": World(
        about="two routers that read and report late or are cut off, with requests in flight; three versions",
        make=lambda: start(engines=1, routers=2, publish=3, admit=1, cut=1, wait=1),
        depth=14,
        deep=22,
    ),
    "leaders": World(
        about="two coordinators; one may die, or pause for longer than its lease, at each step of a turn",
        make=lambda: start(engines=2, coordinators=2, torn=True, publish=2, crash=1, ask=1, wait=1),
        depth=13,
        deep=16,
    ),
    "rewound": World(
        about="Redis is set back to an older state, the coordinator dies, an operator voids, a router is behind",
        make=lambda: start(engines=1, routers=1, torn=True, publish=2, save=1, rewind=1, crash=1, ask=1, wait=1),
        depth=10,
        deep=16,
    ),
    "paused": World(
        about="Redis is set back while a former leader is paused in its turn",
        make=lambda: start(engines=1, coordinators=2, torn=True, publish=2, save=1, rewind=1, wait=2),
        depth=11,
        deep=16,
    ),
    "emptied": World(
        about="Redis is emptied; the trainer goes on or another begins, the coordinator dies",
        make=lambda: start(engines=1, routers=1, torn=True, publish=3, begin=1, empty=1, crash=1, wait=1),
        depth=10,
        deep=16,
    ),
}
