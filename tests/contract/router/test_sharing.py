"""Where requests go: groups stay together, templates pin nobody, several routers decide as one."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from adaptersync.router.ownership import Arrival, Ownership
from adaptersync.router.policy import Choice
from adaptersync.router.table import TableView
from adaptersync_core.blocks import BY_BYTES, block_hashes
from adaptersync_core.errors import ControlUnavailable
from adaptersync_core.keys import Keys
from adaptersync_core.pipe import Pipe
from adaptersync_core.registry import Registry
from support.router_fleet import V1, V2, Fleet
from support.wait import wait_until

GROUP = 8


def _prompt(number: int, *, template: int = 0, length: int = 64) -> list[int]:
    return [7] * template + [1000 + number * 100 + place for place in range(length)]


async def test_a_burst_of_one_group_lands_on_one_replica(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router():
        burst = [asyncio.create_task(fleet.complete(V1, _prompt(1))) for _ in range(GROUP)]
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == GROUP)
        assert sorted(replica.in_flight for replica in fleet.replicas.values()) == [0, GROUP]
        assert sum((await _totals(fleet)).values()) == GROUP
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert {answer.status for answer in await asyncio.gather(*burst)} == {200}
        routings = Counter(row["routing"] for row in await fleet.rows(GROUP))
        assert routings == {"cold": 1, "affinity": GROUP - 1}
        await wait_until(lambda: _idle(fleet))


async def test_only_what_was_read_as_tokens_is_an_agents_to_take_back(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for prompt, by_bytes in ((_prompt(1), False), ("some words " * 40, True)):
            assert (await fleet.complete(V1, prompt)).status == 200
            blocks = await fleet.cache.command("HKEYS", fleet.keys.owned(V1))
            assert {block.endswith(BY_BYTES) for block in blocks} == {by_bytes}
            await fleet.cache.command("DEL", fleet.keys.owned(V1))


async def test_an_owner_that_is_too_busy_is_passed_over(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(spill=2):
        burst = [asyncio.create_task(fleet.complete(V1, _prompt(1))) for _ in range(9)]
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 9)
        # three more than nobody, then both own it and stay level
        assert sorted(replica.in_flight for replica in fleet.replicas.values()) == [4, 5]
        for replica in fleet.replicas.values():
            replica.gate.set()
        await asyncio.gather(*burst)
        assert Counter(row["routing"] for row in await fleet.rows(9))["spill"] == 1


async def test_a_shared_template_pins_nobody(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(spill=100):
        prompts = [_prompt(number, template=400) for number in range(16)]
        burst = [asyncio.create_task(fleet.complete(V1, prompt)) for prompt in prompts for _ in range(2)]
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 32)
        shares = sorted(replica.in_flight for replica in fleet.replicas.values())
        assert shares[0] >= 10, shares
        for replica in fleet.replicas.values():
            replica.gate.set()
        await asyncio.gather(*burst)
        # and each pair stays together all the same
        by_prompt: dict[bytes, set[str]] = {}
        for replica in fleet.replicas.values():
            for seen in replica.seen:
                by_prompt.setdefault(seen.body, set()).add(replica.name)
        assert len(by_prompt) == 16
        assert all(len(names) == 1 for names in by_prompt.values())


async def test_versions_share_nothing(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "retained", V2: "current"}, fleet.urls)
    async with fleet.router():
        for version in (V1, V2):
            await fleet.complete(version, _prompt(1))
        assert [row["routing"] for row in await fleet.rows(2)] == ["cold", "cold"]
        names = [await fleet.cache.command("HKEYS", fleet.keys.owned(version)) for version in (V1, V2)]
        assert len(names[0]) == len(names[1]) == 4
        assert not set(names[0]) & set(names[1])


async def test_text_and_chat_find_their_owner_too(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    text = "Compute the sum of the numbers below and answer with the result only. " * 10
    chat = [{"role": "system", "content": text}, {"role": "user", "content": "12 + 30"}]
    other = [{"content": text, "role": "system"}, {"content": "12 + 30", "role": "user"}]  # the same, written otherwise
    async with fleet.router():
        bodies: list[tuple[str, dict[str, object]]] = [
            ("/v1/completions", {"prompt": text}),
            ("/v1/completions", {"prompt": [text, "another"]}),
            ("/v1/chat/completions", {"messages": chat}),
            ("/v1/chat/completions", {"messages": other}),
            ("/v1/completions", {"prompt": [_prompt(5), [1]]}),
            ("/v1/completions", {"prompt": _prompt(5)}),
        ]
        for path, body in bodies:
            assert (await fleet.post(path, {"model": V1} | body)).status == 200
        rows = await fleet.rows(6)
        assert [row["routing"] for row in rows] == ["cold", "affinity"] * 3
        assert rows[1]["replica"] == rows[0]["replica"]


async def test_two_routers_decide_as_one(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router(name="left") as left, fleet.router(name="right") as right:
        burst = [
            asyncio.create_task(fleet.complete(V1, _prompt(1), url=(left, right)[place % 2])) for place in range(GROUP)
        ]
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == GROUP)
        assert sorted(replica.in_flight for replica in fleet.replicas.values()) == [0, GROUP]
        # a prompt that nobody knows goes where both of them together have less to do
        answer = asyncio.create_task(fleet.complete(V1, _prompt(2), url=left))
        await wait_until(lambda: sorted(replica.in_flight for replica in fleet.replicas.values()) == [1, GROUP])
        for replica in fleet.replicas.values():
            replica.gate.set()
        await asyncio.gather(*burst, answer)
        await wait_until(lambda: _idle(fleet))


def arrival(hashes: Sequence[str], candidates: Sequence[str], turn: int, *, weight: int = 1, alike: int = 1) -> Arrival:
    return Arrival(
        version=V1, hashes=tuple(hashes), candidates=tuple(candidates), turn=turn, weight=weight, alike=alike
    )


async def test_ends_are_told_at_once_and_stay_told(cache_url: str) -> None:
    """Without the beat, which would mend a count that was not told; and the beat does not bring it back."""
    keys, pipe = Keys("test"), Pipe(cache_url, name="test", timeout_s=2.0)
    await pipe.connect()
    ownership = Ownership(pipe, keys, router="left", policy="promise", spill=8, blocks_per_version=1000)
    telling = asyncio.create_task(ownership.tell_ends())
    choices = [await ownership.choose(arrival((), ("r0", "r1"), turn)) for turn in range(4)]
    assert await pipe.call("HGET", keys.inflight, "r0") == "2"
    for choice in choices:
        ownership.release(choice)

    async def told() -> bool:
        return not await pipe.call("EXISTS", keys.inflight)

    await wait_until(told)
    telling.cancel()
    beating = asyncio.create_task(ownership.beat())
    await wait_until(lambda: pipe.call("EXISTS", keys.inflight))
    assert await pipe.call("HKEYS", keys.inflight) == ["left|"]  # a lease, and nothing in flight
    beating.cancel()
    await pipe.close()


async def test_sequences_are_counted_and_given_back(cache_url: str) -> None:
    """And the other prompts of a request are owned, too, without being counted again or promised anything."""
    keys, pipe = Keys("test"), Pipe(cache_url, name="test", timeout_s=2.0)
    await pipe.connect()
    ownership = Ownership(pipe, keys, router="left", policy="promise", spill=8, blocks_per_version=1000)
    telling = asyncio.create_task(ownership.tell_ends())
    first, second = ("a" * 16,), ("b" * 16, "c" * 16)
    choice = await ownership.choose(arrival(first, ("r0", "r1"), 0, weight=24, alike=8))
    await ownership.note(V1, (second, ()), choice, block_size=16)
    assert (choice.replica, choice.weight, ownership.inflight["r0"]) == ("r0", 24, 24)
    assert await pipe.call("HMGET", keys.inflight, "r0", "left|r0", "r1") == ["24", "24", None]
    promises = await pipe.call("HGETALL", keys.promises(V1))
    assert [field for field in promises[::2] if field[0] == ":"] == [":" + first[0]]
    alone = await ownership.choose(arrival(second, ("r0",), 1))
    assert (alone.outcome, alone.owned) == ("affinity", 2)
    for each in (choice, alone):
        ownership.release(each)
    assert not ownership.inflight

    async def told() -> bool:
        return not await pipe.call("EXISTS", keys.inflight)

    await wait_until(told)
    telling.cancel()
    await pipe.close()


async def test_a_version_that_leaves_while_a_request_is_routed_fails_nobody(cache_url: str) -> None:
    pipe = Pipe(cache_url, name="test", timeout_s=2.0)
    await pipe.connect()
    ownership = Ownership(pipe, Keys("test"), router="left", policy="promise", spill=8, blocks_per_version=1000)
    choice = await ownership.choose(arrival(("a" * 16,), ("r0", "r1"), 0))
    await ownership.forget(())
    await ownership.note(V1, (("b" * 16,),), choice, block_size=16)
    assert (await ownership.choose(arrival(("b" * 16,), ("r0", "r1"), 0))).owned == 1
    await pipe.close()


async def test_a_router_that_is_alone_counts_sequences_too() -> None:
    pipe = Pipe("redis://127.0.0.1:1", name="test", timeout_s=0.1)
    ownership = Ownership(pipe, Keys("test"), router="left", policy="threshold", spill=2, blocks_per_version=1000)
    first = await ownership.choose(arrival((), ("r0", "r1"), 0, weight=8, alike=8))
    await ownership.note(V1, (("a" * 16,),), first, block_size=16)  # nobody to tell
    assert (first.outcome, first.replica, ownership.inflight["r0"]) == ("local", "r0", 8)
    assert (await ownership.choose(arrival((), ("r0", "r1"), 0))).replica == "r1"  # its home is too far ahead
    ownership.release(first)
    assert "r0" not in ownership.inflight
    await pipe.close()


async def test_two_routers_expect_the_same(cache_url: str) -> None:
    """Each group split over both, shuffled; what one of them is promised, the other keeps."""
    keys, pipes = Keys("test"), [Pipe(cache_url, name="test", timeout_s=5.0) for _ in range(2)]
    for pipe in pipes:
        await pipe.connect()
    routers = [
        Ownership(pipe, keys, router=name, policy="promise", spill=8, blocks_per_version=100_000)
        for pipe, name in zip(pipes, ("left", "right"), strict=True)
    ]
    telling = [asyncio.create_task(router.tell_ends()) for router in routers]
    replicas, chance = [f"r{place}" for place in range(4)], random.Random(1)
    seen: dict[str, set[int]] = {replica: set() for replica in replicas}
    running: list[tuple[Ownership, Choice]] = []
    asked, warm = [0, 0], 0
    for window in range(12):
        waiting = [(prompt, router) for prompt in range(16) for router in routers for _ in range(GROUP // 2)]
        chance.shuffle(waiting)
        for prompt, router in waiting:
            if len(running) == 64:
                ended, choice = running.pop(chance.randrange(64))
                ended.release(choice)
            number = window * 16 + prompt
            hashes = block_hashes(V1, [7] * 16 + [number] * 48, 16, 100)
            choice = await router.choose(arrival(hashes, replicas, number))
            assert choice.outcome != "local"
            running.append((router, choice))
            asked[router is routers[1]] += 1
            warm += number in seen[choice.replica]
            seen[choice.replica].add(number)
    assert asked[0] == asked[1] == 768
    assert warm / 1536 > 0.86
    for router, choice in running:
        router.release(choice)

    async def told() -> bool:
        return not await pipes[0].call("EXISTS", keys.inflight)

    await wait_until(told)
    # nothing is in flight any more, so nothing is expected of what went before
    choice = await routers[0].choose(arrival(("f" * 16,), replicas, 0))
    assert choice.outcome == "cold"
    promises = await pipes[1].call("HGETALL", keys.promises(V1))
    assert [field for field in promises[::2] if field[0] == ":"] == [":" + "f" * 16]
    # and a version that is gone takes along what was kept of it; how often its run's prompts come is kept
    await routers[0].forget({V1})
    assert await pipes[0].call("EXISTS", keys.owned(V1), keys.promises(V1)) == 2
    await routers[0].forget({V2})
    assert await pipes[0].call("EXISTS", keys.owned(V1), keys.promises(V1)) == 0
    assert await pipes[0].call("EXISTS", keys.repeats("run-a")) == 1
    for task in telling:
        task.cancel()
    for pipe in pipes:
        await pipe.close()


async def test_a_version_that_left_the_table_frees_what_was_kept_of_it(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for model in (V1, "base"):
            assert (await fleet.complete(model, _prompt(1))).status == 200
        assert await fleet.cache.command("EXISTS", fleet.keys.owned(V1)) == 1
        await fleet.table({V2: "current"})

        async def freed() -> bool:
            return await fleet.cache.command("EXISTS", fleet.keys.owned(V1), fleet.keys.promises(V1)) == 0  # type: ignore[no-any-return]

        await wait_until(freed)
        assert await fleet.cache.command("EXISTS", fleet.keys.owned("base")) == 1


async def test_a_router_that_stops_leaves_nothing_behind(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(fleet.router())
        burst = [asyncio.create_task(fleet.complete(V1, _prompt(place))) for place in range(6)]
        await wait_until(lambda: _counted(fleet, 6))
        await wait_until(lambda: _known(fleet))
        stopping = asyncio.create_task(stack.aclose())
        await asyncio.sleep(0)
        for replica in fleet.replicas.values():
            replica.gate.set()
        # what was in flight when the stop came is answered, and its rows are written
        assert {answer.status for answer in await asyncio.gather(*burst)} == {200}
        await stopping
    assert len(await fleet.rows(6)) == 6
    assert await fleet.cache.command("EXISTS", fleet.keys.inflight) == 0
    assert await fleet.control.command("ZCARD", fleet.keys.routers) == 0


async def test_the_coordinator_hears_the_generation_and_what_is_in_flight(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    registry = Registry(fleet.control, fleet.keys)
    for replica in fleet.replicas.values():
        replica.gate.clear()
    async with fleet.router():
        waiting = asyncio.create_task(fleet.complete("run-a"))
        await wait_until(lambda: sum(replica.in_flight for replica in fleet.replicas.values()) == 1)
        generation = await fleet.table({V1: "retiring", V2: "current"})

        async def reported(inflight: dict[str, int]) -> bool:
            (seen,) = (await registry.fleet()).routers.values()
            report = seen.report
            return report.generation == generation and report.inflight == inflight

        await wait_until(lambda: reported({V1: 1}))
        for replica in fleet.replicas.values():
            replica.gate.set()
        assert (await waiting).headers["x-adaptersync-version"] == V1  # it keeps the version it was admitted with
        await wait_until(lambda: reported({}))


async def test_a_router_is_known_before_it_reads_the_table(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the coordinator, which counts nobody, could unload what the router is about to serve from."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    known = []
    read = TableView.read

    async def looked(self: TableView) -> None:
        known.append(await _known(fleet))
        await read(self)

    monkeypatch.setattr(TableView, "read", looked)
    async with fleet.router():
        assert known[0]


async def _known(fleet: Fleet) -> bool:
    return await fleet.control.command("ZCARD", fleet.keys.routers) == 1  # type: ignore[no-any-return]


async def _totals(fleet: Fleet) -> dict[str, int]:
    return {name: count for name, count in (await fleet.counts()).items() if "|" not in name}


async def _counted(fleet: Fleet, count: int) -> bool:
    return sum((await _totals(fleet)).values()) == count


async def _idle(fleet: Fleet) -> bool:
    return not await fleet.counts()


async def test_a_router_that_can_read_and_not_report_stops_serving_in_time(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator does not wait for whom it does not hear of, however young that one's table is."""
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(table_max_age_s=3.0):
        assert (await fleet.complete(V1)).status == 200

        async def unheard(self: Registry, router: str, report: object) -> None:
            raise ControlUnavailable("writes are refused")

        monkeypatch.setattr(Registry, "report_router", unheard)
        await wait_until(lambda: _too_old(fleet), timeout_s=8.0)
        assert (await fleet.get("/health")).json["redis"]["control"] == "reachable"


async def _too_old(fleet: Fleet) -> bool:
    answer = await fleet.complete(V1)
    return answer.status == 503 and "too old" in answer.message
