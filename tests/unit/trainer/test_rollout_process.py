"""The seam with TRL's rollout process: names, answers, arguments, start and stop. TRL is real, the fleet is not."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from adaptersync.trainer.conversations import Conversation, present
from adaptersync_core.errors import AdapterSyncError, Unroutable
from adaptersync_core.identity import adapter_id
from support.rollouts import DiesBeforeItIsReady, FillsQueues, SaysClocks, one_turn, rollout_loop
from support.trainers import RUN
from support.wait import wait_until_sync

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]

# --- the rollout loop -------------------------------------------------------------------------------------------------


class Fleet:
    """A router with a script: each request gets the next reply, the last one again and again."""

    def __init__(self, *replies: Callable[[str], web.Response]) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []
        self.shown: list[str | None] = []  # as keys

    async def complete(self, request: web.Request) -> web.Response:
        self.asked.append((await request.json())["model"])
        self.shown.append(request.headers.get("Authorization"))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply(self.asked[-1])


def served(seq: int | None = None, *, voided: bool = False, request: str = "") -> Callable[[str], web.Response]:
    """An answer by version `seq`, or by the one that is asked for."""

    def reply(model: str) -> web.Response:
        number = int(model.rpartition("@v")[2]) if seq is None else seq
        choice = {"token_ids": [15, 2], "logprobs": {"token_logprobs": [-0.5, -0.1]}, "finish_reason": "stop"}
        headers = {"x-adaptersync-version": adapter_id(RUN, number, "a" * 64)}
        if request:
            headers["x-adaptersync-request-id"] = request
        return web.json_response(
            {"model": model, "choices": [choice]}, headers=headers | ({"x-adaptersync-voided": "1"} if voided else {})
        )

    return reply


def refused(status: int, **headers: str) -> Callable[[str], web.Response]:
    return lambda model: web.json_response({"error": f"{model} refused"}, status=status, headers=headers)


@contextlib.asynccontextmanager
async def loop_on(trl: ModuleType, fleet: Fleet, promoted: int) -> AsyncIterator[Any]:
    """The rollout loop as the process would have it, less the tokenizer and the dataset."""
    app = web.Application()
    app.router.add_post("/v1/completions", fleet.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    shown = {"Authorization": "Bearer as-key"}
    async with rollout_loop(trl, f"http://127.0.0.1:{port}", RUN, promoted, shown) as loop:
        yield loop
    await runner.cleanup()


async def test_a_turn_asks_for_the_promoted_version_by_run_and_number(trl: ModuleType) -> None:
    fleet = Fleet(served())
    async with loop_on(trl, fleet, promoted=7) as loop:
        assert await one_turn(loop) == ([15, 2], [-0.5, -0.1])
    assert (fleet.asked, fleet.shown) == (["sums@v7"], ["Bearer as-key"])


async def test_a_conversation_keeps_its_version_and_its_rows_carry_it(
    trl: ModuleType, process: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns, a promotion between them: both are asked of the version that was current at the beginning."""
    fleet = Fleet(served())
    async with loop_on(trl, fleet, promoted=7) as loop:

        async def two_turns(self: Any, prompt: Any) -> Any:
            await self._generate_one_turn([1])
            self._model_version_value.value = 8
            await self._generate_one_turn([1, 2])
            return [], [], [SimpleNamespace(rollout_id=prompt)], 0, 0, None

        async def scored(self: Any, group: Any) -> Any:
            return [SimpleNamespace(model_version=None) for rows in group.completions_sequences for _ in rows]

        monkeypatch.setattr(process._AsyncRolloutLoop, "_generate_one", two_turns)
        monkeypatch.setattr(process._AsyncRolloutLoop, "_score_group", scored)
        older = await asyncio.create_task(loop._generate_one("a"))
        newer = await asyncio.create_task(loop._generate_one("b"))
        group = SimpleNamespace(completions_sequences=[older[2], newer[2]])
        samples = await loop._score_group(group)
        assert loop._written_by == {}
    assert fleet.asked == ["sums@v7", "sums@v7", "sums@v8", "sums@v8"]
    assert [sample.model_version for sample in samples] == [7, 8]


async def test_an_answer_by_another_version_is_thrown_away_and_asked_for_again(trl: ModuleType) -> None:
    fleet = Fleet(served(6), served())
    async with loop_on(trl, fleet, promoted=7) as loop:
        assert (await one_turn(loop))[0] == [15, 2]
        assert loop._counters == {"adaptersync/served_mismatch_total": 1}
    assert fleet.asked == ["sums@v7", "sums@v7"]


async def test_a_fleet_that_keeps_answering_with_another_version_fails_the_run(
    trl: ModuleType, process: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "pause_s", lambda *_: 0.0)
    fleet = Fleet(served(6))
    async with loop_on(trl, fleet, promoted=7) as loop:
        with pytest.raises(Unroutable, match=r"sums-v6-a{12} answered instead .*model=sums@v7 attempts=3"):
            await one_turn(loop)
    assert len(fleet.asked) == 3


