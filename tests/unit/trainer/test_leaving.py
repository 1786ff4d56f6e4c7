"""A process that leaves hands over what it made, and waits for nothing else; it leaves when who made it is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import pytest

from support.rollouts import SAMPLE, begins_one, hands_over

SAMPLES = 200
LONG_S = 45.0


@pytest.mark.parametrize("fails", [False, True])
def test_all_it_made_is_handed_over_and_then_it_is_gone(fails: bool, capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=hands_over, args=(queue, SAMPLES, LONG_S, fails), daemon=True)
    began = time.monotonic()
    process.start()
    assert [queue.get(timeout=40) for _ in range(SAMPLES)] == [SAMPLE] * SAMPLES
    process.join(40)
    assert process.exitcode == int(fails)
    assert time.monotonic() - began < LONG_S
    said = capfd.readouterr()
    sys.stderr.write(said.err)
    assert said.out == "worked"
    assert ("no more" in said.err) == fails


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_is_gone_soon_after_the_trainer_that_was_killed(how: signal.Signals) -> None:
    """Though its queue is full, and nobody will read it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    queue = context.Queue()  # which is gone with the last who has it
    trainer = context.Process(target=begins_one, args=(queue, theirs))
    trainer.start()
    theirs.close()
    assert ours.poll(40)
    assert ours.recv() != trainer.pid
    assert trainer.pid is not None
    os.kill(trainer.pid, how)
    trainer.join(20)
    assert trainer.exitcode == -how
    assert ours.poll(20)
    with pytest.raises(EOFError):
        ours.recv()
