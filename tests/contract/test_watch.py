"""Watching another trainer's directory, on a real Redis and a real store: what is published, once, in order."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from adaptersync.trainer import watch as watch_module
from adaptersync.trainer.arrivals import PRESETS, Layout
from adaptersync.trainer.publication import Outcome
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync.trainer.watch import News, Watch
from adaptersync_core.config import Config, GroupSection, RedisSection, StoreSection
from adaptersync_core.errors import ControlUnavailable, Fenced
from adaptersync_core.manifest import CONFIG_FILE, WEIGHTS_FILE, inspect
from adaptersync_core.store import ArtifactStore
from support.adapters import make_adapter
from support.artifacts import small_adapter

PRIME_RL = PRESETS["prime-rl"]
QUIET = threading.Event()  # never set


class Place:
    """What a trainer writes into, who watches it, and what was told."""

    def __init__(self, config: Config, root: Path) -> None:
        self.config = config
        self.root = root
        self.told: list[News] = []
        self.store = ArtifactStore(Path(config.store.path))
        self.now: float | None = None  # as the watch has it; None: as it is

    def step(self, step: int, *, seed: int | None = None, mark: str = "STABLE", name: str = "step_{}") -> Path:
        directory = small_adapter(self.root / name.format(step), seed=step if seed is None else seed)
        if mark:
            (directory / mark).touch()
        return directory

    @contextmanager
    def watch(self, layout: Layout = PRIME_RL, *, settle_s: float = 0.0, everything: bool = False) -> Iterator[Watch]:
        with AdapterPublisher(self.config, run="run", incarnation="watch") as publisher:
            yield Watch(
                publisher,
                self.root,
                layout,
                self.told.append,
                settle_s=settle_s,
                everything=everything,
                clock=lambda: time.monotonic() if self.now is None else self.now,
            )

    def look(self, watch: Watch, times: int = 1) -> list[tuple[str, int | None]]:
        """What is told meanwhile."""
        before = len(self.told)
        for _ in range(times):
            watch.look(QUIET)
        return [(news.what, news.step) for news in self.told[before:]]

    def published(self) -> list[int | None]:
        """Steps of everything in the store, as it was published."""
        return [self.store.read_manifest(name).step for name in self.store.versions()]


@pytest.fixture
def place(redis_url: str, cache_url: str, tmp_path: Path) -> Place:
    config = Config(
        group=GroupSection(name="group"),
        redis=RedisSection(control_url=redis_url, cache_url=cache_url),
        store=StoreSection(path=str(tmp_path / "store")),
    )
    (tmp_path / "out").mkdir()
    return Place(config, tmp_path / "out")


def test_steps_are_published_in_order_with_their_number(place: Place) -> None:
    with place.watch() as watch:
        assert place.look(watch) == [("waiting", None)]
        for step in (9, 10, 11):
            place.step(step)
        assert place.look(watch) == [("published", 9), ("published", 10), ("published", 11)]
        assert place.look(watch, 2) == []
    assert place.published() == [9, 10, 11]
    assert place.told[-1].version == list(place.store.versions())[-1]
    assert place.told[-1].directory == str(place.root / "step_11")


def test_before_its_mark_nothing_is_published(place: Place) -> None:
    with place.watch() as watch:
        place.look(watch)
        directory = place.step(1, mark="")
        assert place.look(watch, 2) == [("waiting", None)]  # says once which mark is missing
        assert "STABLE" in place.told[-1].reason
        (directory / "STABLE").touch()
        assert place.look(watch) == [("published", 1)]


def test_a_checkpoint_of_transformers_is_complete_with_its_state(place: Place) -> None:
    with place.watch(PRESETS["trl"]) as watch:
        place.look(watch)
        directory = place.step(20, mark="rollout_state.json", name="checkpoint-{}")
        (directory / "optimizer.pt").touch()
        assert ("published", 20) not in place.look(watch)
        (directory / "trainer_state.json").write_text("{}")
        assert place.look(watch) == [("published", 20)]
    (name,) = place.store.versions()
    assert sorted(path.name for path in place.store.directory(name).iterdir()) == [
        CONFIG_FILE,
        WEIGHTS_FILE,
        "manifest.json",
    ]


def test_an_adapter_may_lie_below_the_steps_directory(place: Place) -> None:
    layout = Layout(pattern="now/step_{step}/lora", complete="DONE")
    with place.watch(layout) as watch:
        assert place.look(watch) == [("waiting", None)]
        small_adapter(place.root / "now" / "step_3" / "lora")
        (place.root / "now" / "step_3" / "DONE").touch()
        (place.root / "now" / "step_4").mkdir()
        assert place.look(watch) == [("published", 3)]


@pytest.mark.parametrize("everything", [False, True])
def test_after_a_restart_nothing_is_published_again(place: Place, everything: bool) -> None:
    for step in (1, 2, 3):
        place.step(step)
    with place.watch(everything=True) as watch:
        place.look(watch)
        epoch = watch._publisher.epoch
    place.told.clear()
    with place.watch(everything=everything) as watch:
        place.look(watch, 2)
        assert watch._publisher.epoch == epoch  # so its window goes on, too
        assert {news.what for news in place.told} == {"passed"}
        place.step(4)
        assert place.look(watch) == [("published", 4)]
    assert place.published() == [1, 2, 3, 4]


def test_the_same_bytes_for_the_same_step_are_not_published_twice_even_if_they_look_new(place: Place) -> None:
    with place.watch() as watch:
        place.look(watch)
        place.step(1)
        place.look(watch)
        for path in (*place.root.glob("*/adapter*"), *place.root.glob("*/STABLE")):
            os.utime(path, (2e9, 2e9))  # as a copy looks
        assert place.look(watch) == [("repeated", 1)]
        assert place.told[-1].version == place.told[-2].version
        place.step(2, seed=1)  # a step that changed nothing is a version, and marked as such
        for path in (*place.root.glob("step_2/*"),):
            os.utime(path, (2e9 + 1, 2e9 + 1))
        assert place.look(watch) == [("published", 2)]
        assert "same bytes" in place.told[-1].reason
    assert place.published() == [1, 2]


def test_what_was_stored_and_not_announced_is_published(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer was killed in between: nobody has ever heard of that version."""
    place.step(1)

    async def killed(*_: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch, place.watch() as watch:
        patch.setattr(AdapterPublisher, "_offer", killed)
        with pytest.raises(RuntimeError, match="killed"):
            watch.look(QUIET)
    assert len(list(place.store.versions())) == 1
    with place.watch() as watch:
        assert place.look(watch) == [("published", 1)]


def test_a_trainer_that_went_back_is_followed(place: Place) -> None:
    with place.watch() as watch:
        place.look(watch)
        for step in (1, 2, 3):
            place.step(step)
        place.look(watch)
        shutil.rmtree(place.root / "step_2")
        place.step(2, seed=77)
        assert place.look(watch) == [("published", 2)]
    assert place.published() == [1, 2, 3, 2]


def test_a_bad_directory_is_told_once_and_the_next_step_comes(place: Place) -> None:
    with place.watch() as watch:
        place.look(watch)
        make_adapter(place.root / "step_1", layers=1, config={"use_dora": True})
        (place.root / "step_1" / "STABLE").touch()
        place.step(2)
        assert place.look(watch) == [("bad", 1), ("published", 2)]
        (bad,) = [news for news in place.told if news.what == "bad"]
        assert "use_dora" in bad.reason
        assert "train with use_dora=False" in bad.fix
        assert place.look(watch, 2) == []


def truncated(directory: Path) -> None:
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-5])


