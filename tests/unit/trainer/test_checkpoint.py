"""What a checkpoint says of its adapter, and that training goes on with that adapter or not at all."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from adaptersync.trainer import checkpoint
from adaptersync.trainer.checkpoint import Checkpoint, adapter_in
from adaptersync_core.errors import AdapterInvalid, ConfigError
from adaptersync_core.manifest import CONFIG_FILE, WEIGHTS_FILE
from support.artifacts import small_adapter
from support.publications import FakePublisher
from support.rollouts import StubWorker
from support.trainers import BATCH, RUN


def changed(adapter: Path, **settings: object) -> Path:
    path = adapter / CONFIG_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return adapter


# what it says


def test_the_same_adapter_is_recognised_wherever_its_base_lies_and_whichever_peft_saved_it(tmp_path: Path) -> None:
    adapter = small_adapter(tmp_path / "adapter")
    held = adapter_in(adapter, run=RUN, epoch=1, seq=2)
    held.check(changed(adapter, base_model_name_or_path="/elsewhere", peft_version="9"))


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    held = adapter_in(small_adapter(tmp_path / "one", seed=1), run=RUN, epoch=1, seq=2)
    with pytest.raises(AdapterInvalid, match=r"not the checkpoint's adapter: other tensors.*run=sums") as refusal:
        held.check(small_adapter(tmp_path / "two", seed=2))
    assert "adaptersync.json" in refusal.value.next_step


def test_what_scales_the_same_tensors_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    adapter = changed(small_adapter(tmp_path / "one"), lora_alpha=16)
    held = adapter_in(adapter, run=RUN, epoch=1, seq=2)
    with pytest.raises(AdapterInvalid, match="lora_alpha is 32 and was 16"):
        held.check(changed(adapter, lora_alpha=32))


def test_it_reads_what_it_wrote_and_what_was_written_before_there_was_a_digest(tmp_path: Path) -> None:
    held = adapter_in(small_adapter(tmp_path / "adapter"), run=RUN, epoch=3, seq=5)
    held.write(tmp_path / "checkpoint-1")
    assert checkpoint.read(tmp_path / "checkpoint-1") == held
    assert checkpoint.read(tmp_path) is None
    (tmp_path / "adaptersync.json").write_text('{"run": "sums", "epoch": 3, "seq": 5, "digest": ""}')
    old = checkpoint.read(tmp_path)
    assert old == Checkpoint(run=RUN, epoch=3, seq=5, digest="")
    old.check(tmp_path / "adapter")  # nothing to compare with
    (tmp_path / "adaptersync.json").write_text("{")
    with pytest.raises(ConfigError, match=r"adaptersync\.json"):
        checkpoint.read(tmp_path)


def test_one_that_cannot_be_written_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = adapter_in(small_adapter(tmp_path / "adapter"), run=RUN, epoch=3, seq=5)
    held.write(tmp_path)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        Checkpoint(run=RUN, epoch=4, seq=0, digest="").write(tmp_path)
    assert checkpoint.read(tmp_path) == held


def test_the_order_of_sets_is_the_same_in_every_process(tmp_path: Path) -> None:
    one, two = (
        changed(small_adapter(tmp_path / f"{number}"), target_modules=modules)
        for number, modules in enumerate((["v_proj", "q_proj"], ["q_proj", "v_proj"]))
    )
    assert adapter_in(one).digest != adapter_in(two).digest
    for adapter in (one, two):
        checkpoint.settle_order(adapter)
    assert adapter_in(one).digest == adapter_in(two).digest
    assert json.loads((one / CONFIG_FILE).read_text())["target_modules"] == ["q_proj", "v_proj"]


# what a trainer makes of it

trainer = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]


def marked(test: Callable[..., None]) -> Callable[..., None]:
    for mark in trainer:
        test = mark(test)
    return test


def saved_by(made: Any, step: int = 2) -> Path:
    return Path(made.args.output_dir) / f"checkpoint-{step}"


@marked
def test_a_checkpoint_says_which_version_it_holds(make_trainer: Callable[..., Any]) -> None:
    publisher = FakePublisher()
    made = make_trainer(publisher)
    made.train()
    state = json.loads((saved_by(made) / "adaptersync.json").read_bytes())
    assert (state["run"], state["epoch"], state["seq"]) == (RUN, 7, 3)
    assert (state["scaling"]["r"], state["scaling"]["lora_alpha"]) == (4, 8)
    weights = (saved_by(made) / WEIGHTS_FILE).read_bytes()
    assert state["weights"] == sha256(weights).hexdigest()  # the checkpoint's own
    assert publisher.published[2].files[WEIGHTS_FILE] == weights
    assert not list(made._outgoing.iterdir())  # what was handed over
    assert made._saves == len(publisher.published)  # and nothing was gathered and saved twice


@marked
def test_a_checkpoint_waits_for_no_number_and_gets_it_later(make_trainer: Callable[..., Any]) -> None:
    """The store is slow, or Redis away: the version of the checkpoint's step is published one step later."""
    from transformers import TrainerCallback

    publisher = FakePublisher()
    publisher.on_their_way.add(3)
    made = make_trainer(publisher)
    numbers: list[int] = []

    class Looks(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            numbers.append(json.loads((saved_by(made) / "adaptersync.json").read_bytes())["seq"])

    made.add_callback(Looks())
    made.train()
    assert numbers == [0, 3]


@marked
def test_between_two_syncs_a_checkpoint_holds_what_was_never_published(make_trainer: Callable[..., Any]) -> None:
    publisher = FakePublisher()
    made = make_trainer(publisher, sync_steps=3, rollout_worker=StubWorker(BATCH, batches=9))
    made.train()
    state = json.loads((saved_by(made) / "adaptersync.json").read_bytes())
    assert [one.step for one in publisher.published] == [0, 3]
    assert state["seq"] == 0
    assert not list(made._outgoing.iterdir())  # what was saved to be hashed, and what was handed over
    assert state["weights"] == sha256((saved_by(made) / WEIGHTS_FILE).read_bytes()).hexdigest()


@marked
def test_a_resumed_trainer_publishes_the_checkpoints_bytes_first(make_trainer: Callable[..., Any]) -> None:
    first = make_trainer(FakePublisher())
    first.train()
    publisher = FakePublisher(last=40)
    second = make_trainer(publisher, steps=4)
    second.train(resume_from_checkpoint=str(saved_by(first)))
    assert [one.step for one in publisher.published] == [2, 3, 4]
    assert publisher.published[0].files[WEIGHTS_FILE] == (saved_by(first) / WEIGHTS_FILE).read_bytes()
    assert publisher.published[1].files[WEIGHTS_FILE] != publisher.published[0].files[WEIGHTS_FILE]
    assert second.rollout_worker.started_with == 41  # nothing is generated before they are promoted
    assert second.rollout_worker.versions == [41, 42, 43]


@marked
@pytest.mark.parametrize("what", ["tensors", "alpha"])
def test_a_trainer_that_loaded_something_else_publishes_nothing(
    make_trainer: Callable[..., Any], tmp_path: Path, what: str
) -> None:
    first = make_trainer(FakePublisher())
    first.train()
    place = saved_by(first)
    if what == "tensors":  # another step's, as a copy that went wrong leaves them
        (place / WEIGHTS_FILE).write_bytes((saved_by(first, 3) / WEIGHTS_FILE).read_bytes())
    publisher = FakePublisher()
    second = make_trainer(publisher, alpha=8 if what == "tensors" else 16)
    with pytest.raises(AdapterInvalid, match="other tensors" if what == "tensors" else "lora_alpha is 16 and was 8"):
        second.train(resume_from_checkpoint=str(place))
    assert publisher.published == []
    assert second.rollout_worker.started_with is None
    assert publisher.closed


@marked
def test_a_checkpoint_of_another_trainer_is_gone_on_from_and_said_to_be(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    first = make_trainer(FakePublisher())
    first.train()
    (saved_by(first) / "adaptersync.json").unlink()
    publisher = FakePublisher()
    with caplog.at_level(logging.WARNING, logger="adaptersync.trainer.trl"):
        make_trainer(publisher).train(resume_from_checkpoint=str(saved_by(first)))
    assert "does not say which adapter it holds" in caplog.text
    assert publisher.published
