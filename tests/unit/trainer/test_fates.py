"""What became of rollouts, as the trainer knows it."""

from __future__ import annotations

import pickle
import queue
from collections.abc import AsyncIterator, Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from adaptersync.trainer import fates as module
from adaptersync.trainer.fates import Dropped, RolloutFates, written
from adaptersync.trainer.pace import Pace
from adaptersync.trainer.samples import Samples
from adaptersync_core.errors import ControlUnavailable
from adaptersync_core.fates import REQUESTS, Fates, in_entries, read_fates, write_fates
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from support.publications import FakePublication, FakePublisher
from support.rollouts import StubWorker
from support.trainers import BATCH


@pytest.fixture
async def registry(redis_url: str) -> AsyncIterator[Registry]:
    client = RedisClient(redis_url, name="test")
    yield Registry(client, Keys("g"))
    await client.close()


async def told(registry: Registry) -> list[Fates | None]:
    entries = await registry.client.read_stream(registry.keys.fates, "0")
    return [read_fates(fields) for _, fields in entries]


def test_an_entry_is_read_as_it_was_written() -> None:
    fates = Fates(run="a", epoch=3, step=7, fate="dropped", reason="too old", requests=("x-1", "x-2"))
    fields = write_fates(fates)
    assert read_fates(dict(zip(fields[::2], fields[1::2], strict=True))) == fates
    assert read_fates({"run": "a", "epoch": "1", "fate": "eaten", "requests": "x"}) is None
    assert read_fates({"run": "a"}) is None


def test_alike_ones_share_entries_of_bounded_size() -> None:
    many = [(f"r-{n}", "trained", 1, "") for n in range(REQUESTS + 1)]
    entries = in_entries("a", 1, [*many, ("x", "dropped", 1, "why")])
    assert [len(each.requests) for each in entries] == [REQUESTS, 1, 1]


async def test_what_was_said_is_written_once(registry: Registry) -> None:
    rollouts = RolloutFates()
    rollouts.trained(["a", "b"], step=4)
    rollouts.dropped(["c"], "too old", step=4)
    await rollouts.write(registry, "run", 2)
    await rollouts.write(registry, "run", 2)
    assert await told(registry) == [
        Fates(run="run", epoch=2, step=4, fate="trained", requests=("a", "b")),
        Fates(run="run", epoch=2, step=4, fate="dropped", reason="too old", requests=("c",)),
    ]


async def test_while_redis_is_away_the_latest_wait(
    registry: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "WAITING", 3)
    away = RedisClient("redis://127.0.0.1:1/0", name="away")
    rollouts = RolloutFates()
    rollouts.trained(["a", "b", "c"])
    with pytest.raises(ControlUnavailable):
        await rollouts.write(Registry(away, registry.keys), "run", 1)
    rollouts.trained(["d"])
    await rollouts.write(registry, "run", 1)
    await away.close()
    assert [each.requests for each in await told(registry) if each] == [("b", "c", "d")]
    assert "1 rollouts is lost" in caplog.text


def of(seq: int, *requests: str, tokens: int = 3, dropped: tuple[tuple[str, str], ...] = ()) -> Any:
    version = written(seq, requests)
    version.dropped = dropped
    return SimpleNamespace(model_version=version, input_ids=[0] * tokens)


async def test_samples_say_what_becomes_of_them(registry: Registry) -> None:
    publisher, rollouts = FakePublisher(), RolloutFates()
    pace = Pace(lambda: publisher.current_seq, max_staleness=1, timeout_s=1)
    for sync in (1, 2, 3):
        pace.submitted(sync, FakePublication(publisher, sync))
    held: queue.Queue[Any] = queue.Queue()
    for sample in (of(3, "a", "b"), of(1, "old"), of(2, "long", tokens=9), of(2, "c", dropped=(("x", "cut off"),))):
        held.put(sample)
    held.put(SimpleNamespace(model_version=3, input_ids=[]))  # another's worker, which tags with numbers alone
    trainer = SimpleNamespace(state=SimpleNamespace(global_step=5), args=SimpleNamespace(token_budget=8))
    samples = Samples(held, pace, rollouts, trainer)
    assert [samples.get(timeout=1).model_version for _ in range(5)] == [3, 1, 2, 2, 3]
    await rollouts.write(registry, "run", 1)
    entries = [each for each in await told(registry) if each]
    found = {name: (each.fate, each.reason, each.step) for each in entries for name in each.requests}
    assert found == {
        "a": ("trained", "", 5),
        "b": ("trained", "", 5),
        "old": ("dropped", "too old", 5),
        "long": ("dropped", "longer than token_budget", 5),
        "x": ("dropped", "cut off", 5),
        "c": ("trained", "", 5),
    }


def test_what_came_to_nothing_rides_with_one_sample_only() -> None:
    dropped, shared = Dropped(), written(7, ["a"])
    dropped.note(["x", ""], "why")
    samples = [SimpleNamespace(model_version=shared) for _ in range(2)]
    dropped.ride([])
    dropped.ride(samples)
    carried = [pickle.loads(pickle.dumps(sample.model_version)) for sample in samples]  # noqa: S301 - our own
    assert [(each, each.requests, each.dropped) for each in carried] == [
        (7, ("a",), (("x", "why"),)),
        (7, ("a",), ()),
    ]


@pytest.mark.trl
@pytest.mark.filterwarnings("default")
@pytest.mark.timeout(180)
def test_each_sample_that_training_takes_up_is_told_of_with_its_step(make_trainer: Callable[..., Any]) -> None:
    publisher, worker = FakePublisher(), StubWorker(BATCH)
    put, names = worker.rollout_buffer.put, count()

    def tagged(sample: Any) -> None:
        sample.model_version = written(sample.model_version, [f"r-{next(names)}"])
        put(sample)

    worker.rollout_buffer.put = tagged  # type: ignore[method-assign, assignment]
    make_trainer(publisher, rollout_worker=worker, steps=2).train()
    told = list(publisher.rollouts._waiting)
    assert [(name, fate, reason) for name, fate, _, reason in told] == [
        (f"r-{n}", "trained", "") for n in range(len(told))
    ]
    steps = [step for _, _, step, _ in told]
    assert steps == sorted(steps)
    assert set(steps) <= {0, 1, 2}
    assert len(told) >= 2 * BATCH
