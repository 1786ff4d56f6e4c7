"""TRL, loaded once for the tests that need it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support import trainers
from support.publications import FakePublisher


@pytest.fixture(scope="session")
def trl() -> ModuleType:
    return trainers.load_trl()


@pytest.fixture(scope="session")
def process(trl: ModuleType) -> ModuleType:
    return importlib.import_module("adaptersync.trainer.rollout_process")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory, trl: ModuleType) -> Path:
    return trainers.tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def make_trainer(
    trl: ModuleType, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """A trainer on a stub worker and a fake publisher, ready to train."""
    trainers.on_cpu(monkeypatch)

    def make(publisher: FakePublisher, **given: Any) -> Any:
        monkeypatch.setattr(trl.AdapterSyncGRPOTrainer, "_open_publisher", lambda _self: publisher)
        return trainers.trainer(trl, tiny_base, tmp_path / "out", **given)

    return make
