"""How much of a trainer's prompts real engines compute, beside what one engine with everything cached would.

Real vLLM servers, started as `adaptersync up` starts them; the completions of a prompt are asked for one after the
other, without streaming, as trainers ask. The engines' own counters say what they computed.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp
import msgspec
from msgspec import Struct

from adaptersync.trainer import AdapterPublisher
from adaptersync_core.base_model import base_shapes
from adaptersync_core.blocks import block_hashes
from adaptersync_core.errors import PublicationFailed, Unroutable
from adaptersync_core.vllm import VllmClient
from adaptersync_tools.bench.engine import RANK, write_adapter
from adaptersync_tools.bench.result import Machine, Result, Target, now
from adaptersync_tools.output import console, table
from adaptersync_tools.up import Progress, Stack, StackSettings

RUN = "bench"
MOST = 1.03  # of what one engine would compute
TOKEN_IDS = (3, 30)  # in any vocabulary
OUTCOME_S = 60.0
ANSWER_S = 300.0


class Settings(Struct, frozen=True, kw_only=True):
    """`prompts` of `tokens` tokens, of which all begin with the same `template`; `completions` of each.

    Completions of `window` prompts come in shuffled order, then those of the next; `clients` requests are in flight.
    """

    replicas: int = 2
    prompts: int = 64
    completions: int = 8
    tokens: int = 135
    template: int = 23
    answer_tokens: int = 16
    window: int = 1
    clients: int = 32


class PrefixResult(Result, frozen=True, kw_only=True):
    """Tokens of all prompts, those that the engines computed, and those that one engine would have computed.

    `share` is each replica's part of the requests.
    """

    asked: int
    computed: int
    ideal: int
    share: dict[str, float]


def run(settings: Settings, model: Path, directory: Path, progress: Progress) -> PrefixResult:
    """Start a fleet in `directory`, measure, and stop it."""
    adapter = write_adapter(directory / "adapter", base_shapes(model.absolute()), seed=1)
    wanted = StackSettings(
        model=model,
        state_dir=directory / "fleet",
        replicas=settings.replicas,
        engine={"max_lora_rank": RANK, "max_model_len": max(settings.tokens + settings.answer_tokens, 128)},
        overrides={"trainer.run": RUN, "coordinator.min_ready": settings.replicas},
    )
    with Stack(wanted, progress) as stack, AdapterPublisher(stack.config) as publisher:
        outcome = publisher.publish(adapter).wait(OUTCOME_S)
        if outcome.state != "current":
            raise PublicationFailed(outcome.reason, state=outcome.state)
        return asyncio.run(measure(stack, settings, progress))


async def measure(stack: Stack, settings: Settings, progress: Progress) -> PrefixResult:
    began_at = now()
    requests = _requests(settings)
    clients = {
        name: VllmClient(url, token=(stack.state_dir / f"{name}.token").read_text())
        for name, url in stack.engine_urls.items()
    }
    try:
        before = {name: await _counted(client) for name, client in clients.items()}
        size = max([(await client.facts()).block_size for client in clients.values()])
        progress.waiting(f"{len(requests)} requests")
        await _ask(stack.router_url, requests, settings)
        after = {name: await _counted(client) for name, client in clients.items()}
    finally:
        for client in clients.values():
            await client.close()
    asked, cached, finished = (sum(after[name][place] - before[name][place] for name in clients) for place in range(3))
    share = {name: (after[name][2] - before[name][2]) / finished for name in clients}
    computed, ideal = int(asked - cached), _ideal(requests, size)
    return PrefixResult(
        bench="prefixes",
        began_at=began_at,
        machine=Machine.here(),
        settings={**msgspec.to_builtins(settings), "model": stack.settings.model.name, "block_size": size},
        figures=(),
        targets=(
            Target.at_most("prompt tokens computed, of what one engine would", computed / ideal, MOST),
            Target.at_least("requests that the engines finished", finished, len(requests), unit="requests"),
        ),
        asked=int(asked),
        computed=computed,
        ideal=ideal,
        share=share,
    )


def _requests(settings: Settings) -> list[list[int]]:
    chance = random.Random(0)  # noqa: S311 (prompts, not secrets)
    template = [chance.randrange(*TOKEN_IDS) for _ in range(settings.template)]
    rest = max(settings.tokens - settings.template, 1)
    prompts = [[*template, *(chance.randrange(*TOKEN_IDS) for _ in range(rest))] for _ in range(settings.prompts)]
    requests: list[list[int]] = []
    for first in range(0, len(prompts), settings.window):
        some = prompts[first : first + settings.window] * settings.completions
        chance.shuffle(some)
        requests += some
    return requests


async def _ask(url: str, requests: list[list[int]], settings: Settings) -> None:
    """Unroutable when one is not answered: then the engines did not do what is compared."""
    waiting = iter(requests)

    async def ask(session: aiohttp.ClientSession) -> None:
        for prompt in waiting:
            body = {"model": RUN, "prompt": prompt, "max_tokens": settings.answer_tokens, "ignore_eos": True}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise Unroutable(f"request was not answered: {text[:200]}", status=answer.status)

    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
    async with session, asyncio.TaskGroup() as tasks:
        for _ in range(settings.clients):
            tasks.create_task(ask(session))


async def _counted(client: VllmClient) -> tuple[float, float, float]:
    """Of one engine: prompt tokens it was asked for, those found in its cache, and requests it finished."""
    totals = {"vllm:prompt_tokens_total": 0.0, "vllm:prefix_cache_hits_total": 0.0, "vllm:request_success_total": 0.0}
    for name, _, value in await client.metrics():
        if name in totals:
            totals[name] += value
    asked, cached, finished = totals.values()
    return asked, cached, finished


def _ideal(requests: list[list[int]], block_size: int) -> int:
    """What one engine computes that evicts nothing; the last token of a prompt is computed always."""
    seen: set[str] = set()
    computed = 0
    for prompt in requests:
        hashes = block_hashes(RUN, prompt, block_size, len(prompt))
        known = next((place for place, name in enumerate(hashes) if name not in seen), len(hashes))
        computed += len(prompt) - min(known, (len(prompt) - 1) // block_size) * block_size
        seen.update(hashes)
    return computed


def show_more(result: PrefixResult) -> None:
    rows = [(name, f"{share:.1%}") for name, share in sorted(result.share.items())]
    console().print(table("", ("replica", "requests>"), rows))
    parts = f"{result.computed} of {result.asked} prompt tokens were computed; one engine would have: {result.ideal}"
    console().print(parts)
