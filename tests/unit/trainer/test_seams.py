"""A TRL that is built another way is refused at the start, in one line that says what to install."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib import metadata
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
    monkeypatch.setattr(seams, "LEAVES", (*seams.LEAVES, "weight_plane"))
    with pytest.raises(ConfigError, match=rf"has no AdapterSyncGRPOTrainer\(\)\.weight_plane; {INSTALL}"):
        make_trainer(FakePublisher())
