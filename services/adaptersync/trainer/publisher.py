"""Publish adapters from any trainer, and learn what became of them.

    with AdapterPublisher(load_config(), run="my-run") as publisher:
        publication = publisher.publish("out/adapter", step=10)
        outcome = publication.wait(60)          # current, superseded or rolled_back, with the reason

`publish` returns when the version is stored and announced; the fleet loads it while training goes on. `submit` does not
even wait for that: it saves a model and returns, and what remains is done by a thread of its own. One publisher is one
incarnation of the run's trainer: it begins a new epoch, and an older one that still lives can publish no more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from msgspec.structs import replace

from adaptersync.trainer import history
from adaptersync.trainer.fates import RolloutFates
from adaptersync.trainer.publication import Outcome, Publication
from adaptersync.trainer.source import SavesAdapter, directory_of
from adaptersync.trainer.submissions import Submission, Submitter
from adaptersync.trainer.tidying import Tidying
from adaptersync_core import markers
from adaptersync_core.bus import Bell, ring_on_events
from adaptersync_core.config import Config
from adaptersync_core.errors import (
    AdapterSyncError,
    ConfigError,
    ControlUnavailable,
    Forgotten,
    PublicationFailed,
    StoreGone,
)
from adaptersync_core.events import REPORTS
from adaptersync_core.fitness import fleet_findings
from adaptersync_core.identity import check_run
from adaptersync_core.keys import Keys
from adaptersync_core.lane import ANSWER_S, FastLane
from adaptersync_core.manifest import FILES, AdapterShape, Manifest, check_finite, content_digest, hash_file, inspect
from adaptersync_core.proof import Probe
from adaptersync_core.records import VersionRecord
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore
from adaptersync_core.store_identity import agree
from adaptersync_core.table import Table
from adaptersync_core.traces import traces

INSIST_S = 30.0  # how long a call is repeated while Redis or the store is away; every call is safe to repeat
PAUSE_S = 0.2
CLOSE_S = 60.0  # for what was submitted to be published when it is closed; longer than a call is repeated
BEAT_S = 2.0  # how often it says that it lives; several times within TRAINER_ALIVE_S
LOOK_S = 1.0  # how often outcomes are looked for when no event says so

T = TypeVar("T")
log = logging.getLogger(__name__)


class AdapterPublisher:
    """One trainer's hold on a run. Safe to use from several threads; versions come in the order of the calls.

    `config.trainer` names run and window unless given here. ConfigError without a run, ControlUnavailable without
    Redis. Each publisher is a trainer of its own, which replaces the one before; those that name the same `incarnation`
    are one, whose versions share a window.
    """

    def __init__(
        self, config: Config, run: str | None = None, *, max_staleness: int | None = None, incarnation: str = ""
    ) -> None:
        self.run = check_run(run or config.trainer.run or _no_run(), base_model=config.group.base_model)
        self.max_staleness = config.trainer.max_staleness if max_staleness is None else max_staleness
        if self.max_staleness < 0:
            raise ConfigError("max_staleness cannot be negative", next_step="give 0 or more", value=self.max_staleness)
        self.epoch = 0
        self.epochs: set[int] = set()  # with those before it, where Redis has lost one
        self.latest_seq = 0
        self._reserved = 0
        self._named = incarnation
        self._incarnation = ""
        self.current_seq: int | None = None  # None while the fleet serves nothing of these epochs as current
        self._generation = 0
        self._store = ArtifactStore(Path(config.store.path))
        self._store_id = ""
        self._client = RedisClient(config.redis.control_url, name=f"trainer-{self.run}")
        keys = Keys(config.group.name)
        self._registry = Registry(self._client, keys)
        cache_url = config.redis.cache_url or config.redis.control_url
        self._cache = RedisClient(cache_url, name=f"trainer-{self.run}", timeout_s=ANSWER_S, text=False)
        self._lane = FastLane(self._cache, keys, limit_bytes=config.redis.lane_bytes)
        table = self._registry.table
        self._tidying = Tidying(self._store, self.run, config.store, lambda: self._call(table()))
        self._tasks: list[asyncio.Task[None]] = []
        self._pending: dict[str, Publication] = {}
        self._watchers: list[Callable[[int | None], None]] = []
        self.rollouts = RolloutFates()
        self._publishing = threading.Lock()
        self._submitter = Submitter(self._publish_submitted, name=f"outgoing-{self.run}")
        self._last: Manifest | None = None
        self._traces = traces(config, "trainer", self.run)
        self._compared: AdapterShape | None = None
        self._said_at = time.monotonic()
        self._present = True
        self._bell = Bell()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"publisher-{self.run}", daemon=True)
        self._thread.start()
        try:
            self._call(self._start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> AdapterPublisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def publish(
        self,
        source: str | Path | SavesAdapter,
        *,
        step: int | None = None,
        timings: Mapping[str, float] | None = None,
        load: Mapping[str, float] | None = None,
        probe: Probe | None = None,
    ) -> Publication:
        """Store and announce an adapter: a PEFT directory, or a model that saves itself as one.

        `timings` are seconds the trainer spent, by phase, and `load` is how much of what it used, under the names of
        `Manifest`: `adaptersync phases` shows them, and `adaptersync bottleneck` needs `step_s`, `rollout_wait_s` and
        `sync_s` to say what limits the run, and `inflight` of `inflight_max` to say it well.

        `probe` lets replicas prove what they answer by what the trainer computes: n token ids of any text, and n - 1
        differences of log-probability, of `tokens[i + 1]` after `tokens[:i + 1]`, under the adapter less under the base
        model alone. Natural logarithms over the whole vocabulary at temperature 1; some hundred tokens on which the
        adapter has an effect. They are scored on every replica before it accepts, where its engine can do that; n must
        fit into its context.

        AdapterInvalid when the fleet could not serve it, StoreError when it cannot be stored, Fenced when a newer
        trainer has begun the run. After an error nothing was announced, and the next call may publish the same again.
        """
        with self._publishing, directory_of(source) as directory, self._traces.publication(run=self.run) as traced:
            if not self._thread.is_alive():
                raise PublicationFailed("publisher is closed", next_step="publish before close()", run=self.run)
            began = time.monotonic()
            inspect(directory)  # what is no adapter is told of as that
            files = tuple(hash_file(directory / name) for name in FILES)
            # Checked after it was hashed: what is stored is what was hashed, so nothing else can have been checked.
            shape = inspect(directory)
            self._compare(shape)
            check_finite(directory)
            hashed = time.monotonic()
            digest = content_digest(files)
            draft = Manifest(
                run=self.run,
                seq=0,
                epoch=0,
                digest=digest,
                files=files,
                shape=shape,
                created_at=time.time(),
                step=step,
                probe=probe,
                markers=markers.COUNT,
                repeats=self._last.adapter_id if self._last and self._last.digest == digest else "",
                timings={**(timings or {}), "hashed_s": hashed - began},
                load=dict(load or {}),
                traceparent=traced.traceparent,
            )
            try:
                publication = self._store_and_announce(draft, directory, hashed)
            except Forgotten:
                self._call(self._begin_again())
                publication = self._store_and_announce(draft, directory, hashed)
            manifest = publication.manifest
            traced.note(version=manifest.adapter_id, size=manifest.size)
            log.info("published %s in %.3f s", manifest.adapter_id, time.monotonic() - began)
            if manifest.noop:
                usual = "" if self._last else ", as is usual before the first step"
                log.warning("%s changes nothing: %s%s", manifest.adapter_id, manifest.noop, usual)
            self._last = manifest
            return publication

    def _compare(self, shape: AdapterShape) -> None:
        """AdapterInvalid when the fleet as it is would refuse the adapter; asked once for all that are alike."""
        alike = replace(shape, noop=False)
        if alike == self._compared:
            return
        reports = self._call(self._insist(self._registry.ready))
        for finding in fleet_findings(shape, reports):
            if finding.level == "error":
                raise finding.refusal()
            log.warning("%s; %s", finding.what, finding.fix)
        self._compared = alike if reports else None

    def submit(
        self,
        source: str | Path | SavesAdapter,
        *,
        step: int | None = None,
        timings: Mapping[str, float] | None = None,
        load: Mapping[str, float] | None = None,
        probe: Probe | None = None,
        remove: bool = False,
    ) -> Submission:
        """Like `publish`, and returns as soon as a model has saved itself: nothing is read, hashed or sent before.

        A directory stays as it is until the submission has a `publication` or an `outcome`; with `remove` it is then
        removed, and where this raises, too. What is submitted is published in order. What could not be, for want of a
        server or of room, is tried again until it succeeds; a newer submission takes the place of one that waits or
        failed, which then counts as `replaced`. An adapter the fleet could not serve counts as `failed`. Raises only
        what ends all publishing: Fenced, or PublicationFailed after close().
        """
        if isinstance(source, str | Path):
            directory = Path(source)
        else:
            with directory_of(source, keep=True) as directory:
                remove = True
        submission = Submission(directory, step=step, timings=timings, load=load, probe=probe, remove=remove)
        try:
            self._submitter.submit(submission)
        except BaseException:
            submission.discard()
            raise
        return submission

    @property
    def retries(self) -> int:
        """How often a submission had to be tried again."""
        return self._submitter.retries

    def _publish_submitted(self, submission: Submission) -> Publication:
        timings = {**submission.timings, "queued_s": time.monotonic() - submission.submitted_at}
        return self.publish(
            submission.directory, step=submission.step, timings=timings, load=submission.load, probe=submission.probe
        )

    def _store_and_announce(self, draft: Manifest, directory: Path, since: float) -> Publication:
        self._call(self._insist(self._find_store))
        nonce = secrets.token_hex(8)
        reserve = self._registry.reserve
        seq = self._call(
            self._insist(
                lambda: reserve(
                    self.run, epoch=self.epoch, nonce=nonce, trainer=self._incarnation, latest=self._reserved
                )
            )
        )
        self._reserved = seq
        publication = Publication(replace(draft, seq=seq, epoch=self.epoch))
        self._store.publish(publication.manifest, directory)
        self._call(self._offer(publication, since))
        self._tidying.begin()
        return publication

    def newest(self) -> Manifest | None:
        """What of the run was announced last, by whomever."""
        return self._call(self._insist(lambda: history.newest(self._registry, self._store, self.run)))

    def find(self, digest: str, step: int | None) -> str:
        """The version of the run with these bytes that was announced for this step; empty when there is none."""
        find = history.find
        return self._call(self._insist(lambda: find(self._registry, self._store, self.run, digest=digest, step=step)))

    def on_promoted(self, callback: Callable[[int | None], None]) -> None:
        """Call `callback(seq)` from this object's own thread whenever `current_seq` changes."""
        self._watchers.append(callback)

    def close(self) -> None:
        """Say that the run has ended, after what was submitted or is being published: CLOSE_S for all of it.

        Versions the fleet is at go on without us.
        """
        give_up_at = time.monotonic() + CLOSE_S
        self._submitter.close(CLOSE_S)
        in_order = self._publishing.acquire(timeout=max(give_up_at - time.monotonic(), 0.0))
        if not in_order:
            log.warning("a publication does not end, for %.0f s: run %s is ended without it", CLOSE_S, self.run)
        self._tidying.end(max(give_up_at - time.monotonic(), 0.0))
        try:
            if self._thread.is_alive():
                self._call(self._end())
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()
                self._loop.close()
        finally:
            if in_order:
                self._publishing.release()
        for publication in self._pending.values():
            publication.abandon()
        self._traces.close()

    # on the loop of this object's thread

    async def _start(self) -> None:
        await self._begin()
        name = f"trainer-{self.run}"
        follow = ring_on_events(self._bell, self._client.url, self._registry.keys.events, name=name, unless=REPORTS)
        self._tasks = [asyncio.create_task(follow), asyncio.create_task(self._watch())]  # a loop alone forgets them

    async def _begin_again(self) -> None:
        """Redis lost our epoch: once a coordinator has restored what was decided, go on under the next one."""
        deadline = time.monotonic() + INSIST_S
        while not (await self._insist(self._registry.table)).generation:
            if time.monotonic() > deadline:
                raise ControlUnavailable("Redis lost its state, and no coordinator restores it", run=self.run)
            await asyncio.sleep(PAUSE_S)
        await self._begin()
        log.warning("Redis lost its state: run %s goes on as trainer epoch %d", self.run, self.epoch)

    async def _begin(self) -> None:
        nonce, host = self._named or secrets.token_hex(16), socket.gethostname()
        self._incarnation = nonce
        await self._insist(self._find_store)
        stored = await asyncio.to_thread(self._store.highest, self.run)
        begin = self._registry.begin_run
        self.epoch, self.latest_seq = await self._insist(
            lambda: begin(self.run, nonce=nonce, max_staleness=self.max_staleness, trainer=host, stored=stored)
        )
        self.epochs.add(self.epoch)

    async def _find_store(self) -> None:
        self._store_id = await agree(self._registry, self._store.root, self._store_id)

    async def _offer(self, publication: Publication, since: float) -> None:
        """Lane and markers at once, and the announcement as soon as agents find the version by either.

        Who has its bytes from the lane looks for no marker. A version that could not be marked at all is announced as
        one that is looked for directly.
        """
        manifest = publication.manifest
        marking = asyncio.create_task(asyncio.to_thread(self._store.mark, manifest))
        try:
            if not await self._lane.put(manifest, self._store.directory(manifest.adapter_id)) and not await marking:
                publication.manifest = replace(manifest, markers=0)
            await self._announce(publication, since)
        finally:
            await marking

    async def _announce(self, publication: Publication, since: float) -> None:
        async def say() -> float:
            stored_s = time.monotonic() - since  # up to the try that is heard
            await self._registry.publish(
                publication.manifest,
                published_at=publication.manifest.created_at,
                trainer=self._incarnation,
                stored_s=stored_s,
            )
            return stored_s

        publication.announced(await self._insist(say))
        self._pending[publication.adapter_id] = publication
        self._bell.ring()  # its outcome may have come before we listened for it
        self.latest_seq = publication.seq

    async def _watch(self) -> None:
        known = True
        while True:
            await self._bell.wait(LOOK_S)
            failure: AdapterSyncError | None = None
            # what is wrong with outcomes must not make a trainer look dead
            for step in (self._beat, self._look, self._tell_fates):
                try:
                    await step()
                except AdapterSyncError as error:
                    failure = error
            if failure and known:  # once, not every second until the server is back
                log.warning("outcomes not known: %s", failure)
            known = failure is None

    async def _tell_fates(self) -> None:
        await self.rollouts.write(self._registry, self.run, self.epoch)

    async def _beat(self) -> None:
        if time.monotonic() - self._said_at <= BEAT_S:
            return
        present = await self._registry.beat(self.run, epoch=self.epoch, trainer=self._incarnation)
        self._said_at = time.monotonic()
        if self._present and not present:
            log.warning("run %s is no longer trainer epoch %d's: what is published next says why", self.run, self.epoch)
        self._present = present

    async def _look(self) -> None:
        # Before the table, so that whoever hears that a version is current finds it in `current_seq`.
        records = {name: await self._registry.version(name) for name in list(self._pending)}
        for name in [name for name, record in records.items() if record is None]:  # Redis lost what was announced
            manifest = self._pending[name].manifest
            await self._registry.publish(manifest, published_at=manifest.created_at, trainer=self._incarnation)
        outcomes = {name: _outcome(record) for name, record in records.items()}
        table = await self._registry.table()
        current = self._current(table)
        if table.generation < self._generation and current is None:
            current = self.current_seq  # Redis has lost the table, and a coordinator restores it
        self._generation = max(self._generation, table.generation)
        if current != self.current_seq:
            self.current_seq = current
            self._tell(current)
        for name, outcome in outcomes.items():
            if outcome is not None:
                self._pending.pop(name).settle(outcome)

    def _current(self, table: Table) -> int | None:
        entry = table.runs.get(self.run)
        version = table.versions.get(entry.current) if entry and entry.current else None
        return version.seq if version is not None and version.epoch in self.epochs else None

    def _tell(self, seq: int | None) -> None:
        for callback in self._watchers:
            try:
                callback(seq)
            except Exception:  # the caller's own: it must not end the watch that everybody waits for
                log.exception("a callback for promotions failed")

    async def _insist(self, call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        deadline = time.monotonic() + INSIST_S
        told = ""
        while True:
            try:
                return await call()
            except (ControlUnavailable, StoreGone) as error:
                if time.monotonic() > deadline:
                    raise
                if error.reason != told:
                    log.warning("will try again: %s", error)
                    told = error.reason
                await asyncio.sleep(PAUSE_S)

    async def _end(self) -> None:
        ours = asyncio.all_tasks() - {asyncio.current_task()}  # also a call of a publication that does not end
        for task in ours:
            task.cancel()
        await asyncio.gather(*ours, return_exceptions=True)
        if self.epoch:
            try:
                await self._tell_fates()
                await self._registry.end_run(self.run, epoch=self.epoch)
            except AdapterSyncError as error:
                log.warning("the end of run %s is not known: %s", self.run, error)
        await self._client.close()
        await self._cache.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except (CancelledError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not self._loop.is_closed():
                raise
            work.close()
            raise PublicationFailed("publisher was closed meanwhile", run=self.run) from error


def _outcome(record: VersionRecord | None) -> Outcome | None:
    match record.state if record else "":
        case "current" | "retained" | "retiring" | "retired":
            return Outcome(state="current")
        case "superseded" | "rolled_back" | "voided" as state:
            assert record is not None  # noqa: S101 - it has a state
            return Outcome(state=state, reason=record.reason, want=record.want)
    return None


def _no_run() -> str:
    raise ConfigError("no run name", next_step="give run=..., or set trainer.run")
