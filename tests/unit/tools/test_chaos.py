"""The judge of chaos runs sees each way in which a promise can be broken, and nothing where none is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.events import (
    AdapterPublished,
    ControlRestored,
    Event,
    ReplicaAcked,
    VersionPromoted,
    VersionRetired,
    VersionRetiring,
    VersionRolledBack,
    VersionSuperseded,
    VersionVoided,
)
from adaptersync_tools.audit.verify import Counts
from adaptersync_tools.chaos.__main__ import chaos
from adaptersync_tools.chaos.history import History, Rollout, Violation
from adaptersync_tools.chaos.names import Names
from adaptersync_tools.chaos.plan import DECK, KINDS, LEASES_S, STEPS, Kind, faults
from adaptersync_tools.chaos.report import Report, Struck, document, kinds, lines, show
from adaptersync_tools.cli.common import run_command
from adaptersync_tools.output import console

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


SERVICES = ["agent-0", "engine-0", "redis-cache", "redis-control", "router", "trainer"]


def test_a_seed_is_a_plan() -> None:
    first, again, other = (list(islice(faults(seed, SERVICES), 200)) for seed in (1, 1, 2))
    assert first == again != other
    assert [fault.number for fault in first] == list(range(1, 201))


@pytest.mark.parametrize("seed", range(5))
def test_every_kind_of_fault_comes_up_in_every_deck_and_strikes_what_it_can(seed: int) -> None:
    dealt = list(islice(faults(seed, SERVICES), 10 * len(DECK)))
    for place in range(0, len(dealt), len(DECK)):
        assert {fault.kind for fault in dealt[place : place + len(DECK)]} == set(KINDS)
    struck = {kind: {fault.target for fault in dealt if fault.kind == kind} for kind in KINDS}
    assert struck["kill"] == struck["freeze"] == set(SERVICES)
    assert struck["stall"] == {"agent-0", "engine-0", "router", "trainer"}
    assert struck["flush"] == {"redis-cache", "redis-control"}
    assert struck["rewind"] == {"redis-control"}
    assert {fault.after for fault in dealt} == set(STEPS)
    assert all(fault.lasts_s >= LEASES_S for fault in dealt if fault.kind == "stall")
    assert all(fault.lasts_s > 0 for fault in dealt if fault.kind in ("freeze", "rewind"))


# across a Redis that lost something

RESTORED = ControlRestored(incarnation="b", generation=2)


def across(before: list[Event], after: list[Event]) -> list[str]:
    """What is found in events on either side of a loss."""
    history, found = told(*before)
    assert not found
    history.lost()
    return [violation.what for event in after for violation in history.add(90_000.0, event)]


def test_the_last_promotion_may_be_lost_and_made_again() -> None:
    assert across(way_in(V1), [RESTORED, promoted(V1)]) == []
    assert across(way_in(V1), [RESTORED, REFUSED[0]]) == []


def test_what_was_decided_before_the_last_decision_holds() -> None:
    later = [*way_in(V1), VersionRetiring(version=V2, generation=2, reason="")]
    (what,) = across(later, [RESTORED, promoted(V1)])
    assert "promoted twice" in what
    (what,) = across(later, [RESTORED, REFUSED[0]])
    assert "refused after it was promoted" in what
    # of one that could be made again, once
    assert "promoted twice" in across(way_in(V1), [RESTORED, promoted(V1), promoted(V1)])[0]


def test_what_was_voided_never_returns_whatever_is_lost() -> None:
    voided = [*way_in(V1), *way_in(V2), VersionVoided(version=V2, generation=2, reason="bad", current=V1)]
    found = across(voided, [RESTORED, promoted(V2)])
    assert any("was voided and came back" in what for what in found)
    back = VersionVoided(version=V1, generation=3, reason="", current=V2)
    assert across(voided, [RESTORED, back]) == [f"went back to what was refused: {V2}"]
    history, _ = told(*voided)
    history.lost()
    late = replace(RIGHT, version=V2, model=V2, tokens=tuple(speak(V2, (1, 2), 2, 3)), sent_at=50.0, got_at=51.0)
    assert ["served after it was withdrawn" in one.what for one in history.judge(late)] == [True]


def test_what_was_withdrawn_last_may_be_served_again_until_it_is_withdrawn_again() -> None:
    history, _ = told(*way_in(V1), VersionRetiring(version=V1, generation=2, reason=""))
    history.lost()
    late = replace(RIGHT, sent_at=50.0, got_at=51.0)
    assert history.judge(late) == []
    history.add(60_000.0, RESTORED)
    history.add(61_000.0, VersionRetiring(version=V1, generation=3, reason=""))
    assert history.judge(late) == []
    assert history.judge(replace(RIGHT, sent_at=70.0, got_at=71.0))


# names


def test_a_name_has_one_digest_wherever_it_is_read() -> None:
    names = Names()
    digest = "0123456789ab" + "0" * 52
    assert names.add("an event", V1, digest) == names.add("the store", V1, digest) == []
    assert "two digests" in names.add("the ledger", V1, digest[:-1] + "1")[0]
    assert "another digest" in names.add("the store", V2, digest)[0]
    assert "names no version" in names.add("the ledger", "latest", digest)[0]


def test_a_number_is_given_once_but_files_that_nobody_announced_may_bear_it() -> None:
    names = Names()
    assert names.add("an event", V1, "0123456789ab") == []
    assert names.add("the store", "run-v1-ffffffffffff", "ffffffffffff") == []
    (what,) = names.add("the ledger", "run-v1-ffffffffffff", "ffffffffffff")
    assert "number reused" in what


# the report


def report(**changes: Any) -> Report:
    made = Report(
        seed=7,
        seconds=90,
        replicas=2,
        slots=64,
        began_at=1000.0,
        faults=[],
        answers={"200": 5},
        versions={"promoted": 1},
        restored=1,
        probes=3,
        names=4,
        rows=5,
        unrecorded=0,
        audited={"run": Counts(rollouts=5)},
        crashes={},
        rest_s=None,
        converge_bound_s=60,
        violations=[],
    )
    return replace(made, **changes)


def struck(kind: Kind, at_s: float, recovered_s: float | None, *, done: bool = True) -> Struck:
    fault = replace(next(faults(1, SERVICES)), kind=kind)
    return Struck(fault=fault, at_s=at_s, ended_s=at_s + 1, recovered_s=recovered_s, done=done)


def test_the_summary_says_how_to_run_it_again_and_what_broke() -> None:
    text = "\n".join(lines(report()))
    assert "tools/chaos --seed 7 --seconds 90 --replicas 2 --slots 64" in text
    assert "not reached" in text
    assert "every promise held" in text
    broken = report(violations=[Violation(kind="ledger", what="2 answers have no row", at=1012.0)])
    assert "VIOLATION    12.0 s  ledger: 2 answers have no row" in "\n".join(lines(broken))
    twice = report(violations=[Violation(kind="answer", what=f"wrong (request={n})", at=1001.0) for n in range(3)])
    assert "answer: wrong (request=0), and 2 like it" in "\n".join(lines(twice))
    assert "1 promises were broken" in "\n".join(lines(broken))


def test_the_table_counts_recoveries_and_violations_by_kind() -> None:
    made = report(
        faults=[
            struck("kill", 1, 2.0),
            struck("kill", 10, 4.0),
            struck("kill", 20, None),
            struck("flush", 8, 1, done=False),
        ],
        violations=[Violation(kind="answer", what="x", at=1000 + at_s) for at_s in (2, 9, 30)],
    )
    found = {view.kind: view for view in kinds(made)}
    kill, flush = found["kill"], found["flush"]
    assert (kill.count, kill.missed, kill.p50_s, kill.max_s, kill.violations) == (3, 0, 3.0, 4.0, 2)
    assert (flush.count, flush.missed, flush.violations) == (1, 1, 1)
    assert found["stall"].p50_s is None


def test_what_another_fleet_left_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet").mkdir()
    assert run_command(chaos, ["--keep", str(tmp_path)], "chaos") == 2
    assert "must be empty" in capsys.readouterr().err


def test_the_document_says_whether_it_is_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(report())["sound"] is True
    broken = report(violations=[Violation(kind="ledger", what="lost", at=1.0)])
    assert document(broken)["sound"] is False
    show(broken, console())
    shown = capsys.readouterr().out
    assert "recovery p50" in shown
    assert "VIOLATION" in shown
