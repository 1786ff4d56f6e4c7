"""Requests that are at a replica, and their end when the table says that the replica does not answer.

One of which the client has received nothing ends at once: another replica can be asked. One whose answer has begun
ends when it stands still, since a replica that lost only its agent goes on answering. What a draining replica has is
left alone, and what one has that is silent and ready, if nobody else could answer. An end is that of the answer; the
caller says what it means.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from adaptersync.router.connection import Answer, ReplicaError
from adaptersync_core.table import Member, Table

STILL_S = 5.0  # between two pieces of an answer of a replica that is said not to answer: then it is right


class Lost(ReplicaError):
    """The table says that no answer is to be expected."""


class Attempt:
    """One request at one life of one replica; use as a context.

    `lost` says why it was ended, or is to be. Tell it which answer was `asked` for, and when something `moved` on to
    the client.
    """

    __slots__ = ("_answer", "_attempts", "_loop", "_moved_at", "_timer", "engine_epoch", "lost", "replica")

    def __init__(self, attempts: Attempts, replica: str, engine_epoch: str) -> None:
        self._attempts = attempts
        self._answer: Answer | None = None
        self._loop = attempts.loop
        self._moved_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.replica = replica
        self.engine_epoch = engine_epoch
        self.lost = ""

    def __enter__(self) -> Attempt:
        self._attempts.present.setdefault(self.replica, set()).add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._answer = None
        if self._timer is not None:
            self._timer.cancel()
        present = self._attempts.present[self.replica]
        present.discard(self)
        if not present:
            del self._attempts.present[self.replica]

    def asked(self, answer: Answer) -> None:
        """This is about to be asked for; Lost when that is no use any more."""
        self._answer = answer
        if self.lost:
            raise Lost(self.lost)

    def moved(self) -> None:
        """The client receives something, or more."""
        self._moved_at = self._loop.time()
        if self.lost:
            self.end(self.lost)

    def end(self, reason: str) -> None:
        """Now, or when the answer has stood still for long enough."""
        self.lost = reason
        if self._timer is not None:
            self._timer.cancel()
        if self._moved_at is None:
            self._cut()
        else:
            self._timer = self._loop.call_at(self._moved_at + STILL_S, self._cut)

    def _cut(self) -> None:
        if self._answer is not None:
            self._answer.fail(Lost(self.lost))


class Attempts:
    """All of this router's attempts, by replica."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.present: dict[str, set[Attempt]] = {}

    def at(self, replica: str, engine_epoch: str) -> Attempt:
        return Attempt(self, replica, engine_epoch)

    def look(self, table: Table) -> None:
        """A new table has come: end what will get no answer."""
        others = len(table.ready()) > len(table.silent())
        for replica, attempts in self.present.items():
            member = table.members.get(replica)
            for attempt in attempts:
                reason = _lost(member, attempt.engine_epoch, others=others)
                if reason and not attempt.lost:
                    attempt.end(f"{replica}: {reason}")


def _lost(member: Member | None, engine_epoch: str, *, others: bool) -> str:
    """Why nothing more is to be expected, or nothing. Who left the table drained, or was found silent before.

    `others`: replicas that are heard could answer instead of one that the floor keeps.
    """
    if member is None:
        return ""
    if member.engine_epoch != engine_epoch:
        return "its engine restarted"
    return member.reason if member.silent and (others or member.state != "ready") else ""
