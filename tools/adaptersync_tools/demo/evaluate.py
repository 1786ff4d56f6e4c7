"""Measure a served model on the problems nobody was trained on, through the router.

    python -m adaptersync_tools.demo.evaluate base my-run

prints one JSON line per model: how many problems there were, what its answers would have been rewarded with, greedy and
sampled at temperature 1 (of sums, that is the share of right ones), and which version answered. It asks as any client
would, so it measures what the fleet serves, not what the trainer holds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from adaptersync.trainer.answers import pause_s
from adaptersync.trainer.asking import ask
from adaptersync_core.config import load_config
from adaptersync_core.errors import AdapterSyncError, Unroutable
from adaptersync_tools.demo import rewards
from adaptersync_tools.demo.lessons import CARRY, LESSONS, Lesson
from adaptersync_tools.demo.task import Problem, draw

AT_ONCE = 32
TIMEOUT_S = 60.0
LATER = (429, 503)  # a fleet that is full, or whose replicas are late


async def evaluate(
    url: str, model: str, problems: list[Problem], lesson: Lesson = CARRY, base: Path = Path()
) -> dict[str, Any]:
    """What `main` prints of a model; Unroutable when the router does not answer for it."""
    tokenizer = lesson.tokenizer(base)
    reward = getattr(rewards, lesson.reward)
    chats = [[{"role": "user", "content": lesson.ask(problem)}] for problem in problems]
    asked = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    served: set[str] = set()
    slots = asyncio.Semaphore(AT_ONCE)

    async def rewarded(session: aiohttp.ClientSession, number: int, temperature: float) -> float:
        request = {
            "model": model,
            "prompt": asked[number],
            "max_tokens": lesson.answer_tokens,
            "temperature": temperature,
            "seed": number,
            "return_token_ids": True,
        }
        async with slots:
            body = await answered(session, f"{url}/v1/completions", request)
        served.add(body["model"])
        text = tokenizer.decode(body["choices"][0]["token_ids"], skip_special_tokens=True)
        return float(reward([text], answer=[lesson.solve(problems[number])])[0])

    async def mean(session: aiohttp.ClientSession, temperature: float) -> float:
        answers = await asyncio.gather(*(rewarded(session, number, temperature) for number in range(len(problems))))
        return round(sum(answers) / len(answers), 4)

    async with aiohttp.ClientSession() as session:
        greedy = await mean(session, 0.0)
        sampled = await mean(session, 1.0)
    told = {"model": model, "problems": len(problems), "greedy": greedy, "sampled": sampled}
    return {**told, "served": sorted(served)}


async def answered(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> Any:
    """The body of an answer, asked for again while the fleet says that it may come later; else Unroutable."""
    began = time.monotonic()
    for attempt in itertools.count(1):
        answer, body = await ask(session, url, request, TIMEOUT_S)
        if body is not None:
            return body
        pause = pause_s(attempt, answer.retry_after_s)
        if answer.status not in LATER or time.monotonic() - began + pause > TIMEOUT_S:
            break
        await asyncio.sleep(pause)
    raise Unroutable(answer.reason, status=answer.status or 502, model=request["model"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure served models on held-out problems.")
    parser.add_argument("models", nargs="+", help="run, version or base model, as the router knows it")
    parser.add_argument("--lesson", choices=sorted(LESSONS), default="carry")
    parser.add_argument("--base", type=Path, default=Path(), help="the base model, for its tokenizer")
    parser.add_argument("--problems", type=int, help="by default as many as the lesson has")
    options = parser.parse_args(argv)
    try:
        url, lesson = load_config().trainer.router_url, LESSONS[options.lesson]
        problems = draw("test", options.problems or lesson.problems, seed=7)
        for model in options.models:
            result = asyncio.run(evaluate(url, model, problems, lesson, options.base))
            print(msgspec.json.encode(result).decode(), flush=True)
    except AdapterSyncError as error:
        print(f"evaluation failed: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
