"""Many deadlines on one timer."""

from __future__ import annotations

import asyncio

from adaptersync.router.deadlines import Deadlines
from support.wait import wait_until


class Waiting:
    def __init__(self, name: str, expired: list[str]) -> None:
        self.name = name
        self.expired = expired

    def expire(self) -> None:
        self.expired.append(self.name)


async def test_each_expires_at_its_time_and_once_unless_it_was_dropped() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time()
    expired: list[str] = []
    late, sooner, soonest, dropped, far = (
        Waiting(name, expired) for name in ("late", "sooner", "soonest", "no", "far")
    )
    deadlines.add(far, now + 600)
    deadlines.add(late, now + 0.2)
    deadlines.add(sooner, now + 0.1)
    deadlines.add(dropped, now + 0.01)
    deadlines.add(soonest, now - 1)
    deadlines.drop(dropped)
    await wait_until(lambda: len(expired) == 3)
    assert expired == ["soonest", "sooner", "late"]
    deadlines.drop(late)  # it is over
    again = Waiting("again", expired)
    deadlines.add(again, now)
    await wait_until(lambda: len(expired) == 4)
    assert expired[-1] == "again"


async def test_one_that_is_asked_for_again_has_a_new_deadline() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time()
    expired: list[str] = []
    one = Waiting("one", expired)
    deadlines.add(one, now + 0.01)
    deadlines.drop(one)
    deadlines.add(one, now + 0.1)
    await wait_until(lambda: expired)
    assert asyncio.get_running_loop().time() >= now + 0.1
