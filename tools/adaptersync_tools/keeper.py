"""Keeps a fleet on one machine as large as its host was asked to be: `adaptersync up`'s part of `adaptersync scale`.

Level-triggered: compares what is asked for with what runs, and does one thing about the difference with each look. More
is quick: engine and agent are started, and the fleet itself finds out when they serve. Fewer takes as long as requests
in flight: the agent says that its replica drains, every router has let go of it, its engine is idle; then it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from adaptersync_core import scaling
from adaptersync_core.address import where
from adaptersync_core.errors import ControlError, ControlUnavailable, EngineError
from adaptersync_core.keys import Keys
from adaptersync_core.records import Fleet
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.scaling import UP, Scale
from adaptersync_core.vllm import VllmClient
from adaptersync_tools.up import Stack, agent_of, engine_of

LOOK_S = 0.1  # between two looks at a replica that is let go of
READ_S = 5.0  # for one look at Redis
LEAVE_S = 10.0  # what an agent takes at most to say that its replica drains
ENGINE_S = 5.0  # what an idle engine gets before it is ended by force
ROUTER_S = 65.0  # what a router takes at most to let requests end
WORKER_S = 600.0  # what a job takes at most

Kind = Literal["replicas", "routers", "workers"]
T = TypeVar("T")
log = logging.getLogger(__name__)


class Step(Struct, frozen=True):
    """One more of a kind, or one fewer."""

    kind: Kind
    more: bool


def next_step(asked: Scale, running: Scale) -> Step | None:
    """What to do first about the difference: what is wanted comes before what is not. What nobody asked for stays."""
    kinds: tuple[Kind, ...] = ("replicas", "routers", "workers")
    kinds = tuple(kind for kind in kinds if getattr(asked, kind) is not None)
    for kind in kinds:
        if getattr(asked, kind) > getattr(running, kind):
            return Step(kind, True)
    for kind in kinds:
        if getattr(asked, kind) < getattr(running, kind):
            return Step(kind, False)
    return None


def possible(asked: Scale, most: int) -> Scale:
    """What a stack can do of it: so many replicas, and its first router goes with itself."""
    replicas = None if asked.replicas is None else min(asked.replicas, most)
    routers = None if asked.routers is None else max(1, asked.routers)
    return replace(asked, replicas=replicas, routers=routers)


def let_go(fleet: Fleet, replica: str, since: int) -> bool:
    """Whether no router sends a replica anything any more: each serves a table in which it does not serve."""
    member = fleet.table.members.get(replica)
    if member is not None and member.state == "ready":
        return False
    routers = [seen.report for seen in fleet.routers.values() if seen.may_serve]
    return all(each.incarnation == fleet.table.incarnation and each.generation >= since for each in routers)


class Keeper:
    """Of one running stack. `host` is this machine, as its agents name it."""

    def __init__(self, stack: Stack, host: str) -> None:
        self._stack = stack
        self._host = host
        self._announced = False
        self._leaving: dict[str, str] = {}  # addresses of engines whose agents were ended

    def _announce(self) -> None:
        """What was started is what is asked for, until somebody asks for something else."""
        running = self.running()
        self._visit(lambda registry: scaling.ask(registry.client, registry.keys, self._host, running))
        self._announced = True

    def leave(self) -> None:
        try:
            self._visit(lambda registry: scaling.forget(registry.client, registry.keys, self._host))
        except ControlError as error:
            log.warning("left without saying so: %s", error)

    def running(self) -> Scale:
        stack = self._stack
        return Scale(
            replicas=len(stack.engine_urls),
            routers=len(stack.router_urls),
            workers=stack.workers,
            keeper=UP,
            most=stack.most_replicas,
        )

    def follow(self) -> Step | None:
        """One look, and at most one step, which is returned. What could not be done is tried again by the next."""
        try:
            self._finish()
            if not self._announced:
                self._announce()
            scales = self._visit(lambda registry: scaling.asked(registry.client, registry.keys))
            if self._host not in scales:  # Redis has lost it
                self._announce()
                return None
            running = self.running()
            step = next_step(possible(scales[self._host], running.most), running)
            if step is not None:
                self._take(step)
            return step
        except ControlError as error:
            log.warning("cannot see whether to scale: %s", error)
            return None

    def _take(self, step: Step) -> None:
        stack = self._stack
        match step:
            case Step("replicas", True):
                log.warning("started %s", stack.add_replica())
            case Step("routers", True):
                log.warning("started %s at %s", stack.add_router(), stack.router_urls[-1])
            case Step("workers", True):
                log.warning("started %s", stack.add_worker())
            case Step("replicas", False):
                replica, url = stack.engine_urls.popitem()
                self._leaving[replica] = url
                self._finish()
            case Step("routers", False):
                stack.drop_router(patience_s=ROUTER_S)
                log.warning("ended a router")
            case Step("workers", False):
                stack.drop_worker(patience_s=WORKER_S)
                log.warning("ended a worker")

    def _finish(self) -> None:
        """End the replicas that are on their way out, agents first. ControlError, and they stay on their way."""
        supervisor, drain_s = self._stack.supervisor, self._stack.config.engine.drain_s
        for replica, url in list(self._leaving.items()):
            if agent_of(replica) in supervisor.services:
                supervisor.retire(agent_of(replica), patience_s=LEAVE_S)
            began = time.monotonic()
            idle = self._visit(
                lambda registry, replica=replica, url=url: _idle(registry, replica, url, limit_s=drain_s),  # type: ignore[misc]
                limit_s=drain_s + READ_S,
            )
            supervisor.retire(engine_of(replica), patience_s=ENGINE_S)
            del self._leaving[replica]
            how = "idle" if idle else "not idle"
            log.warning("ended %s, %s after %.1f s", replica, how, time.monotonic() - began)

    def _visit(self, call: Callable[[Registry], Awaitable[T]], *, limit_s: float = READ_S) -> T:
        config = self._stack.config
        late = ControlUnavailable(
            "Redis cannot be reached: no answer in time",
            next_step="check the server",
            redis=where(config.redis.control_url),
        )

        async def run() -> T:
            client = RedisClient(config.redis.control_url, name="keeper")
            try:
                async with asyncio.timeout(limit_s):
                    return await call(Registry(client, Keys(config.group.name)))
            except TimeoutError:
                raise late from None
            finally:
                await client.close()

        return asyncio.run(run())


async def _idle(registry: Registry, replica: str, url: str, *, limit_s: float) -> bool:
    """Until nobody asks an engine any more, and it is idle; False when that took too long.

    ControlError while Redis cannot be asked: routers go on by their last table, and may send it something yet.
    """
    deadline = time.monotonic() + limit_s
    since: int | None = None
    async with VllmClient(url) as engine:
        while time.monotonic() < deadline:
            fleet = await registry.fleet()
            member = fleet.table.members.get(replica)
            if since is None and (member is None or member.state != "ready"):
                since = fleet.table.generation
            try:
                if since is not None and let_go(fleet, replica, since) and not await engine.busy():
                    return True
            except EngineError as error:
                log.warning("%s is let go of: %s", replica, error)
            await asyncio.sleep(LOOK_S)
    return False
