"""TRL's AsyncGRPOTrainer, publishing adapters through adaptersync.

    from adaptersync.trainer.trl import AdapterSyncGRPOTrainer

    trainer = AdapterSyncGRPOTrainer(run="sums", model=..., peft_config=..., args=..., ...)
    trainer.train()

A script for TRL changes the class and names the run; `args.vllm_server_base_url` is the router's address. The only
module that touches TRL, which is loaded by importing this one. What it changes in TRL:

- A sync saves the adapter and publishes it. Nothing is paused and no server is told to load anything.
- Training goes on while the fleet stages, proves and promotes (`pace` says how far). `trainer.model_version` is the
  sequence number last published, the rollout worker's is the one last promoted.
- A conversation asks for the version that was current when it began, until its end, and trains on an answer only if
  the router says that this version wrote it (`answers`).
- An error on one process is raised on all, so that none waits for the others for ever.
- The rollout process is drained when it is stopped; TRL waits 15 s for it whenever its queues hold something. One
  that dies while it starts fails the run; TRL can hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import pickle
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from adaptersync.trainer.answers import Answer, Verdict, judge, model_name, pause_s
from adaptersync.trainer.pace import Counts, Pace
from adaptersync.trainer.publisher import AdapterPublisher, Publication
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import AdapterSyncError, ConfigError, PublicationFailed, Unroutable
from adaptersync_core.headers import VERSION, VOIDED
from adaptersync_core.identity import check_run

TRL_NEEDED = "adaptersync works with trl 1.16: pip install 'trl>=1.16,<1.17' 'peft>=0.19'"

try:
    from accelerate.utils import gather_object
    from trl.experimental.async_grpo import AsyncGRPOConfig, async_grpo_trainer, async_rollout_worker
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
    from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, _AsyncRolloutLoop
except ImportError as error:
    raise ImportError(f"{TRL_NEEDED} ({error})") from error

logger = logging.getLogger(__name__)

STATE_FILE = "adaptersync.json"  # in a checkpoint, beside TRL's rollout_state.json
STOP_S = 15.0  # for the rollout process to end while it is drained; what it still makes is not wanted
LULL_S = 0.02  # without anything to read: then a queue is taken as drained, for now
MISMATCHES = 3  # wrong versions for one request: then the fleet is at fault, not chance
# The rollout process reports its counts as metrics, and these appear among TRL's.
COUNTED_AS = {
    Verdict.MISMATCH: "adaptersync/served_mismatch_total",
    Verdict.REPIN: "adaptersync/repinned_total",
    Verdict.RETRY: "rollout/vllm_retry_total",
    Verdict.GIVE_UP: "adaptersync/refused_total",
}

# What is overridden or replaced below. TRL keeps these under `experimental`, where any release may move them.
SEAMS: dict[Any, tuple[str, ...]] = {
    AsyncGRPOTrainer: (
        "_init_lora_sync",
        "_sync_weight",
        "_sync_weight_lora",
        "_save_checkpoint",
        "_inner_training_loop",
        "log",
    ),
    AsyncRolloutWorker: ("_loop_cls", "start", "stop", "check_health", "update_model_version"),
    _AsyncRolloutLoop: ("_request_model", "_generate_one", "_generate_one_turn", "_post", "_score_group"),
    async_grpo_trainer: ("AsyncRolloutWorker", "save_lora_adapter", "validate_lora_for_vllm_sync"),
    async_rollout_worker: ("is_vllm_available",),
}


def check_seams(seams: dict[Any, tuple[str, ...]] | None = None) -> None:
    """ConfigError if the TRL that is installed is built another way than the one this module knows."""
    seams = SEAMS if seams is None else seams
    missing = [
        f"{place.__name__}.{name}" for place, names in seams.items() for name in names if not hasattr(place, name)
    ]
    if missing:
        raise ConfigError(f"this TRL has no {', '.join(missing)}", next_step=TRL_NEEDED)


@dataclass(slots=True)
class Conversation:
    """Which version a conversation asks for, and the oldest one that wrote a part of it."""

    asks: int
    oldest: int


_conversation: ContextVar[Conversation] = ContextVar("conversation")


class RolloutLoop(_AsyncRolloutLoop):
    """TRL's rollout loop, in its process: pins conversations to versions and judges every answer."""

    def __init__(self, *, arguments: str, **kwargs: Any) -> None:
        super().__init__(**pickle.loads(Path(arguments).read_bytes()), **kwargs)  # noqa: S301 - written by our parent
        self._written_by: dict[str, int] = {}  # rollout id → oldest version in it; emptied as groups are scored

    @property
    def _request_model(self) -> str:
        return model_name(self.lora_name, _conversation.get().asks)

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        current = self.model_version
        conversation = Conversation(asks=current, oldest=current)
        _conversation.set(conversation)  # every conversation is a task, and so has a context of its own
        result = await super()._generate_one(*args, **kwargs)
        for row in result[2]:
            self._written_by[row.rollout_id] = conversation.oldest
        return result

    async def _score_group(self, group: Any) -> Any:
        """Tag each row with the version that wrote it; TRL tags a group with the version its first member met."""
        samples = await super()._score_group(group)
        rollouts = [row.rollout_id for rows in group.completions_sequences for row in rows]
        for sample, rollout in zip(samples, rollouts, strict=True):
            sample.model_version = self._written_by[rollout]
        for rollout in set(rollouts):
            del self._written_by[rollout]
        return samples

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        """One turn's answer from the version it asked for.

        Retries what can pass for `timeout` seconds; Unroutable when it does not, or when the fleet keeps answering
        with another version. That ends the rollout process, and with it the run, with the reason: TRL itself would
        ask 90 times over 505 s and has no way to go on without one member of a group.
        """
        conversation = _conversation.get()
        give_up_at = time.monotonic() + timeout
        mismatches = attempt = 0
        while True:
            asked, name = conversation.asks, self._request_model
            answer, body = await self._ask(path, {**payload, "model": name}, timeout)
            verdict = judge(answer, run=self.lora_name, asked=asked, promoted=self.model_version)
            if verdict is Verdict.TAKE:
                conversation.oldest = min(conversation.oldest, asked)
                return body
            if verdict is Verdict.MISMATCH:
                mismatches += 1
                logger.warning("asked for %s and %s answered: asking again", name, answer.served)
            elif verdict is Verdict.REPIN:
                conversation.asks = self.model_version
            self._counters[COUNTED_AS[verdict]] += 1
            attempt += 1
            wait_s = pause_s(attempt, answer.retry_after_s)
            too_long = time.monotonic() + wait_s > give_up_at
            if verdict is Verdict.GIVE_UP or mismatches >= MISMATCHES or too_long:
                raise Unroutable(
                    f"no answer to train on: {answer.reason or f'{answer.served} answered instead'}",
                    status=answer.status,
                    model=name,
                    attempts=attempt,
                )
            await asyncio.sleep(wait_s)

    async def _ask(self, path: str, payload: dict[str, Any], timeout: float) -> tuple[Answer, Any]:
        try:
            async with self.session.post(
                f"{self.vllm_server_url}{path}", json=payload, timeout=aiohttp.ClientTimeout(total=timeout)
            ) as response:
                raw = await response.read()
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            return Answer(status=0, reason=f"{type(error).__name__}: {error}"), None
        if response.status != 200:
            retry_after = response.headers.get("Retry-After", "")
            return Answer(
                status=response.status,
                retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
                reason=raw[:300].decode(errors="replace"),
            ), None
        try:
            body = msgspec.json.decode(raw)
            served = response.headers.get(VERSION) or body["model"]
            aborted = body["choices"][0].get("finish_reason") == "abort"
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
            return Answer(status=0, reason=f"not a completion ({type(error).__name__}: {error})"), None
        voided = VOIDED in response.headers
        reason = "aborted by vLLM" if aborted else f"{served} was found bad meanwhile" if voided else ""
        return Answer(status=200, served=served, aborted=aborted, voided=voided, reason=reason), body


