"""The demo's measurement and its commands' exit codes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from adaptersync_core.errors import Unroutable
from adaptersync_tools.demo import evaluate as asked
from adaptersync_tools.demo import train
from adaptersync_tools.demo.evaluate import evaluate
from adaptersync_tools.demo.task import draw
from adaptersync_tools.demo.tokenizer import build
from adaptersync_tools.demo.warmup import answer_ids, prompts

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]


@contextlib.asynccontextmanager
async def pupil(*, late: int = 0) -> AsyncIterator[str]:
    """A server of one model, `sums`: always right when greedy, careless when it samples; `late` at first."""
    tokenizer = build()
    problems = draw("test", 200, seed=7)
    known = {tuple(ids): problem for ids, problem in zip(prompts(tokenizer, problems), problems, strict=True)}

    async def complete(request: web.Request) -> web.Response:
        nonlocal late
        body: dict[str, Any] = await request.json()
        if late:
            late -= 1
            return web.json_response({"error": {"message": "silent"}}, status=503, headers={"Retry-After": "0"})
        if body["model"] != "sums":
            return web.json_response({"error": {"message": "model does not exist"}}, status=404)
        problem = known[tuple(body["prompt"])]
        answer = problem.answer if body["temperature"] == 0 else problem.careless_answer
        choice = {"token_ids": answer_ids(tokenizer, answer)}
        return web.json_response({"model": "sums-v3-0123456789ab", "choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
    await runner.cleanup()


async def test_accuracy_is_the_share_of_right_answers_by_what_was_served() -> None:
    problems = draw("test", 200, seed=7)
    async with pupil() as url:
        result = await evaluate(url, "sums", problems)
    careful = sum(not problem.carries for problem in problems) / len(problems)
    assert result == {
        "model": "sums",
        "problems": 200,
        "greedy": 1.0,
        "sampled": careful,
        "served": ["sums-v3-0123456789ab"],
    }


async def test_a_fleet_that_is_late_is_asked_again() -> None:
    async with pupil(late=5) as url:
        assert (await evaluate(url, "sums", draw("test", 3, seed=7)))["greedy"] == 1.0


async def test_a_fleet_that_stays_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "TIMEOUT_S", 0.05)
    async with pupil(late=1_000_000) as url:
        with pytest.raises(Unroutable, match="silent"):
            await evaluate(url, "sums", draw("test", 3, seed=7))


async def test_a_model_that_is_not_served_is_an_error_with_the_routers_reason() -> None:
    async with pupil() as url:
        with pytest.raises(Unroutable, match=r"model does not exist.*model=other"):
            await evaluate(url, "other", draw("test", 3, seed=7))


def test_training_that_cannot_begin_says_why_and_exits_accordingly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = train.main(["--base", str(tmp_path), "--run", "Not A Name", "--steps", "1", "--out", str(tmp_path / "out")])
    assert code == 64
    assert "training failed: run name must be" in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*.json*"))


def test_figures_can_be_read_while_training_goes_on(tmp_path: Path) -> None:
    """What a parent that shows progress relies on: a step is a whole line as soon as it is over."""
    from types import SimpleNamespace

    path = tmp_path / "steps.jsonl"
    with open(path, "wb", buffering=0) as steps:
        reporter = train._reporter(steps, started=0.0)
        for step in (1, 2):
            reporter.on_log(None, SimpleNamespace(global_step=step), None, logs={"reward": 0.5, "ratio": 1.0})
            assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, step + 1))
        reporter.on_log(None, SimpleNamespace(global_step=2), None, logs={"train_runtime": 9.0})
        assert len(path.read_text().splitlines()) == 2
