"""Measure a served model on the problems nobody was trained on, through the router.

    python -m adaptersync_tools.demo.evaluate base my-run

prints one JSON line per model: the share of exactly right answers, greedy and sampled at temperature 1, and which
version answered. It asks as any client would, so it measures what the fleet serves, not what the trainer holds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import aiohttp
import msgspec

from adaptersync_core.config import load_config
from adaptersync_core.errors import AdapterSyncError, Unroutable
from adaptersync_tools.demo.task import ANSWER_CHARS, Problem, draw
from adaptersync_tools.demo.tokenizer import build
from adaptersync_tools.demo.warmup import answer_ids, prompts

AT_ONCE = 32
TIMEOUT_S = 60.0


async def evaluate(url: str, model: str, problems: list[Problem]) -> dict[str, Any]:
    """`{"model", "greedy", "sampled", "served"}`; Unroutable when the router does not answer for the model."""
    tokenizer = build()
    asked = prompts(tokenizer, problems)
    wanted = [answer_ids(tokenizer, problem.answer) for problem in problems]
    served: set[str] = set()
    slots = asyncio.Semaphore(AT_ONCE)

    async def right(session: aiohttp.ClientSession, number: int, temperature: float) -> bool:
        request = {
            "model": model,
            "prompt": asked[number],
            "max_tokens": ANSWER_CHARS + 1,
            "temperature": temperature,
            "seed": number,
            "return_token_ids": True,
        }
        async with slots, session.post(f"{url}/v1/completions", json=request) as response:
            raw = await response.read()
            if response.status != 200:
                raise Unroutable(raw[:200].decode(errors="replace"), status=response.status, model=model)
            body = msgspec.json.decode(raw)
            served.add(body["model"])
            return bool(body["choices"][0]["token_ids"] == wanted[number])

    async def share_right(session: aiohttp.ClientSession, temperature: float) -> float:
        answers = await asyncio.gather(*(right(session, number, temperature) for number in range(len(problems))))
        return round(sum(answers) / len(answers), 4)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
        greedy = await share_right(session, 0.0)
        sampled = await share_right(session, 1.0)
    return {"model": model, "greedy": greedy, "sampled": sampled, "served": sorted(served)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure served models on held-out problems.")
    parser.add_argument("models", nargs="+", help="run, version or base model, as the router knows it")
    parser.add_argument("--problems", type=int, default=500)
    options = parser.parse_args(argv)
    try:
        url = load_config().trainer.router_url
        for model in options.models:
            result = asyncio.run(evaluate(url, model, draw("test", options.problems, seed=7)))
            print(msgspec.json.encode(result).decode(), flush=True)
    except AdapterSyncError as error:
        print(f"evaluation failed: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
