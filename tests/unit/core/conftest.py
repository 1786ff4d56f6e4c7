"""What tests of the store and of its markers share: an empty store, and an adapter to put into it."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptersync_core.store import ArtifactStore
from support.artifacts import small_adapter


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_adapter(tmp_path / "source")
