"""`adaptersync replica N`: one engine as a service. Starts it, says when it serves, lets it finish, ends it.

An engine knows nothing of systemd. Whoever keeps it does: READY when it answers, a sign of life with each answer, so
that one that hangs is started again. A stop waits for what is in flight, in bounded time, since vLLM itself would not.
What an engine starts is left to the unit, which ends whatever is in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
from pathlib import Path

from msgspec.structs import replace

from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, ConfigError
from adaptersync_core.notify import Notifier
from adaptersync_core.vllm import VllmClient
from adaptersync_tools.engines import EngineSettings, EventPorts, gpu_count, simulator_spec, vllm_spec
from adaptersync_tools.instance import ReplicaSlot
from adaptersync_tools.supervisor import Spec

LOOK_S = 1.0
PROBE_S = 10.0  # for one answer; the unit's watchdog decides how many may be missed
SETTLE_S = 0.5  # between two looks at an engine that is to be stopped: routers learn of it from its agent
GPUS = "CUDA_VISIBLE_DEVICES"

log = logging.getLogger(__name__)


def spec(config: Config, at: ReplicaSlot, environment: dict[str, str]) -> Spec:
    """The engine's command. A GPU that the unit has chosen stays chosen."""
    engine = config.engine
    if not engine.model:
        raise ConfigError("no model to serve", next_step="set engine.model", key="engine.model")
    settings = EngineSettings(
        model=Path(engine.model),
        base_name=config.group.base_model,
        max_loras=engine.max_loras,
        max_cpu_loras=engine.max_cpu_loras,
        max_lora_rank=engine.max_lora_rank,
        max_num_seqs=engine.max_num_seqs,
        host=engine.host,
        arguments=tuple(shlex.split(engine.arguments)),
    )
    ports = EventPorts(events=at.events_port, replay=at.replay_port)
    if engine.kind == "simulated":
        return simulator_spec(settings, number=at.number, port=at.port, token_file=at.token_file, event_ports=ports)
    gpus = gpu_count()
    made = vllm_spec(
        settings,
        number=at.number,
        replicas=gpus or 1,
        port=at.port,
        gpus=gpus,
        token_file=at.token_file,
        event_ports=ports,
    )
    chosen = {GPUS: environment[GPUS]} if GPUS in environment else {}
    return replace(made, environment={**made.environment, **chosen})


async def keep(spec: Spec, url: str, notifier: Notifier, *, drain_s: float) -> int:
    """Run the engine until it ends, or SIGTERM comes; its exit status, 0 when it was to end."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    process = await asyncio.create_subprocess_exec(*spec.command, env={**os.environ, **spec.environment})
    notifier.status("engine starts")
    watching = asyncio.create_task(_watch(url, notifier))
    ended, told = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((ended, told), return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            log.error("engine ended with %d", process.returncode)
            return process.returncode or 1
        notifier.stopping()
        await _drained(url, notifier, ended, drain_s)
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait((ended,), timeout=spec.grace_s)
        return 0
    finally:
        for task in (watching, told):
            task.cancel()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _watch(url: str, notifier: Notifier) -> None:
    """Runs until cancelled. While the engine starts, it is enough that it has not ended."""
    async with VllmClient(url) as engine:
        while True:
            try:
                await engine.healthy(timeout_s=PROBE_S)
                notifier.ready()
                notifier.status(f"serves at {url}")
                notifier.alive()
            except AdapterSyncError as error:
                if notifier.is_ready:
                    notifier.status(f"no answer: {error}")
                else:
                    notifier.alive()
            await asyncio.sleep(LOOK_S)


async def _drained(url: str, notifier: Notifier, ended: asyncio.Task[int], limit_s: float) -> None:
    """Until nothing is in flight, twice in a row; or the engine ended, or is silent, or the time is over."""
    quiet = 0
    notifier.status("waits for requests in flight")
    with contextlib.suppress(TimeoutError, AdapterSyncError):
        async with asyncio.timeout(limit_s), VllmClient(url) as engine:
            while quiet < 2 and not ended.done():
                quiet = 0 if await engine.busy() else quiet + 1
                await asyncio.sleep(SETTLE_S)
