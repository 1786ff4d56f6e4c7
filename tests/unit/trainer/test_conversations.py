"""A conversation keeps its version; one that nobody would train on is cut off and begun again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from adaptersync.trainer import conversations as module
from adaptersync.trainer.conversations import Conversation, Conversations, present
from support.wait import wait_until


class Rollouts:
    """`told` is what the trainer says; a conversation lasts until `go`."""

    def __init__(self, *, cut_off: bool = True) -> None:
        self.told = SimpleNamespace(value=1, oldest=0)
        self.go = asyncio.Event()
        self.asked: list[int] = []
        self.cancelled = self.doomed = 0
        self.all = Conversations(self.told, cut_off=cut_off, on_doomed=self.count)

    def count(self, conversation: Conversation) -> None:
        self.doomed += 1

    def hold(self) -> asyncio.Task[tuple[Conversation, str]]:
        return asyncio.create_task(self.all.hold(self.converse))

    async def converse(self) -> str:
        self.asked.append(present.get().asks)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        present.get().took(present.get().asks)
        return "said"


@contextlib.asynccontextmanager
async def watched(rollouts: Rollouts) -> AsyncIterator[Rollouts]:
    watch = asyncio.create_task(rollouts.all.watch())
    yield rollouts
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.005)


async def ended(task: asyncio.Task[Any]) -> Any:
    return await asyncio.wait_for(task, 10)


async def test_a_promotion_does_not_disturb_it() -> None:
    async with watched(Rollouts()) as rollouts:
        task = rollouts.hold()
        await wait_until(lambda: rollouts.asked == [1])
        rollouts.told.value, rollouts.told.oldest = 2, 1
        await asyncio.sleep(0.05)  # ten looks
        rollouts.go.set()
        conversation, said = await ended(task)
        assert (said, conversation.counts_as, rollouts.asked, rollouts.doomed) == ("said", 1, [1], 0)


async def test_too_old_it_is_cancelled_and_begun_again_on_the_version_of_now() -> None:
    async with watched(Rollouts()) as rollouts:
        task = rollouts.hold()
        await wait_until(lambda: rollouts.asked == [1])
        rollouts.told.value = rollouts.told.oldest = 3
        await wait_until(lambda: rollouts.asked == [1, 3])
        assert (rollouts.cancelled, rollouts.doomed) == (1, 1)
        rollouts.go.set()
        conversation, _ = await ended(task)
        assert conversation.counts_as == 3
    assert not rollouts.all._under_way


async def test_none_is_begun_on_a_version_that_is_too_old_already() -> None:
    async with watched(Rollouts()) as rollouts:
        rollouts.told.oldest = 2  # the next version is on its way
        task = rollouts.hold()
        await asyncio.sleep(0.05)
        assert rollouts.asked == []
        rollouts.told.value = 2
        await wait_until(lambda: rollouts.asked == [2])
        rollouts.go.set()
        await ended(task)


@pytest.mark.parametrize("oldest", [0, 1])
async def test_none_is_begun_while_nothing_is_served(oldest: int) -> None:
    async with watched(Rollouts()) as rollouts:
        rollouts.told.value, rollouts.told.oldest = 0, oldest
        task = rollouts.hold()
        await asyncio.sleep(0.05)
        assert rollouts.asked == []
        rollouts.told.value = 2
        await wait_until(lambda: rollouts.asked == [2])
        rollouts.go.set()
        await ended(task)


async def test_what_a_part_was_written_by_counts_not_what_is_asked_now() -> None:
    conversation = Conversation(asks=5)
    assert conversation.counts_as == 5
    conversation.took(7)
    assert conversation.counts_as == 7
    conversation.took(6)
    conversation.took(8)
    assert conversation.counts_as == 6


async def test_in_an_environment_it_is_left_to_end() -> None:
    async with watched(Rollouts(cut_off=False)) as rollouts:
        task = rollouts.hold()
        await wait_until(lambda: rollouts.asked == [1])
        rollouts.told.value = rollouts.told.oldest = 3
        await asyncio.sleep(0.05)
        rollouts.go.set()
        conversation, _ = await ended(task)
        assert (conversation.counts_as, rollouts.doomed) == (1, 0)


@pytest.mark.parametrize("doomed", [False, True])
async def test_who_ends_it_all_is_not_held_up(doomed: bool) -> None:
    async with watched(Rollouts()) as rollouts:
        task = rollouts.hold()
        await wait_until(lambda: rollouts.asked == [1])
        if doomed:
            (conversation,) = rollouts.all._under_way
            conversation.doomed = True
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ended(task)
        assert (rollouts.cancelled, rollouts.doomed) == (1, 0)
