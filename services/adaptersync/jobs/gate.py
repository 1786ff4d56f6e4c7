"""Ask a function of the operator's whether a version may be served; its word is a request like an operator's own.

    from adaptersync.jobs.gate import Candidate, Verdict

    def judge(candidate: Candidate) -> Verdict:
        return Verdict(outcome="pass")

The version is loaded everywhere and served to nobody but who shows `candidate.headers` to the router; its files are in
`candidate.directory`. A function may be asked twice about one version: when its worker was killed. Its job has
`coordinator.gate_timeout_s`, and so has the version: a coordinator waits no longer, whatever becomes of the worker.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from adaptersync_core.api_keys import read_secret
from adaptersync_core.config import Config, load_config
from adaptersync_core.headers import GATE
from adaptersync_core.keys import Keys
from adaptersync_core.manifest import Manifest
from adaptersync_core.records import Request
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore

KINDS = {"pass": "admit", "fail": "refuse", "inconclusive": "inconclusive"}  # what is asked of the coordinator
REASON = 500  # characters

log = logging.getLogger(__name__)


class Candidate(Struct, frozen=True, kw_only=True):
    """A version that waits. `router_url` is the settings' `trainer.router_url`; with `headers` it may be asked for."""

    version: str
    run: str
    manifest: Manifest
    directory: Path
    base_model: str
    router_url: str
    headers: dict[str, str]


class Verdict(Struct, frozen=True, kw_only=True):
    outcome: Literal["pass", "fail", "inconclusive"]
    reason: str = ""


def evaluate_version(adapter_id: str) -> str:
    """The job. Which function is asked stands in the settings, never in the job."""
    config = load_config()
    manifest = asyncio.run(_waiting(config, adapter_id))
    if manifest is None:
        return "waits no more"
    verdict = ask(config, manifest)  # by the thread that rq interrupts when the time is up
    log.info("gate: %s: %s", adapter_id, verdict)
    return asyncio.run(_say(config, manifest, verdict))


def ask(config: Config, manifest: Manifest) -> Verdict:
    """What the function says; inconclusive when it cannot be asked, fails, or answers something else.

    Code of somebody else: it may exit, and even what it leaves behind may fail when it is looked at. A job that failed
    with it would be asked for again, and the version would wait until its time is up.
    """
    named = config.coordinator.gate_function
    module, _, function = named.partition(":")
    try:
        answer = getattr(importlib.import_module(module), function)(_candidate(config, manifest))
        if not isinstance(answer, Verdict):
            return _inconclusive(f"{named} returned no Verdict: {_shown(answer, repr)}")
        verdict = msgspec.convert(msgspec.structs.asdict(answer), Verdict)
        return Verdict(outcome=verdict.outcome, reason=_written(verdict.reason))
    except BaseException as error:  # and what interrupts it when its time is up
        log.warning("%s", named, exc_info=True)
        return _inconclusive(f"{named}: {type(error).__name__}: {_shown(error, str)}")


def _inconclusive(reason: str) -> Verdict:
    return Verdict(outcome="inconclusive", reason=_written(reason))


def _shown(left: object, how: Callable[[object], str]) -> str:
    try:
        return how(left)
    except BaseException as error:
        return f"it cannot be shown, for {type(error).__name__}"


def _written(reason: str) -> str:
    """As it can be sent: not every text of Python's can."""
    return reason[:REASON].encode(errors="backslashreplace").decode()[:REASON]


def _candidate(config: Config, manifest: Manifest) -> Candidate:
    token = config.router.gate_token
    if config.router.gate_token_file:
        token = read_secret(Path(config.router.gate_token_file))
    headers = {GATE: token} if token else {}
    if config.trainer.router_key_file:
        headers["authorization"] = f"Bearer {read_secret(Path(config.trainer.router_key_file))}"
    return Candidate(
        version=manifest.adapter_id,
        run=manifest.run,
        manifest=manifest,
        directory=ArtifactStore(Path(config.store.path)).directory(manifest.adapter_id),
        base_model=config.group.base_model,
        router_url=config.trainer.router_url,
        headers=headers,
    )


async def _waiting(config: Config, adapter_id: str) -> Manifest | None:
    """Of a version that is at the gate, and of which nothing was said yet."""
    client = RedisClient(config.redis.control_url, name="gate")
    try:
        registry = Registry(client, Keys(config.group.name))
        version = (await registry.table()).versions.get(adapter_id)
        if version is None or not version.unanswered:
            return None
        return await registry.manifest(adapter_id)
    finally:
        await client.close()


async def _say(config: Config, manifest: Manifest, verdict: Verdict) -> str:
    """Once it waits no more, somebody else has answered."""
    if await _waiting(config, manifest.adapter_id) is None:
        return f"{verdict.outcome}, and it waits no more"
    name = manifest.adapter_id
    request = Request(kind=KINDS[verdict.outcome], run=manifest.run, version=name, reason=verdict.reason)
    client = RedisClient(config.redis.control_url, name="gate")
    try:
        registry = Registry(client, Keys(config.group.name))
        await registry.request(request, request_id=f"gate-{name}")  # said twice, it is one request
    finally:
        await client.close()
    return f"{verdict.outcome} {verdict.reason}".strip()
