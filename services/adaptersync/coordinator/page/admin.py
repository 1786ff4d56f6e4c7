"""What may be asked for through the page, and in which form. Pure; who may ask is the server's business."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import Struct

from adaptersync_core.errors import NameInvalid
from adaptersync_core.identity import check_name, parse_adapter_id
from adaptersync_core.records import Request

REASON = 500  # characters


class Asked(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of a request. `current` is what its sender saw as the run's current version."""

    kind: Literal["rollback", "admit", "refuse"]
    run: str
    version: str = ""
    reason: str = ""
    current: str = ""


def read(body: bytes) -> Request:
    """What is asked of the coordinator; NameInvalid when it is nothing that can be."""
    try:
        asked = msgspec.json.decode(body, type=Asked)
    except (msgspec.DecodeError, RecursionError) as error:
        raise NameInvalid(f"request cannot be read: {error}") from error
    check_name("run", asked.run)
    if asked.version or asked.kind != "rollback":
        parse_adapter_id(asked.version)
    if asked.kind != "admit" and not asked.reason.strip():
        raise NameInvalid("no reason", next_step="say why, in some words", run=asked.run)
    return Request(
        kind=asked.kind,
        run=asked.run,
        version=asked.version,
        reason=asked.reason.strip()[:REASON],
        current=asked.current if asked.kind == "rollback" else None,
    )
