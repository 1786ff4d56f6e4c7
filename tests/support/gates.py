"""Functions that a gate may ask, as a user writes them; what they shall do stands in a file beside the store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from adaptersync.jobs.gate import Candidate, Verdict


def passes(candidate: Candidate) -> Verdict:
    assert (candidate.directory / "adapter_model.safetensors").is_file()
    return Verdict(outcome="pass", reason=f"{candidate.run} is good")


def fails(candidate: Candidate) -> Verdict:
    return Verdict(outcome="fail", reason="answers too long")


def cannot_say(candidate: Candidate) -> Verdict:
    return Verdict(outcome="inconclusive", reason="too few samples")


def breaks(candidate: Candidate) -> Verdict:
    raise ValueError("no such benchmark")


def answers_nonsense(candidate: Candidate) -> str:
    return "yes"


def sleeps(candidate: Candidate) -> Verdict:
    """Longer than any gate has."""
    time.sleep(3600)
    return Verdict(outcome="pass")


def waits(candidate: Candidate) -> Verdict:
    """The first time it is asked, until it is killed; it says who it is by a file."""
    begun = Path(os.environ["GATE_BEGUN"])
    if not begun.exists():
        begun.write_text(str(os.getpid()))
        time.sleep(3600)
    return Verdict(outcome="pass", reason="the second time")


def starts_something(candidate: Candidate) -> Verdict:
    """Which is handed the environment, and leaves it in a file."""
    handed = subprocess.run(["env"], capture_output=True, check=True).stdout
    Path(os.environ["GATE_BEGUN"]).write_bytes(handed)
    return Verdict(outcome="pass")


class Unspeakable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def exits(candidate: Candidate) -> Verdict:
    sys.exit("no GPU")


def is_interrupted(candidate: Candidate) -> Verdict:
    raise KeyboardInterrupt


def raises_what_cannot_be_told(candidate: Candidate) -> Verdict:
    raise Unspeakable


def answers_what_cannot_be_told(candidate: Candidate) -> object:
    return Unspeakable()


def fails_with_half_a_character(candidate: Candidate) -> Verdict:
    raise OSError("no such file: answers-\udce4.json")


def answers_no_outcome(candidate: Candidate) -> Verdict:
    return Verdict(outcome=["pass"])  # type: ignore[arg-type]


def answers_no_reason(candidate: Candidate) -> Verdict:
    return Verdict(outcome="pass", reason=None)  # type: ignore[arg-type]


def passes_with_half_a_character(candidate: Candidate) -> Verdict:
    return Verdict(outcome="pass", reason="as in answers-\udce4.json")