def without_config(directory: Path) -> None:
    (directory / CONFIG_FILE).unlink()


def unreadable(directory: Path) -> None:
    (directory / WEIGHTS_FILE).unlink()
    (directory / WEIGHTS_FILE).mkdir()  # fails to be read even for root


@pytest.mark.parametrize("broken", [truncated, without_config, unreadable])
def test_a_directory_that_is_not_whole_is_waited_for_and_then_given_up(
    place: Place, broken: Callable[[Path], None]
) -> None:
    place.now = 100.0
    with place.watch(settle_s=5.0) as watch:
        place.look(watch)
        broken(place.step(1))
        place.step(2)
        assert place.look(watch, 3) == []  # a mount may show the mark first
        place.now += 5.0
        assert place.look(watch) == [("bad", 1), ("published", 2)]
        assert place.told[-2].reason
        assert place.told[-2].fix


def test_a_directory_that_is_deleted_while_it_is_published_is_no_error(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deleted(directory: Path) -> object:
        if directory.name == "step_1":
            shutil.rmtree(directory)
        return inspect(directory)

    monkeypatch.setattr("adaptersync.trainer.watch.inspect", deleted)
    with place.watch(settle_s=3600.0) as watch:
        place.look(watch)
        place.step(1)
        place.step(2)
        assert place.look(watch, 2) == [("published", 2)]
        shutil.rmtree(place.root)
        assert place.look(watch, 2) == [("waiting", None)]
        assert "cannot be read" in place.told[-1].reason
        place.step(3)
        assert place.look(watch) == [("published", 3)]


def test_what_cannot_be_stored_is_tried_again_and_told_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "RETRY_S", 0.0)
    with place.watch() as watch:
        place.look(watch)
        place.step(1)
        run = Path(place.config.store.path) / "run"
        run.rmdir() if run.is_dir() else None
        run.write_text("in the way")
        assert place.look(watch, 3) == [("trouble", 1)]
        assert "could not be stored" in place.told[-1].reason
        run.unlink()
        assert place.look(watch) == [("published", 1)]


