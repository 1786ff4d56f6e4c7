"""A coordinator with scripted replicas and a publisher, while Redis is emptied, set back or cut in half, and while the
coordinator dies at each step of a turn: nothing voided returns, no number is announced twice, the trainer goes on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from adaptersync.coordinator.app import Coordinator
from adaptersync.router.table import TableView
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.config import Config, CoordinatorSection, GroupSection, JobsSection, RedisSection, StoreSection
from adaptersync_core.errors import ControlError, StoreError
from adaptersync_core.keys import Keys
from adaptersync_core.records import Request
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import NUMBERS_GAP, Registry
from adaptersync_core.table import Table
from adaptersync_tools.servers import RedisServer, Role
from support.artifacts import small_adapter
from support.redis_servers import server_binary
from support.scripted import ScriptedReplica
from support.wait import wait_until

LEASE_S = 1.0


class Died(BaseException):
    """The process ended here."""


class Group:
    """One server of its own, that may be stopped and started with older files, and everybody around it."""

    def __init__(self, server: RedisServer, directory: Path) -> None:
        self.server = server
        self.directory = directory
        self.config = Config(
            group=GroupSection(name="group"),
            redis=RedisSection(control_url=server.url, cache_url=server.url, lane_bytes=0),
            store=StoreSection(path=str(directory / "store")),
            coordinator=CoordinatorSection(min_ready=1, tick_s=0.02, lease_s=LEASE_S),
            jobs=JobsSection(verify=False),
        )
        self.client = RedisClient(server.url, name="test")
        self.registry = Registry(self.client, Keys("group"))
        self.replicas = [ScriptedReplica(self.registry, name) for name in ("r1", "r2")]
        self.view = TableView(self.registry, max_age_s=60)
        self.served: list[str] = []
        self._made = 0
        self._coordinator: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    def start(self) -> None:
        self._tasks += [asyncio.create_task(replica.live()) for replica in self.replicas]
        self._tasks.append(asyncio.create_task(self._follow()))
        self.lead()

    def lead(self, prepare: Callable[[Coordinator], None] = lambda _: None) -> None:
        """Another coordinator process."""
        coordinator = Coordinator(self.config, self.registry)
        prepare(coordinator)
        self._coordinator = asyncio.create_task(_work(coordinator))
        self._tasks.append(self._coordinator)

    async def stop_leading(self) -> None:
        if self._coordinator is not None:
            self._coordinator.cancel()
            await asyncio.gather(self._coordinator, return_exceptions=True)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()
        assert all(isinstance(end, asyncio.CancelledError | Died) for end in ended), ended

    async def _follow(self) -> None:
        """A router's table; what it ever served."""
        while True:
            await self.view.read()
            self.served += [name for name in self.view.table.versions if self.view.table.routable(name)]
            await asyncio.sleep(0.005)

    def adapter(self) -> Path:
        self._made += 1
        return small_adapter(self.directory / f"adapter-{self._made}", seed=self._made, scale=0.5)

    async def publish(self, publisher: AdapterPublisher, *, wait: bool = True) -> str:
        publication = await asyncio.to_thread(publisher.publish, self.adapter())
        if wait:
            outcome = await asyncio.to_thread(publication.wait, 15)
            assert outcome.state == "current", outcome
        return publication.adapter_id

    async def table(self) -> Table:
        return await self.registry.table()

    async def current(self) -> str | None:
        entry = (await self.table()).runs.get("run")
        return entry.current if entry else None

    async def void(self, name: str) -> None:
        await self.registry.request(Request(kind="rollback", run="run", reason="bad"))

        async def voided() -> bool:
            record = await self.registry.version(name)
            return record is not None and record.state == "voided"

        await wait_until(voided)


async def _work(coordinator: Coordinator) -> None:
    while True:
        with contextlib.suppress(ControlError, StoreError):
            await coordinator.work()
        await asyncio.sleep(0.02)


@pytest.fixture
async def group(redis_kind: str, tmp_path: Path) -> AsyncIterator[Group]:
    binary, place = server_binary(redis_kind), tmp_path / "server"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]  # one that it keeps when it is started again
    server = RedisServer(Role.CONTROL, place, binary=binary, port=port, maxmemory_mb=64)
    server.start()
    group = Group(server, tmp_path)
    group.start()
    yield group
    await group.close()
    server.stop()


@pytest.fixture
async def publisher(group: Group) -> AsyncIterator[AdapterPublisher]:
    publisher = await asyncio.to_thread(AdapterPublisher, group.config, "run", max_staleness=1)
    yield publisher
    await asyncio.to_thread(publisher.close)


async def incarnation(group: Group) -> str:
    return (await group.table()).incarnation


async def test_an_emptied_redis_is_rebuilt_and_nothing_voided_returns(
    group: Group, publisher: AdapterPublisher
) -> None:
    first, bad = await group.publish(publisher), await group.publish(publisher)
    await group.void(bad)
    before = await group.table()
    await wait_until(lambda: group.view.table.generation >= before.generation)
    group.served.clear()
    await group.client.command("FLUSHALL")
    await wait_until(lambda: _newer(group, before))
    assert await group.current() == first
    record = await group.registry.version(bad)
    assert record is not None
    assert (record.state, record.reason) == ("voided", "bad")
    served = await group.registry.version(first)
    assert served is not None
    assert served.state == "current"
    await wait_until(lambda: group.view.table.incarnation != before.incarnation)
    following = await group.publish(publisher)
    assert int(following.split("-v")[1].split("-")[0]) > NUMBERS_GAP
    assert bad not in group.served
    assert await group.current() == following
    numbers = [seq for _, seq in await group.registry.published("run")]
    assert len(numbers) == len(set(numbers)) == 3


