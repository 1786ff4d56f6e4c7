"""One request at one replica: sent, and its answer passed through, or found to be none that another could not better.

No replica is asked before the row is opened. What an answer, or its absence, says of the replica is told to `outages`;
who is asked next is for the caller to know.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from adaptersync.router.attempts import Attempt, Attempts
from adaptersync.router.call import Call
from adaptersync.router.connection import (
    Answer,
    ConnectFailed,
    CutShort,
    Gone,
    NoRoom,
    ReplicaError,
    TimedOut,
    Unsendable,
)
from adaptersync.router.connections import Connections
from adaptersync.router.course import Elsewhere
from adaptersync.router.credentials import Credentials
from adaptersync.router.faults import NOTHING, fault, unanswered
from adaptersync.router.ledger import Ledger
from adaptersync.router.metrics import Metrics
from adaptersync.router.outages import Outages
from adaptersync.router.request import ClientGone, Pair, Reply, Request
from adaptersync.router.resolve import RETRY_S
from adaptersync.router.table import TableView
from adaptersync.router.upstream import answer_headers, retry_after, with_retry_after
from adaptersync.router.usage import TAIL_BYTES
from adaptersync_core.config import RouterSection
from adaptersync_core.errors import Unroutable
from adaptersync_core.rollouts import OPEN

WHOLE_BYTES = 256 << 10  # answers up to this size, where known, are read before the first byte is passed on
SAID_S = 5.0  # for the body of an answer that says what is wrong: nothing is computed for it, and others may do better


class Exchange:
    """How this router, called `name`, asks replicas."""

    def __init__(
        self,
        *,
        name: str,
        settings: RouterSection,
        connections: Connections,
        view: TableView,
        attempts: Attempts,
        outages: Outages,
        ledger: Ledger,
        metrics: Metrics,
        credentials: Credentials | None = None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._connections = connections
        self._view = view
        self._attempts = attempts
        self._outages = outages
        self._ledger = ledger
        self._metrics = metrics
        self._credentials = credentials

    async def send(
        self,
        request: Request,
        call: Call,
        replica: str,
        body: bytes,
        sent: Sequence[Pair],
        *,
        last: bool,
        wait_s: float,
    ) -> Reply | None:
        """One attempt; Elsewhere when another replica may do better and the client has received nothing.

        `wait_s` is how long others asked to be left alone.
        """
        member = self._view.table.members.get(replica)
        if member is None or member.state != "ready" or (call.row.rank or 0) >= member.ranks:
            raise Elsewhere("gone", "replica left while it was chosen")
        call.row.engine_epoch = member.engine_epoch
        if call.recorded:
            self._record(call)
        shown = sent if self._credentials is None else self._credentials.shown(replica, sent)
        sent_at = time.monotonic()
        left_s = self._settings.request_timeout_s - (sent_at - call.started)  # of all that it may take
        attempt = self._attempts.at(replica, member.engine_epoch)

        def connected(answer: Answer) -> None:
            self._outages.reached(replica)
            attempt.asked(answer)

        try:
            with (
                attempt,
                await self._connections.post(member.url, request.target, shown, body, left_s, connected) as answer,
            ):
                call.row.first_byte_s = time.monotonic() - sent_at
                call.row.status = answer.status
                # where the router has keys, clients' are not shown to replicas
                as_client = shown is sent and not self._settings.keys_file
                reason = fault(answer.status, as_client=as_client)
                if reason or answer.status == 429:
                    wait_s = max(wait_s, self._judge(answer, reason, replica, member.engine_epoch, last=last))
                if (
                    answer.status == 200
                    and (answer.length is None or answer.length > WHOLE_BYTES)
                    and await self._stream(request, call, attempt, answer, sent_at)
                ):
                    self._outages.answered(replica)
                    return None
                whole = await (answer.read(WHOLE_BYTES) if answer.status == 200 else _said_of_it(answer, reason))
                if answer.status == 404 and call.row.run and call.row.version.encode() in whole:
                    self._outages.lacking.found(replica, call.row.version, member.engine_epoch)
                    self._view.nudge()  # whoever reports does so at once
                    self._metrics.count("missing_version", replica)
                    raise Elsewhere("missing_version", "replica does not know the version")
                if answer.status == 200 and not whole:
                    reason = NOTHING
                    self._failed(replica, member.engine_epoch, "empty", reason, last=last)
                if answer.status in (429, 503):
                    wait_s = max(wait_s, RETRY_S)  # coming back helps, whether or not the replica says so
                elif not reason:
                    self._outages.answered(replica)
                    wait_s = 0.0
                if reason:
                    call.row.outcome = "upstream_error"
                    raise unanswered(call.row, reason, whole, wait_s)
                call.answered(whole[-TAIL_BYTES:])
                call.look_for_void(self._view.table)
                pairs = answer_headers(answer, call.headers())
                if wait_s:
                    pairs = with_retry_after(pairs, wait_s)
                if len(whole) <= WHOLE_BYTES:
                    return Reply(answer.status, pairs, whole)
                await _pass_on(request, attempt, answer, pairs, whole)  # what is wrong, at length
                return None
        except Unsendable as error:
            raise Unroutable(f"request cannot be passed on: {error}", status=400) from error
        except NoRoom as error:
            # says nothing of the replica, and with the next one it would be no better
            raise Unroutable(
                f"router cannot open another connection: {error}",
                status=503,
                retry_after_s=RETRY_S,
                next_step="allow it more open files",
                router=self._name,
            ) from error
        except ReplicaError as error:
            # who had little of the request's time, after others, is not at fault that it is over
            hurried = isinstance(error, TimedOut) and left_s < self._settings.request_timeout_s / 2
            if not attempt.lost and not hurried:
                away = isinstance(error, ConnectFailed | Gone)
                self._outages.failed(replica, member.engine_epoch, time.monotonic(), _said(error), away=away)
            if request.begun:
                # not ended, so the client's connection is cut: it must not take what it has for all of it
                call.end("upstream_error", call.row.status, attempt.lost or _said(error))
                return None
            raise self._broken(call, attempt, error) from error

    def _broken(self, call: Call, attempt: Attempt, error: ReplicaError) -> Elsewhere | Unroutable:
        """What follows where nothing of an answer has reached the client."""
        if attempt.lost:
            return Elsewhere("silent", attempt.lost)
        if isinstance(error, TimedOut):
            call.row.outcome = "upstream_error"
            return Unroutable(
                "replica did not answer in time", status=504, replica=attempt.replica, version=call.row.version
            )
        if not isinstance(error, ConnectFailed):  # it was asked, and that may be what ended it
            return Elsewhere("cut", f"replica did not answer to the end: {_said(error)}")
        return Elsewhere("unreachable", f"replica cannot be reached: {_said(error)}")

    def _judge(self, answer: Answer, reason: str, replica: str, engine_epoch: str, *, last: bool) -> float:
        """What to make of an answer that another replica may do better than; how long it asks to be left alone.

        One that has too much to do has not failed.
        """
        wait_s = retry_after(answer)
        if answer.status == 429 or (answer.status == 503 and wait_s):
            if not last:
                raise Elsewhere("full", f"replica is full: {answer.status}", wait_s=wait_s)
            return wait_s
        self._failed(replica, engine_epoch, f"status_{answer.status}", reason, last=last)
        return wait_s

    def _failed(self, replica: str, engine_epoch: str, kind: str, reason: str, *, last: bool) -> None:
        """It did not answer, whatever it said."""
        self._outages.failed(replica, engine_epoch, time.monotonic(), reason)
        if not last:
            raise Elsewhere(kind, reason)

    async def _stream(self, request: Request, call: Call, attempt: Attempt, answer: Answer, sent_at: float) -> bool:
        """Pass chunks on as they come. False when there are none.

        A replica that queues a stream has said 200: the client is told nothing before there is something of it.
        """
        chunk = await answer.piece()
        if not chunk:
            return False
        if answer.length is None:  # a long answer that comes whole says nothing of its first token
            call.row.first_token_s = time.monotonic() - sent_at
        call.look_for_void(self._view.table)
        tail = await _pass_on(request, attempt, answer, answer_headers(answer, call.headers()), chunk)
        first_s = call.row.first_token_s
        if first_s is not None:
            self._metrics.observe("first_token_seconds", first_s, call.row.replica, call.row.version)
            self._metrics.observe("decode_seconds", time.monotonic() - sent_at - first_s, call.row.replica)
        call.answered(tail)
        return True

    def _record(self, call: Call) -> None:
        """Open the row, or have it name another replica; whether the ledger has room decides if we serve."""
        row = call.row
        row.outcome = OPEN
        call.sent = self._ledger.open(row) or self._settings.when_spool_full == "serve"
        row.outcome = "ok"
        if call.sent:
            return
        raise Unroutable(
            "ledger's spool is full: the request could not be recorded",
            status=503,
            retry_after_s=RETRY_S,
            next_step="check the control server",
            router=self._name,
        )


async def _pass_on(request: Request, attempt: Attempt, answer: Answer, pairs: Sequence[Pair], chunk: bytes) -> bytes:
    """Begin with this chunk; only the tail is remembered, for the token counts.

    ClientGone, too, when the time ends while the client is waited for: that is not the replica's fault.
    """
    tail = b""
    request.begin(answer.status, pairs, answer.length)
    while chunk:
        attempt.moved()  # from here on nobody else can be asked
        await request.write(chunk)
        if answer.late:
            raise ClientGone("client took the answer too slowly for the time that it had")
        tail = (tail + chunk)[-TAIL_BYTES:]
        chunk = await answer.piece()
    request.end()
    return tail


async def _said_of_it(answer: Answer, reason: str) -> bytes:
    """The body of an answer that says what is wrong, or its beginning; one that is none, by `reason`, need not end."""
    try:
        async with asyncio.timeout(SAID_S):
            return await answer.read(WHOLE_BYTES)
    except TimeoutError as error:
        if not reason:
            raise CutShort(f"what is wrong was not said within {SAID_S:.0f} s") from error
    except ReplicaError:
        if not reason:
            raise
    return b""


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
