"""Conversations of the rollout process: each keeps to one version, and is begun again once that is too old.

Knows what the trainer says over shared memory, and asyncio; knows nothing of HTTP or TRL.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

LOOK_S = 0.1  # how soon it is noticed what the trainer says

T = TypeVar("T")


class Clocks(ctypes.Structure):
    """What the trainer tells the rollout process. `value` (TRL's name) is the number of the version that is current, 0
    while none of this trainer's is.

    What a version below `oldest` writes will not be trained on.
    """

    _fields_ = (("value", ctypes.c_int64), ("oldest", ctypes.c_int64))


class Told(Protocol):
    @property
    def value(self) -> int: ...
    @property
    def oldest(self) -> int: ...


@dataclass(slots=True, eq=False)
class Conversation:
    """Which version a conversation asks for, the oldest one that wrote a part of it, and the requests it is made of."""

    asks: int
    oldest: int | None = None
    task: asyncio.Task[Any] | None = None
    doomed: bool = False
    requests: list[str] = field(default_factory=list)

    def took(self, version: int, request_id: str = "") -> None:
        if request_id:
            self.requests.append(request_id)
        self.oldest = version if self.oldest is None else min(self.oldest, version)

    @property
    def counts_as(self) -> int:
        return self.asks if self.oldest is None else self.oldest


present: ContextVar[Conversation] = ContextVar("conversation")


class Conversations:
    """`cut_off`: whether one can be begun again. `on_doomed` is called for each that was cut off."""

    def __init__(self, told: Told, *, cut_off: bool, on_doomed: Callable[[Conversation], None]) -> None:
        self._told = told
        self._cut_off = cut_off
        self._on_doomed = on_doomed
        self._under_way: set[Conversation] = set()
        self._moved = asyncio.Event()

    async def watch(self) -> None:
        """Until cancelled."""
        seen = (0, 0)
        while True:
            if (told := (self._told.value, self._told.oldest)) != seen:
                seen = told
                self._moved.set()
                self._moved = asyncio.Event()
                self._doom(told[1])
            await asyncio.sleep(LOOK_S)

    def _doom(self, oldest: int) -> None:
        for conversation in self._under_way if self._cut_off else ():
            if conversation.counts_as < oldest and conversation.task is not None:
                conversation.doomed = True
                conversation.task.cancel()  # and its request with it, to the engine

    async def hold(self, begin: Callable[[], Coroutine[Any, Any, T]]) -> tuple[Conversation, T]:
        """One conversation to its end, on a version that can be trained on."""
        while True:
            while (current := self._told.value) < max(self._told.oldest, 1):
                await self._moved.wait()  # a promotion is on its way; what the fleet serves until then is of no use
            conversation = Conversation(asks=current)
            present.set(conversation)
            conversation.task = asyncio.create_task(begin())  # in a context of its own
            self._under_way.add(conversation)
            try:
                return conversation, await conversation.task
            except asyncio.CancelledError:
                this = asyncio.current_task()
                if not conversation.doomed or (this is not None and this.cancelling()):
                    raise
                self._on_doomed(conversation)
            finally:
                self._under_way.discard(conversation)
