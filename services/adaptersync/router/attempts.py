"""Requests that are at a replica, and their end when the table says that the replica does not answer.

One of which the client has received nothing ends at once: another replica can be asked. One whose answer has begun
ends when it stands still, since a replica that lost only its agent goes on answering. What a draining replica has is
left alone, and what one has that is silent and ready, if nobody else could answer. Knows no HTTP and asks nobody; the
caller says what an end means.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from adaptersync_core.table import Member, Table

STILL_S = 5.0  # between two pieces of an answer of a replica that is said not to answer: then it is right


class Attempt:
    """One request at one life of one replica; use as a context, which raises TimeoutError when it is ended.

    `lost` says why it was, or is to be. Tell it when something `moved` on to the client.
    """

    __slots__ = ("_attempts", "_moved_at", "_timeout", "engine_epoch", "lost", "replica")

    def __init__(self, attempts: Attempts, replica: str, engine_epoch: str) -> None:
        self._attempts = attempts
        self._moved_at: float | None = None
        self._timeout = asyncio.timeout(None)
        self.replica = replica
        self.engine_epoch = engine_epoch
        self.lost = ""

    async def __aenter__(self) -> Attempt:
        await self._timeout.__aenter__()
        self._attempts.present.setdefault(self.replica, set()).add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        present = self._attempts.present[self.replica]
        present.discard(self)
        if not present:
            del self._attempts.present[self.replica]
        await self._timeout.__aexit__(kind, error, trace)

    def moved(self) -> None:
        """The client receives something, or more."""
        self._moved_at = asyncio.get_running_loop().time()
        if self.lost:
            self.end(self.lost)

    def end(self, reason: str) -> None:
        """Now, or when the answer has stood still for long enough."""
        self.lost = reason
        now = asyncio.get_running_loop().time()
        self._timeout.reschedule(now if self._moved_at is None else max(now, self._moved_at + STILL_S))


class Attempts:
    """All of this router's attempts, by replica."""

    def __init__(self) -> None:
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
