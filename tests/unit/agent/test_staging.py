"""Bytes from a store that lags, forgets, tears and lies: staged whole and verified, or refused with the reason."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import pytest
from msgspec.structs import replace

from adaptersync.agent import staging as staging_module
from adaptersync.agent.staging import Staging
from adaptersync_core import markers
from adaptersync_core.errors import AdapterInvalid, ArtifactCorrupt, NameInvalid, StagingFailed, StoreError
from adaptersync_core.manifest import FILES, WEIGHTS_FILE, Manifest
from adaptersync_core.markers import Lookout
from adaptersync_core.store import ArtifactStore, Reader, verify_files
from adaptersync_tools.simulator.store import LaggingView
from support.artifacts import manifest_of, small_adapter, stored
from support.strangers import Stranger, common
from support.wait import wait_until


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(staging_module, "LAST_PAUSE_S", 0.05)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "store").mkdir()
    return tmp_path / "store"


def staging_of(tmp_path: Path, root: Path, reader: Reader | None = None) -> Staging:
    return Staging(tmp_path / "staged", ArtifactStore(root, reader))


async def whole(staging: Staging, manifest: Manifest, *, timeout_s: float = 5.0) -> dict[str, float]:
    phases = await staging.bring(manifest, timeout_s=timeout_s)
    verify_files(manifest, staging.path(manifest.adapter_id))
    assert sorted(path.name for path in staging.path(manifest.adapter_id).iterdir()) == sorted(FILES)
    assert staging.staged() == [manifest.adapter_id]
    assert [path.name for path in staging.root.iterdir()] == [manifest.adapter_id]
    return phases


async def test_a_version_is_staged_and_how_long_it_took_is_said(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    staging = staging_of(tmp_path, root)
    phases = await whole(staging, manifest)
    assert list(phases) == ["visible_s", "staged_s", "verified_s"]
    assert all(0 <= spent < 5 for spent in phases.values())


async def test_a_manifest_whose_name_stands_for_other_files_is_refused_at_once(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    forged = replace(manifest, digest="0" * 64)
    with pytest.raises(ArtifactCorrupt, match="named after other files"):
        await staging_of(tmp_path, root).bring(forged, timeout_s=60)


async def test_an_engine_of_another_user_can_read_what_is_staged(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    staging = staging_of(tmp_path, root)
    umask = os.umask(0o077)
    try:
        await whole(staging, manifest)
    finally:
        os.umask(umask)
    place = staging.path(manifest.adapter_id)
    assert [oct(path.stat().st_mode & 0o777) for path in (staging.root, place)] == ["0o755", "0o755"]
    assert {oct(path.stat().st_mode & 0o777) for path in place.iterdir()} == {"0o644"}


async def test_nothing_is_staged_or_taken_where_a_stranger_was_first(
    tmp_path: Path, root: Path, stranger: Stranger
) -> None:
    """Who owns the place can exchange what was verified."""
    manifest = stored(ArtifactStore(root), tmp_path)
    place = common(tmp_path) / "ours"
    staging = Staging(place / "staged", ArtifactStore(root))
    await staging.bring(manifest, timeout_s=5)
    stranger.takes(place)
    with pytest.raises(StagingFailed, match="belongs to somebody else"):
        await staging.bring(manifest, timeout_s=5)


async def test_a_staged_version_is_not_fetched_again(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    view = LaggingView(root)
    staging = staging_of(tmp_path, root, view)
    await whole(staging, manifest)
    looks = view.looks.total()
    await whole(staging, manifest)
    assert view.looks.total() == looks


async def test_a_version_that_shows_up_late_is_waited_for(tmp_path: Path, root: Path) -> None:
    view = LaggingView(root, visibility_delay_s=0.3)
    manifest = stored(ArtifactStore(root), tmp_path)
    phases = await whole(staging_of(tmp_path, root, view), manifest)
    assert 0.2 < phases["visible_s"] < 1.5
    assert phases["staged_s"] < 0.2  # the copy alone


async def test_a_mount_that_remembers_what_was_absent_is_outlasted(tmp_path: Path, root: Path) -> None:
    view = LaggingView(root, visibility_delay_s=0.1, negative_ttl_s=0.4)
    manifest = stored(ArtifactStore(root), tmp_path)
    phases = await whole(staging_of(tmp_path, root, view), manifest)
    assert 0.3 < phases["visible_s"] < 1.5
    assert phases["staged_s"] < 0.2  # the copy alone


async def test_markers_cost_a_mount_that_remembers_what_was_absent_no_more_than_its_delay(
    tmp_path: Path, root: Path
) -> None:
    """The first version of a run: not even the run's directory was there before."""
    view = LaggingView(root, visibility_delay_s=1.0, negative_ttl_s=3600)
    manifest = stored(ArtifactStore(root), tmp_path, marked=True)
    phases = await whole(staging_of(tmp_path, root, view), manifest)
    assert 0.8 < phases["visible_s"] < 2.0
    assert phases["staged_s"] < 0.2  # the copy alone
    markers_looked_at = [path for path in view.looks if path.parent == root]
    assert len(markers_looked_at) > 3
    assert {view.looks[path] for path in markers_looked_at} == {1}


