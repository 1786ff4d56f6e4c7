"""The hot path: one request in, one replica chosen, its answer passed through, one ledger row.

Reads of a body only what routing needs, and changes in it only a name that had to be resolved. No replica is asked
before the row is opened. Until the client has received a byte, a replica that fails is replaced by another. Nothing
here knows how names are resolved or owners found.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
from msgspec import Raw

from adaptersync.router.admission import Admission
from adaptersync.router.answers import refusal
from adaptersync.router.asked import Asked, check
from adaptersync.router.attempts import Attempt, Attempts
from adaptersync.router.call import Call
from adaptersync.router.chains import NONE, Chains, RememberedChains
from adaptersync.router.connection import Answer, ConnectFailed, Gone, NoRoom, ReplicaError, TimedOut, Unsendable
from adaptersync.router.connections import Connections
from adaptersync.router.course import Course, Elsewhere, Leg
from adaptersync.router.explanation import Explanation, why
from adaptersync.router.faults import NOTHING, fault, unanswered
from adaptersync.router.ledger import Ledger
from adaptersync.router.metrics import Metrics
from adaptersync.router.outages import Outages
from adaptersync.router.ownership import Arrival, Ownership
from adaptersync.router.request import ClientGone, Pair, Reply, Request
from adaptersync.router.resolve import RETRY_S, Target, Wanted, parse
from adaptersync.router.sessions import NONE as NO_SESSION
from adaptersync.router.sessions import Kept, Sessions, session_name, still
from adaptersync.router.table import TableView
from adaptersync.router.upstream import answer_headers, request_headers, retry_after, to_rank, with_retry_after
from adaptersync.router.usage import TAIL_BYTES
from adaptersync_core import headers
from adaptersync_core.config import RouterSection
from adaptersync_core.errors import Unroutable
from adaptersync_core.ranks import split
from adaptersync_core.rollouts import LABEL, OPEN

WHOLE_BYTES = 256 << 10  # answers up to this size, where known, are read before the first byte is passed on
CLIENT_GONE = 499
CHAT = "/v1/chat/completions"

_GATE = headers.GATE.encode()


class Proxy:
    """Everything one request touches, wired once. `serving` are requests at replicas, by version. Without `sessions`
    each request stands for itself."""

    def __init__(
        self,
        *,
        name: str,
        settings: RouterSection,
        connections: Connections,
        view: TableView,
        remembered: RememberedChains,
        admission: Admission,
        ownership: Ownership,
        sessions: Sessions | None,
        attempts: Attempts,
        outages: Outages,
        ledger: Ledger,
        metrics: Metrics,
        stopping: Callable[[], bool],
    ) -> None:
        self._name = name
        self._settings = settings
        self._connections = connections
        self._view = view
        self._remembered = remembered
        self._admission = admission
        self._ownership = ownership
        self._sessions = sessions
        self._attempts = attempts
        self._outages = outages
        self._ledger = ledger
        self._metrics = metrics
        self._stopping = stopping
        self._gate = settings.gate_token.encode()
        self._decoder = msgspec.json.Decoder(Asked)
        self._prefix = secrets.token_hex(6)
        self._count = 0
        self._at_replicas = 0
        self._bytes = 0  # of their bodies
        self.serving: Counter[str] = Counter()

    def rollout(self, request: Request) -> Awaitable[Reply | None]:
        """POST /v1/completions and /v1/chat/completions."""
        return self._handle(request, generates=True)

    def tokenize(self, request: Request) -> Awaitable[Reply | None]:
        """POST /tokenize: any replica can; leaves no ledger row, since nothing is generated."""
        return self._handle(request, generates=False)

    def refuse(self, request: Request, error: Unroutable) -> Reply:
        """What did not arrive as it should is recorded all the same, where it was a rollout."""
        call = self._call(request, recorded=request.path in ("/v1/completions", CHAT))
        try:
            return self._refusal(call, error)
        finally:
            self._close(call)

    def _call(self, request: Request, *, recorded: bool) -> Call:
        self._count += 1
        gate = bool(self._gate) and hmac.compare_digest(request.header(_GATE), self._gate)
        return Call(f"{self._prefix}-{self._count:x}", self._name, request, recorded=recorded, gate=gate)

    def _refusal(self, call: Call, error: Unroutable) -> Reply:
        call.end("refused" if call.row.outcome == "ok" else call.row.outcome, error.status, str(error))
        self._look_for_void(call)
        return refusal(error, status=error.status, headers=call.headers())

    async def _handle(self, request: Request, *, generates: bool) -> Reply | None:
        call = self._call(request, recorded=generates)
        try:
            return await self._serve(request, call, generates=generates)
        except Unroutable as error:
            return self._refusal(call, error)
        except (asyncio.CancelledError, ClientGone):
            call.end("stopped" if self._stopping() else "client_gone", CLIENT_GONE)
            raise
        except BaseException as error:
            call.end("router_error", 500, repr(error))
            raise
        finally:
            self._close(call)

    async def _serve(self, request: Request, call: Call, *, generates: bool) -> Reply | None:
        body = request.body
        asked = self._read(body)
        call.row.asked = (asked.model or "")[:LABEL]
        if call.explained:
            call.explanation = Explanation(policy=self._ownership.policy, spill=self._ownership.spill)
        if generates:
            check(asked, chat=request.path == CHAT, scoring=self._settings.prompt_logprobs)
        kept = NO_SESSION
        if asked.model:
            name = asked.model
            if self._sessions is not None and call.session and generates:
                kept, name = await self._continued(call, name, self._sessions)
            target = await self._admission.admit(name, since=call.started, gate=call.gate)
            if call.explanation is not None:
                base = self._admission.base_model
                call.explanation.why = why(asked.model, base_model=base, session=name != asked.model)
        elif generates:
            raise Unroutable("request names no model", status=400, next_step="see GET /v1/models")
        else:
            target = Target(model="")
        # no await between the resolution and this count: the coordinator unloads what nobody says to be using
        call.admitted(target, self._view.table.generation)
        self.serving[target.model] += 1
        try:
            settings, size = self._settings, len(body)  # which is held for as long as another replica may be asked
            if self._at_replicas >= settings.max_inflight or self._bytes + size > settings.inflight_bytes:
                raise Unroutable(
                    "router is full", status=503, retry_after_s=RETRY_S, in_flight=self._at_replicas, router=self._name
                )
            self._at_replicas += 1
            self._bytes += size
            try:
                if asked.model and asked.model != target.model:
                    body = _rename(body, target.model)
                # what is not generated leaves nothing in a replica's cache
                chains = await self._chains(target, asked, chat=request.path == CHAT) if generates else NONE
                return await self._dispatch(request, call, target, body, chains, kept)
            finally:
                self._at_replicas -= 1
                self._bytes -= size
        finally:
            self.serving[target.model] -= 1
            if self.serving[target.model] <= 0:
                del self.serving[target.model]

    async def _continued(self, call: Call, name: str, sessions: Sessions) -> tuple[Kept, str]:
        """What the session has that this is asked in, and what to admit for `name`."""
        base = self._admission.base_model
        wanted = Wanted(run=base) if name == base else parse(name)
        call.row.session = session_name(call.session, wanted.run)
        kept = await sessions.read(call.row.session)
        return kept, still(kept, wanted, self._view.table) or name

    def _read(self, body: bytes) -> Asked:
        try:
            return self._decoder.decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Unroutable(f"request body is not what it should be: {error}", status=400) from error

    async def _chains(self, target: Target, asked: Asked, *, chat: bool) -> Chains:
        chains = await self._remembered.chains(target.model, asked, chat=chat, block_size=self._view.block_size)
        self._metrics.count("prompts", chains.read, chains.reason)
        return chains

    async def _dispatch(
        self, request: Request, call: Call, target: Target, body: bytes, chains: Chains, kept: Kept
    ) -> Reply | None:
        """Try replicas until one answers, or nobody is left."""
        sent = request_headers(request, call.row.request_id.encode())
        course = Course(self._view, self._outages, target.model, until=call.started + self._settings.hold_s)
        call.row.alike = chains.alike
        while True:
            now = time.monotonic()
            leg = course.next(now)
            if call.explanation is not None:
                asked = (*leg.candidates, *course.tried) if leg else course.tried
                call.explanation.left_out = self._left_out(target.model, asked, now)
                call.explanation.blocks = len(chains.first)
            if leg is None:
                if course.failure:
                    call.row.outcome = "upstream_error"
                raise course.end()
            if not leg.candidates:
                reason = "version is not loaded by any replica that should hold it"
                try:
                    await self._admission.wait(call.row.asked, reason, call.started)
                finally:
                    call.held(now)
                continue
            try:
                return await self._ask(request, call, target, body, sent, chains, kept, leg, wait_s=course.wait_s)
            except Elsewhere as failure:
                course.failed(call.row.replica, failure, now)
                call.failed(failure.kind)
                self._metrics.count("retries", failure.kind)
            finally:
                if leg.trial:
                    self._outages.tried(leg.candidates[0])

    async def _ask(
        self,
        request: Request,
        call: Call,
        target: Target,
        body: bytes,
        sent: Sequence[Pair],
        chains: Chains,
        kept: Kept,
        leg: Leg,
        *,
        wait_s: float,
    ) -> Reply | None:
        """Choose one of the leg's candidates and send it there; Elsewhere."""
        began, hashes = time.monotonic(), chains.first
        ranked = self._view.ranked  # by the table that the candidates are of, whatever has come when one is chosen
        choice = await self._ownership.choose(
            Arrival(
                version=target.model,
                hashes=hashes,
                candidates=tuple(self._view.ranks(leg.candidates) if ranked else leg.candidates),
                turn=int(hashes[-1][:7], 16) if hashes else self._count,
                weight=chains.weight,
                alike=chains.alike,
                kept=kept.replica,
                promising=not leg.trial,
                whole=leg.whole,
                explained=call.explained,
                block_size=self._view.block_size,
            )
        )
        try:
            if call.explanation is not None:
                call.explanation.choice = choice
            if chains.others:
                await self._ownership.note(target.model, chains.others, choice, block_size=self._view.block_size)
            call.routed(choice, chains, self._view.block_size, time.monotonic() - began)
            if ranked:
                call.row.replica, call.row.rank = split(choice.replica)
                sent = to_rank(sent, call.row.rank)
            replica = call.row.replica
            if call.row.session and self._sessions is not None:
                # a turn that finds out whether a replica is back does not take its session along
                home = kept.replica if leg.trial and kept.replica else choice.replica
                self._sessions.keep(call.row.session, Kept(target.model, home))
            self._metrics.count("routed", choice.outcome, replica)
            return await self._send(request, call, target, replica, body, sent, last=leg.last, wait_s=wait_s)
        finally:
            self._ownership.release(choice)

    def _left_out(self, version: str, others: Collection[str], now: float) -> dict[str, str]:
        """Who is neither asked nor was, and why."""
        return {
            name: f"{member.state}: {member.reason}"
            if member.state != "ready"
            else self._outages.left_out(name, version, now)
            for name, member in self._view.table.members.items()
            if name not in others
        }

    async def _send(
        self,
        request: Request,
        call: Call,
        target: Target,
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
        sent_at = time.monotonic()
        left_s = self._settings.request_timeout_s - (sent_at - call.started)  # of all that it may take
        attempt = self._attempts.at(replica, member.engine_epoch)

        def connected(answer: Answer) -> None:
            self._outages.reached(replica)
            attempt.asked(answer)

        try:
            with attempt:
                with await self._connections.post(member.url, request.target, sent, body, left_s, connected) as answer:
                    call.row.first_byte_s = time.monotonic() - sent_at
                    call.row.status = answer.status
                    reason = "" if answer.status == 200 else fault(answer.status)
                    if reason or answer.status == 429:
                        wait_s = max(wait_s, self._judge(answer, reason, replica, member.engine_epoch, last=last))
                    if (
                        answer.status == 200
                        and (answer.length is None or answer.length > WHOLE_BYTES)
                        and await self._stream(request, call, attempt, answer)
                    ):
                        self._outages.answered(replica)
                        return None
                    whole = await (_as_far_as_it_comes(answer) if reason else answer.read(WHOLE_BYTES))
                if answer.status == 404 and target.run and target.model.encode() in whole:
                    self._outages.lacking.found(replica, target.model, member.engine_epoch)
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
                self._look_for_void(call)
                pairs = answer_headers(answer, call.headers())
                return Reply(answer.status, with_retry_after(pairs, wait_s) if wait_s else pairs, whole)
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
            away = isinstance(error, ConnectFailed | Gone)
            # who had little of the request's time, after others, is not at fault that it is over
            hurried = isinstance(error, TimedOut) and left_s < self._settings.request_timeout_s / 2
            if not attempt.lost and not hurried:
                self._outages.failed(replica, member.engine_epoch, time.monotonic(), _said(error), away=away)
            if request.begun:
                # not ended, so the client's connection is cut: it must not take what it has for all of it
                call.end("upstream_error", call.row.status, attempt.lost or _said(error))
                return None
            if attempt.lost:
                raise Elsewhere("silent", attempt.lost) from error
            if isinstance(error, TimedOut):
                call.row.outcome = "upstream_error"
                raise Unroutable(
                    "replica did not answer in time", status=504, replica=replica, version=target.model
                ) from error
            asked = not isinstance(error, ConnectFailed)  # and may be what ended it
            kind, what = ("cut", "did not answer to the end") if asked else ("unreachable", "cannot be reached")
            raise Elsewhere(kind, f"replica {what}: {_said(error)}") from error

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

    async def _stream(self, request: Request, call: Call, attempt: Attempt, answer: Answer) -> bool:
        """Pass chunks on as they come; only the tail is remembered, for the token counts. False when there are none.

        A replica that queues a stream has said 200: the client is told nothing before there is something of it.
        """
        chunk = await answer.piece()
        if not chunk:
            return False
        self._look_for_void(call)
        tail = b""
        request.begin(answer.status, answer_headers(answer, call.headers()), answer.length)
        while chunk:
            attempt.moved()  # from here on nobody else can be asked
            await request.write(chunk)
            tail = (tail + chunk)[-TAIL_BYTES:]
            chunk = await answer.piece()
        request.end()
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

    def _look_for_void(self, call: Call) -> None:
        """Has the version been found bad while this ran?"""
        if self._view.table.voided(call.row.version):
            call.row.voided = True

    def _close(self, call: Call) -> None:
        row, count, observe = call.row, self._metrics.count, self._metrics.observe
        row.total_s = time.monotonic() - call.started
        count("requests", row.outcome, str(row.status))
        observe("total_seconds", row.total_s)
        if row.hold_s is not None:
            observe("hold_seconds", row.hold_s)
        if row.route_s is not None:
            observe("route_seconds", row.route_s)
        if row.first_byte_s is not None:
            observe("first_byte_seconds", row.first_byte_s, row.replica)
        if row.prompt_tokens:
            count("prompt_tokens", row.replica, row.version, by=row.prompt_tokens)
        if row.cached_tokens is not None:
            count("cached_tokens", row.replica, row.version, by=row.cached_tokens)
            if row.predicted_tokens is not None:
                count("predicted_tokens", row.replica, row.version, by=row.predicted_tokens)
        if call.recorded:
            self._look_for_void(call)
            self._ledger.close(row, sent=call.sent)


def _rename(body: bytes, model: str) -> bytes:
    """The same object with another `model`; every other value keeps its bytes."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError) as error:  # in a field that nobody has read so far
        raise Unroutable(f"request body is not what it should be: {error}", status=400) from error
    fields["model"] = Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


async def _as_far_as_it_comes(answer: Answer) -> bytes:
    """The body of an answer that is none; it is not asked for the whole of it."""
    with contextlib.suppress(ReplicaError):
        return await answer.read(WHOLE_BYTES)
    return b""


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