class RolloutWorker(AsyncRolloutWorker):
    """TRL's handle on the rollout process: our loop in it, a start that cannot hang, a stop that need not wait."""

    _loop_cls = RolloutLoop
    _loop_kwargs: dict[str, Any]

    def start(self) -> None:
        """Start the process and wait until it is ready.

        Its arguments, a whole dataset among them, travel in a file. Through multiprocessing's pipe they would hang the
        trainer for ever when the process dies before reading them, as it does under a script that trains outside
        `if __name__ == "__main__"`: the writer holds the reading end open as well, so the write never fails.
        """
        arguments = self._loop_kwargs
        with tempfile.NamedTemporaryFile(prefix="adaptersync-rollouts-") as file:
            try:
                pickle.dump(arguments, file)
            except (pickle.PicklingError, AttributeError, TypeError):
                super().start()  # says which arguments cannot be sent to a process, and why
                raise
            file.flush()
            self._loop_kwargs = {"arguments": file.name}
            try:
                super().start()
            finally:
                self._loop_kwargs = arguments

    def stop(self) -> None:
        process = self._process
        if process is not None and process.pid is not None:
            self._stop_event_mp.set()
            deadline = time.monotonic() + STOP_S
            # The process cannot end while its queues' feeder threads have something left to hand over.
            while process.is_alive() and time.monotonic() < deadline:
                for unread in (self.rollout_buffer, self.metrics_queue):
                    _drain(unread, deadline)
                process.join(LULL_S)
            if process.is_alive():
                logger.warning("rollout process did not end within %.0f s: terminating it", STOP_S)
                process.terminate()
        super().stop()

    def check_health(self, stale_after_s: float) -> None:
        """Called when the trainer has waited 5 s for a sample; says in one line why there will be no more."""
        try:
            super().check_health(stale_after_s)
        except RuntimeError as error:
            why = str(error.__cause__ or error).partition("\n")[0]
            raise AdapterSyncError(f"the rollout process ended: {why}", next_step="its traceback is above") from error