async def test_names_that_are_looked_at_before_they_are_written_cost_no_more_than_that(
    tmp_path: Path, root: Path
) -> None:
    """As where bytes were to come by the fast lane, and do not: it was announced before it was marked."""
    view = LaggingView(root, negative_ttl_s=3600)
    manifest = replace(stored(ArtifactStore(root), tmp_path), markers=markers.COUNT, created_at=time.time())
    staging = asyncio.create_task(staging_of(tmp_path, root, view).bring(manifest, timeout_s=10))
    await wait_until(lambda: len(view.looks) > 3)
    ArtifactStore(root).mark(manifest)
    marked = time.monotonic()
    await staging
    assert time.monotonic() - marked < 1.0
    assert {view.looks[path] for path in view.looks if path.parent == root} == {1}


async def test_without_markers_such_a_mount_stays_blind(tmp_path: Path, root: Path) -> None:
    view = LaggingView(root, visibility_delay_s=0.7, negative_ttl_s=3600)
    manifest = stored(ArtifactStore(root), tmp_path)
    with pytest.raises(StoreError, match="No such file"):
        await staging_of(tmp_path, root, view).bring(manifest, timeout_s=1.0)


async def test_markers_that_are_gone_are_not_needed(tmp_path: Path, root: Path) -> None:
    """As in a store that was copied without its hidden files: what was waited for in vain is then looked for itself."""
    manifest = stored(ArtifactStore(root), tmp_path, marked=True)
    for name in markers.names(manifest):
        (root / name).unlink()
    phases = await whole(staging_of(tmp_path, root), manifest, timeout_s=0.5)
    assert phases["visible_s"] < 1.0


async def test_an_old_version_is_not_waited_for_by_its_markers(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path, marked=True)
    view = LaggingView(root)
    old = replace(manifest, created_at=time.time() - markers.TRUSTED_S - 1)
    await whole(staging_of(tmp_path, root, view), old)
    assert not [path for path in view.looks if path.parent == root]


async def test_another_attempt_goes_on_with_names_that_were_never_tried(tmp_path: Path, root: Path) -> None:
    view = LaggingView(root, visibility_delay_s=1.0, negative_ttl_s=3600)
    manifest = stored(ArtifactStore(root), tmp_path, marked=True)
    staging = staging_of(tmp_path, root, view)
    attempt = asyncio.create_task(staging.bring(manifest, timeout_s=10))
    await wait_until(lambda: len(view.looks) > 3)
    attempt.cancel()
    await asyncio.gather(attempt, return_exceptions=True)
    await whole(staging, manifest)
    assert {view.looks[path] for path in view.looks if path.parent == root} == {1}


class Blind:
    def open(self, path: Path) -> BinaryIO:
        raise FileNotFoundError(2, os.strerror(2), str(path))


