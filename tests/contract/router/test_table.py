"""Which tables a router takes for the newer."""

from __future__ import annotations

import pytest

from adaptersync.router.table import TableView
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.table import Table
from support.tables import make_table


class Told(Registry):
    """A registry whose table a test sets."""

    present = Table()

    async def table(self) -> Table:
        return self.present


@pytest.mark.parametrize(
    ("incarnation", "generation", "taken"),
    [
        ("a", 8, True),
        ("b", 8, True),
        ("b", 7, True),  # as new, of another leader: what this one had of that generation was lost
        ("a", 6, False),  # set back
        ("b", 6, False),
        ("", 0, False),  # gone
    ],
)
async def test_only_what_is_as_new_is_taken(incarnation: str, generation: int, taken: bool) -> None:
    registry = Told(RedisClient("redis://127.0.0.1:1/0", name="test"), Keys("group"))
    view = TableView(registry, max_age_s=60)
    registry.present = Table(incarnation="a", generation=7)
    await view.read()
    registry.present = Table(incarnation=incarnation, generation=generation)
    await view.read()
    assert (view.table == registry.present) is taken


async def test_who_may_be_chosen_is_made_ready_once_a_table() -> None:
    """Each rank stands for itself, beside a replica that has one; who is left out takes all its ranks along."""
    registry = Told(RedisClient("redis://127.0.0.1:1/0", name="test"), Keys("group"))
    view = TableView(registry, max_age_s=60)
    urls = {"r10": "u10", "r2": "u2", "r3": "u3"}
    registry.present = make_table({}, urls, members={"r2": {"ranks": 11}, "r3": {"state": "joining", "ranks": 2}})
    await view.read()
    ranks = [f"r2/{rank}" for rank in range(11)]
    assert view.ready == ["r10", "r2"]
    assert view.ranks(view.ready) == ["r10", *ranks]
    assert view.ranks(view.ready) is view.ranks(view.ready)
    assert view.ranks(["r10"]) == ["r10"]
    assert view.ranks(["r2"]) == ranks
    registry.present = make_table({}, urls, generation=2)
    await view.read()
    assert not view.ranked
    assert view.ranks(view.ready) is view.ready