async def test_a_withdrawn_version_gives_way_to_the_one_promoted_since(trl: ModuleType) -> None:
    fleet = Fleet(refused(410), served())
    async with loop_on(trl, fleet, promoted=7) as loop:
        conversation = Conversation(asks=5)
        present.set(conversation)
        await loop._generate_one_turn([1])
        assert loop._counters == {"adaptersync/repinned_total": 1}
    assert fleet.asked == ["sums@v5", "sums@v7"]
    assert (conversation.asks, conversation.oldest) == (7, 7)  # nothing of version 5 is in it


async def test_what_a_voided_version_wrote_is_asked_for_again_from_the_one_before(trl: ModuleType) -> None:
    fleet = Fleet(served(voided=True), served())
    async with loop_on(trl, fleet, promoted=6) as loop:  # the pointer has gone back
        conversation = Conversation(asks=7)
        present.set(conversation)
        await loop._generate_one_turn([1])
        assert loop._counters == {"adaptersync/repinned_total": 1}
    assert fleet.asked == ["sums@v7", "sums@v6"]
    assert (conversation.asks, conversation.oldest) == (6, 6)


async def test_a_busy_fleet_is_asked_again_when_it_says(trl: ModuleType) -> None:
    fleet = Fleet(refused(503, **{"Retry-After": "0"}), refused(502), served())
    async with loop_on(trl, fleet, promoted=7) as loop:
        await one_turn(loop)
        assert loop._counters == {"rollout/vllm_retry_total": 2}


async def test_what_is_no_whole_completion_is_asked_for_again(trl: ModuleType) -> None:
    aborted = {"model": adapter_id(RUN, 7, "a" * 64), "choices": [{"token_ids": [15], "finish_reason": "abort"}]}
    fleet = Fleet(
        lambda _: web.Response(text="<html>a proxy's greeting</html>"),
        lambda _: web.json_response({"model": "sums@v7", "choices": []}),
        lambda _: web.json_response(aborted),
        served(),
    )
    async with loop_on(trl, fleet, promoted=7) as loop:
        assert (await one_turn(loop))[0] == [15, 2]
        assert loop._counters == {"rollout/vllm_retry_total": 3}


async def test_a_request_the_router_refuses_fails_at_once_with_its_reason(trl: ModuleType) -> None:
    fleet = Fleet(refused(422))
    async with loop_on(trl, fleet, promoted=7) as loop:
        with pytest.raises(Unroutable, match="sums@v7 refused"):
            await one_turn(loop)
    assert len(fleet.asked) == 1


async def test_patience_with_a_fleet_that_is_away_has_an_end(trl: ModuleType) -> None:
    fleet = Fleet(refused(503))
    async with loop_on(trl, fleet, promoted=7) as loop:
        loop.request_timeout = 0.6
        with pytest.raises(Unroutable, match="attempts=2"):
            await one_turn(loop)


