"""Publishing from a trainer to a real coordinator and scripted replicas: what becomes of it, and what may fail."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adaptersync.trainer import publisher as publisher_module
from adaptersync.trainer.publication import Outcome, Publication
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync_core.config import (
    Config,
)
from adaptersync_core.errors import (
    AdapterInvalid,
    ConfigError,
    ControlUnavailable,
    Fenced,
    NameInvalid,
    PublicationFailed,
    StoreError,
)
from adaptersync_core.manifest import WEIGHTS_FILE, Manifest, check_finite
from adaptersync_core.proof import Probe
from adaptersync_core.records import Request
from adaptersync_core.store import ArtifactStore, verify_files
from support.proxy import Fault, FaultProxy
from support.publishing import Group, config_of, living_group, publishing
from support.wait import wait_until

CURRENT = Outcome(state="current")


@pytest.fixture
async def group(redis_url: str, cache_url: str, tmp_path: Path) -> AsyncIterator[Group]:
    async with living_group(redis_url, cache_url, tmp_path) as group:
        yield group


@pytest.fixture
async def publisher(group: Group) -> AsyncIterator[AdapterPublisher]:
    async with publishing(group.config) as publisher:
        yield publisher


async def publish(publisher: AdapterPublisher, source: object, **more: int) -> Publication:
    return await asyncio.to_thread(publisher.publish, source, **more)  # type: ignore[arg-type]


async def outcome(publication: Publication) -> Outcome:
    return await asyncio.to_thread(publication.wait, 10)


async def test_a_probe_goes_with_its_version(group: Group, publisher: AdapterPublisher) -> None:
    probe = Probe(tokens=(1, 2, 3), deltas=(0.25, -0.5))
    publication = await asyncio.to_thread(publisher.publish, group.adapter(), probe=probe)
    known = await group.registry.manifest(publication.adapter_id)
    assert known is not None
    assert known.probe == probe == group.store.read_manifest(publication.adapter_id).probe
    assert await outcome(publication) == CURRENT


async def test_weights_that_are_not_finite_are_refused_with_the_tensors_name(
    group: Group, publisher: AdapterPublisher
) -> None:
    source = group.adapter()
    path = source / WEIGHTS_FILE
    good = path.read_bytes()
    path.write_bytes(good[:-4] + struct.pack("<f", float("nan")))  # the end of the last tensor
    with pytest.raises(AdapterInvalid, match="not a number") as refusal:
        await publish(publisher, source)
    assert str(refusal.value.ids["tensor"]).endswith(".lora_B.weight")
    assert list(group.store.versions()) == []
    path.write_bytes(good)
    assert await outcome(await publish(publisher, source)) == CURRENT


async def test_what_changes_once_it_was_checked_is_not_published(
    group: Group, publisher: AdapterPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = group.adapter()

    def spoiled(directory: Path) -> None:
        check_finite(directory)
        path = directory / WEIGHTS_FILE
        path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", float("nan")))

    monkeypatch.setattr(publisher_module, "check_finite", spoiled)
    with pytest.raises(AdapterInvalid, match="changed"):
        await publish(publisher, source)
    assert list(group.store.versions()) == []


async def test_a_published_version_becomes_current(group: Group, publisher: AdapterPublisher) -> None:
    told: list[int | None] = []
    publisher.on_promoted(told.append)
    source = group.adapter()
    publication = await publish(publisher, source, step=12)
    assert await outcome(publication) == publication.outcome == CURRENT
    assert (publication.seq, publisher.epoch, publisher.latest_seq) == (1, 1, 1)
    assert publication.adapter_id == f"run-v1-{publication.digest[:12]}"
    await wait_until(lambda: told == [1])
    assert publisher.current_seq == 1
    manifest = group.store.read_manifest(publication.adapter_id)
    assert manifest == publication.manifest == await group.registry.manifest(publication.adapter_id)
    assert (manifest.step, manifest.epoch) == (12, 1)
    assert manifest.timings["hashed_s"] > 0
    verify_files(manifest, group.store.directory(publication.adapter_id))
    assert (await group.registry.table()).runs["run"].max_staleness == 1


async def test_the_same_bytes_again_are_another_version(group: Group, publisher: AdapterPublisher) -> None:
    source = group.adapter()
    first = await publish(publisher, source)
    second = await publish(publisher, str(source))
    assert (first.seq, second.seq) == (1, 2)
    assert first.digest == second.digest
    assert await outcome(second) == CURRENT


async def test_a_refused_version_is_rolled_back_with_its_reasons_and_the_next_is_not(
    group: Group, publisher: AdapterPublisher
) -> None:
    group.replicas[0].refuses[2] = "rank 32 is above the engine's 16"
    assert await outcome(await publish(publisher, group.adapter())) == CURRENT
    refused = await outcome(await publish(publisher, group.adapter()))
    assert refused == Outcome(state="rolled_back", reason="r1: rank 32 is above the engine's 16")
    assert publisher.current_seq == 1
    assert await outcome(await publish(publisher, group.adapter())) == CURRENT


async def test_what_is_overtaken_while_the_fleet_is_busy_is_superseded(
    group: Group, publisher: AdapterPublisher
) -> None:
    for replica in group.replicas:
        replica.answers.clear()
    first = await publish(publisher, group.adapter())
    await wait_until(lambda: _candidate(group, first.adapter_id))
    later = [await publish(publisher, group.adapter()) for _ in range(3)]
    assert [publication.outcome for publication in (first, *later)] == [None] * 4
    for replica in group.replicas:
        replica.answers.set()
    states = [(await outcome(publication)).state for publication in (first, *later)]
    assert states == ["current", "superseded", "superseded", "current"]
    assert later[-1].adapter_id in (await outcome(later[0])).reason


async def _candidate(group: Group, name: str) -> bool:
    return (await group.registry.table()).candidate("run") == name


async def test_a_rollback_is_heard_of(group: Group, publisher: AdapterPublisher) -> None:
    told: list[int | None] = []
    publisher.on_promoted(told.append)
    for _ in range(2):
        assert await outcome(await publish(publisher, group.adapter())) == CURRENT
    await wait_until(lambda: told == [1, 2])
    await group.registry.request(Request(kind="rollback", run="run", reason="wrong language"))
    await wait_until(lambda: told == [1, 2, 1])
    assert publisher.current_seq == 1


async def test_who_is_slow_to_answer_is_said_to_be(group: Group, publisher: AdapterPublisher) -> None:
    group.replicas[0].answers.clear()
    publication = await publish(publisher, group.adapter())
    with pytest.raises(PublicationFailed, match=r"no outcome in 0\.2 s") as refusal:
        await asyncio.to_thread(publication.wait, 0.2)
    assert refusal.value.ids["version"] == publication.adapter_id
    assert "adaptersync status" in refusal.value.next_step
    group.replicas[0].answers.set()
    assert await outcome(publication) == CURRENT


# trainers that follow each other


async def test_a_newer_trainer_fences_the_older_and_numbers_go_on(group: Group, publisher: AdapterPublisher) -> None:
    assert await outcome(await publish(publisher, group.adapter())) == CURRENT
    async with publishing(group.config) as newer:
        assert (newer.epoch, newer.latest_seq) == (publisher.epoch + 1, 1)
        before = await group.registry.published("run")
        with pytest.raises(Fenced, match="newer trainer") as refusal:
            await publish(publisher, group.adapter())
        assert refusal.value.ids["epoch"] == 1
        assert await group.registry.published("run") == before
        publication = await publish(newer, group.adapter())
        assert publication.seq == 2
        assert await outcome(publication) == CURRENT
        await wait_until(lambda: newer.current_seq == 2)
        await wait_until(lambda: publisher.current_seq is None)  # what another trainer promoted is not this one's


async def test_two_runs_of_one_group(group: Group, publisher: AdapterPublisher) -> None:
    async with publishing(group.config, "other-run") as other:
        for one in (publisher, other):
            assert await outcome(await publish(one, group.adapter())) == CURRENT
    assert await group.registry.runs() == ["other-run", "run"]


async def test_numbers_of_old_versions_are_forgotten_once_newer_ones_are_decided(
    group: Group, publisher: AdapterPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adaptersync_core.registry.PUBLISHED_KEPT", 2)
    for _ in range(5):
        assert await outcome(await publish(publisher, group.adapter())) == CURRENT
    group.replicas[0].refuses[6] = "no room"
    assert (await outcome(await publish(publisher, group.adapter()))).state == "rolled_back"

    async def kept() -> bool:
        return [seq for _, seq in await group.registry.published("run")] == [5, 6]

    await wait_until(kept)


async def test_two_threads_publish_in_some_order_and_none_is_lost(group: Group, publisher: AdapterPublisher) -> None:
    sources = [group.adapter() for _ in range(12)]
    with ThreadPoolExecutor(2) as threads:
        loop = asyncio.get_running_loop()
        made = await asyncio.gather(*(loop.run_in_executor(threads, publisher.publish, source) for source in sources))
    assert sorted(publication.seq for publication in made) == list(range(1, 13))
    assert [seq for _, seq in await group.registry.published("run")] == list(range(1, 13))
    states = {publication.seq: (await outcome(publication)).state for publication in made}
    assert states[12] == "current"
    assert set(states.values()) <= {"current", "superseded"}


# sources


class Model:
    """What the publisher needs of a PeftModel."""

    def __init__(self, source: Path | None) -> None:
        self.source = source
        self.saved_to: Path | None = None

    def save_pretrained(self, save_directory: str) -> None:
        self.saved_to = Path(save_directory)
        if self.source is None:
            raise OSError(28, "No space left on device")
        for path in self.source.iterdir():
            (self.saved_to / path.name).write_bytes(path.read_bytes())


async def test_a_model_saves_itself_and_leaves_nothing_behind(group: Group, publisher: AdapterPublisher) -> None:
    model = Model(group.adapter())
    assert await outcome(await publish(publisher, model)) == CURRENT
    assert model.saved_to is not None
    assert not model.saved_to.exists()


async def test_a_model_that_cannot_save_itself_announces_nothing(group: Group, publisher: AdapterPublisher) -> None:
    model = Model(None)
    with pytest.raises(OSError, match="No space left"):
        await publish(publisher, model)
    assert model.saved_to is not None
    assert not model.saved_to.exists()
    assert await group.registry.published("run") == []


async def test_an_adapter_that_changes_nothing_is_published_with_a_warning(
    group: Group, publisher: AdapterPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for scale in (0.0, 1.0, 0.0):
        caplog.clear()
        publication = await publish(publisher, group.adapter(scale=scale))
        assert publication.manifest.shape.noop == (scale == 0.0)
        said.append([line.partition(" changes nothing: ")[2] for line in caplog.messages if "changes nothing" in line])
        assert await outcome(publication) == CURRENT
    zero = "every lora_B is zero"
    assert said == [[f"{zero}, as is usual before the first step"], [], [zero]]


async def test_an_invalid_adapter_announces_nothing_and_takes_no_number(
    group: Group, publisher: AdapterPublisher
) -> None:
    bad = group.adapter()
    (bad / WEIGHTS_FILE).write_bytes(b"not safetensors")
    with pytest.raises(AdapterInvalid):
        await publish(publisher, bad)
    assert await group.registry.published("run") == []
    publication = await publish(publisher, group.adapter())
    assert publication.seq == 1
    assert await outcome(publication) == CURRENT


async def test_a_store_that_is_full_announces_nothing_and_the_next_call_may_succeed(
    group: Group, publisher: AdapterPublisher
) -> None:
    place = group.store.root / "run"
    place.parent.mkdir(exist_ok=True)
    place.write_text("in the way")
    with pytest.raises(StoreError):
        await publish(publisher, group.adapter())
    assert await group.registry.published("run") == []
    place.unlink()
    publication = await publish(publisher, group.adapter())
    assert publication.seq == 2  # a gap: the number is never given again
    assert await outcome(publication) == CURRENT


# Redis


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[FaultProxy]:
    async with FaultProxy("127.0.0.1", int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        yield proxy


@pytest.mark.parametrize("fault", list(Fault))
async def test_what_redis_swallows_is_published_once(
    group: Group, proxy: FaultProxy, tmp_path: Path, fault: Fault
) -> None:
    async with publishing(
        config_of(f"redis://127.0.0.1:{proxy.port}/0", group.config.redis.cache_url, tmp_path)
    ) as publisher:
        assert await outcome(await publish(publisher, group.adapter())) == CURRENT  # the server knows the scripts now
        done = proxy.faults_done
        proxy.arm(fault, match=b"published:run", times=2)
        publication = await publish(publisher, group.adapter())
        assert proxy.faults_done == done + 2
        assert await outcome(publication) == CURRENT
        assert [seq for _, seq in await group.registry.published("run")] == [1, 2]
    told = await group.registry.client.read_stream(group.registry.keys.events, "0", count=1000)
    assert [fields["version"] for _, fields in told if fields["type"] == "adapter.published"].count(
        publication.adapter_id
    ) == 1


async def test_a_trainer_outlives_a_redis_that_is_away(group: Group, proxy: FaultProxy, tmp_path: Path) -> None:
    async with publishing(
        config_of(f"redis://127.0.0.1:{proxy.port}/0", group.config.redis.cache_url, tmp_path)
    ) as publisher:
        proxy.refuse = True
        proxy.cut()
        work = asyncio.create_task(publish(publisher, group.adapter()))
        await asyncio.sleep(1)  # how long it is away
        assert not work.done()
        proxy.refuse = False
        assert await outcome(await work) == CURRENT


async def test_a_redis_that_stays_away_is_an_error_in_time_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(publisher_module, "INSIST_S", 0.3)
    monkeypatch.setattr(publisher_module, "PAUSE_S", 0.05)
    before = threading.active_count()
    with pytest.raises(ControlUnavailable):
        await asyncio.to_thread(AdapterPublisher, config_of("redis://127.0.0.1:1/0", "", tmp_path))
    assert caplog.text.count("will try again") == 1
    await wait_until(lambda: not [one for one in threading.enumerate() if one.name == "publisher-run"])
    await wait_until(lambda: threading.active_count() <= before + 1)  # the one of to_thread


# its own life


async def test_a_callback_that_fails_does_not_end_the_watch(
    group: Group, publisher: AdapterPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int | None] = []

    def fail(seq: int | None) -> None:
        raise RuntimeError("mine")

    publisher.on_promoted(fail)
    publisher.on_promoted(told.append)
    for _ in range(2):
        assert await outcome(await publish(publisher, group.adapter())) == CURRENT
    await wait_until(lambda: told == [1, 2])
    assert "a callback for promotions failed" in caplog.text


async def test_closing_ends_the_run_and_the_next_trainer_begins_it_again(group: Group) -> None:
    async with publishing(group.config):
        assert (await group.registry.fleet()).runs["run"].ended_at == 0
    assert (await group.registry.fleet()).runs["run"].ended_at > 0
    async with publishing(group.config):
        assert (await group.registry.fleet()).runs["run"].ended_at == 0


async def test_publishers_of_one_incarnation_share_a_window(group: Group) -> None:
    for _ in range(2):
        async with publishing(group.config, incarnation="mine") as publisher:
            assert await outcome(await publish(publisher, group.adapter())) == CURRENT
    versions = (await group.registry.table()).versions.values()
    assert {version.seq: version.state for version in versions} == {1: "retained", 2: "current"}


async def test_an_announcement_that_redis_lost_is_made_again(group: Group, publisher: AdapterPublisher) -> None:
    for replica in group.replicas:
        replica.answers.clear()
    first = await publish(publisher, group.adapter())
    await wait_until(lambda: _candidate(group, first.adapter_id))
    second = await publish(publisher, group.adapter())
    keys = group.registry.keys
    await group.registry.client.command("DEL", keys.manifest(second.adapter_id), keys.published("run"))
    for replica in group.replicas:
        replica.answers.set()
    assert await outcome(second) == CURRENT


async def test_closed_is_closed(group: Group) -> None:
    async with publishing(group.config) as publisher:
        await asyncio.to_thread(publisher.close)
        await asyncio.to_thread(publisher.close)
        with pytest.raises(PublicationFailed, match="publisher is closed"):
            await publish(publisher, group.adapter())


async def test_nobody_waits_for_a_publisher_that_is_closed(group: Group) -> None:
    for replica in group.replicas:
        replica.answers.clear()
    async with publishing(group.config) as publisher:
        publication = await publish(publisher, group.adapter())
        waiting = asyncio.create_task(outcome(publication))
    with pytest.raises(PublicationFailed, match="closed before the outcome was known"):
        await asyncio.wait_for(waiting, 5)
    assert publication.outcome is None


async def test_a_publication_in_progress_is_completed_before_the_end(
    group: Group, publisher: AdapterPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, go = threading.Event(), threading.Event()
    store = ArtifactStore.publish

    def slow(self: ArtifactStore, manifest: Manifest, source: Path) -> Path:
        began.set()
        assert go.wait(10)
        return store(self, manifest, source)

    monkeypatch.setattr(ArtifactStore, "publish", slow)
    publishing = asyncio.create_task(publish(publisher, group.adapter()))
    await asyncio.to_thread(began.wait, 10)
    closing = asyncio.create_task(asyncio.to_thread(publisher.close))
    assert await asyncio.wait({closing}, timeout=0.2) == (set(), {closing})
    go.set()
    publication = await asyncio.wait_for(publishing, 10)
    await closing
    assert [name for name, _ in await group.registry.published("run")] == [publication.adapter_id]


def test_a_run_needs_a_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run name"):
        AdapterPublisher(Config())
    with pytest.raises(NameInvalid):
        AdapterPublisher(Config(), run="My Run")
    for name in ("base", "r2-v7-0a27f46bd8f3"):
        with pytest.raises(NameInvalid, match="choose another run name"):
            AdapterPublisher(Config(), run=name)


def test_a_window_cannot_be_negative() -> None:
    with pytest.raises(ConfigError, match="max_staleness cannot be negative"):
        AdapterPublisher(Config(), run="run", max_staleness=-1)


async def test_what_is_no_adapter_at_all_is_refused_in_words(group: Group, publisher: AdapterPublisher) -> None:
    with pytest.raises(AdapterInvalid, match=r"neither a directory nor a model.*given=NoneType"):
        await publish(publisher, None)
    assert await outcome(await publish(publisher, group.adapter())) == CURRENT


async def test_what_happened_is_logged_in_one_line(
    group: Group, publisher: AdapterPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="adaptersync.trainer.publisher"):
        publication = await publish(publisher, group.adapter())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "adaptersync.trainer.publisher"]
    assert line.startswith(f"published {publication.adapter_id} in ")
