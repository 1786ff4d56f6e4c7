"""Engines behind one server: what each is called where requests are sent to one of them. Pure.

A data-parallel vLLM is one replica: one address, one agent, one member of the table. Behind it are several engines, its
ranks, each with a cache of its own. Where ownership, counts and choices are kept, each rank stands for itself, under a
name that is made and taken apart here alone. A replica of one engine goes by its own name there.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST = 64  # ranks of one replica that are told apart
Ranks = Annotated[int, Meta(ge=1, le=MOST)]
_SEPARATOR = "/"  # which no replica's name has


def told_apart(engines: int) -> int:
    """How many ranks a server of so many engines has here; of one with more than that, the server itself chooses."""
    return engines if 1 <= engines <= MOST else 1


def rank_name(replica: str, rank: int | None) -> str:
    return replica if rank is None else f"{replica}{_SEPARATOR}{rank}"


def rank_names(replica: str, ranks: int) -> tuple[str, ...]:
    return tuple(rank_name(replica, rank) for rank in range(ranks)) if ranks > 1 else (replica,)


def split(name: str) -> tuple[str, int | None]:
    """The replica, and which of its ranks, where it has several."""
    replica, separator, rank = name.partition(_SEPARATOR)
    return replica, int(rank) if separator else None
