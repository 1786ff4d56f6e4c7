"""Two things a run has to show about its engines: that nobody paused them, and whose prefixes they cache.

Asks the engines and the router themselves; believes no counter of ours.
"""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
from msgspec import Struct

from adaptersync_core.errors import Unroutable
from adaptersync_tools.summary import PrefixCache

PROMPTS = 4
REPEATS = 4  # more than the replicas an idle fleet spreads one prompt over
PROMPT_TOKENS = 80  # digits, a token each for the demo's and the simulator's tokenizer: more than two blocks of 32
TIMEOUT_S = 30.0
_ACCESS = re.compile(rb'"[A-Z]+ (/[^ ?"]*)[^"]*" \d{3}')  # a line of vLLM's access log


class Answer(Struct, frozen=True, kw_only=True):
    """`cached` prompt tokens were not computed, says the engine."""

    version: str
    replica: str
    cached: int


def prefix_cache(router_url: str, versions: tuple[str, str], *, seed: int) -> PrefixCache:
    """Ask fresh prompts several times under each of two versions, and compare answers of one replica.

    A prompt that a replica had before under the same version must come from its cache; one that it had only under the
    other version must not.
    """
    rng = random.Random(seed)  # noqa: S311 (prompts, not secrets)
    within: list[int] = []
    across: list[int] = []
    for _ in range(PROMPTS):
        prompt = "".join(rng.choice("0123456789") for _ in range(PROMPT_TOKENS))
        known: dict[str, set[str]] = {}
        for version in versions:
            for _ in range(REPEATS):
                answer = ask(router_url, version, prompt)
                had = known.setdefault(answer.replica, set())
                if version in had:
                    within.append(answer.cached)
                elif had:
                    across.append(answer.cached)
                had.add(version)
    return PrefixCache(
        versions=versions,
        within_answers=len(within),
        within_tokens=sum(within),
        across_answers=len(across),
        across_tokens=sum(across),
        holds=bool(within) and bool(across) and all(within) and not any(across),
    )


def ask(router_url: str, model: str, prompt: str) -> Answer:
    """One token after `prompt`."""
    body = orjson.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0})
    request = urllib.request.Request(  # noqa: S310 (our own loopback)
        f"{router_url}/v1/completions", data=body, headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            usage: dict[str, Any] = orjson.loads(answer.read())["usage"]
            headers = answer.headers
    except OSError as error:
        raise Unroutable(f"router did not answer: {error}", status=503, model=model) from error
    return Answer(
        version=headers.get("x-adaptersync-version", ""),
        replica=headers.get("x-adaptersync-replica", ""),
        cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
    )


def pauses_in_logs(logs: Iterable[Path]) -> int | None:
    """How often vLLM servers were told to pause, by their access logs; None when a log holds no access at all."""
    count = 0
    for log in logs:
        paths = _ACCESS.findall(log.read_bytes())
        if not paths:
            return None
        count += paths.count(b"/pause")
    return count


def pauses_of_simulators(urls: Iterable[str]) -> int:
    """The same from simulators, which count every call."""
    count = 0
    for url in urls:
        with urllib.request.urlopen(f"{url}/simulator/calls", timeout=TIMEOUT_S) as answer:  # noqa: S310
            count += int(orjson.loads(answer.read())["calls"]["/pause"])
    return count
