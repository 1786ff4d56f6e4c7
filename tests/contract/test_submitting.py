"""Handing adapters over to a publisher on a real Redis: a trainer does not wait, nothing is lost or out of order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from adaptersync.trainer import outgoing
from adaptersync.trainer import publisher as publisher_module
from adaptersync.trainer.publication import Outcome
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync.trainer.submissions import Submission
from adaptersync_core.errors import Fenced, PublicationFailed
from adaptersync_core.manifest import WEIGHTS_FILE, Manifest
from adaptersync_core.store import ArtifactStore
from support.publishing import Group, living_group, publishing
from support.wait import wait_until

CURRENT = Outcome(state="current")


@pytest.fixture
def redis_kind() -> str:
    return "redis7"


@pytest.fixture
async def group(redis_url: str, cache_url: str, tmp_path: Path) -> AsyncIterator[Group]:
    async with living_group(redis_url, cache_url, tmp_path) as group:
        yield group


@pytest.fixture
async def publisher(group: Group) -> AsyncIterator[AdapterPublisher]:
    async with publishing(group.config) as publisher:
        yield publisher


class Gate:
    """Holds up whoever writes into the store, while it is shut."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.open = threading.Event()
        self.open.set()

    def shut(self) -> None:
        self.began.clear()
        self.open.clear()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    store = ArtifactStore.publish

    def slow(self: ArtifactStore, manifest: Manifest, source: Path) -> Path:
        gate.began.set()
        assert gate.open.wait(30)
        return store(self, manifest, source)

    monkeypatch.setattr(ArtifactStore, "publish", slow)
    yield gate
    gate.open.set()


async def outcome(submission: Submission) -> Outcome:
    return await asyncio.to_thread(submission.wait, 30)


async def announced(group: Group) -> list[int]:
    return [seq for _, seq in await group.registry.published("run")]


async def test_it_does_not_wait_for_the_store_and_the_newest_of_those_that_wait_is_published(
    group: Group, publisher: AdapterPublisher, gate: Gate
) -> None:
    gate.shut()
    first = publisher.submit(group.adapter(), step=1)  # by the loop's own thread: a call that waited would never return
    await asyncio.to_thread(gate.began.wait, 10)
    second, third = (publisher.submit(group.adapter(), step=step) for step in (2, 3))
    assert (first.outcome, third.outcome) == (None, None)
    gate.open.set()
    assert [(await outcome(one)).state for one in (second, third)] == ["replaced", "current"]
    assert (await outcome(first)).state in ("current", "superseded")  # the third may come before it is staged
    assert (first.seq, second.seq, third.seq) == (1, None, 2)
    assert await announced(group) == [1, 2]
    assert third.publication is not None
    assert third.publication.manifest.timings["queued_s"] > 0
    assert third.publication.manifest.step == 3


async def test_while_the_store_is_full_trainers_go_on_and_what_is_newest_is_published_once_there_is_room(
    group: Group, publisher: AdapterPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "FIRST_REST_S", 0.05)
    assert await outcome(publisher.submit(group.adapter(), step=0)) == CURRENT
    place = group.store.root / "run"
    aside = place.rename(place.with_name("aside"))
    place.write_text("in the way")
    older = publisher.submit(group.adapter(), step=1)
    await wait_until(lambda: older.attempts > 1)
    newer = publisher.submit(group.adapter(), step=2)
    place.unlink()
    aside.rename(place)
    assert await outcome(newer) == CURRENT
    assert (await outcome(older)).state in ("replaced", "current")  # it may have been quicker
    assert publisher.retries >= 1


async def test_what_cannot_be_served_and_what_is_rolled_back_leave_the_next_alone(
    group: Group, publisher: AdapterPublisher
) -> None:
    bad = group.adapter()
    (bad / WEIGHTS_FILE).write_bytes(b"not safetensors")
    failed = await outcome(publisher.submit(bad))
    assert failed.state == "failed"
    assert failed.reason
    group.replicas[0].refuses[1] = "rank 32 is above the engine's 16"
    assert (await outcome(publisher.submit(group.adapter()))).state == "rolled_back"
    assert await outcome(publisher.submit(group.adapter())) == CURRENT
    assert await announced(group) == [1, 2]


async def test_after_a_newer_trainer_began_whoever_submits_hears_of_it(
    group: Group, publisher: AdapterPublisher
) -> None:
    assert await outcome(publisher.submit(group.adapter())) == CURRENT
    async with publishing(group.config):
        late = publisher.submit(group.adapter())
        with pytest.raises(Fenced, match="newer trainer"):
            await outcome(late)
        with pytest.raises(Fenced, match="newer trainer"):
            publisher.submit(group.adapter())
    assert await announced(group) == [1]


class Model:
    def __init__(self, source: Path) -> None:
        self.source = source
        self.saved_to: Path | None = None
        self.thread = 0

    def save_pretrained(self, save_directory: str) -> None:
        self.saved_to, self.thread = Path(save_directory), threading.get_ident()
        for path in self.source.iterdir():
            (self.saved_to / path.name).write_bytes(path.read_bytes())


async def test_a_model_is_saved_before_it_returns_and_its_files_go_once_they_are_published(
    group: Group, publisher: AdapterPublisher, gate: Gate
) -> None:
    """What was trained since must not be in it."""
    gate.shut()
    model = Model(group.adapter())
    submission = publisher.submit(model)
    assert model.thread == threading.get_ident()
    assert model.saved_to is not None
    assert model.saved_to.exists()
    gate.open.set()
    assert await outcome(submission) == CURRENT
    assert not model.saved_to.exists()


async def test_what_is_not_taken_leaves_nothing_behind(group: Group, publisher: AdapterPublisher) -> None:
    await asyncio.to_thread(publisher.close)
    model, directory = Model(group.adapter()), group.adapter()
    for source in (model, directory):
        with pytest.raises(PublicationFailed, match="closed"):
            publisher.submit(source, remove=True)
    assert model.saved_to is not None
    assert (model.saved_to.exists(), directory.exists()) == (False, False)


async def test_closing_publishes_what_was_submitted(group: Group, gate: Gate) -> None:
    gate.shut()
    async with publishing(group.config) as publisher:
        submissions = [publisher.submit(group.adapter())]
        await asyncio.to_thread(gate.began.wait, 10)
        submissions.append(publisher.submit(group.adapter()))
        closing = asyncio.create_task(asyncio.to_thread(publisher.close))
        assert await asyncio.wait({closing}, timeout=0.2) == (set(), {closing})
        gate.open.set()
        await asyncio.wait_for(closing, 20)
    assert await announced(group) == [1, 2]
    assert [one.seq for one in submissions] == [1, 2]


async def test_a_store_that_hangs_holds_up_the_end_of_a_run_for_a_while_only(
    group: Group, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher_module, "CLOSE_S", 0.3)
    gate.shut()
    async with publishing(group.config) as publisher:
        submission = publisher.submit(group.adapter())
        await asyncio.to_thread(gate.began.wait, 10)
        await asyncio.wait_for(asyncio.to_thread(publisher.close), 10)
        with pytest.raises(PublicationFailed, match="closed"):
            await outcome(submission)
        assert (await group.registry.fleet()).runs["run"].ended_at > 0
        gate.open.set()
        await wait_until(lambda: not [one for one in threading.enumerate() if one.name == "outgoing-run"])
    assert await announced(group) == []