async def test_what_another_agent_of_the_host_has_staged_is_not_waited_for(tmp_path: Path, root: Path) -> None:
    """They share the mount, and as a rule the staged versions, too."""
    view = LaggingView(root, visibility_delay_s=1.0, negative_ttl_s=3600)
    manifest = stored(ArtifactStore(root), tmp_path, marked=True)
    waiting = asyncio.create_task(staging_of(tmp_path, root, Blind()).bring(manifest, timeout_s=30))
    phases = await whole(staging_of(tmp_path, root, view), manifest)
    assert (await waiting)["visible_s"] < phases["visible_s"] + 0.5


async def test_names_outlast_the_patience_of_an_agent(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever that is: pauses grow with it. No time passes here."""
    monkeypatch.undo()
    waited = [0.0]
    began = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: began + waited[0])

    async def sleep(pause: float) -> None:
        waited[0] += pause

    monkeypatch.setattr(asyncio, "sleep", sleep)
    for timeout_s in (60.0, 300.0):
        waited[0] = 0.0
        view = LaggingView(root)
        manifest = replace(manifest_of(small_adapter(tmp_path / "a")), markers=markers.COUNT, created_at=time.time())
        await Lookout(ArtifactStore(root, view).shows).wait(manifest, until=began + timeout_s)
        assert timeout_s - timeout_s / 50 <= waited[0] <= timeout_s + 0.001
        assert set(view.looks.values()) == {1}


async def test_a_version_that_never_shows_up_is_given_up_in_time_and_named(tmp_path: Path, root: Path) -> None:
    manifest = manifest_of(small_adapter(tmp_path / "a"))
    staging = staging_of(tmp_path, root)
    before = time.monotonic()
    with pytest.raises(StoreError, match="No such file") as refusal:
        await staging.bring(manifest, timeout_s=0.3)
    assert time.monotonic() - before < 1
    assert refusal.value.ids["version"] == manifest.adapter_id
    assert "mount" in refusal.value.next_step
    assert list(staging.root.iterdir()) == []


@pytest.mark.parametrize("name", FILES)
async def test_an_upload_on_its_way_is_waited_for(tmp_path: Path, root: Path, name: str) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    view = LaggingView(root)
    path = ArtifactStore(root).directory(manifest.adapter_id) / name
    view.tear(path, 10)
    staging = staging_of(tmp_path, root, view)
    work = asyncio.create_task(whole(staging, manifest))
    await wait_until(lambda: view.looks[path] > 2)
    view.heal(path)
    await work


async def test_a_whole_file_that_stays_wrong_is_refused_long_before_the_deadline(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "CERTAIN_S", 0.2)
    manifest = stored(ArtifactStore(root), tmp_path)
    view = LaggingView(root)
    view.corrupt(ArtifactStore(root).directory(manifest.adapter_id) / WEIGHTS_FILE, 7)
    before = time.monotonic()
    with pytest.raises(ArtifactCorrupt, match="wrong bytes") as refusal:
        await staging_of(tmp_path, root, view).bring(manifest, timeout_s=8)
    assert 0.2 <= time.monotonic() - before < 5
    assert refusal.value.ids["file"] == WEIGHTS_FILE


@pytest.mark.parametrize("arrives", ["in pieces", "at its full size first"])
async def test_an_upload_that_takes_longer_than_that_is_waited_for(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, arrives: str
) -> None:
    """Short, or whole with bytes that go on changing: both are on their way."""
    monkeypatch.setattr(staging_module, "CERTAIN_S", 0.2)
    manifest = stored(ArtifactStore(root), tmp_path)
    view = LaggingView(root)
    path = ArtifactStore(root).directory(manifest.adapter_id) / WEIGHTS_FILE
    work = asyncio.create_task(whole(staging_of(tmp_path, root, view), manifest))
    view.tear(path, 10)
    for offset in range(12):
        if arrives == "at its full size first":
            view.heal(path)
            view.corrupt(path, offset)
        looks = view.looks[path]
        await wait_until(lambda looks=looks: view.looks[path] > looks + 1 or work.done())  # type: ignore[misc]
    assert not work.done()
    view.heal(path)
    await work


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("harm", "reason"), [("tear", "wrong size"), ("corrupt", "wrong bytes")])
async def test_wrong_bytes_are_never_staged(tmp_path: Path, root: Path, name: str, harm: str, reason: str) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    view = LaggingView(root)
    getattr(view, harm)(ArtifactStore(root).directory(manifest.adapter_id) / name, 7)
    staging = staging_of(tmp_path, root, view)
    with pytest.raises(ArtifactCorrupt, match=reason) as refusal:
        await staging.bring(manifest, timeout_s=0.2)
    assert refusal.value.ids["file"] == name
    assert list(staging.root.iterdir()) == []


async def test_staged_files_that_went_bad_are_replaced(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    staging = staging_of(tmp_path, root)
    await whole(staging, manifest)
    (staging.path(manifest.adapter_id) / WEIGHTS_FILE).write_bytes(b"bad")
    await whole(staging, manifest)


async def test_staged_files_that_went_bad_stay_while_there_is_nothing_better(tmp_path: Path, root: Path) -> None:
    """An engine may hold them: without a file under its name a whole server can die."""
    manifest = stored(ArtifactStore(root), tmp_path)
    staging = staging_of(tmp_path, root)
    await whole(staging, manifest)
    (staging.path(manifest.adapter_id) / WEIGHTS_FILE).write_bytes(b"bad")
    (ArtifactStore(root).directory(manifest.adapter_id) / WEIGHTS_FILE).write_bytes(b"bad too")
    with pytest.raises(ArtifactCorrupt):
        await staging.bring(manifest, timeout_s=0.1)
    assert (staging.path(manifest.adapter_id) / WEIGHTS_FILE).read_bytes() == b"bad"


class Held:
    """A mount on which every read waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.waiting = threading.Event()

    def open(self, path: Path) -> BinaryIO:
        self.waiting.set()
        assert self.go.wait(10)
        return path.open("rb")


async def test_a_copy_on_its_way_is_no_leftover(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    reader = Held()
    staging = staging_of(tmp_path, root, reader)
    work = asyncio.create_task(whole(staging, manifest))
    await asyncio.to_thread(reader.waiting.wait, 5)
    halves = list(staging.root.iterdir())
    assert staging.staged() == []
    assert list(staging.root.iterdir()) == halves != []
    reader.go.set()
    await work


async def test_a_copy_that_was_interrupted_long_ago_is_removed(tmp_path: Path, root: Path) -> None:
    staging = staging_of(tmp_path, root)
    old, new = (staging.root / f".half-run-v1-0123456789ab-{number}" for number in range(2))
    for path in (old, new):
        path.mkdir(parents=True)
        (path / WEIGHTS_FILE).write_bytes(b"half")
    os.utime(old, (time.time() - 2 * staging_module.HALF_S,) * 2)
    (staging.root / "something else").mkdir()
    assert staging.staged() == []
    assert sorted(path.name for path in staging.root.iterdir()) == [new.name, "something else"]


async def test_two_at_once_stage_one(tmp_path: Path, root: Path) -> None:
    """As two agents of one host do."""
    manifest = stored(ArtifactStore(root), tmp_path)
    reader = Held()
    first, second = staging_of(tmp_path, root, reader), staging_of(tmp_path, root, reader)
    work = [asyncio.create_task(one.bring(manifest, timeout_s=5)) for one in (first, second)]
    await wait_until(lambda: first.root.exists() and len(list(first.root.iterdir())) == 2)
    reader.go.set()
    await asyncio.gather(*work)
    await whole(first, manifest)


async def test_a_disk_that_is_full_is_a_reason(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)

    def full(descriptor: int, mode: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fchmod", full)
    monkeypatch.setattr(staging_module, "DISK_S", 0.1)
    with pytest.raises(StagingFailed, match="No space left on device") as refusal:
        await staging_of(tmp_path, root).bring(manifest, timeout_s=60)
    assert refusal.value.own_fault
    assert "agent.stage_path" in refusal.value.next_step


async def test_a_disk_that_recovers_is_not_given_up_because_the_mount_was_late(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging_module, "DISK_S", 0.2)
    manifest = stored(ArtifactStore(root), tmp_path)
    staging = staging_of(tmp_path, root, LaggingView(root, visibility_delay_s=0.5))
    write = ArtifactStore.copy_out
    failed: list[Path] = []

    def fails_once(store: ArtifactStore, manifest: Manifest, target: Path) -> None:
        write(store, manifest, target)
        if not failed:
            failed.append(target)
            raise OSError(5, os.strerror(5), str(target))

    monkeypatch.setattr(ArtifactStore, "copy_out", fails_once)
    await whole(staging, manifest)
    assert failed


async def test_no_disk_is_waited_for(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read again before it is used, and the store has it."""
    manifest = stored(ArtifactStore(root), tmp_path)
    staging = staging_of(tmp_path, root)
    staging.root.mkdir()
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    await whole(staging, manifest)
    assert not flushed


async def test_what_is_staged_needs_no_look_at_the_store(tmp_path: Path, root: Path) -> None:
    """Nor does a mount that hangs keep an engine out that was started again."""
    manifest = stored(ArtifactStore(root), tmp_path, marked=True)
    await whole(staging_of(tmp_path, root), manifest)
    view = LaggingView(root)
    await whole(staging_of(tmp_path, root, view), manifest)
    assert not view.looks


class Unreadable(BytesIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError(5, os.strerror(5))


class Broken:
    """A mount that opens files and cannot read them."""

    def open(self, path: Path) -> BinaryIO:
        return Unreadable()


async def test_a_mount_that_cannot_be_read_is_not_this_hosts_disk(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    with pytest.raises(StoreError, match="Input/output error") as refusal:
        await staging_of(tmp_path, root, Broken()).bring(manifest, timeout_s=0.1)
    assert not refusal.value.own_fault
    assert "mount" in refusal.value.next_step


async def test_a_disk_that_does_not_give_back_what_was_written_is_at_fault_itself(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)

    def lies(manifest: Manifest, directory: Path) -> None:
        raise ArtifactCorrupt("file has the wrong bytes", version=manifest.adapter_id, file=WEIGHTS_FILE)

    monkeypatch.setattr(staging_module, "verify_files", lies)
    with pytest.raises(StagingFailed, match="reads otherwise: file has the wrong bytes") as refusal:
        await staging_of(tmp_path, root).bring(manifest, timeout_s=60)
    assert refusal.value.own_fault


async def test_a_staged_version_is_checked_against_manifest_engine_and_base(tmp_path: Path, root: Path) -> None:
    manifest = stored(ArtifactStore(root), tmp_path)
    staging = staging_of(tmp_path, root)
    await whole(staging, manifest)
    base: dict[str, tuple[int, ...]] = {"model.layers.0.self_attn.q_proj.weight": (8, 8)}
    staging.check(manifest, max_lora_rank=2, base=base)
    staging.check(manifest, max_lora_rank=0, base={})  # neither is known
    with pytest.raises(AdapterInvalid, match="rank 2 is above the engine's 1") as refusal:
        staging.check(manifest, max_lora_rank=1, base=base)
    assert "--max-lora-rank" in refusal.value.next_step
    with pytest.raises(AdapterInvalid, match="no such weight"):
        staging.check(manifest, max_lora_rank=2, base={"x": (1, 1)})
    other = replace(manifest, shape=replace(manifest.shape, alpha=99.0))
    with pytest.raises(AdapterInvalid, match="different adapters"):
        staging.check(other, max_lora_rank=2, base=base)


def test_only_adapter_ids_become_paths(tmp_path: Path, root: Path) -> None:
    staging = staging_of(tmp_path, root)
    for name in ("../x", "", "run", "/etc"):
        with pytest.raises(NameInvalid):
            staging.path(name)
        with pytest.raises(NameInvalid):
            staging.discard(name)


def test_what_is_discarded_is_gone_and_twice_is_fine(tmp_path: Path, root: Path) -> None:
    staging = staging_of(tmp_path, root)
    staging.discard("run-v1-0123456789ab")
    staging.path("run-v1-0123456789ab").mkdir(parents=True)
    staging.discard("run-v1-0123456789ab")
    assert staging.staged() == []
    assert staging_of(tmp_path / "nowhere", root).staged() == []