def test_trouble_is_not_tried_again_at_once(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.now, tries = 100.0, list[float | None]()

    def refuse(*_: object, **__: object) -> None:
        tries.append(place.now)
        raise ControlUnavailable("Redis cannot be reached")

    with place.watch() as watch:
        place.look(watch)
        place.step(1)
        monkeypatch.setattr(watch._publisher, "publish", refuse)
        while place.now < 200.0:
            place.look(watch)
            place.now += 0.5
    assert tries[:6] == [100.0, 101.0, 103.0, 107.0, 115.0, 131.0]
    assert tries[6] == 161.0


def test_a_newer_trainer_of_the_run_ends_the_watch(place: Place) -> None:
    with place.watch() as watch:
        place.look(watch)
        with AdapterPublisher(place.config, run="run"):
            place.step(1)
            with pytest.raises(Fenced, match="newer trainer"):
                watch.run(QUIET, interval_s=0.01)


def test_it_waits_for_a_fleet_that_decides_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "UNDECIDED", 2)
    with place.watch() as watch:
        place.look(watch)
        for step in (1, 2, 3):
            place.step(step)
        assert place.look(watch, 2) == [("published", 1), ("published", 2), ("waiting", None)]
        assert watch.busy
        first, _ = next(iter(watch._undecided.values()))
        first.settle(Outcome(state="rolled_back", reason="for a test"))
        assert place.look(watch) == [("rolled_back", 1), ("published", 3), ("waiting", None)]


def test_a_look_at_many_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the latest only those are looked at that are new, or not dealt with."""
    monkeypatch.setattr(watch_module, "LATEST", 3)
    for step in range(1, 9):
        place.step(step)
    with place.watch() as watch:
        place.look(watch)
        seen: list[str] = []
        see = watch._see

        def counted(name: str, step: int) -> object:
            seen.append(name)
            return see(name, step)

        monkeypatch.setattr(watch, "_see", counted)
        place.look(watch)
        assert sorted(seen) == ["step_6", "step_7", "step_8"]


def test_all_of_many_come_although_a_look_is_bounded(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "LATEST", 2)
    for step in range(1, 7):
        place.step(step)
    with place.watch(everything=True) as watch:
        place.look(watch)
    assert place.published() == [1, 2, 3, 4, 5, 6]


def test_it_ends_when_it_is_told_to(place: Place) -> None:
    stop = threading.Event()
    with place.watch() as watch:
        thread = threading.Thread(target=watch.run, args=(stop,), kwargs={"interval_s": 3600.0})
        thread.start()
        stop.set()
        thread.join(10)
        assert not thread.is_alive()


def test_a_version_is_found_by_bytes_and_step(place: Place) -> None:
    source = small_adapter(place.root / "a", seed=1)
    with AdapterPublisher(place.config, run="run") as publisher:
        assert publisher.newest() is None
        publication = publisher.publish(source, step=3)
        assert publisher.newest() == publication.manifest
        assert publisher.find(publication.digest, 3) == publication.adapter_id
        assert publisher.find(publication.digest, 4) == ""
        assert publisher.find(publication.digest, None) == ""
        assert publisher.find("0" * 64, 3) == ""
    with AdapterPublisher(place.config, run="another") as publisher:
        assert publisher.find(publication.digest, 3) == ""