async def test_who_waits_for_a_version_that_is_current_hears_of_it_after_redis_was_emptied(
    group: Group, publisher: AdapterPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asleep() -> None:
        pass

    with monkeypatch.context() as busy:
        busy.setattr(publisher, "_look", asleep)
        publication = await asyncio.to_thread(publisher.publish, group.adapter())
        await wait_until(lambda: _holds(group, publication.adapter_id))
        before = await group.table()
        await group.client.command("FLUSHALL")
        await wait_until(lambda: _newer(group, before))
    assert publication.outcome is None
    assert (await asyncio.to_thread(publication.wait, 10)).state == "current"


async def _newer(group: Group, before: Table) -> bool:
    with contextlib.suppress(ControlError):  # away for a moment
        table = await group.table()
        return table.generation > before.generation and table.incarnation != before.incarnation
    return False


@pytest.mark.parametrize("key", ["table", "control", "run:run", "published:run"])
async def test_a_part_that_is_lost_is_noticed_or_put_back(group: Group, publisher: AdapterPublisher, key: str) -> None:
    first = await group.publish(publisher)
    await group.client.command("DEL", f"adaptersync:{{group}}:{key}")
    if key in ("table", "control"):
        await wait_until(lambda: _holds(group, first))
    following = await group.publish(publisher)
    assert await group.current() == following != first


async def _holds(group: Group, name: str) -> bool:
    return await group.current() == name


async def test_a_redis_that_is_set_back_goes_on_from_the_journal(group: Group, publisher: AdapterPublisher) -> None:
    first = await group.publish(publisher)
    kept = _copy(group)
    bad = await group.publish(publisher)
    await group.void(bad)
    before = await group.table()
    await wait_until(lambda: group.view.table.generation >= before.generation)
    group.served.clear()
    group.server.stop()
    _put_back(group, kept)
    group.server.start()
    await wait_until(lambda: _newer(group, before), timeout_s=20)
    assert await group.current() == first
    following = await group.publish(publisher)
    assert await group.current() == following
    assert bad not in group.served


def _copy(group: Group) -> Path:
    kept = group.directory / "kept"
    shutil.copytree(group.directory / "server", kept)
    return kept


def _put_back(group: Group, kept: Path) -> None:
    for path in kept.iterdir():
        target = group.directory / "server" / path.name
        if target.is_dir():
            shutil.rmtree(target)
            shutil.copytree(path, target)


STEPS = ("before", "commit", "after")


@pytest.mark.parametrize("lost", ["nothing", "everything"])
@pytest.mark.parametrize("step", STEPS)
async def test_a_coordinator_that_dies_at_a_step_of_a_void_leaves_it_voided_or_not_begun(
    group: Group, publisher: AdapterPublisher, step: str, lost: str
) -> None:
    """Before the intent is noted nothing has happened; from then on it is refused, whatever is lost."""
    first, bad = await group.publish(publisher), await group.publish(publisher)
    await group.stop_leading()
    group.lead(lambda coordinator: die_at(coordinator, step))
    await asyncio.sleep(LEASE_S * 1.2)  # the former leader's lease
    await group.registry.request(Request(kind="rollback", run="run", reason="bad"))
    await wait_until(lambda: _is_done(group), timeout_s=10)
    if lost == "everything":
        await group.client.command("FLUSHALL")
    group.served.clear()
    group.lead()
    if step == "before" and lost == "everything":  # the request itself is gone
        await wait_until(lambda: _holds(group, bad), timeout_s=10)
    else:
        await wait_until(lambda: _holds(group, first), timeout_s=10)
    following = await group.publish(publisher)
    assert await group.current() == following


async def _is_done(group: Group) -> bool:
    assert group._coordinator is not None
    return group._coordinator.done()


def die_at(coordinator: Coordinator, step: str) -> None:
    """End this coordinator when it is about to void: before the intent, before the commit, before the outcome."""
    note, decide = coordinator._note, coordinator._registry.decide
    voiding = False

    async def noting(entry: Any) -> None:
        nonlocal voiding
        refusal = entry is not None and any(record.state == "voided" for record in entry.fates.values())
        voiding = voiding or refusal
        if step == "before" and refusal and entry.table is None:
            raise Died
        if step == "after" and voiding and entry is not None and entry.table is not None:
            raise Died
        await note(entry)

    async def deciding(decision: Any, *arguments: Any, **more: Any) -> None:
        if step == "commit" and voiding:
            raise Died
        await decide(decision, *arguments, **more)

    coordinator._note = noting  # type: ignore[method-assign]
    registry = Registry(coordinator._registry.client, coordinator._registry.keys)
    registry.decide = deciding  # type: ignore[method-assign]
    coordinator._registry = registry


async def test_nothing_is_decided_while_the_journal_cannot_be_written(
    group: Group, publisher: AdapterPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await group.publish(publisher)

    def full(*_: object) -> None:
        raise StoreError("journal cannot be written: No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("adaptersync.coordinator.journal.Journal.write", full)
        patch.setattr("adaptersync.coordinator.journal.Journal.begin", full)
        before = (await group.table()).generation
        await group.publish(publisher, wait=False)
        await asyncio.sleep(0.5)
        assert (await group.table()).generation <= before + 1  # the one whose outcome could not be noted
        assert await group.current() == first
    await wait_until(lambda: _moved(group, first))


async def _moved(group: Group, name: str) -> bool:
    return await group.current() not in (None, name)


async def test_two_coordinators_of_one_name_take_turns(group: Group, publisher: AdapterPublisher) -> None:
    group.lead()
    first = await group.publish(publisher)
    assert (await group.table()).versions[first].state == "current"
    terms = await group.registry.client.read_stream(group.registry.keys.events, "0", count=1000)
    assert [fields["type"] for _, fields in terms].count("coordinator.elected") == 1  # the other waits
