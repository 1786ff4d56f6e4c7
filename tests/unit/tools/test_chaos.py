"""The judge of chaos runs sees each way in which a promise can be broken, and nothing where none is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.events import (
    AdapterPublished,
    Event,
    ReplicaAcked,
    VersionPromoted,
    VersionRetired,
    VersionRetiring,
    VersionRolledBack,
    VersionSuperseded,
    VersionVoided,
)
from adaptersync_tools.chaos.history import History, Rollout
from adaptersync_tools.chaos.plan import faults
from adaptersync_tools.chaos.report import Report, lines

LATE_S = 5.0
V1, V2 = "run-v1-0123456789ab", "run-v2-ba9876543210"


def speak(version: str, prompt: Sequence[int], limit: int, seed: int) -> list[int]:
    return [len(version) + seed, *prompt][:limit]


def published(version: str) -> AdapterPublished:
    seq = int(version.split("-")[1].removeprefix("v"))
    return AdapterPublished(version=version, run="run", seq=seq, epoch=1, digest="", size=1, rank=1, noop=False)


def acked(version: str, replica: str, accepted: bool = True) -> ReplicaAcked:
    return ReplicaAcked(version=version, replica=replica, engine_epoch="1", accepted=accepted)


def promoted(version: str) -> VersionPromoted:
    return VersionPromoted(version=version, generation=1, replicas="r1 r2")


def way_in(version: str) -> list[Event]:
    return [published(version), acked(version, "r1"), acked(version, "r2"), promoted(version)]


def told(*events: Event, at_s: float = 1.0) -> tuple[History, list[str]]:
    """A history after some events, a second apart, and what it found wrong with them."""
    history = History(late_s=LATE_S, speak=speak)
    found = [
        violation.what for place, event in enumerate(events) for violation in history.add((at_s + place) * 1000, event)
    ]
    return history, found


REFUSED = [
    VersionRolledBack(version=V1, generation=1, reason="bad"),
    VersionSuperseded(version=V1, generation=1, reason="newer"),
]


def test_an_ordinary_life_breaks_nothing() -> None:
    events = [
        *way_in(V1),
        *way_in(V2),
        VersionRetiring(version=V1, generation=3, reason="beyond the window"),
        VersionRetired(version=V1, generation=4),
        VersionVoided(version=V2, generation=5, reason="bad", current=V1),
    ]
    assert told(*events)[1] == []


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([published(V1), published("run-v1-ffffffffffff")], "number reused"),
        ([published(V1), acked(V1, "r1"), promoted(V1)], "without the word of r2"),
        ([published(V1), acked(V1, "r1"), acked(V1, "r2"), acked(V1, "r2", False), promoted(V1)], "word of r2"),
        ([*way_in(V1), promoted(V1)], "promoted twice"),
        ([*way_in(V1)[:-1], REFUSED[0], promoted(V1)], "came back"),
        ([*way_in(V1)[:-1], REFUSED[1], promoted(V1)], "came back"),
        ([*way_in(V1)[:-1], VersionRetired(version=V1, generation=1), promoted(V1)], "came back"),
        ([*way_in(V1), REFUSED[0]], "refused after it was promoted"),
    ],
)
def test_what_may_not_happen_is_seen_in_the_events(events: list[Event], said: str) -> None:
    (what,) = told(*events)[1]
    assert said in what


RIGHT = Rollout(
    asked="run",
    prompt=(1, 2),
    seed=3,
    limit=2,
    sent_at=10.0,
    got_at=11.0,
    status=200,
    version=V1,
    model=V1,
    tokens=tuple(speak(V1, (1, 2), 2, 3)),
)
WITHDRAWN_AT_S = 20.0


def judged(**changes: Any) -> list[str]:
    """V1 is promoted at 4 s and withdrawn at 20 s; V2 never comes."""
    history, found = told(*way_in(V1), published(V2))
    assert not found
    history.add(WITHDRAWN_AT_S * 1000, VersionRetiring(version=V1, generation=3, reason=""))
    return [violation.what for violation in history.judge(replace(RIGHT, **changes))]


@pytest.mark.parametrize("asked", ["run", "run@v1", V1])
@pytest.mark.parametrize("sent_at", [3.9, 10.0, WITHDRAWN_AT_S + LATE_S])
def test_a_right_answer_is_right(asked: str, sent_at: float) -> None:
    assert judged(asked=asked, sent_at=sent_at, got_at=sent_at + 100) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": V2}, "two versions"),
        ({"asked": "other"}, "another version than asked for"),
        ({"asked": "run@v2"}, "another version than asked for"),
        ({"asked": V2}, "another version than asked for"),
        ({"sent_at": 1.0, "got_at": 3.5}, "before it was promoted"),
        ({"version": V2, "model": V2, "tokens": tuple(speak(V2, (1, 2), 2, 3))}, "before it was promoted"),
        ({"sent_at": WITHDRAWN_AT_S + LATE_S + 1, "got_at": 100.0}, "after it was withdrawn"),
        ({"tokens": (1, 2)}, "not those of the version's weights"),
        ({"tokens": RIGHT.tokens[:1]}, "not those of the version's weights"),
    ],
)
def test_each_wrong_answer_is_seen(changes: dict[str, Any], said: str) -> None:
    (what,) = judged(**changes)
    assert said in what


@pytest.mark.parametrize("status", [404, 409, 410])
def test_a_valid_version_may_not_be_called_gone(status: int) -> None:
    for asked in ("run@v1", V1):
        (what,) = judged(asked=asked, status=status)
        assert "valid version was refused" in what
        assert judged(asked=asked, status=status, got_at=WITHDRAWN_AT_S + 1) == []
        assert judged(asked=asked, status=status, sent_at=2.0) == []
    (what,) = judged(status=status)
    assert "run was refused" in what
    assert judged(asked=V2, status=status) == []


@pytest.mark.parametrize("status", [0, 500, 503, 504])
def test_a_fleet_that_is_broken_on_purpose_may_fail_to_answer(status: int) -> None:
    assert judged(status=status) == []


def test_a_seed_is_a_plan() -> None:
    targets = ["agent-0", "router"]
    first, again, other = (list(islice(faults(seed, targets), 200)) for seed in (1, 1, 2))
    assert first == again != other
    assert {fault.target for fault in first} == set(targets)
    assert {fault.kind for fault in first} == {"kill", "freeze"}
    assert all(fault.lasts_s > 0 for fault in first if fault.kind == "freeze")


def test_the_summary_says_how_to_run_it_again_and_what_broke() -> None:
    report = Report(
        seed=7,
        seconds=90,
        replicas=2,
        faults=[],
        answers={"200": 5},
        versions={"promoted": 1},
        probes=3,
        rows=5,
        unrecorded=0,
        crashes={},
        converged_s=None,
        converge_bound_s=60,
        violations=[],
    )
    text = "\n".join(lines(report))
    assert "tools/chaos --seed 7 --minutes 1.5 --replicas 2" in text
    assert "not within 60 s" in text
    assert "every promise held" in text
