"""What the events and the store say of a run's versions: when each was announced, accepted, served and given up.

As much as fits into memory: some kilobytes a version. Knows nothing of rollouts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from adaptersync_core.archive import Archive, partition
from adaptersync_core.chain import place
from adaptersync_core.errors import ArtifactCorrupt, NameInvalid, StoreError
from adaptersync_core.events import (
    AdapterPublished,
    ControlRestored,
    ReplicaAcked,
    VersionPromoted,
    VersionReady,
    VersionRetired,
    VersionRolledBack,
    VersionSuperseded,
    VersionVoided,
    from_fields,
)
from adaptersync_core.identity import parse_adapter_id
from adaptersync_core.store import ArtifactStore

Place = tuple[int, int]


class Load(Struct, frozen=True):
    """What a replica said of a version in one life of its engine, and when."""

    at: Place
    accepted: bool
    proof: str


@dataclass(slots=True)
class Version:
    """`digest` is as announced; places are of the first such event, and None where none is archived."""

    digest: str = ""
    published: Place | None = None
    ready: Place | None = None
    promoted: Place | None = None
    voided: Place | None = None
    retired: Place | None = None
    given_up: bool = False
    stored: str = ""  # digest of the manifest in the store
    loads: dict[tuple[str, str], list[Load]] = field(default_factory=lambda: defaultdict(list))

    def load(self, replica: str, engine_epoch: str, until: Place) -> Load | None:
        """The last word of a replica before that moment: of two streams only the milliseconds can be compared."""
        said = [load for load in self.loads.get((replica, engine_epoch), ()) if load.at[0] <= until[0]]
        return said[-1] if said else None


class Evidence:
    """`restored`: Redis lost its state meanwhile, and events with it; what they would say cannot be missed then."""

    def __init__(self) -> None:
        self.versions: dict[str, Version] = defaultdict(Version)
        self.restored = False
        self.contradictions: list[str] = []
        self.known = False  # whether any event speaks of the run

    def complete(self, version: str) -> bool:
        """Whether all that happened to it is in the archive."""
        found = self.versions.get(version)
        return found is not None and found.published is not None and not self.restored


def read_evidence(events: Archive, store: ArtifactStore, run: str, *, lenient: bool = False) -> Evidence:
    """StoreError where a file is not what was archived; `lenient`: it is left out."""
    evidence = Evidence()
    for line in sorted(_lines(events, run, lenient=lenient), key=lambda line: place(line["entry"])):
        evidence.known = evidence.known or line["run"] == run
        try:
            event = from_fields(msgspec.json.decode(line["fields"], type=dict[str, str]))
        except (msgspec.MsgspecError, TypeError):
            continue  # of another release, or no event at all
        _take(evidence, place(line["entry"]), event)
    for name in [name for name in store.versions() if parse_adapter_id(name).run == run]:
        evidence.versions[name]
    for name, version in evidence.versions.items():
        _compare(evidence, store, name, version)
    return evidence


def _lines(events: Archive, run: str, *, lenient: bool) -> Iterator[dict[str, Any]]:
    wanted = (f"run={partition(run)}/", f"run={partition('')}/")
    for table in events.tables(wanted, ["entry", "type", "run", "fields"], lenient=lenient):
        yield from (line for line in table.to_pylist() if line["run"] == run or line["type"] == "control.restored")


def _take(evidence: Evidence, at: Place, event: Any) -> None:
    if isinstance(event, ControlRestored):
        evidence.restored = True
        return
    name = getattr(event, "version", "")
    if not name:
        return
    version = evidence.versions[name]
    match event:
        case AdapterPublished():
            if version.digest and version.digest != event.digest:
                said = f"{name}: announced with digest {event.digest}, and before with {version.digest}"
                evidence.contradictions.append(said)
            version.digest = version.digest or event.digest
            version.published = version.published or at
        case ReplicaAcked():
            version.loads[event.replica, event.engine_epoch].append(Load(at, event.accepted, event.proof))
        case VersionReady():
            version.ready = version.ready or at
        case VersionPromoted():
            if version.voided:
                evidence.contradictions.append(f"{name}: promoted after it was voided")
            version.promoted = version.promoted or at
        case VersionVoided():
            version.voided = version.voided or at
        case VersionRetired():
            version.retired = version.retired or at
            version.given_up = True
        case VersionRolledBack() | VersionSuperseded():
            version.given_up = True


def _compare(evidence: Evidence, store: ArtifactStore, name: str, version: Version) -> None:
    """The name, the announcement and the store's manifest speak of the same bytes."""
    said = evidence.contradictions
    try:
        parsed = parse_adapter_id(name)
    except NameInvalid:
        said.append(f"{name}: an event names a version that cannot be one")
        return
    if version.digest and not version.digest.startswith(parsed.digest12):
        said.append(f"{name}: announced with digest {version.digest}")
    if not store.directory(name).is_dir():
        if version.promoted and not version.given_up and not version.voided:
            said.append(f"{name}: store has no such version, and nothing says that it was retired")
        return
    try:
        manifest = store.read_manifest(name)
    except ArtifactCorrupt as error:
        said.append(f"{name}: {error}")
        return
    except StoreError as error:
        said.append(f"{name}: {error}")
        return
    version.stored = manifest.digest
    if version.digest and manifest.digest != version.digest:
        said.append(f"{name}: manifest in the store has digest {manifest.digest}, announced was {version.digest}")
