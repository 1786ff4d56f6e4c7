"""A TRL that is built another way is refused at the start, in one line that says what to install."""

from __future__ import annotations

import importlib
import pickle
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from adaptersync_core.errors import ConfigError
from support.publications import FakePublisher

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]

INSTALL = r"adaptersync works with trl 1\.16: pip install 'trl>=1\.16,<1\.17' 'peft>=0\.19'"


@pytest.fixture
def seams(trl: ModuleType) -> ModuleType:
    return importlib.import_module("adaptersync.trainer.seams")


def test_the_release_that_is_installed_has_all_that_is_used(seams: ModuleType) -> None:
    seams.check_seams()


class AnotherTrainer:
    rollout_worker = None

    def _save_checkpoint(self, model: Any) -> None: ...

    def log(self, *args: Any, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("seam", "said"),
    [
        ("_sync_weight_lora(t0)", r"AnotherTrainer\._sync_weight_lora;"),
        ("_save_checkpoint(model, trial)", r"AnotherTrainer\._save_checkpoint\(trial=\);"),
    ],
)
def test_what_is_missing_is_named(seams: ModuleType, seam: str, said: str) -> None:
    version = metadata.version("trl")
    with pytest.raises(ConfigError, match=rf"^trl {version} is installed, which has no {said} {INSTALL}") as error:
        seams.check_seams({AnotherTrainer: ("rollout_worker", seam)})
    assert "\n" not in str(error.value)


def test_of_a_wrapper_nothing_is_missed(seams: ModuleType) -> None:
    seams.check_seams({AnotherTrainer: ("log(logs, start_time)",)})


@pytest.mark.parametrize("place", ["trl.experimental.async_grpo", "trl.experimental.async_grpo.async_rollout_worker"])
def test_a_release_that_keeps_it_elsewhere_is_refused_when_it_is_imported(
    seams: ModuleType, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As 1.18 does, which has no such module under `experimental`."""
    monkeypatch.setitem(sys.modules, place, None)
    with pytest.raises(ImportError, match=rf"^{INSTALL} \(trl [0-9.]+ is installed: .*{place}") as error:
        _import_anew(monkeypatch)
    assert "\n" not in str(error.value)


def test_without_trl_the_same_is_said(seams: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", nowhere)
    monkeypatch.setitem(sys.modules, "trl.experimental.async_grpo", None)
    with pytest.raises(ImportError, match=rf"^{INSTALL} \(trl is not installed: "):
        _import_anew(monkeypatch)


def _import_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "adaptersync.trainer.seams")
    importlib.import_module("adaptersync.trainer.seams")


@pytest.mark.parametrize("name", ["_sync_weight_lora", "_save_checkpoint"])
def test_a_trainer_does_not_begin_with_another_trl(
    seams: ModuleType, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for owner in seams.AsyncGRPOTrainer.__mro__:
        if name in vars(owner):
            monkeypatch.delattr(owner, name)
    with pytest.raises(ConfigError, match=rf"has no AsyncGRPOTrainer\.{name}; {INSTALL}"):
        make_trainer(FakePublisher())


def test_a_trainer_is_not_what_it_was_made_without(
    seams: ModuleType, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a constructor leaves behind is seen only once it has run."""
    monkeypatch.setitem(seams.LEAVES, seams.AsyncGRPOTrainer, ("rollout_worker", "weight_plane"))
    with pytest.raises(ConfigError, match=rf"has no AdapterSyncGRPOTrainer\(\)\.weight_plane; {INSTALL}"):
        make_trainer(FakePublisher())


@pytest.mark.parametrize("name", ["rollout_buffer", "metrics_queue", "_stop_event_mp"])
def test_a_rollout_worker_without_what_is_used_of_it_is_refused_before_anything_is_trained(
    seams: ModuleType, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Some of it is looked at when training has ended, and what was trained would be lost."""
    init = seams.AsyncRolloutWorker.__init__

    def another(self: Any, **given: Any) -> None:
        init(self, **given)
        delattr(self, name)

    monkeypatch.setattr(seams.AsyncRolloutWorker, "__init__", another)
    with pytest.raises(ConfigError, match=rf"has no RolloutWorker\(\)\.{name}; {INSTALL}"):
        make_trainer(FakePublisher(), rollout_worker=None)


def test_so_is_a_rollout_loop_as_its_process_starts(
    process: ModuleType, seams: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def another(self: Any, **_: Any) -> None:
        self.session = self.vllm_server_url = self.lora_name = self.environment_factories = None
        self._model_version_value = None

    monkeypatch.setattr(seams._AsyncRolloutLoop, "__init__", another)
    arguments = tmp_path / "arguments"
    arguments.write_bytes(pickle.dumps({"key_file": ""}))
    with pytest.raises(ConfigError, match=rf"has no RolloutLoop\(\)\._counters; {INSTALL}"):
        process.RolloutLoop(arguments=str(arguments))
