"""TRL's AsyncGRPOTrainer, publishing adapters through adaptersync.

    from adaptersync.trainer.trl import AdapterSyncGRPOTrainer

    trainer = AdapterSyncGRPOTrainer(run="sums", model=..., peft_config=..., args=..., ...)
    trainer.train()

A script for TRL changes the class and names the run; `args.vllm_server_base_url` is the router's address. How TRL works
is known here, where importing loads it, and in `rollout_process`; where it keeps what is used of it, in `seams`.
What is changed in TRL:

- A sync gathers the adapter and saves it into a directory of its own; all else is done by the publisher's thread
  (`outgoing`). Nothing is paused and no server is told to load anything.
- Training goes on while the fleet stages, proves and promotes (`pace` says how far). `trainer.model_version` counts
  syncs, the rollout worker's is the number of the version last promoted; a sample is as old as the syncs since its
  version's.
- A conversation asks for the version that was current when it began, until its end, and trains on an answer only if
  the router says that this version wrote it (`answers`). Once that is too old to be trained on, the conversation is cut
  off, its request with it, and begun again; except in an environment, which only TRL can reset.
- A checkpoint says which adapter it holds (`checkpoint`); training goes on from it with that adapter or not at all.
- An error on one process is raised on all, so that none waits for the others for ever; but not from within a step.
- The rollout process is drained when it is stopped; TRL waits 15 s for it whenever its queues hold something. One
  that dies while it starts fails the run; TRL can hang.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from adaptersync.trainer import checkpoint
from adaptersync.trainer.figures import Figures, Saving
from adaptersync.trainer.pace import Counts, Pace
from adaptersync.trainer.publication import Publication
from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync.trainer.rollout_process import DOOMED, RolloutWorker
from adaptersync.trainer.samples import Samples
from adaptersync.trainer.seams import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    check_made,
    check_seams,
    gather_object,
)
from adaptersync.trainer.submissions import Submission
from adaptersync_core.config import Config, load_config
from adaptersync_core.errors import ConfigError, PublicationFailed
from adaptersync_core.identity import check_run

logger = logging.getLogger(__name__)

UNTOLD = 64  # publications without an outcome whose phases may still be logged
TOLD = frozenset({"gather_s", "save_s", "queued_s", "hashed_s", "stored_s", "promoted_s"})  # of a version's phases
SHOWN = ("published", "promoted", "superseded", "rolled_back", "replaced", "failed")  # counts among TRL's metrics


@contextlib.contextmanager
def _our_rollout_worker(key_file: str = "") -> Iterator[None]:
    """While TRL's constructor runs, have it make our worker and not insist on vLLM, which nothing here uses."""
    theirs = async_grpo_trainer.AsyncRolloutWorker, async_rollout_worker.is_vllm_available
    async_grpo_trainer.AsyncRolloutWorker = functools.partial(RolloutWorker, key_file=key_file)
    async_rollout_worker.is_vllm_available = lambda *_, **__: True
    try:
        yield
    finally:
        async_grpo_trainer.AsyncRolloutWorker, async_rollout_worker.is_vllm_available = theirs


class Batches(IterableDataset):
    """What TRL makes of the samples. Ends when there can be no more of it, and says why when it is asked.

    accelerate deals batches out from the main process. It tells the others of an end, except before the first batch,
    but of an error it does not: they would wait for their part as long as the main process lives.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._source = batches
        self._begun: Iterator[Any] = iter(())
        self._failure: Exception | None = None

    def begin(self) -> None:
        """Wait for an epoch's first batch; raises what keeps it from coming."""
        source = iter(self._source)
        self._begun = itertools.chain(list(itertools.islice(source, 1)), source)

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._begun
        except Exception as error:  # whatever it is: `check` raises it
            self._failure = error

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


