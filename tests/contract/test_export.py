"""A stored version given away: to a directory, and to a Hub that listens on this host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync.jobs.export import abandoned, to_directory, to_hub
from adaptersync_core.config import Config, JobsSection, StoreSection
from adaptersync_core.errors import ArtifactCorrupt, ConfigError, StoreError
from adaptersync_core.manifest import MANIFEST_FILE
from adaptersync_core.store import ArtifactStore, verify_files
from support.artifacts import manifest_of, small_adapter
from support.hub import Hub, running_hub


@pytest.fixture
def config(tmp_path: Path) -> Config:
    jobs = JobsSection(export_path=str(tmp_path / "exports"))
    return Config(store=StoreSection(path=str(tmp_path / "store")), jobs=jobs)


@pytest.fixture
def version(config: Config, tmp_path: Path) -> str:
    source = small_adapter(tmp_path / "a")
    manifest = manifest_of(source)
    ArtifactStore(Path(config.store.path)).publish(manifest, source)
    return manifest.adapter_id


def test_a_directory_has_what_was_stored_and_a_repeat_changes_nothing(config: Config, version: str) -> None:
    place = to_directory(config, version)
    assert place == Path(config.jobs.export_path) / version
    store = ArtifactStore(Path(config.store.path))
    verify_files(store.read_manifest(version), place)
    assert (place / MANIFEST_FILE).read_bytes() == (store.directory(version) / MANIFEST_FILE).read_bytes()
    before = (place / "adapter_model.safetensors").stat().st_mtime_ns
    assert to_directory(config, version) == place
    assert (place / "adapter_model.safetensors").stat().st_mtime_ns == before
    assert sorted(path.name for path in place.parent.iterdir()) == [version]
    assert list(abandoned(place.parent)) == []


def test_other_bytes_under_its_name_are_left_alone_and_said(config: Config, version: str) -> None:
    mine = Path(config.jobs.export_path) / version / "adapter_model.safetensors"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    with pytest.raises(ArtifactCorrupt):
        to_directory(config, version)
    assert mine.read_bytes() == b"mine"


def test_spoilt_bytes_are_not_given_away(config: Config, version: str) -> None:
    weights = ArtifactStore(Path(config.store.path)).directory(version) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(ArtifactCorrupt):
        to_directory(config, version)
    assert list(Path(config.jobs.export_path).iterdir()) == []


def test_where_nobody_said_where_to_nothing_goes(config: Config, version: str) -> None:
    nowhere = replace(config, jobs=JobsSection())
    with pytest.raises(ConfigError, match="no directory"):
        to_directory(nowhere, version)
    with pytest.raises(ConfigError, match="no place on the Hub"):
        to_hub(nowhere, version)
    with pytest.raises(StoreError):
        to_directory(config, "run-v9-0123456789ab")


@pytest.fixture
def hub() -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    with running_hub() as hub:
        yield hub


@pytest.fixture
def to_the_hub(config: Config, hub: Hub, tmp_path: Path) -> Config:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    return replace(config, jobs=JobsSection(hub_namespace="our-lab", hub_url=hub.url, hub_token_file=str(token)))


def test_the_hub_has_a_private_repository_a_run_and_a_tag_a_version(to_the_hub: Config, version: str, hub: Hub) -> None:
    assert to_hub(to_the_hub, version) == f"{hub.url}/our-lab/run/tree/{version}"
    assert hub.private == {"our-lab/run"}
    directory = ArtifactStore(Path(to_the_hub.store.path)).directory(version)
    assert hub.files["our-lab/run"] == {path.name: path.read_bytes() for path in directory.iterdir()}
    assert hub.tags["our-lab/run"] == {version: f"{1:040x}"}
    assert hub.tokens == {"Bearer hf_secret"}
    to_hub(to_the_hub, version)
    assert hub.commits == [version]  # a repeat finds its tag


def test_an_upload_that_was_cut_off_before_its_tag_is_made_whole(to_the_hub: Config, version: str, hub: Hub) -> None:
    hub.fail = "/tag/"
    with pytest.raises(StoreError, match="the Hub did not take it"):
        to_hub(to_the_hub, version)
    assert hub.tags["our-lab/run"] == {}
    hub.fail = ""
    to_hub(to_the_hub, version)
    assert list(hub.tags["our-lab/run"]) == [version]


def test_spoilt_bytes_are_not_uploaded(to_the_hub: Config, version: str, hub: Hub) -> None:
    weights = ArtifactStore(Path(to_the_hub.store.path)).directory(version) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x00\x01")
    with pytest.raises(ArtifactCorrupt):
        to_hub(to_the_hub, version)
    assert hub.files == {}


def test_no_secret_is_in_an_error(to_the_hub: Config, version: str, hub: Hub) -> None:
    hub.fail = "/commit/"
    with pytest.raises(StoreError) as failed:
        to_hub(to_the_hub, version)
    assert "hf_secret" not in str(failed.value)