async def test_samples_carry_the_requests_they_were_made_of_and_those_that_came_to_nothing(
    trl: ModuleType, process: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(served(6, request="r-1"), served(request="r-2"), served(request="r-3"))
    async with loop_on(trl, fleet, promoted=7) as loop:

        async def turn(self: Any, prompt: Any) -> Any:
            await self._generate_one_turn([1])
            return [], [], [SimpleNamespace(rollout_id=prompt)] if prompt == "a" else [], 0, 0, None

        async def scored(self: Any, group: Any) -> Any:
            return [SimpleNamespace(model_version=None) for rows in group.completions_sequences for _ in rows]

        monkeypatch.setattr(process._AsyncRolloutLoop, "_generate_one", turn)
        monkeypatch.setattr(process._AsyncRolloutLoop, "_score_group", scored)
        made = await asyncio.create_task(loop._generate_one("a"))
        await asyncio.create_task(loop._generate_one("b"))
        samples = await loop._score_group(SimpleNamespace(completions_sequences=[made[2]]))
    (version,) = [pickle.loads(pickle.dumps(sample.model_version)) for sample in samples]  # noqa: S301 - our own
    assert version == 7
    assert version.requests == ("r-2",)
    mismatch = f"asked for sums@v7, {adapter_id(RUN, 6, 'a' * 64)} answered"
    assert version.dropped == (("r-1", mismatch), ("r-3", "nothing to train on"))


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(trl: ModuleType) -> Iterator[Any]:
    from accelerate import PartialState

    PartialState(cpu=True)  # TRL's logging wants it
    with trl._our_rollout_worker():
        made = trl.async_grpo_trainer.AsyncRolloutWorker(queue_maxsize=1000)
    assert type(made) is trl.RolloutWorker
    yield made
    made.stop()


def test_the_process_is_told_where_its_key_is_and_reads_it_itself(
    trl: ModuleType, process: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The key itself is in no argument, and not in what the process is handed."""
    from accelerate import PartialState

    PartialState(cpu=True)
    file, handed = tmp_path / "key", []
    file.write_text("as-key")
    monkeypatch.setattr(
        process.AsyncRolloutWorker,
        "start",
        lambda self: handed.append(Path(self._loop_kwargs["arguments"]).read_bytes()),
    )
    with trl._our_rollout_worker(str(file)):
        worker = trl.async_grpo_trainer.AsyncRolloutWorker(queue_maxsize=1000)
    try:
        worker.start()
        worker.check_start()
    finally:
        worker.stop()
    assert b"as-key" not in handed[0]
    arguments = tmp_path / "arguments"
    arguments.write_bytes(handed[0])
    monkeypatch.setattr(
        process._AsyncRolloutLoop, "__init__", lambda self, **_: setattr(self, "environment_factories", None)
    )
    monkeypatch.setattr(process, "check_made", lambda _: None)  # TRL's constructor made nothing of it
    monkeypatch.setattr(process.RolloutLoop, "_model_version_value", None, raising=False)
    assert process.RolloutLoop(arguments=str(arguments))._shown == {"Authorization": "Bearer as-key"}


def test_stopping_does_not_wait_for_samples_nobody_reads(
    trl: ModuleType, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl.RolloutWorker, "_loop_cls", FillsQueues)
    worker.start()
    process = worker._process
    worker.stop()
    assert process.exitcode == 0  # it ended; TRL waits 15 s in vain and kills it


def test_the_process_hears_what_is_promoted_and_what_is_too_old(
    trl: ModuleType, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl.RolloutWorker, "_loop_cls", SaysClocks)
    worker.start()
    assert worker.rollout_buffer.get(timeout=60) == (0, 0)
    worker.update_model_version(7)
    worker.update_oldest_useful(5)
    wait_until_sync(lambda: worker.rollout_buffer.get(timeout=60) == (7, 5), timeout_s=20)


@pytest.mark.parametrize("why", ["told to stop", "failed"])
async def test_the_loop_ends_at_once_and_leaves_no_request_behind(
    trl: ModuleType, process: ModuleType, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    ended: list[str] = []

    async def generate(self: Any, stop_event: asyncio.Event) -> None:
        try:
            if why == "failed":
                raise Unroutable("no answer to train on", status=422)
            await asyncio.sleep(60)  # as TRL waits for answers that are under way
        finally:
            ended.append(why)

    monkeypatch.setattr(process._AsyncRolloutLoop, "_generate_loop", generate)
    async with loop_on(trl, Fleet(served()), promoted=7) as loop:
        before = asyncio.all_tasks()
        stop = asyncio.Event()
        running = asyncio.create_task(loop._generate_loop(stop_event=stop))
        if why == "failed":
            with pytest.raises(Unroutable):
                await asyncio.wait_for(running, 10)
        else:
            await asyncio.sleep(0.05)
            stop.set()
            await asyncio.wait_for(running, 10)
        assert ended == [why]
        assert asyncio.all_tasks() == before


def test_the_loop_ends_with_its_trainer(process: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    for name in ("leave_with_parent", "leave_at_once"):
        monkeypatch.setattr(process, name, functools.partial(said.append, name))
    monkeypatch.setattr(process._AsyncRolloutLoop, "run", lambda _: said.append("run"))
    process.RolloutLoop.__new__(process.RolloutLoop).run()
    assert said == ["leave_with_parent", "run", "leave_at_once"]


def test_a_process_that_dies_at_its_start_fails_the_start(worker: Any) -> None:
    """Its arguments are larger than a pipe holds: sent through one, they would hang the trainer."""
    dataset = [DiesBeforeItIsReady(), b"x" * 1_000_000]
    worker._loop_kwargs["dataset"] = dataset
    worker.start()
    with pytest.raises(RuntimeError, match="exited during init"):
        worker.check_start()
    assert worker._loop_kwargs["dataset"] is dataset  # where TRL looks for it when it saves and resumes


def test_why_the_process_ended_is_said_in_one_line(worker: Any) -> None:
    worker._exception_info_queue.put(("Unroutable", "no answer to train on: 422", "Traceback ..."))
    wait_until_sync(lambda: not worker._exception_info_queue.empty())
    worker._failed_event.set()
    with pytest.raises(AdapterSyncError, match=r"^the rollout process ended: Unroutable: no answer to train on: 422;"):
        worker.check_health(300.0)


def test_arguments_that_cannot_be_sent_are_named(worker: Any) -> None:
    worker._loop_kwargs["reward_funcs"] = [lambda **_: [0.0]]
    worker.start()
    with pytest.raises(TypeError, match="must be picklable"):
        worker.check_start()
