"""The seam with TRL: clocks, names, answers, errors, start and stop. TRL is real, servers and fleet are not."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from adaptersync.trainer.conversations import Conversation, present
from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, ConfigError, NameInvalid, PublicationFailed, Unroutable
from adaptersync_core.identity import adapter_id
from support.publications import FakePublisher
from support.rollouts import DiesBeforeItIsReady, FillsQueues, SaysClocks, StubWorker, one_turn, rollout_loop
from support.trainers import BATCH, RUN
from support.wait import wait_until_sync

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]

# --- the rollout loop -------------------------------------------------------------------------------------------------


class Fleet:
    """A router with a script: each request gets the next reply, the last one again and again."""

    def __init__(self, *replies: Callable[[str], web.Response]) -> None:
        self.replies = list(replies)
        self.asked: list[str] = []

    async def complete(self, request: web.Request) -> web.Response:
        self.asked.append((await request.json())["model"])
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return reply(self.asked[-1])


def served(seq: int | None = None, *, voided: bool = False) -> Callable[[str], web.Response]:
    """An answer by version `seq`, or by the one that is asked for."""

    def reply(model: str) -> web.Response:
        number = int(model.rpartition("@v")[2]) if seq is None else seq
        choice = {"token_ids": [15, 2], "logprobs": {"token_logprobs": [-0.5, -0.1]}, "finish_reason": "stop"}
        headers = {"x-adaptersync-version": adapter_id(RUN, number, "a" * 64)}
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
    async with rollout_loop(trl, f"http://127.0.0.1:{port}", RUN, promoted) as loop:
        yield loop
    await runner.cleanup()


async def test_a_turn_asks_for_the_promoted_version_by_run_and_number(trl: ModuleType) -> None:
    fleet = Fleet(served())
    async with loop_on(trl, fleet, promoted=7) as loop:
        assert await one_turn(loop) == ([15, 2], [-0.5, -0.1])
    assert fleet.asked == ["sums@v7"]


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


# --- the trainer ------------------------------------------------------------------------------------------------------


def test_the_trainers_clock_is_what_was_published_and_the_workers_what_was_promoted(
    make_trainer: Callable[..., Any],
) -> None:
    publisher = FakePublisher()
    trainer = make_trainer(publisher)
    worker = trainer.rollout_worker
    clocks: list[tuple[int, int]] = []
    submit = publisher.submit

    def note_clocks(*args: Any, **kwargs: Any) -> Any:
        clocks.append((trainer.model_version, worker.versions[-1] if worker.versions else 0))
        return submit(*args, **kwargs)

    publisher.submit = note_clocks  # type: ignore[method-assign]
    trainer.train()

    assert clocks == [(0, 0), (1, 1), (2, 1), (3, 2)]  # before each publication: one ahead from the second on
    assert worker.started_with == 1  # nothing is generated before a version is promoted
    assert trainer.model_version == 4
    assert worker.versions == [1, 2, 3, 4]  # the last one by the wait at the end of training
    assert worker.oldest == [1, 1, 1, 1, 1, 1, 2, 2]  # in each sync before a promotion is waited for, and after
    assert (trainer.counts.published, trainer.counts.promoted) == (4, 4)
    assert publisher.closed
    assert [published.step for published in publisher.published] == [0, 1, 2, 3]
    assert all(
        {"adapter_config.json", "adapter_model.safetensors"} <= set(published.files)
        for published in publisher.published
    )
    assert len({published.directory for published in publisher.published}) == 4  # what is on its way stays as it is
    assert [{"step_s", "sync_s"} <= published.timings.keys() for published in publisher.published] == [
        False, True, True, True,
    ]  # fmt: skip
    assert all({"gather_s", "save_s"} <= published.timings.keys() for published in publisher.published)
    assert all(published.timings["rollout_wait_s"] >= 0 for published in publisher.published[2:])
    assert publisher.published[-1].load["queued_max"] == trainer.args.queue_maxsize
    steps = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert all(entry["adaptersync/gather_s"] >= 0 < entry["adaptersync/save_s"] for entry in steps)
    assert [entry["adaptersync/published"] for entry in steps] == [2, 3, 4]
    assert all("sample/dropped_stale_total" not in entry for entry in steps)


TRACKIO = """
from contextvars import ContextVar
from types import SimpleNamespace

__version__ = "0.43.0"
context_vars = SimpleNamespace(current_space_id=ContextVar("space", default=None))
begun, logged = [], []


class Config(dict):
    def update(self, values, allow_val_change):
        super().update(values)


config = Config()


def init(**given):
    begun.append(given)


def log(values):
    logged.append(values)


def finish():
    begun.append("finished")
