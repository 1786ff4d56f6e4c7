"""Which replicas a look must read again."""

from __future__ import annotations

import msgspec

from adaptersync_core.keys import REPLICA_TTL_S
from adaptersync_core.records import Ack, hash_fields
from adaptersync_core.sightings import Sightings
from support.artifacts import REPORT

NAME = "run-v1-0123456789ab"


def record(heartbeat_ms: int) -> dict[str, str]:
    flat = hash_fields(REPORT)
    return {"heartbeat_ms": str(heartbeat_ms), **dict(zip(flat[::2], flat[1::2], strict=True))}


def seen_at(date: float, *, now_ms: float) -> Sightings:
    sightings = Sightings()
    assert sightings.due({"r1": date}) == ["r1"]
    sightings.note("r1", date, now_ms, record(int(date)), {})
    return sightings


def test_who_said_nothing_since_is_not_read_again() -> None:
    sightings = seen_at(1000, now_ms=1001)
    assert sightings.due({"r1": 1000, "r2": 1500}) == ["r2"]
    assert set(sightings.replicas(now=2.0)) == {"r1"}
    assert sightings.replicas(now=2.0)["r1"].age_s == 1.0


def test_any_other_date_is_read_again() -> None:
    """An earlier one, too: the server's clock, or its whole state, was set back."""
    sightings = seen_at(1000, now_ms=1001)
    assert sightings.due({"r1": 1001}) == ["r1"]
    assert sightings.due({"r1": 999}) == ["r1"]


def test_a_word_of_this_very_millisecond_may_have_a_second_one_beside_it() -> None:
    sightings = seen_at(1000, now_ms=1000)
    assert sightings.due({"r1": 1000}) == ["r1"]
    sightings.note(
        "r1", 1000, 1001, record(1000), {NAME: msgspec.json.encode(Ack(accepted=True, engine_epoch="e")).decode()}
    )
    assert sightings.due({"r1": 1000}) == []
    assert sightings.acks()["r1"][NAME].accepted


def test_who_left_the_index_is_forgotten() -> None:
    sightings = seen_at(1000, now_ms=1001)
    assert sightings.due({}) == []
    assert sightings.replicas(now=2.0) == {}
    assert sightings.acks() == {}


def test_a_record_that_has_expired_is_not_seen_any_more() -> None:
    sightings = seen_at(1000, now_ms=1001)
    assert sightings.replicas(now=1.0 + REPLICA_TTL_S)
    assert not sightings.replicas(now=1.1 + REPLICA_TTL_S)


def test_an_index_entry_without_a_record_is_nobody() -> None:
    sightings = Sightings()
    sightings.note("r1", 1000, 1001, {}, {})
    assert sightings.replicas(now=1.0) == {}
    assert sightings.due({"r1": 1000}) == []
