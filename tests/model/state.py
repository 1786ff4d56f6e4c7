"""Everything there is in the model: values, and the promise that was broken."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from adaptersync.coordinator.journal import Recollection
from adaptersync_core.config import Config, CoordinatorSection, GroupSection
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import (
    Ack,
    Decision,
    Leadership,
    ReplicaReport,
    RouterReport,
    RunRecord,
)
from adaptersync_core.table import Table

RUN = "run1"
YOUNG_S = 100.0  # every deadline of the model
WAIT_S = 1000.0
FOR_EVER_S = 1e12
WINDOW = 1
CONFIG = Config(
    group=GroupSection(base_model="base"),
    coordinator=CoordinatorSection(
        min_ready=1, alive_s=YOUNG_S, deadline_s=YOUNG_S, eject_s=YOUNG_S, unload_s=YOUNG_S, drain_s=FOR_EVER_S
    ),
)
Action = tuple[str, ...]


class Engine(Struct, frozen=True):
    """An engine and its agent. `late` is what a frozen agent was about to do; `seen` the newest table it has read.

    `refuses` says whose fault it calls it.
    """

    life: int = 1
    loaded: tuple[str, ...] = ()
    seen: int = 0
    frozen: bool = False
    refuses: Literal["", "version", "replica"] = ""
    draining: bool = False
    absent: bool = False
    late: tuple[str, str, str] | None = None


class Router(Struct, frozen=True):
    """A router. `stale`: its table is too old to be served from."""

    table: Table = Table()
    inflight: tuple[str, ...] = ()
    cut: bool = False
    stale: bool = True


class Trainer(Struct, frozen=True):
    """One incarnation of the run's trainer; `seq` is a number it has reserved and not used yet, `latest` its last."""

    epoch: int
    nonce: int
    seq: int = 0
    latest: int = 0
    closed: bool = False


class Redis(Struct, frozen=True):
    """The control server. Reports carry the time they were made at."""

    leader: str = ""
    term: str = ""
    token: int = 0
    until: float = 0.0
    generation: int = 0
    table: Table = Table()
    run: RunRecord | None = None
    nonce: int = 0
    floor: int = 0
    published: dict[str, Manifest] = {}
    reports: dict[str, tuple[ReplicaReport, float]] = {}
    acks: dict[str, dict[str, Ack]] = {}
    routers: dict[str, tuple[RouterReport, float]] = {}
    asked: bool = False


class Coordinator(Struct, frozen=True):
    """One process. `step` is how far a turn has come; `known` is what it believes the journal to hold."""

    term: str = ""
    former: str = ""
    known: Recollection | None = None
    lease: Leadership | None = None
    step: Literal["rest", "decided", "committed"] = "rest"
    decision: Decision | None = None
    runs: dict[str, RunRecord] = {}


class Journal(Struct, frozen=True):
    """The file of the last term, and whose it is; what others still write is read by nobody."""

    term: str = ""
    known: Recollection = Recollection()


class Told(Struct, frozen=True):
    """What has happened, for the promises: it decides nothing. `written` is the last generation of each term."""

    refused: frozenset[str] = frozenset()
    epochs: dict[int, int] = {}
    names: dict[int, str] = {}
    written: dict[str, int] = {}
    leading: str = ""


class State(Struct, frozen=True):
    """Everything. `left` is how often each kind of fault or deed may still happen.

    `torn`: a turn may end between its commit and the note of it; `set_back`: Redis is, and nobody has seen it yet.
    """

    now: float
    engines: dict[str, Engine]
    routers: dict[str, Router]
    coordinators: dict[str, Coordinator]
    trainers: tuple[Trainer, ...]
    redis: Redis
    journal: Journal
    store: dict[str, Manifest]
    left: dict[str, int]
    terms: int = 0
    begun: int = 0
    saved: Redis | None = None
    set_back: bool = False
    torn: bool = False
    told: Told = Told()


class Broken(AssertionError):
    """A promise that does not hold."""
