"""The seam with TRL's trainer: clocks, samples, errors, start and stop. TRL is real, servers and fleet are not."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from adaptersync_core.config import Config
from adaptersync_core.errors import AdapterSyncError, ConfigError, NameInvalid, PublicationFailed
from support.publications import FakePublisher
from support.rollouts import StubWorker
from support.trainers import BATCH, RUN

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]


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
