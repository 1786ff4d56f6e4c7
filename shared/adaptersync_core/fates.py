"""What became of rollouts: the entries of the `fates` stream, which trainers write.

A router knows how a request ended; only its trainer knows whether it was trained on. An entry tells one fate of many
requests: `XADD fates * run my-run epoch 1 step 7 fate trained requests "9f2c-1a 9f2c-1b"`. A request may be told of
several times, since a conversation may give several samples: `trained` beats `dropped`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

TRAINED = "trained"
DROPPED = "dropped"
VOIDED = "voided"  # nobody said what became of it, and its version was found bad
REQUESTS = 256  # ids in one entry: 5 KB


class Fates(Struct, frozen=True, kw_only=True):
    """`step` is the optimizer step during which the sample was taken up, or dropped for the `reason`."""

    run: str
    epoch: int
    fate: str
    requests: tuple[str, ...]
    step: int = 0
    reason: str = ""


class _Entry(Struct, kw_only=True):
    run: str
    epoch: int
    fate: str
    requests: str
    step: int = 0
    reason: str = ""


def write_fates(fates: Fates) -> list[str]:
    """Field, value, field, value, ... of an entry."""
    fields = ["run", fates.run, "epoch", str(fates.epoch), "step", str(fates.step), "fate", fates.fate]
    if fates.reason:
        fields += "reason", fates.reason
    return [*fields, "requests", " ".join(fates.requests)]


def read_fates(fields: Mapping[str, str]) -> Fates | None:
    """None where it cannot be read."""
    try:
        entry = msgspec.convert(fields, _Entry, strict=False)
    except (msgspec.ValidationError, UnicodeEncodeError):
        return None
    if entry.fate not in (TRAINED, DROPPED):
        return None
    return Fates(
        run=entry.run,
        epoch=entry.epoch,
        fate=entry.fate,
        requests=tuple(entry.requests.split()),
        step=entry.step,
        reason=entry.reason,
    )


def in_entries(run: str, epoch: int, told: Sequence[tuple[str, str, int, str]]) -> list[Fates]:
    """(request id, fate, step, reason) each, put together where they are alike, in the order they came."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    for request_id, fate, step, reason in told:
        groups.setdefault((fate, step, reason), []).append(request_id)
    return [
        Fates(run=run, epoch=epoch, fate=fate, step=step, reason=reason, requests=tuple(ids[at : at + REQUESTS]))
        for (fate, step, reason), ids in groups.items()
        for at in range(0, len(ids), REQUESTS)
    ]
