"""The ledger: one row for every rollout that was asked for, and how its stream is read.

A rollout leaves one entry or several: `open` while it runs, when that takes long; then how it ended; either may be
written again after a lost reply. They are joined by `request_id`. One that was opened and never ended is `unknown`: its
router died. Knows nothing of how rows come into the stream.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection, Iterable, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from adaptersync_core.registry import Registry

# what an outcome may be, where it is asked for by name; see Row for all of them
OPEN = "open"
UNKNOWN = "unknown"
SERVED = "ok"
REFUSED = "refused"
GIVEN_UP = ("client_gone", "stopped")  # the client or a stop ended them, not the fleet
NEVER_ENDED = "nothing says how it ended"
LABEL = 128  # characters of a name that a client gave
PAGE = 1000
FIELD = "row"  # of an entry, its only one: the row as JSON, as it came from the spool; former entries have one for each

Fields = Mapping[str, str]
log = logging.getLogger(__name__)


class Row(Struct, kw_only=True, omit_defaults=True):
    """`version` is the adapter id (the base model's name for the base); times are seconds; None is not known.

    `outcome`: ok; refused (by us or by the replica, see `status`); upstream_error; client_gone; stopped (by us);
    router_error; open; unknown. `first_byte_s` counts from sending to the replica. `started_at` is the router's wall
    clock. `voided`: the version was found bad, while it ran or later. `gated`: asked with the gate's own credentials.
    `substituted` is the name that the version stands for, when it is another's. `tried` are replicas that were asked
    before `replica`, each with why it did not do, when `attempts` are several. `session` stands for the session of its
    run that it was asked in. `predicted_tokens` were expected to be cached there. What else routing went by: `weight`
    sequences, `alike` of them of a prompt of so many `blocks`, of which `boilerplate` were everybody's; `chain` is its
    hash, with "known:hash " before it where the prompt goes on from one that was known; a block is of `block_size`
    tokens, or bytes. `rank` is which of the replica's engines answered, where it has several. A row may be without what
    came after it was opened. A router fills it as it goes. `prompt` is the head of the SHA-256 of the prompt's JSON, or
    the messages', as it was sent. `request_id` is a random name of the router's process and, for rollouts, a number
    that counts without a gap.

    `first_token_s` counts from sending to the replica, too, and only streams have it: when the first token of an answer
    was there that came whole, only its engine knows.
    """

    request_id: str
    router: str
    path: str
    asked: str
    outcome: str
    started_at: float
    status: int = 0
    total_s: float | None = None
    run: str = ""
    version: str = ""
    digest: str = ""
    replica: str = ""
    engine_epoch: str = ""
    routing: str = ""
    owned_blocks: int | None = None
    attempts: int = 0
    tried: str = ""
    hold_s: float | None = None
    route_s: float | None = None
    first_byte_s: float | None = None
    first_token_s: float | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    generation: int = 0
    voided: bool = False
    gated: bool = False
    predicted_tokens: int | None = None
    blocks: int = 0
    boilerplate: int = 0
    chain: str = ""
    block_size: int = 0
    weight: int = 1
    alike: int = 1
    substituted: str = ""
    session: str = ""
    rank: int | None = None
    reason: str = ""
    prompt: str = ""


_decoder = msgspec.json.Decoder(Row)


def decode(fields: Fields) -> Row | None:
    """The row of an entry, of the former form as well; None where it cannot be read."""
    try:
        if FIELD in fields:
            return _decoder.decode(fields[FIELD])
        return msgspec.convert(fields, Row, strict=False)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None


def join(rows: Iterable[Row | None], *, voided: Collection[str] = ()) -> list[Row]:
    """One row a rollout, in the order in which they first appear; `voided` are versions that were found bad."""
    found: dict[str, Row] = {}
    for row in rows:
        if row is not None:
            known = found.get(row.request_id)
            if known is None or _says_more(row, known):
                found[row.request_id] = row
    return [_concluded(row, voided) for row in found.values()]


def _says_more(row: Row, known: Row) -> bool:
    """How it ended beats that nobody knows, which beats that it began; of two beginnings the later one counts."""
    rank = {OPEN: 0, UNKNOWN: 1}
    mine, theirs = rank.get(row.outcome, 2), rank.get(known.outcome, 2)
    return mine > theirs or mine == theirs == 0


def _concluded(row: Row, voided: Collection[str]) -> Row:
    if row.outcome == OPEN:
        row = replace(row, outcome=UNKNOWN, reason=NEVER_ENDED)
    return replace(row, voided=True) if row.version in voided else row


async def pages(registry: Registry, after: str = "-") -> AsyncIterator[tuple[str, list[Row]]]:
    """The ledger as it stands, from `after` on, a page at a time, each with where the next begins."""
    async for then, rows in dated(registry, after):
        yield then, [row for _, row in rows]


async def dated(registry: Registry, after: str = "-") -> AsyncIterator[tuple[str, list[tuple[float, Row]]]]:
    """The same, each row with when it was written, in seconds of the server's clock.

    How many entries cannot be read is said once, at the end.
    """
    unread, first = 0, ""
    while page := await registry.client.command("XRANGE", registry.keys.rollouts, after, "+", "COUNT", PAGE):
        rows: list[tuple[float, Row]] = []
        for entry, fields in page:
            row = decode(fields)
            if row is not None:
                rows.append((int(entry.partition("-")[0]) / 1000, row))
            else:
                unread, first = unread + 1, first or entry
        after = f"({page[-1][0]}"
        yield after, rows
    if unread:
        log.warning("%d ledger entries cannot be read and are left out; see XRANGE from entry=%s", unread, first)


async def read_rollouts(registry: Registry) -> list[Row]:
    """The whole ledger, joined with what became of the versions since."""
    rows: list[Row] = []
    async for _, page in pages(registry):
        rows += page
    served = sorted({row.version for row in rows if row.run and row.version})
    voided: set[str] = set()
    for first in range(0, len(served), PAGE):
        names = served[first : first + PAGE]
        records = await registry.records(names)
        voided |= {name for name, (_, record) in zip(names, records, strict=True) if record.get("state") == "voided"}
    return join(rows, voided=voided)


class Ended:
    """How many rollouts have ended, counted on with each look; one that was written twice may count twice."""

    def __init__(self) -> None:
        self._after = "-"
        self.count = 0

    async def read(self, registry: Registry) -> int:
        async for after, rows in pages(registry, self._after):
            self._after = after
            self.count += sum(row.outcome != OPEN for row in rows)
        return self.count
