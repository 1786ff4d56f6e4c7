"""Give a stored version away: to a directory, or to the Hub. Where to is in the settings, never in the job.

A directory has the adapter as PEFT and vLLM load it, with its manifest, and appears whole under the version's name. On
the Hub each run is a private repository, each version a commit with a tag that is its name. A repeat changes nothing.
"""

from __future__ import annotations

import importlib.util
import logging
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from adaptersync_core.api_keys import read_secret
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import ConfigError, StoreError
from adaptersync_core.manifest import MANIFEST_FILE, Manifest
from adaptersync_core.store import (
    STAGING_S,
    ArtifactStore,
    make_directory,
    sync_directory,
    verify_files,
    write_durably,
)

TARGETS = ("directory", "hub")
_STAGING = ".export-"

log = logging.getLogger(__name__)


def export_version(adapter_id: str, target: str) -> str:
    """The job; returns where the version is."""
    config = load_config()
    return to_hub(config, adapter_id) if target == "hub" else str(to_directory(config, adapter_id))


def to_directory(config: Config, adapter_id: str) -> Path:
    """Copy a version, checked on the way; a directory that holds other bytes under its name is left alone."""
    if not config.jobs.export_path:
        raise ConfigError("there is no directory to export to", next_step="set jobs.export_path where workers run")
    store, root = ArtifactStore(Path(config.store.path)), Path(config.jobs.export_path)
    manifest = store.read_manifest(adapter_id)
    place = root / adapter_id
    staging = root / f"{_STAGING}{adapter_id}-{secrets.token_hex(4)}"
    try:
        if not place.exists():
            make_directory(root)
            make_directory(staging)
            _fill(store, manifest, staging)
            sync_directory(staging)
            if not place.exists():  # a job whose worker was lost may be at it still
                staging.rename(place)
                sync_directory(root)
        verify_files(manifest, place)
    except OSError as error:
        raise StoreError(
            f"version cannot be exported: {error.strerror or error}",
            next_step="check space and permissions",
            version=adapter_id,
            path=str(root),
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    log.info("exported %s to %s", adapter_id, place)
    return place


def to_hub(config: Config, adapter_id: str) -> str:
    """Upload a version and tag it; the tag comes last, and says that it is there."""
    jobs = config.jobs
    if not jobs.hub_namespace:
        raise ConfigError("there is no place on the Hub", next_step="set jobs.hub_namespace where workers run")
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ConfigError("exports to the Hub need the extra `hub`", next_step="pip install 'adaptersync[hub]'")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    store = ArtifactStore(Path(config.store.path))
    manifest = store.read_manifest(adapter_id)
    verify_files(manifest, store.directory(adapter_id))
    repository = f"{jobs.hub_namespace}/{manifest.run}"
    token = read_secret(Path(jobs.hub_token_file)) if jobs.hub_token_file else False
    api = HfApi(endpoint=jobs.hub_url, token=token)
    try:
        api.create_repo(repository, private=True, exist_ok=True)
        tags = api.list_repo_refs(repository).tags
        if not any(tag.name == adapter_id for tag in tags):
            done = api.upload_folder(
                repo_id=repository,
                folder_path=store.directory(adapter_id),
                allow_patterns=[*(file.name for file in manifest.files), MANIFEST_FILE],
                commit_message=adapter_id,
            )
            api.create_tag(repository, tag=adapter_id, revision=done.oid, exist_ok=True)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise StoreError(
            f"the Hub did not take it: {error}",
            next_step="check jobs.hub_url, jobs.hub_namespace and the token; then ask again",
            version=adapter_id,
            repository=repository,
        ) from error
    log.info("exported %s to %s", adapter_id, repository)
    return f"{jobs.hub_url}/{repository}/tree/{adapter_id}"


def abandoned(root: Path) -> Iterator[Path]:
    """What exports left that were killed in the midst of it."""
    for path in root.glob(f"{_STAGING}*") if root.is_dir() else ():
        if time.time() - path.stat().st_mtime > STAGING_S:
            yield path


def _fill(store: ArtifactStore, manifest: Manifest, directory: Path) -> None:
    store.copy_out(manifest, directory)
    write_durably(directory / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
