"""A session keeps its version and its replica over its turns, whichever router it asks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from adaptersync.router import outages
from adaptersync.router.resolve import Wanted
from adaptersync.router.sessions import OWN, Kept, Sessions, session_name, still
from adaptersync_core.keys import Keys
from adaptersync_core.pipe import Pipe
from support.router_fleet import V1, V2, V3, Answer, Fleet, Servers
from support.tables import make_table, version_name
from support.wait import wait_until

OTHER = version_name(1, run="run-b")


async def turn(fleet: Fleet, session: str, model: str = "run-a", *, number: int = 1, url: str = "") -> Answer:
    """One turn of a conversation: another prompt each time, which nobody owns."""
    prompt = [number * 100 + place for place in range(64)]
    body = {"model": model, "prompt": prompt}
    return await fleet.post("/v1/completions", body, url=url, headers={"x-session-id": session})


def served(answer: Answer) -> tuple[str, str]:
    assert answer.status == 200, answer.body
    return answer.headers["x-adaptersync-version"], answer.headers["x-adaptersync-replica"]


async def test_a_session_keeps_version_and_replica_and_others_get_the_current_one(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router():
        first = served(await turn(fleet, "a"))
        assert first[0] == V1
        await fleet.table({V1: "retained", V2: "current"})
        for number in range(2, 8):
            assert served(await turn(fleet, "a", "run-a@current" if number % 2 else "run-a", number=number)) == first
        assert served(await turn(fleet, "b"))[0] == V2
        assert served(await fleet.complete("run-a"))[0] == V2
        rows = await fleet.rows(9)
        assert [row["routing"] for row in rows[1:7]] == ["session"] * 6
        assert {row.get("session") for row in rows[:7]} == {session_name(b"a", "run-a")}
        assert rows[7]["session"] == session_name(b"b", "run-a")
        assert "session" not in rows[8]
        assert {seen.headers.get("x-session-id") for each in fleet.replicas.values() for seen in each.seen} == {
            "a",
            "b",
            None,
        }


async def test_two_routers_agree(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router(name="left") as left, fleet.router(name="right") as right:
        first = served(await turn(fleet, "a", url=left))
        await fleet.table({V1: "retained", V2: "current"})
        for number in range(2, 8):
            assert served(await turn(fleet, "a", number=number, url=(left, right)[number % 2])) == first


async def test_a_version_that_left_the_window_is_left_for_the_current_one_and_that_is_kept(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router():
        _, replica = served(await turn(fleet, "a"))
        await fleet.table({V1: "retiring", V2: "current"})
        assert served(await turn(fleet, "a", number=2)) == (V2, replica)
        await fleet.table({V2: "retained", V3: "current"})
        assert served(await turn(fleet, "a", number=3)) == (V2, replica)


async def test_a_version_that_is_named_is_served_and_the_session_goes_on_with_it(fleet: Fleet) -> None:
    await fleet.table({V1: "retained", V2: "current"})
    async with fleet.router():
        assert served(await turn(fleet, "a"))[0] == V2
        assert served(await turn(fleet, "a", V1, number=2))[0] == V1
        assert served(await turn(fleet, "a", number=3))[0] == V1


async def test_a_session_says_nothing_of_another_run(fleet: Fleet) -> None:
    await fleet.table({V1: "current", OTHER: "current"})
    async with fleet.router():
        assert served(await turn(fleet, "a"))[0] == V1
        assert served(await turn(fleet, "a", "run-b"))[0] == OTHER
        await fleet.table({V1: "retained", V2: "current", OTHER: "current"})
        assert served(await turn(fleet, "a"))[0] == V1
        assert served(await turn(fleet, "a", "base"))[0] == "base"
        assert (await turn(fleet, "a", "no such name")).status == 404


async def test_a_session_whose_replica_is_gone_moves_and_stays(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router():
        _, home = served(await turn(fleet, "a"))
        (other,) = set(fleet.replicas) - {home}
        await fleet.table({V1: "current"}, members={home: {"state": "draining"}})
        assert served(await turn(fleet, "a", number=2)) == (V1, other)
        await fleet.table({V1: "current"})
        assert served(await turn(fleet, "a", number=3)) == (V1, other)


async def test_a_session_whose_replica_lacks_the_version_moves_with_the_answer(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router():
        _, home = served(await turn(fleet, "a"))
        (other,) = set(fleet.replicas) - {home}
        fleet.replicas[home].holds = set()
        assert served(await turn(fleet, "a", number=2)) == (V1, other)
        fleet.replicas[home].holds = None
        assert served(await turn(fleet, "a", number=3)) == (V1, other)


async def test_a_turn_that_finds_out_whether_a_replica_is_back_does_not_take_its_session_along(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "SHORTEST_S", 0.1)
    await fleet.table({V1: "current"})
    async with fleet.router():
        _, home = served(await turn(fleet, "a"))
        (other,) = set(fleet.replicas) - {home}
        sick = fleet.replicas[other]
        sick.fail = [500] * 3
        for number in range(100):
            if sick.fail:  # by prompts that nobody has had
                assert (await fleet.complete(V1, [number] * 64)).status == 200
        assert not sick.fail

        async def half_open() -> bool:
            return bool((await fleet.get("/health")).json["replicas"][other]["circuit"] == "half open")

        await wait_until(half_open)
        assert served(await turn(fleet, "a", number=2)) == (V1, other)
        assert served(await turn(fleet, "a", number=3)) == (V1, home)


async def test_without_the_cache_a_router_goes_by_what_it_knows(servers: Servers, own_fleet: Fleet) -> None:
    fleet = own_fleet
    await fleet.table({V1: "current"})
    async with fleet.router():
        first = served(await turn(fleet, "a"))
        servers.cache.kill()
        await fleet.table({V1: "retained", V2: "current"})
        for number in range(2, 8):
            assert served(await turn(fleet, "a", number=number)) == first
        assert served(await turn(fleet, "b"))[0] == V2


async def test_switched_off_each_request_stands_for_itself(fleet: Fleet) -> None:
    await fleet.table({V1: "current"})
    async with fleet.router(session_s=0):
        assert served(await turn(fleet, "a"))[0] == V1
        await fleet.table({V1: "retained", V2: "current"})
        assert served(await turn(fleet, "a", number=2))[0] == V2
        assert not await fleet.cache.command("KEYS", fleet.keys.session("*"))


async def test_what_is_kept_ends_with_its_time_and_is_bounded(cache_url: str) -> None:
    keys, pipe = Keys("test"), Pipe(cache_url, name="test", timeout_s=2.0)
    await pipe.connect()
    sessions = Sessions(pipe, keys, keep_s=60.0)
    for number in range(OWN + 5):
        sessions.keep(f"{number:016x}", Kept(V1, "r0"))
    await wait_until(lambda: pipe.call("EXISTS", keys.session(f"{OWN + 4:016x}")))
    assert 0 < await pipe.call("PTTL", keys.session(f"{0:016x}")) <= 60_000
    assert await sessions.read(f"{0:016x}") == Kept(V1, "r0")
    await pipe.call("FLUSHALL")
    assert await sessions.read(f"{4:016x}") == Kept()
    assert await sessions.read(f"{7:016x}") == Kept(V1, "r0")  # the two that were read came into the places of two
    short = Sessions(pipe, keys, keep_s=0.0)
    short.keep("a" * 16, Kept(V1, "r0"))
    await pipe.call("DEL", keys.session("a" * 16))  # known here alone
    assert await short.read("a" * 16) == Kept()
    await pipe.close()


async def test_what_the_server_lost_or_has_otherwise_is_written_again(cache_url: str) -> None:
    keys, pipe = Keys("test"), Pipe(cache_url, name="test", timeout_s=2.0)
    await pipe.connect()
    sessions, name = Sessions(pipe, keys, keep_s=60.0), "a" * 16
    here, there = Kept(V1, "r0"), Kept(V1, "r1")
    sessions.keep(name, here)
    assert await sessions.read(name) == here
    await pipe.call("FLUSHALL")
    assert await sessions.read(name) == here  # as it is remembered
    sessions.keep(name, here)
    assert await pipe.call("GET", keys.session(name)) == f"{V1} r0"
    # a turn that is sent elsewhere, and back
    assert await sessions.read(name) == here
    sessions.keep(name, there)
    sessions.keep(name, here)
    assert await pipe.call("GET", keys.session(name)) == f"{V1} r0"
    # nothing new, nothing written
    assert await sessions.read(name) == here
    await pipe.call("SET", keys.session(name), "as it was", "PX", 60_000)
    sessions.keep(name, here)
    assert await pipe.call("GET", keys.session(name)) == "as it was"
    await pipe.close()


@pytest.mark.parametrize(
    ("states", "wanted", "goes_on"),
    [
        ({V1: "retained", V2: "current"}, Wanted(run="run-a"), V1),
        ({V1: "retiring", V2: "current"}, Wanted(run="run-a"), ""),
        ({V1: "ready", V2: "current"}, Wanted(run="run-a"), ""),
        ({V2: "current"}, Wanted(run="run-a"), ""),
        ({V1: "retained", V2: "current"}, Wanted(run="run-b"), ""),
        ({V1: "retained", V2: "current"}, Wanted(run="run-a", adapter_id=V2), ""),
        ({V1: "retained", V2: "current"}, Wanted(run="run-a", seq=2), ""),
    ],
)
def test_what_a_session_goes_on_with(states: Mapping[str, str], wanted: Wanted, goes_on: str) -> None:
    table = make_table(states, {})  # type: ignore[arg-type]
    assert still(Kept(V1, "r0"), wanted, table) == goes_on
