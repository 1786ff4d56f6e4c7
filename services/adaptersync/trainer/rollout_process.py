"""The rollout process of AdapterSyncGRPOTrainer: TRL's loop in it, and the trainer's handle on it.

Pins each conversation to a version and takes an answer only from that one; lets go of what is too old; begins and ends
without the waits of TRL's. Knows what the trainer tells it, over shared memory, of what is promoted and what is of use;
knows nothing of publishing.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import pickle
import queue
import tempfile
import time
from pathlib import Path
from typing import Any

from adaptersync.trainer.answers import Verdict, judge, model_name, pause_s, writer
from adaptersync.trainer.asking import ask
from adaptersync.trainer.conversations import Clocks, Conversation, Conversations, present
from adaptersync.trainer.fates import Dropped, Written, tag, written
from adaptersync.trainer.leaving import leave_at_once, leave_with_parent
from adaptersync.trainer.seams import AsyncRolloutWorker, _AsyncRolloutLoop, check_made
from adaptersync_core.api_keys import bearer
from adaptersync_core.errors import AdapterSyncError, Unroutable

logger = logging.getLogger(__name__)

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
DOOMED = "adaptersync/doomed_total"


class RolloutLoop(_AsyncRolloutLoop):
    """TRL's rollout loop, in its process: pins conversations to versions and judges every answer."""

    def __init__(self, *, arguments: str, **kwargs: Any) -> None:
        given = pickle.loads(Path(arguments).read_bytes())  # noqa: S301 - written by our parent
        self._shown = bearer(given.pop("key_file"))
        super().__init__(**given, **kwargs)
        check_made(self)
        self._dropped = Dropped()
        self._written_by: dict[str, Written] = {}  # rollout id → oldest version in it; emptied as groups are scored
        self._conversations = Conversations(
            self._model_version_value,
            cut_off=self.environment_factories is None,  # one is reset where TRL begins a conversation, nowhere else
            on_doomed=self._count_doomed,
        )

    def run(self) -> None:
        leave_with_parent()
        super().run()
        leave_at_once()

    def _count_doomed(self, conversation: Conversation) -> None:
        self._counters[DOOMED] += 1
        self._dropped.note(conversation.requests, "too old before it ended")

    @property
    def _request_model(self) -> str:
        return model_name(self.lora_name, present.get().asks)

    async def _generate_loop(self, stop_event: asyncio.Event) -> None:
        """Ends at once when told to stop; TRL waits for answers that nobody will train on."""
        generating = asyncio.create_task(super()._generate_loop(stop_event=stop_event))
        beside = [asyncio.create_task(self._conversations.watch()), asyncio.create_task(stop_event.wait())]
        try:
            await asyncio.wait((generating, beside[1]), return_when=asyncio.FIRST_COMPLETED)
            if generating.done() or not stop_event.is_set():
                await generating
        finally:
            for task in (generating, *beside):
                task.cancel()
            await asyncio.gather(generating, *beside, return_exceptions=True)

    async def _generate_one(self, *args: Any, **kwargs: Any) -> Any:
        begin = functools.partial(super()._generate_one, *args, **kwargs)
        conversation, result = await self._conversations.hold(begin)
        self._dropped.note(() if result[2] else conversation.requests, "nothing to train on")
        by = written(conversation.counts_as, conversation.requests)
        self._written_by.update({row.rollout_id: by for row in result[2]})
        return result

    async def _score_group(self, group: Any) -> Any:
        """Tag each row with the version that wrote it; TRL tags a group with the version its first member met."""
        samples = await super()._score_group(group)
        rollouts = [row.rollout_id for rows in group.completions_sequences for row in rows]
        return self._dropped.ride(tag(samples, rollouts, self._written_by))

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> Any:
        """One turn's answer from the version it asked for.

        Retries what can pass for `timeout` seconds; Unroutable when it does not, or when the fleet keeps answering
        with another version. That ends the rollout process, and with it the run, with the reason: TRL itself would
        ask 90 times over 505 s and has no way to go on without one member of a group.
        """
        conversation = present.get()
        give_up_at = time.monotonic() + timeout
        mismatches = attempt = 0
        while True:
            asked, name = conversation.asks, self._request_model
            url, asking = f"{self.vllm_server_url}{path}", {**payload, "model": name}
            answer, body = await ask(self.session, url, asking, timeout, self._shown)
            promoted = self.model_version
            verdict = judge(answer, run=self.lora_name, asked=asked, promoted=promoted)
            if verdict is Verdict.TAKE:
                conversation.took(writer(answer, self.lora_name) or asked, answer.request_id)
                return body
            self._dropped.note((answer.request_id,), answer.reason or f"asked for {name}, {answer.served} answered")
            if verdict is Verdict.MISMATCH:
                mismatches += 1
                logger.warning("asked for %s and %s answered: asking again", name, answer.served)
            elif verdict is Verdict.REPIN:
                conversation.asks = promoted
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


class RolloutWorker(AsyncRolloutWorker):
    """TRL's handle on the rollout process: our loop in it, a start that cannot hang, a stop that need not wait."""

    _loop_cls = RolloutLoop
    _loop_kwargs: dict[str, Any]

    def __init__(self, *, key_file: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._key_file = key_file
        check_made(self)
        self._not_started: Exception | None = None
        self._model_version_value = self._mp_ctx.Value(Clocks, 0, 0)

    def update_oldest_useful(self, version: int) -> None:
        """What is below this number will not be trained on."""
        self._model_version_value.oldest = version

    def start(self) -> None:
        """Start the process and wait until it is ready.

        TRL does it on the main process alone, while the others go on: what it fails with is raised by `check_start`.
        """
        self._not_started = None
        try:
            self._start()
        except Exception as error:
            self._not_started = error

    def check_start(self) -> None:
        if self._not_started is not None:
            raise self._not_started

    def _start(self) -> None:
        """Its arguments, a whole dataset among them, travel in a file.

        Through multiprocessing's pipe they would hang the trainer for ever when the process dies before reading them,
        as it does under a script that trains outside `if __name__ == "__main__"`: the writer holds the reading end
        open as well, so the write never fails.
        """
        arguments = self._loop_kwargs
        with tempfile.NamedTemporaryFile(prefix="adaptersync-rollouts-") as file:
            try:
                pickle.dump({**arguments, "key_file": self._key_file}, file)
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
