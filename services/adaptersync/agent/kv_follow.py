"""Follow the KV events of one engine, over all its ranks and lives.

vLLM's publisher drops what nobody takes, and keeps its last batches for whoever asks again. A hole in the numbers is
filled from there. So is, by asking now and then, a message that was lost with none after it that would show it. When
the engine's process changes all is begun anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

import msgspec
import zmq
import zmq.asyncio

from adaptersync.agent.cached import Cache, Stream
from adaptersync.agent.kv_events import read_batch
from adaptersync.agent.kv_line import Line
from adaptersync.agent.owned import Owned
from adaptersync_core.errors import AdapterSyncError, EngineUnavailable
from adaptersync_core.keys import Keys
from adaptersync_core.ranks import rank_names
from adaptersync_core.records import CacheReport
from adaptersync_core.redis import RedisClient
from adaptersync_core.vllm import KvSource, VllmClient

QUIET_S = 2.0  # without a message, before the engine is asked whether there was one
LOOK_S = 0.5  # how soon a new life of the engine is noticed
RETRY_S = 1.0  # after the engine did not answer
LEAVE_S = 1.0  # for giving up what this replica owns

log = logging.getLogger(__name__)


class Life:
    """One life of the engine's process: the name of its base model, how many ranks it has, and whether it is over."""

    def __init__(self, epoch: str = "", base_model: str = "", ranks: int = 1) -> None:
        self.epoch = epoch
        self.base_model = base_model
        self.ranks = ranks
        self.over = asyncio.Event()


class Share:
    """What is owned under one name, a replica's or that of one of its ranks."""

    def __init__(self, cache: Cache, owned: Owned) -> None:
        self.cache = cache
        self.owned = owned


