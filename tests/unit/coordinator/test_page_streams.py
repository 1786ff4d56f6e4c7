"""Who is told of events: so many, and so far behind at most."""

from __future__ import annotations

import asyncio

import orjson

from adaptersync.coordinator.page.streams import Streams, message
from adaptersync.coordinator.recent import Happened


def event(place: int, **fields: str) -> Happened:
    return Happened(id=f"{place}-0", at=float(place), type="replica.state", fields={"type": "replica.state", **fields})


def numbers(said: bytes) -> list[str]:
    return [line[4:].decode() for line in said.splitlines() if line.startswith(b"id: ")]


async def test_everybody_is_told_and_a_newcomer_what_it_missed() -> None:
    streams = Streams(2)
    first = streams.join()
    second = streams.join([event(1), event(2)])
    assert first is not None
    assert second is not None
    streams.tell([event(3)])
    assert numbers(await first.take(1.0)) == ["3-0"]
    assert numbers(await second.take(1.0)) == ["1-0", "2-0", "3-0"]
    assert await first.take(0.01) == b""


async def test_no_more_than_may_be() -> None:
    streams = Streams(1)
    first = streams.join()
    assert first is not None
    assert streams.join() is None
    streams.leave(first)
    assert streams.join() is not None


async def test_who_does_not_read_along_is_dropped_and_holds_nothing() -> None:
    streams = Streams(2, behind=3)
    slow, quick = streams.join(), streams.join()
    assert slow is not None
    assert quick is not None
    for place in range(1, 5):
        streams.tell([event(place)])
        assert numbers(await quick.take(1.0)) == [f"{place}-0"]
    assert slow.dropped
    assert not quick.dropped
    assert await slow.take(0.01) == b""


async def test_the_end_wakes_who_waits() -> None:
    streams = Streams(1)
    listener = streams.join()
    assert listener is not None
    waiting = asyncio.create_task(listener.take(30.0))
    await asyncio.sleep(0)
    streams.end()
    assert await asyncio.wait_for(waiting, 1.0) == b""
    assert listener.dropped


def test_a_message_is_one_whatever_it_says() -> None:
    said = message(event(7, replica="r1", reason="two\nlines\n\ndata: not a third"))
    assert said.count(b"\n\n") == 1
    data = next(line for line in said.splitlines() if line.startswith(b"data: "))
    assert orjson.loads(data[6:])["text"] == "two\nlines\n\ndata: not a third"