def _drain(unread: Any, deadline: float) -> None:
    with contextlib.suppress(queue.Empty):
        while time.monotonic() < deadline:
            unread.get(timeout=LULL_S)


@contextlib.contextmanager
def _our_rollout_worker() -> Iterator[None]:
    """While TRL's constructor runs, have it make our worker and not insist on vLLM, which nothing here uses."""
    theirs = async_grpo_trainer.AsyncRolloutWorker, async_rollout_worker.is_vllm_available
    async_grpo_trainer.AsyncRolloutWorker = RolloutWorker
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    try:
        yield
    finally:
        async_grpo_trainer.AsyncRolloutWorker, async_rollout_worker.is_vllm_available = theirs


class AdapterSyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's trainer for a run of an adaptersync fleet; takes what TRL's takes, and:

    run: the run's name, by default `[trainer] run`; its versions are `{run}-v{seq}-{digest}`, also after a restart.
    adaptersync_config: settings of the fleet; by default from the usual file and environment.

    `args.max_staleness` is also how many promotions back the fleet keeps versions of this run, and
    `args.vllm_server_base_url`, where it is left at TRL's default, becomes `[trainer] router_url`.

    A `rollout_worker` of your own must ask for `{run}@v{n}`, with the n that `update_model_version` tells it.
    """

    def __init__(
        self,
        *args: Any,
        run: str | None = None,
        adaptersync_config: Config | None = None,
        **kwargs: Any,
    ) -> None:
        check_seams()
        given = inspect.signature(AsyncGRPOTrainer.__init__).bind(self, *args, **kwargs).arguments
        if given.get("weight_transfer") is not None:
            raise ConfigError("weight_transfer= replaces the sync that adaptersync does", next_step="leave it out")
        if given.get("peft_config") is None:
            raise ConfigError("adaptersync moves adapters only", next_step="pass peft_config=LoraConfig(...)")
        self._adaptersync = adaptersync_config or load_config()
        name = run or self._adaptersync.trainer.run
        if not name:
            raise ConfigError("no run name", next_step="give run=..., or set trainer.run")
        self.run = check_run(name, base_model=self._adaptersync.group.base_model)
        self._publisher: AdapterPublisher | None = None
        self._following = threading.Lock()
        with _our_rollout_worker():
            super().__init__(*args, **kwargs)
        self._pace: Pace[Publication] = Pace(
            lambda: self._publisher.current_seq if self._publisher else None,
            max_staleness=self.args.max_staleness,
            timeout_s=self._adaptersync.trainer.promotion_timeout_s,
        )

    @property
    def counts(self) -> Counts:
        """What became of this run's versions so far (on the main process)."""
        return self._pace.counts

    @property
    def last_publication(self) -> Publication | None:
        return self._pace.newest

    def _init_lora_sync(self, model: Any) -> bool:
        """TRL probes a server here; the fleet need not be up yet, and the agents check what it can serve."""
        async_grpo_trainer.validate_lora_for_vllm_sync(model)
        self._lora_name = self.run  # the worker, which TRL makes next, begins the names it asks for with it
        if self.args.vllm_server_base_url == AsyncGRPOConfig.vllm_server_base_url:
            self.args.vllm_server_base_url = self._adaptersync.trainer.router_url
            self.vllm_client.server_url = self.args.vllm_server_base_url
        return True

    def _open_publisher(self) -> AdapterPublisher:
        # Versions must stay served for as long as TRL may still ask for them.
        return AdapterPublisher(self._adaptersync, self.run, max_staleness=self.args.max_staleness)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # Opened here and not by the constructor: it takes the run over from whoever else is training it.
        self._on_main(self._open)
        try:
            output = super()._inner_training_loop(*args, **kwargs)
            self._on_main(self._pace.settle)
            return output
        finally:
            if self._publisher is not None:
                self._publisher.close()

    def _open(self) -> None:
        self._publisher = self._open_publisher()
        self._publisher.on_promoted(lambda _seq: self._follow())

    def _follow(self) -> None:
        """Let the rollout worker ask for what the fleet serves by now. Called by this thread and the publisher's."""
        with self._following:  # so that the later caller's view is the one that stays
            seq = self._publisher.current_seq if self._publisher else None
            if seq is not None and self.rollout_worker is not None:
                self.rollout_worker.update_model_version(seq)

    def _sync_weight_lora(self, t0: float) -> tuple[float, float, float]:
        """Save and publish; the marks are TRL's: end of the pause (there is none), of the barrier, of the saving."""
        self.accelerator.wait_for_everyone()
        at_barrier = time.time()
        directory = Path(self._lora_dir) / "outgoing"  # the publisher keeps its own copy
        model = self.accelerator.unwrap_model(self.model)
        # On every process: a sharded parameter is put together by all of them.
        self._everywhere(
            lambda: async_grpo_trainer.save_lora_adapter(model, self.accelerator, self._adapter_name, str(directory))
        )
        at_saved = time.time()
        self._on_main(lambda: self._publish(directory, {"save_s": at_saved - at_barrier}))
        return t0, at_barrier, at_saved

    def _publish(self, directory: Path, timings: dict[str, float]) -> None:
        assert self._publisher is not None  # noqa: S101 - opened before the training loop that calls this
        publication = self._publisher.publish(directory, step=self.state.global_step, timings=timings)
        self.model_version = publication.seq
        waited_s = self._pace.published(publication)
        self._follow()
        metrics = self._metrics["train"]
        metrics["adaptersync/promotion_wait_s"].append(waited_s)
        metrics["adaptersync/ahead_max"].append(float(publication.seq - (self._publisher.current_seq or 0)))

    def _on_main(self, action: Callable[[], None]) -> None:
        self._everywhere(action if self.accelerator.is_main_process else lambda: None)

    def _everywhere(self, action: Callable[[], None]) -> None:
        """Run `action`; if it failed on any process, fail on all of them."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:  # whatever it is, the others must hear of it before it is raised
            failure = error
        told = gather_object([f"{type(failure).__name__}: {failure}" if failure else ""])
        if failure is not None:
            raise failure
        others = next((message for message in told if message), None)
        if others is not None:
            raise PublicationFailed(f"another process of this trainer failed: {others}", run=self.run)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        newest = self._pace.newest
        if self.accelerator.is_main_process and self._publisher is not None and newest is not None:
            directory = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            directory.mkdir(parents=True, exist_ok=True)
            state = {"run": self.run, "epoch": self._publisher.epoch, "seq": newest.seq}
            (directory / STATE_FILE).write_bytes(msgspec.json.encode(state))
        super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        counts = self.counts
        if self.accelerator.is_main_process:
            for name in ("published", "promoted", "superseded", "rolled_back"):
                logs[f"adaptersync/{name}"] = getattr(counts, name)
        super().log(logs, start_time)  # adds what the rollout process reported since the last time
        counts.served_mismatch += int(logs.get("adaptersync/served_mismatch_total") or 0)
        counts.repinned += int(logs.get("adaptersync/repinned_total") or 0)