class Follower:
    """Keeps the cache server's word on one replica, or on each of its ranks, equal to its engine's."""

    def __init__(
        self, client: VllmClient, cache_server: RedisClient, keys: Keys, *, replica: str, depth: int, limit: int
    ) -> None:
        """`depth` is how many blocks of a prompt routers look at, `limit` how many of a version are kept."""
        self._client = client
        self._host = urlsplit(client.url).hostname or "127.0.0.1"
        self._cache_server = cache_server
        self._keys = keys
        self._replica = replica
        self._depth = depth
        self._limit = limit
        self._shares: dict[str, Share] = {}  # of former lives, too: what is not given up yet
        self._present: Sequence[Share] = ()  # those of this life
        self._of: dict[int, Share] = {}  # the same by rank
        self._serves: frozenset[str] = frozenset()
        self._life = Life()
        self._streams: dict[int, Stream] = {}
        self._known = False  # all ranks were read up to now once in this life
        self._why: dict[int, str] = {}  # by rank, why it is not followed up to now
        self._nothing = "engine was not seen yet"

    def see(self, epoch: str, base_model: str, ranks: int = 1) -> None:
        """The engine as it was last looked at."""
        life = self._life
        if (epoch, base_model, ranks) != (life.epoch, life.base_model, life.ranks):
            life.over.set()
            self._life = Life(epoch, base_model, ranks)

    def serve(self, versions: Iterable[str]) -> None:
        """The versions that may be asked for now."""
        self._serves = frozenset(versions)
        for share in self._shares.values():
            share.owned.serve(self._serves)

    def report(self) -> CacheReport:
        streams = self._streams.values()
        why = self._nothing or next(iter(self._why.values()), "")
        return CacheReport(
            followed=not why,
            why=why,
            blocks=sum(share.cache.blocks for share in self._present),
            lag_s=round(max((share.owned.lag_s for share in self._present), default=0.0), 3),
            gaps=sum(stream.gaps for stream in streams),
            losses=sum(stream.losses for stream in streams),
            orphans=sum(stream.orphans for stream in streams),
        )

    async def run(self) -> None:
        """Follow until cancelled, then give up what this replica owns, if the cache server answers soon."""
        context = zmq.asyncio.Context()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await self._live_on(context, self._life, tasks)
        finally:
            context.destroy(linger=0)
            self._forget()
            try:
                async with asyncio.timeout(LEAVE_S):
                    for share in self._shares.values():
                        await share.owned.flush()
            except (AdapterSyncError, TimeoutError) as error:
                log.warning("ownership was not given up, the next start sees to it: %s", error)

    async def _live_on(self, context: zmq.asyncio.Context, life: Life, writers: asyncio.TaskGroup) -> None:
        """Follow one life of the engine to its end; returns early when it does not answer."""
        if not life.epoch:
            await life.over.wait()
            return
        try:
            sources = {
                rank: source for rank, source in (await self._client.kv_event_sources()).items() if _is_zmq(source)
            }
        except AdapterSyncError as error:
            self._nothing = f"engine does not say where it publishes: {error}"
            await asyncio.sleep(RETRY_S)
            return
        if not sources:
            self._nothing = "engine publishes no KV events (--kv-events-config)"
            await life.over.wait()
            return
        if life.ranks > 1 and len(sources) != life.ranks:
            self._nothing = f"engine has {life.ranks} ranks, of which {len(sources)} publish KV events"
            await life.over.wait()
            return
        self._nothing = ""
        self._present = [self._share(name, life.base_model, writers) for name in rank_names(self._replica, life.ranks)]
        # a server may have the ranks from some number on of a larger deployment; which one is asked it counts from 0
        self._of = {rank: self._present[place % life.ranks] for place, rank in enumerate(sorted(sources))}
        self._streams = {rank: Stream(share.cache, rank) for rank, share in self._of.items()}
        self._why = dict.fromkeys(sources, "its cache is being read")
        try:
            async with asyncio.TaskGroup() as tasks:
                for rank, source in sources.items():
                    tasks.create_task(self._follow(context, life, rank, source))
        finally:
            self._forget()

    def _share(self, name: str, base_model: str, writers: asyncio.TaskGroup) -> Share:
        """The one of that name, which is written from now on."""
        share = self._shares.get(name)
        if share is None:
            cache = Cache(depth=self._depth)
            share = Share(cache, Owned(self._cache_server, self._keys, cache, replica=name, limit=self._limit))
            share.owned.serve(self._serves)
            self._shares[name] = share
            writers.create_task(share.owned.write())
            writers.create_task(share.owned.compare())
        share.cache.base_model = base_model
        return share

    def _forget(self) -> None:
        """What was known is of a life that is over."""
        for share in self._present:
            share.owned.end()
            share.cache.clear_all()
            share.owned.changed()
        self._present, self._of, self._streams, self._why, self._known = (), {}, {}, {}, False
        self._nothing = "engine was not looked at again yet"

    async def _follow(self, context: zmq.asyncio.Context, life: Life, rank: int, source: KvSource) -> None:
        said = ""
        while not life.over.is_set():
            try:
                async with Line(context, source, host=self._host) as line:
                    await self._listen(life, rank, line)
            except msgspec.MsgspecError as error:
                self._why[rank] = f"KV events are not understood: {error}"
                log.error("rank %d is not followed until its engine starts again: %s", rank, self._why[rank])
                share = self._of[rank]
                share.owned.end()  # or it would be held against the routers' notes that we know of nothing
                share.cache.clear(rank)
                share.owned.changed()
                await life.over.wait()
            except (EngineUnavailable, zmq.ZMQError) as error:
                self._why[rank] = str(error)
                if str(error) != said:
                    log.warning("KV events of rank %d are not followed: %s", rank, error)
                said = str(error)
                await asyncio.sleep(RETRY_S)

    async def _listen(self, life: Life, rank: int, line: Line) -> None:
        stream, owned = self._streams[rank], self._of[rank].owned
        await self._catch_up(stream, owned, line)
        self._now_known(rank)
        asked = time.monotonic()
        while not life.over.is_set():
            message = await line.receive(timeout_s=LOOK_S)
            if message is not None:
                sequence, payload = message
                batch = read_batch(payload)
                if not stream.offer(sequence, batch):
                    await self._catch_up(stream, owned, line)
                    stream.accept(sequence, batch)
                if stream.doubtful:
                    stream.begin_again()
                    await self._catch_up(stream, owned, line)
                owned.changed()
                asked = time.monotonic()
            elif time.monotonic() - asked >= QUIET_S:
                await self._catch_up(stream, owned, line)
                asked = time.monotonic()

    async def _catch_up(self, stream: Stream, owned: Owned, line: Line) -> None:
        """Take what the engine has beyond what we know."""
        if not line.replays:
            return  # a hole costs all that was known
        async with contextlib.aclosing(line.replay(stream.expected)) as messages:
            async for sequence, payload in messages:
                stream.accept(sequence, read_batch(payload))
        owned.changed()

    def _now_known(self, rank: int) -> None:
        self._why.pop(rank, None)
        if not self._why and not self._known:
            self._known = True
            for share in self._present:
                share.cache.changed_at = math.inf  # that it was said before we listened is no lag
                share.owned.begin()


def _is_zmq(source: KvSource) -> bool:
    return source.enable_kv_cache_events and source.publisher == "zmq"
