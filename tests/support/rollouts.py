"""What stands in for TRL's rollout process in tests. Importable by name, as a spawned process needs it."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import queue
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import requests
from aiohttp import ClientSession

from adaptersync.trainer.conversations import Conversation, Conversations, present
from adaptersync.trainer.fates import Dropped
from adaptersync.trainer.leaving import leave_at_once, leave_with_parent

SAMPLE = b"x" * 20_000  # two hundred of them are far more than a pipe holds


class FillsQueues:
    """A rollout loop that hands over samples nobody reads until it is told to stop."""

    def __init__(self, *, arguments: str, rollout_buffer: Any, heartbeat_value: Any, **_: Any) -> None:
        self._buffer = rollout_buffer
        self._heartbeat = heartbeat_value
        self._stopped = False
        self._loop = SimpleNamespace(call_soon_threadsafe=lambda callback: callback())
        self._stop_event = SimpleNamespace(set=self._stop)

    def _stop(self) -> None:
        self._stopped = True

    def run(self) -> None:
        for _ in range(200):
            self._buffer.put(SAMPLE)
        while not self._stopped:
            self._heartbeat.value = time.time()
            time.sleep(0.01)
        leave_at_once()


class SaysClocks(FillsQueues):
    """Hands over what the trainer tells it, again and again."""

    def __init__(self, *, model_version_value: Any, **more: Any) -> None:
        super().__init__(**more)
        self._told = model_version_value

    def run(self) -> None:
        while not self._stopped:
            self._buffer.put((self._told.value, self._told.oldest))
            time.sleep(0.01)


def hands_over(queue: Any, samples: int, exit_s: float, fails: bool) -> None:
    """A process that makes samples; its interpreter takes so long to be taken down."""
    atexit.register(time.sleep, exit_s)
    for _ in range(samples):
        queue.put(SAMPLE)
    print("worked", end="")
    if fails:
        atexit.unregister(time.sleep)
        raise RuntimeError("no more")
    leave_at_once()


def begins_one(queue: Any, held: Any) -> None:
    """A trainer: it begins `hands_over_to_nobody`, and goes on."""
    context = multiprocessing.get_context("spawn")
    context.Process(target=hands_over_to_nobody, args=(queue, held), daemon=True).start()
    time.sleep(90)


def hands_over_to_nobody(queue: Any, held: Any) -> None:
    """Says once that it is there; `held` is closed when it is gone."""
    leave_with_parent()
    for _ in range(200):
        queue.put(SAMPLE)
    held.send(os.getpid())
    time.sleep(90)


class DiesBeforeItIsReady:
    """Cannot even be imported by the new process: unpickling the name runs this."""

    def __reduce__(self) -> Any:
        return (_die, ())


def _die() -> None:
    raise SystemExit(3)


class StubWorker:
    """A rollout worker without a process: every version it is told of yields some batches, tagged with it."""

    def __init__(self, batch: int, batches: int = 3) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []
        self.oldest: list[int] = []
        self.started_with: int | None = None
        self._batch = batch
        self._batches = batches

    def start(self) -> None:
        self.started_with = self.versions[-1]

    def stop(self) -> None: ...

    def check_health(self, stale_after_s: float) -> None:
        raise AssertionError("the trainer ran out of samples")

    def update_oldest_useful(self, version: int) -> None:
        self.oldest.append(version)

    def update_model_version(self, model_version: int) -> None:
        if self.versions and self.versions[-1] == model_version:
            return
        self.versions.append(model_version)
        for number in range(self._batches * self._batch if model_version else 0):  # of none, nothing is generated
            self.rollout_buffer.put(
                _sample(model_version, number, group=model_version * self._batches + number // self._batch)
            )


class AskingWorker(StubWorker):
    """Begins as the rollout process does, with a request to the router; its answer's version is kept."""

    def __init__(self, batch: int, url: str, run: str) -> None:
        super().__init__(batch)
        self.served = ""
        self._url = url
        self._run = run

    def start(self) -> None:
        super().start()
        body: Any = {"model": f"{self._run}@v{self.started_with}", "prompt": [15, 16, 17], "max_tokens": 2}
        give_up_at = time.monotonic() + 30.0
        while True:
            try:
                answer = requests.post(f"{self._url}/v1/completions", json=body, timeout=30)
                answer.raise_for_status()
            except requests.RequestException:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.1)
                continue
            self.served = answer.headers["x-adaptersync-version"]
            return


@contextlib.asynccontextmanager
async def rollout_loop(
    trl: ModuleType, url: str, run: str, promoted: int, shown: dict[str, str] | None = None
) -> AsyncIterator[Any]:
    """Our rollout loop as its process would have it, less the tokenizer and the dataset. `shown` are its headers."""
    loop_class = trl.RolloutWorker._loop_cls
    loop = loop_class.__new__(loop_class)
    loop.lora_name = run
    loop.vllm_server_url = url
    loop._model_version_value = SimpleNamespace(value=promoted, oldest=0)
    loop._counters = defaultdict(float)
    loop._written_by = {}
    loop._dropped = Dropped()
    loop._shown = shown or {}
    loop._conversations = Conversations(loop._model_version_value, cut_off=True, on_doomed=loop._count_doomed)
    loop.max_tokens, loop.temperature, loop.top_p, loop.top_k, loop.min_p = 8, 1.0, 1.0, 0, None
    loop.repetition_penalty, loop.request_timeout = 1.0, 5
    async with ClientSession() as loop.session:
        yield loop


async def one_turn(loop: Any, asks: int | None = None) -> Any:
    """Of a conversation that begins now; of one that asks for another version than the one promoted last."""
    present.set(Conversation(asks=loop.model_version if asks is None else asks))
    return await loop._generate_one_turn([1, 2, 3])


def _sample(model_version: int, number: int, group: int) -> Any:
    import numpy as np

    from adaptersync.trainer.seams import RolloutSample

    return RolloutSample(
        prompt=[],
        completion=[],
        input_ids=np.array([15, 16, 17, 18 + number % 4]),
        completion_mask=np.array([0, 0, 1, 1]),
        old_log_probs=np.array([0.0, 0.0, -4.0, -4.0], dtype=np.float32),
        advantage=1.0 if number % 2 else -1.0,
        model_version=model_version,
        group_id=group,
        metrics={"reward": 0.5, "adaptersync/tag_max": float(model_version)},
    )
