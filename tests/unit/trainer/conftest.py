"""TRL, loaded once for the tests that need it."""

from __future__ import annotations

import importlib
import os
import warnings
from pathlib import Path
from types import ModuleType

import pytest

INSTALL = "these tests need torch and TRL: pip install 'adaptersync[trl]', or run them with tools/test"


@pytest.fixture(scope="session")
def trl() -> ModuleType:
    """adaptersync.trainer.trl; a test that cannot have it fails, it is not skipped."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other people's imports
        try:
            return importlib.import_module("adaptersync.trainer.trl")
        except ImportError as error:
            pytest.fail(f"{INSTALL} ({error})")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory, trl: ModuleType) -> Path:
    """An untrained model of the demo's kind, so small that a step takes milliseconds."""
    from adaptersync_tools.demo.warmup import Settings, warm_up

    settings = Settings(steps=1, batch=2, hidden=32, layers=2, heads=4, kv_heads=2)
    return warm_up(tmp_path_factory.mktemp("base"), settings, threads=1)