"""


def test_what_trackio_is_told_has_the_phases_and_fates_of_versions(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module of its name that keeps what it is told, under the callback that transformers has for it."""
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "trackio.py").write_text(TRACKIO)
    monkeypatch.syspath_prepend(str(tmp_path / "stub"))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    trainer = make_trainer(FakePublisher(), arguments={"report_to": "trackio", "logging_steps": 1})
    trainer.train()
    told = importlib.import_module("trackio")
    assert (len(told.begun), told.begun[-1]) == (2, "finished")
    steps = [entry for entry in told.logged if "train/ratio" in entry]
    assert [entry["train/global_step"] for entry in steps] == [1, 2, 3]
    assert [entry["train/adaptersync/published"] for entry in steps] == [2, 3, 4]
    assert all(entry[f"train/adaptersync/{name}"] >= 0 for entry in steps for name in ("gather_s", "save_s"))
    assert all("train/perf/rollout_wait_s" in entry for entry in steps)


def test_the_worker_hears_that_nothing_is_served_any_more(make_trainer: Callable[..., Any]) -> None:
    publisher = FakePublisher()
    trainer = make_trainer(publisher)
    trainer.train()
    publisher.current_seq = None
    publisher._callback(None)
    assert trainer.rollout_worker.versions == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("fate", ["rolled_back", "replaced", "failed"])
def test_training_goes_on_whatever_becomes_of_a_version_and_samples_age_all_the_same(
    make_trainer: Callable[..., Any], fate: str
) -> None:
    """The second and third come to nothing. Numbers begin above a hundred, so no clock is taken for the other."""
    publisher = FakePublisher(fates={102: fate, 103: fate}, last=100)
    trainer = make_trainer(publisher, steps=5, max_staleness=3, rollout_worker=StubWorker(BATCH, batches=9))
    trainer.train()
    assert (trainer.counts.published, trainer.counts.promoted, getattr(trainer.counts, fate)) == (6, 4, 2)
    assert trainer.model_version == 6
    assert trainer.rollout_worker.versions == [101, 104, 105, 106]
    steps = [entry for entry in trainer.state.log_history if "ratio" in entry]
    assert [entry["sample/staleness_max"] for entry in steps] == [0, 1, 2, 3, 1]
    assert steps[-1][f"adaptersync/{fate}"] == 2


def test_a_first_version_the_fleet_refuses_ends_training_before_anything_is_generated(
    make_trainer: Callable[..., Any],
) -> None:
    publisher = FakePublisher(fates={1: "rolled_back"})
    trainer = make_trainer(publisher)
    with pytest.raises(PublicationFailed, match="because of 1"):
        trainer.train()
    assert trainer.rollout_worker.started_with is None
    assert publisher.closed


def test_an_error_while_saving_reaches_the_caller(
    trl: ModuleType, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trl.async_grpo_trainer, "save_lora_adapter", full)
    publisher = FakePublisher()
    trainer = make_trainer(publisher)
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert publisher.published == []
    assert publisher.closed


@pytest.mark.parametrize("batches", [0, 1])
def test_samples_that_cannot_be_read_end_training_with_the_reason_everywhere(
    trl: ModuleType, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    get, left = trl.Samples.get, iter(range(batches * BATCH))
    told: list[str] = []

    def ends(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            raise AdapterSyncError("the rollout process ended: killed")
        return get(self, *args, **kwargs)

    def gather(mine: list[str]) -> list[str]:
        told.extend(mine)
        return mine

    monkeypatch.setattr(trl.Samples, "get", ends)
    monkeypatch.setattr(trl, "gather_object", gather)
    publisher = FakePublisher()
    with pytest.raises(AdapterSyncError, match=r"^the rollout process ended: killed"):
        make_trainer(publisher).train()
    assert [one for one in told if one] == ["AdapterSyncError: the rollout process ended: killed"]
    assert len(publisher.published) == 1 + batches


def test_an_error_on_another_process_is_raised_here_too(
    trl: ModuleType, make_trainer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl, "gather_object", lambda mine: ["OSError: no space left", *mine])
    with pytest.raises(PublicationFailed, match=r"another process .* no space left"):
        make_trainer(FakePublisher()).train()


def test_what_would_make_trl_sync_another_way_is_refused(make_trainer: Callable[..., Any]) -> None:
    from peft import LoraConfig

    with pytest.raises(ConfigError, match="pass peft_config"):
        make_trainer(FakePublisher(), peft_config=None)
    with pytest.raises(ConfigError, match="weight_transfer"):
        make_trainer(FakePublisher(), weight_transfer=SimpleNamespace())
    with pytest.raises(ValueError, match="DoRA"):
        make_trainer(
            FakePublisher(), peft_config=LoraConfig(use_dora=True, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    with pytest.raises(NameInvalid):
        make_trainer(FakePublisher(), run="Not A Name")
    with pytest.raises(ConfigError, match="no run name"):
        make_trainer(FakePublisher(), run=None)


def test_the_worker_trl_makes_is_ours_and_asks_the_router(trl: ModuleType, make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(FakePublisher(), rollout_worker=None)
    assert type(trainer.rollout_worker) is trl.RolloutWorker
    arguments = trainer.rollout_worker._loop_kwargs
    assert arguments["lora_name"] == RUN
    assert arguments["vllm_server_url"] == trainer.vllm_client.server_url == Config().trainer.router_url
    publisher = FakePublisher(last=30)
    trainer._pace.submitted(1, publisher.announce())
    trainer._doom()
    assert trainer.rollout_worker._model_version_value.oldest == 31