class AdapterSyncGRPOTrainer(AsyncGRPOTrainer):
    """TRL's trainer for a run of an adaptersync fleet; takes what TRL's takes, and:

    run: the run's name, by default `[trainer] run`; its versions are `{run}-v{seq}-{digest}`, also after a restart.
    adaptersync_config: settings of the fleet; by default from the usual file and environment.

    `args.max_staleness` is also how many promotions back the fleet keeps versions of this run, and
    `args.vllm_server_base_url`, where it is left at TRL's default, becomes `[trainer] router_url`.

    A `rollout_worker` of your own must ask for `{run}@v{n}`, with the n that `update_model_version` tells it, and tag
    samples with it; 0 says that none is served now, and nothing to be asked. If it has an `update_oldest_useful(n)`, it
    is told below which n samples will be dropped.
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
        with _our_rollout_worker(self._adaptersync.trainer.router_key_file):
            super().__init__(*args, **kwargs)
        check_made(self)
        self._batches = Batches([])
        self._epoch: Any = None  # what is being read
        self._figures = Figures(inflight_max=self.args.max_inflight_tasks, queued_max=self.args.queue_maxsize)
        self._untold: deque[Submission] = deque(maxlen=UNTOLD)
        self._pace = self._new_pace(Counts())
        self._resumed: checkpoint.Checkpoint | None = None
        self._outgoing = Path(self._lora_dir) / f"{self.run}-outgoing"
        self._saves = 0  # the same on every process
        self._held: checkpoint.Checkpoint | None = None  # what the next checkpoint holds, if it is of this step:
        self._held_at = -1  # the same on every process
        self._numbers = checkpoint.Numbers()

    @property
    def counts(self) -> Counts:
        """What became of this run's versions so far (on the main process)."""
        return self._pace.counts

    @property
    def last_publication(self) -> Publication | None:
        """What was handed over last, if it is published."""
        return self._pace.newest.publication if self._pace.newest else None

    def _new_pace(self, counts: Counts) -> Pace:
        return Pace(
            lambda: self._publisher.current_seq if self._publisher else None,
            max_staleness=self.args.max_staleness,
            timeout_s=self._adaptersync.trainer.promotion_timeout_s,
            counts=counts,
        )

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
        self._held_at = -1
        # Opened here and not by the constructor: it takes the run over from whoever else is training it.
        self._on_main(lambda: self._open(kwargs.get("resume_from_checkpoint")))
        try:
            output = super()._inner_training_loop(*args, **kwargs)
            self._on_main(self._finish)
            return output
        finally:
            if self._publisher is not None:
                self._publisher.close()

    def _finish(self) -> None:
        self._pace.settle()
        self._numbers.look()

    def _open(self, resumed: str | None) -> None:
        self._resumed = checkpoint.read(Path(resumed)) if resumed else None
        if resumed and self._resumed is None:
            logger.warning("%s does not say which adapter it holds: what was loaded is taken for it", resumed)
        shutil.rmtree(self._outgoing, ignore_errors=True)  # left by a process of this run that was killed
        self._pace = self._new_pace(self.counts)
        self._publisher = self._open_publisher()
        self._publisher.on_promoted(lambda _seq: self._follow())

    def get_train_dataloader(self) -> Any:
        if self.accelerator.is_main_process:
            fates = self._publisher.rollouts if self._publisher else None
            self.rollout_queue = Samples(self.rollout_worker.rollout_buffer, self._pace, fates, self)
        theirs, async_grpo_trainer.DataLoader = async_grpo_trainer.DataLoader, self._loader
        try:
            return super().get_train_dataloader()
        finally:
            async_grpo_trainer.DataLoader = theirs

    def _loader(self, dataset: Any, **options: Any) -> Any:
        self._batches = Batches(dataset)
        return DataLoader(self._batches, **options)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Only the main process reads samples: what goes wrong there is raised on all, when all are here."""
        if epoch_iterator is not self._epoch:
            self._epoch = epoch_iterator
            self._on_main(self._begin)
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if len(batches) < num_batches:
            self._on_main(self._batches.check)
        return batches, items

    def _begin(self) -> None:
        if isinstance(self.rollout_worker, RolloutWorker):
            self.rollout_worker.check_start()
        self._batches.begin()

    def _follow(self) -> None:
        """Let the rollout worker ask for what the fleet serves by now. Called by this thread and the publisher's."""
        with self._following:  # so that the later caller's view is the one that stays
            if self._publisher is not None and self.rollout_worker is not None:
                self.rollout_worker.update_model_version(self._publisher.current_seq or 0)

    def _doom(self) -> None:
        """Let the rollout worker give up what would be dropped, if it can."""
        if hasattr(self.rollout_worker, "update_oldest_useful"):
            self.rollout_worker.update_oldest_useful(self._pace.oldest_useful)

    def _sync_weight(self) -> None:
        with self._figures.sync():
            super()._sync_weight()

    def _sync_weight_lora(self, t0: float) -> tuple[float, float, float]:
        """Save and hand over; the marks are TRL's: end of the pause (there is none), of the barrier, of the saving."""
        self.accelerator.wait_for_everyone()
        at_barrier = time.time()
        directory, timings = self._save_adapter()
        at_saved = time.time()
        if self.control.should_save:
            self._held_at = self.state.global_step
        self._on_main(lambda: self._submit(directory, timings))
        return t0, at_barrier, at_saved

    def _save_adapter(self) -> tuple[Path, dict[str, float]]:
        """Into a directory of its own, and how long that took.

        On every process: a sharded parameter is put together by all of them.
        """
        self._saves += 1
        directory = self._outgoing / str(self._saves)
        model = Saving(self.accelerator.unwrap_model(self.model))

        def save() -> None:
            async_grpo_trainer.save_lora_adapter(model, self.accelerator, self._adapter_name, str(directory))
            if self.accelerator.is_main_process:
                checkpoint.settle_order(directory)

        self._everywhere(save)
        return directory, model.timings()

    def _submit(self, directory: Path, timings: dict[str, float]) -> None:
        assert self._publisher is not None  # noqa: S101 - opened before the training loop that calls this
        if self._resumed is not None:
            self._resumed.check(directory)
            self._resumed = None
        self._numbers.look()
        step = self.state.global_step
        if self._held_at == step:
            self._hold(directory)
        timings = self._figures.timings(step) | timings
        submission = self._publisher.submit(
            directory, step=step, timings=timings, load=self._figures.load(), remove=True
        )
        self.model_version += 1
        self._pace.submitted(self.model_version, submission)
        self._doom()
        waited_s = self._pace.wait()
        self._follow()
        self._doom()
        metrics = self._metrics["train"]
        metrics["adaptersync/promotion_wait_s"].append(waited_s)
        metrics["adaptersync/ahead_max"].append(float(self._pace.ahead))
        self._untold.append(submission)
        while self._untold and self._untold[0].outcome is not None:  # the later phases become known after the step
            ended = self._untold.popleft().publication
            told = ended.timings if ended else {}
            for name in TOLD & told.keys():
                metrics[f"adaptersync/{name}"].append(told[name])

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
        """What it holds was handed over in this very step; where it was not, it is saved once more to be hashed.

        What it holds is written first: one killed in between leaves no checkpoint that does not say so.
        """
        if self._held_at != self.state.global_step:
            directory, _ = self._save_adapter()
            self._on_main(lambda: self._hold(directory))
            shutil.rmtree(directory, ignore_errors=True)
        place = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self._on_main(lambda: self._describe(place))
        save = super()._save_checkpoint
        self._everywhere(lambda: save(model, trial))
        self._numbers.look()

    def _hold(self, directory: Path) -> None:
        epoch = self._publisher.epoch if self._publisher else 0
        self._held = checkpoint.adapter_in(directory, run=self.run, epoch=epoch)

    def _describe(self, place: Path) -> None:
        assert self._held is not None  # noqa: S101 - held just before
        self._held.write(place)
        newest = self._pace.newest
        if newest is not None and newest.step == self.state.global_step:
            self._numbers.want(place, self._held, newest)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        counts = self.counts
        if self.accelerator.is_main_process:
            for name in SHOWN:
                logs[f"adaptersync/{name}"] = getattr(counts, name)
            if self._publisher is not None:
                logs["adaptersync/publish_retries"] = self._publisher.retries
        super().log(logs, start_time)  # adds what the rollout process reported since the last time
        self._figures.logged(logs)
        counts.served_mismatch += int(logs.get("adaptersync/served_mismatch_total") or 0)
        counts.repinned += int(logs.get("adaptersync/repinned_total") or 0)
        counts.doomed += int(logs.get(DOOMED) or 0)
