"""From published to current on a mount that lags, by three ways: with the fast lane, without it, by polling.

A fleet of simulated replicas with the services of production, and as many engines that are driven as `polling.py` says.
On every host the mount shows a new directory late, and hides for a while what was looked for too early. The clock runs
from a saved adapter on the trainer's disk until the trainer's side knows that every replica serves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from pathlib import Path
from types import MappingProxyType

from msgspec import Struct
from msgspec.structs import replace

from adaptersync.trainer import AdapterPublisher
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError
from adaptersync_tools.bench import polling
from adaptersync_tools.bench.result import SECONDS, Figure, Machine, Result, Target, now
from adaptersync_tools.demo.synthetic import Sizes, write_adapter, write_base_model
from adaptersync_tools.engines import HOST, EngineSettings, simulator_spec
from adaptersync_tools.simulator.store import Mount
from adaptersync_tools.up import ENGINE_READY_S, Progress, Stack, StackSettings, answers, free_ports

EIGHT_MB = Sizes(layers=16, rank=64)
LANE, MOUNT, POLLING = "fast lane", "mount alone", "polling"
RUNS = MappingProxyType({LANE: "with-lane", MOUNT: "without-lane", POLLING: "polled"})
LIMIT_S = 60.0  # for one publication, beyond what the mount takes
KEPT = 2  # versions that polled engines hold; older ones are unloaded
FAST_S = 0.5  # promised of the fast lane, whatever the mount does
FASTER: Mapping[float, float] = MappingProxyType({30.0: 10.0, 1.0: 4.0})  # promised against polling, by blind time


class Settings(Struct, frozen=True, kw_only=True):
    """`blind_s` are the times for which a mount goes on hiding what was looked for too early, one run each."""

    publications: int = 5
    replicas: int = 4
    visible_s: float = 3.0
    blind_s: tuple[float, ...] = (30.0, 1.0)
    sizes: Sizes = EIGHT_MB
    every_s: float = polling.EVERY_S


class BenchFailed(AdapterSyncError):
    code = "bench-failed"


def run(settings: Settings, directory: Path, progress: Progress) -> Result:
    """Measure; every process that was started has ended when this returns or raises."""
    began_at = now()
    model = write_base_model(directory / "model", settings.sizes)
    figures: list[Figure] = []
    targets: list[Target] = []
    for blind_s in settings.blind_s:
        samples = _measure(settings, blind_s, model, directory / f"blind-{blind_s:g}", progress)
        polled = Figure.of(f"{POLLING}, blind {blind_s:g} s", samples[POLLING])
        ours = [Figure.of(f"{way}, blind {blind_s:g} s", samples[way], against=polled) for way in (LANE, MOUNT)]
        figures += [*ours, polled]
        targets += promised(blind_s, ours[0], polled)
    size = sum(path.stat().st_size for path in (directory / f"blind-{settings.blind_s[0]:g}" / "adapter").iterdir())
    return Result(
        bench="promotion",
        began_at=began_at,
        machine=Machine.here(),
        settings={
            "publications": settings.publications,
            "replicas": settings.replicas,
            "adapter_bytes": size,
            "visible_s": settings.visible_s,
            "blind_s": list(settings.blind_s),
            "polled_every_s": settings.every_s,
        },
        figures=tuple(figures),
        targets=tuple(targets),
    )


def promised(blind_s: float, lane: Figure, polled: Figure) -> Iterator[Target]:
    """Of the blind times that anything is promised for."""
    if blind_s in FASTER:
        yield Target.at_most(lane.name, lane.p50_s, FAST_S, unit=SECONDS)
        faster = polled.p50_s / lane.p50_s
        yield Target.at_least(f"{POLLING} over {lane.name}", faster, FASTER[blind_s])


def _measure(
    settings: Settings, blind_s: float, model: Path, directory: Path, progress: Progress
) -> dict[str, list[float]]:
    """Seconds by way; the ways take turns, so that what else the machine does meets all of them."""
    root = directory / "fleet" / "store"
    for run_name in RUNS.values():
        (root / run_name).mkdir(parents=True)  # of long ago, when the mounts come into being
    mount = Mount(root=str(root), visibility_delay_s=settings.visible_s, negative_ttl_s=blind_s)
    limit_s = settings.visible_s + 2 * blind_s + LIMIT_S
    rank = settings.sizes.rank
    stack_settings = StackSettings(
        model=model,
        state_dir=directory / "fleet",
        replicas=settings.replicas,
        simulated=True,
        engine={"max_lora_rank": rank},
        overrides={"trainer.max_staleness": 1, "agent.visible_timeout_s": limit_s, "jobs.verify": False},
        mount=mount,
    )
    with Stack(stack_settings, progress) as stack, contextlib.ExitStack() as publishers:
        engines = _polled_engines(stack, mount, rank)
        ways: dict[str, Callable[[Path], None]] = {
            LANE: _publishing(publishers, stack.config, LANE, limit_s),
            MOUNT: _publishing(publishers, _without_lane(stack.config), MOUNT, limit_s),
            POLLING: _polled(engines, root / RUNS[POLLING], limit_s, settings.every_s),
        }
        seeds = count()

        def adapter() -> Path:
            return write_adapter(directory / "adapter", base="base", seed=next(seeds), sizes=settings.sizes)

        ways[LANE](adapter())  # what a fleet does once: connect, load scripts
        samples: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(1, settings.publications + 1):
            for way, publish in ways.items():
                progress.waiting(f"publication {number} of {settings.publications}, {way}, blind {blind_s:g} s")
                source = adapter()
                began = time.monotonic()
                publish(source)
                samples[way].append(time.monotonic() - began)
                stack.check()
        progress.done(f"blind {blind_s:g} s", sum(map(sum, samples.values())))
    return samples


def _publishing(publishers: contextlib.ExitStack, config: Config, way: str, limit_s: float) -> Callable[[Path], None]:
    publisher = publishers.enter_context(AdapterPublisher(config, run=RUNS[way]))

    def publish(source: Path) -> None:
        publication = publisher.publish(source)
        outcome = publication.wait(limit_s)
        if outcome.state != "current":
            raise BenchFailed(f"{outcome.state}: {outcome.reason}", version=publication.adapter_id)

    return publish


def _without_lane(config: Config) -> Config:
    """Of the trainer alone: agents find nothing there, and go to the mount."""
    return replace(config, redis=replace(config.redis, lane_bytes=0))


def _polled(engines: list[str], root: Path, limit_s: float, every_s: float) -> Callable[[Path], None]:
    numbers = count()

    def publish(source: Path) -> None:
        number = next(numbers)
        place = root / f"policy-v{number}"
        polling.store(source, place)
        asyncio.run(polling.synchronize(engines, place.name, place, timeout_s=limit_s, every_s=every_s))
        if number >= KEPT:
            asyncio.run(polling.forget(engines, f"policy-v{number - KEPT}"))

    return publish


def _polled_engines(stack: Stack, mount: Mount, rank: int) -> list[str]:
    """As many as the fleet has, with no agent and no door; their addresses."""
    settings = EngineSettings(model=stack.settings.model, max_lora_rank=rank)
    ports = free_ports(stack.settings.replicas)
    urls = [f"http://{HOST}:{port}" for port in ports]
    for number, port in enumerate(ports):
        spec = simulator_spec(settings, number=number, port=port, token_file=None, mount=mount)
        stack.supervisor.start(replace(spec, name=f"polled-{number}"))
    stack.supervisor.wait_for(
        "polled engines", lambda: all(answers(f"{url}/health") for url in urls), limit_s=ENGINE_READY_S
    )
    return urls
