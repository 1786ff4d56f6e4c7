"""The hot path: one request in, one replica chosen, what it answers passed through, one ledger row.

Reads of a body only what routing needs, and changes in it only a name that had to be resolved. Until the client has
received a byte, a replica that fails is replaced by another. Nothing here knows how names are resolved, owners found,
or replicas asked.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec
from msgspec import Raw

from adaptersync.router.admission import Admission
from adaptersync.router.answers import refusal
from adaptersync.router.asked import Asked, check, crowded, fingerprint
from adaptersync.router.call import Call
from adaptersync.router.chains import NONE, Chains, RememberedChains
from adaptersync.router.course import Course, Elsewhere, Leg
from adaptersync.router.exchange import Exchange
from adaptersync.router.explanation import Explanation, why
from adaptersync.router.firsts import Firsts
from adaptersync.router.ledger import Ledger
from adaptersync.router.metrics import Metrics
from adaptersync.router.outages import Outages
from adaptersync.router.ownership import Arrival, Ownership
from adaptersync.router.policy import turn_of
from adaptersync.router.request import ClientGone, Pair, Reply, Request
from adaptersync.router.resolve import RETRY_S, Target, Wanted, parse
from adaptersync.router.sessions import NONE as NO_SESSION
from adaptersync.router.sessions import Kept, Sessions, session_name, still
from adaptersync.router.table import TableView
from adaptersync.router.traffic import Counts
from adaptersync.router.upstream import request_headers, to_rank
from adaptersync.router.version_phases import VersionPhases
from adaptersync_core import headers
from adaptersync_core.config import RouterSection
from adaptersync_core.errors import Unroutable
from adaptersync_core.ranks import split
from adaptersync_core.rollouts import LABEL

CLIENT_GONE = 499
CHAT = "/v1/chat/completions"

_GATE = headers.GATE.encode()


class Proxy:
    """Everything one request touches, wired once. `serving` are requests at replicas, by version, `counts` what became
    of rollouts. Without `sessions` each request stands for itself."""

    def __init__(
        self,
        *,
        name: str,
        settings: RouterSection,
        view: TableView,
        remembered: RememberedChains,
        admission: Admission,
        ownership: Ownership,
        sessions: Sessions | None,
        exchange: Exchange,
        outages: Outages,
        ledger: Ledger,
        metrics: Metrics,
        firsts: Firsts | None,
        phases: VersionPhases | None,
        stopping: Callable[[], bool],
    ) -> None:
        self._name = name
        self._settings = settings
        self._view = view
        self._remembered = remembered
        self._admission = admission
        self._ownership = ownership
        self._sessions = sessions
        self._exchange = exchange
        self._outages = outages
        self._ledger = ledger
        self._metrics = metrics
        self._firsts = firsts
        self._phases = phases
        self._stopping = stopping
        self._gate = settings.gate_token.encode()
        self._decoder = msgspec.json.Decoder(Asked)
        self._prefix = secrets.token_hex(6)
        self._count = self._others = 0
        self._at_replicas = 0
        self._bytes = 0  # of their bodies
        self.serving: Counter[str] = Counter()
        self.counts = Counts()

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
        if recorded:  # numbered without a gap, so that the ledger tells where it lacks some
            self._count += 1
            number = f"{self._count:x}"
        else:
            self._others += 1
            number = f"t{self._others:x}"
        gate = bool(self._gate) and hmac.compare_digest(request.header(_GATE), self._gate)
        return Call(f"{self._prefix}-{number}", self._name, request, recorded=recorded, gate=gate)

    def _refusal(self, call: Call, error: Unroutable) -> Reply:
        call.end("refused" if call.row.outcome == "ok" else call.row.outcome, error.status, str(error))
        call.look_for_void(self._view.table)
        return refusal(error, status=error.status, headers=call.headers())

    async def _handle(self, request: Request, *, generates: bool) -> Reply | None:
        call = self._call(request, recorded=generates)
        try:
            return await self._serve(request, call, generates=generates)
        except Unroutable as error:
            return self._refusal(call, error)
        except (asyncio.CancelledError, ClientGone) as error:
            call.end("stopped" if self._stopping() else "client_gone", CLIENT_GONE, str(error))
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
            call.row.prompt = fingerprint(asked, chat=request.path == CHAT)
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
                    body = _rename(body, asked, target.model)
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
                course.failed(call.row.replica, failure, time.monotonic())
                call.failed(failure.kind)
                self._metrics.count("retries", failure.kind, call.row.replica)
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
                turn=turn_of(hashes[-1]) if hashes else self._count,
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
            self._metrics.count("routed", choice.outcome, replica, target.model)
            return await self._exchange.send(request, call, replica, body, sent, last=leg.last, wait_s=wait_s)
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
            if self._phases is not None and row.outcome == "ok" and row.attempts == 1:
                first_s = row.first_byte_s if row.first_token_s is None else row.first_token_s
                self._phases.answered(row.version, call.started + (row.hold_s or 0.0) + (row.route_s or 0.0) + first_s)
        if row.prompt_tokens:
            count("prompt_tokens", row.replica, row.version, by=row.prompt_tokens)
        if row.cached_tokens is not None:
            count("cached_tokens", row.replica, row.version, by=row.cached_tokens)
            if row.predicted_tokens is not None:
                count("predicted_tokens", row.replica, row.version, by=row.predicted_tokens)
        if self._firsts is not None:
            self._firsts.answered(row)
        if call.recorded:
            self.counts.ended(row)
            call.look_for_void(self._view.table)
            self._ledger.close(row, sent=call.sent)


def _rename(body: bytes, asked: Asked, model: str) -> bytes:
    """The same object with another `model`; every other value keeps its bytes."""
    if crowded(body, asked):
        raise Unroutable(
            "request body has too many fields for another name to be written into it",
            status=400,
            next_step="leave them out, or ask for the version by its own name",
            version=model,
        )
    try:
        fields = msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, RecursionError) as error:  # in a field that nobody has read so far
        raise Unroutable(f"request body is not what it should be: {error}", status=400) from error
    fields["model"] = Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)
