"""What status, versions and events say of a fleet."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from adaptersync.coordinator import views
from adaptersync_core.records import (
    Ack,
    CacheReport,
    Fleet,
    ReplicaReport,
    RouterReport,
    RunRecord,
    SeenReplica,
    SeenRouter,
)
from adaptersync_core.rollouts import Row
from adaptersync_core.table import LiveVersion, Member, RunEntry, Table

NOW = 1000.0
V1 = "my-run-v1-0123456789ab"


def member(url: str, **fields: object) -> Member:
    made = Member(state="ready", url=url, engine_epoch="e1", since=NOW - 60, block_size=32)
    return replace(made, **fields)


def seen(age_s: float = 0.2) -> SeenReplica:
    report = ReplicaReport(
        url="http://engine", base_model="base", engine_epoch="e1", max_loras=4, max_cpu_loras=8, max_lora_rank=8,
        block_size=32, loaded=(V1,),
    )  # fmt: skip
    return SeenReplica(report=report, age_s=age_s)


def heard(age_s: float, **missing: list[str]) -> SeenRouter:
    report = RouterReport(generation=6, url="http://r", inflight={V1: 3}, missing=missing)
    return SeenRouter(report=report, age_s=age_s)


def fleet() -> Fleet:
    version = LiveVersion(
        run="my-run", seq=1, epoch=1, digest="0" * 64, state="current", published_at=NOW - 40, since=NOW - 30,
        changed_in=4,
    )  # fmt: skip
    table = Table(
        generation=7,
        min_ready=2,
        runs={"my-run": RunEntry(epoch=1, max_staleness=2, considered=1, current=V1)},
        versions={V1: version},
        members={"replica-0": member("http://a"), "replica-1": member("http://b")},
    )
    accepted = Ack(accepted=True, engine_epoch="e1", phases={"loaded_s": 0.01})
    slower = Ack(accepted=True, engine_epoch="e1", phases={"loaded_s": 0.04})
    return Fleet(
        now=NOW,
        table=table,
        runs={"my-run": RunRecord(epoch=1, seq=1, max_staleness=2)},
        published={"my-run": ()},
        replicas={"replica-0": seen(), "replica-1": seen()},
        acks={"replica-0": {V1: accepted}, "replica-1": {V1: slower}},
        routers={"router-0": heard(0.5)},
        requests={},
    )


def status(fleet: Fleet, leader: str = "coordinator-0", left_s: float = 3.0) -> views.StatusView:
    return views.status(fleet, group="default", leader=leader, lease_left_s=left_s, alive_s=5.0)


def test_a_live_version_whose_stored_bytes_are_wrong_is_a_problem() -> None:
    records = {
        V1: {"state": "current", "verified_ok": "false", "verified_reason": "file has the wrong bytes"},
        "other": {"state": "retained", "verified_ok": "true", "verified_reason": ""},
        "another": {"state": "retained"},
    }
    corrupt = views.corrupt(records)
    view = views.status(
        fleet(), group="default", leader="coordinator-0", lease_left_s=3.0, alive_s=5.0, corrupt=corrupt
    )
    assert not view.healthy
    (problem,) = view.problems
    assert problem.startswith(f"stored {V1} is corrupt or missing: file has the wrong bytes; no replica can join")


def test_a_whole_fleet_is_healthy() -> None:
    view = status(fleet())
    assert (view.healthy, view.problems) == (True, [])
    assert [(each.replica, each.holds, each.wanted) for each in view.replicas] == [
        ("replica-0", 1, 1),
        ("replica-1", 1, 1),
    ]
    assert (view.runs[0].current, view.runs[0].replicas, view.runs[0].ready) == (V1, 2, 2)
    assert (view.routers[0].behind, view.routers[0].inflight) == (1, 3)
    assert [replica.slots for replica in view.replicas] == [8, 8]  # as the coordinator counts them


def test_it_says_whether_a_cache_is_followed() -> None:
    assert views.followed(CacheReport(why="engine publishes no KV events")) == "as routed"
    assert views.followed(CacheReport(followed=True, blocks=1200, lag_s=0.061)) == "1200 blocks, 61 ms"
    assert views.followed(CacheReport(followed=True, losses=2)).endswith(", 2 lost")


def test_a_lease_that_was_given_up_ran_out_at_no_time() -> None:
    assert status(fleet(), left_s=-1.8e9).problems == [
        "no coordinator leads; coordinator-0 gave up its lease: its log says why"
    ]


def test_every_problem_is_named() -> None:
    whole = fleet()
    members = {**whole.table.members, "replica-1": member("http://b", state="ejected", reason="refused my-run-v1")}
    silent = replace(whole, replicas={"replica-0": seen(9.0), "replica-1": seen()}, routers={})
    view = status(replace(silent, table=replace(whole.table, members=members)), left_s=-12.0)
    assert not view.healthy
    assert view.problems == [
        "no coordinator leads; coordinator-0 stopped 12 s ago",
        "1 replicas are ready, 2 are needed",
        "replica-0 is silent for 9.0 s",
        "replica-1 is ejected: refused my-run-v1",
        "no router reports",
    ]


def test_a_silent_router_is_named_until_it_cannot_serve_any_more() -> None:
    view = status(replace(fleet(), routers={"router-0": heard(0.5), "router-1": heard(20.0)}))
    assert view.problems == ["router-1 is silent for 20 s; retirement waits until it cannot serve"]
    gone = status(replace(fleet(), routers={"router-0": heard(0.5), "router-1": heard(66.0)}))
    assert (gone.healthy, [each.router for each in gone.routers]) == (True, ["router-0"])


def test_what_replicas_lost_is_named_once_whoever_saw_it() -> None:
    lost = {"replica-1": [V1]}
    routers = {"router-0": heard(0.5, **lost), "router-1": heard(0.5, **lost)}
    view = status(replace(fleet(), routers=routers))
    said = f"replica-1 did not know {V1} when asked; not asked for it until its agent has confirmed it"
    assert (view.healthy, view.problems) == (False, [said])
    assert view.routers[0].missing == lost
    old = status(replace(fleet(), routers={"router-0": heard(0.5), "router-1": heard(20.0, **lost)}))
    assert said not in old.problems


def test_an_ack_of_another_life_of_the_engine_does_not_count() -> None:
    whole = fleet()
    stale = {**whole.acks, "replica-1": {V1: Ack(accepted=True, engine_epoch="e0")}}
    view = status(replace(whole, acks=stale))
    assert view.problems == [f"{V1} is held by 1 of 2 ready replicas"]
    assert view.replicas[1].holds == 0


def test_a_replica_the_coordinator_has_not_seen_is_shown() -> None:
    whole = fleet()
    view = status(replace(whole, replicas={**whole.replicas, "replica-2": seen()}))
    assert view.replicas[2].state == "unknown"
    assert view.problems == ["replica-2 is unknown: the coordinator has not taken it in"]


def test_versions_show_the_slowest_replica_and_what_the_record_says() -> None:
    record = {"state": "current", "reason": "", "current_at": str(NOW - 30), "verified_ok": "false"}
    facts = [views.Facts(version=V1, run="my-run", seq=1, manifest=None, record=record)]
    (view,) = views.versions(facts, fleet())
    assert view.phase("loaded_s") == 0.04
    assert view.phase("staged_s") is None
    assert (view.state, view.verified) == ("current", False)


def test_rollouts_are_counted_by_version() -> None:
    rows = [
        Row(
            request_id=str(n), router="g", path="/", asked="a", outcome=outcome, started_at=1.0, version=V1, voided=True
        )
        for n, outcome in enumerate(["ok", "ok", "unknown", "client_gone"])
    ]
    other = replace(rows[0], version="base", voided=False)
    assert views.count_rollouts([*rows, other]) == {
        V1: views.RolloutCounts(total=4, ok=2, unknown=1, voided=4),
        "base": views.RolloutCounts(total=1, ok=1),
    }


def test_a_version_that_was_not_taken_up_is_published() -> None:
    (view,) = views.versions([views.Facts(version=V1, run="my-run", seq=1, manifest=None, record={})], fleet())
    assert (view.state, view.verified, view.promoted_s) == ("published", None, None)


@pytest.mark.parametrize(
    ("fields", "subject", "text"),
    [
        (
            {"type": "replica.acked", "version": V1, "replica": "replica-0", "engine_epoch": "e1", "accepted": "true",
             "staged_s": "0.014", "loaded_s": "1.5"},
            V1, "accepted by replica-0  staged 14 ms  loaded 1.5 s",
        ),
        (
            {"type": "replica.acked", "version": V1, "replica": "replica-0", "accepted": "false", "reason": "torn"},
            V1, "refused by replica-0  torn",
        ),
        (
            {"type": "replica.state", "replica": "replica-1", "state": "ejected", "reason": "silent"},
            "replica-1", "ejected  silent",
        ),
        ({"type": "version.verified", "version": V1, "ok": "false", "reason": "size"}, V1, "size  not ok"),
        ({"type": "unheard.of", "version": V1, "some_thing": "7"}, V1, "some thing 7"),
        ({"type": "forged", "staged_s": "long", "size": "9" * 5000}, "", f"staged s long  size {'9' * 5000}"),
    ],
)  # fmt: skip
def test_events_are_told(fields: dict[str, str], subject: str, text: str) -> None:
    assert views.tell(fields) == (subject, text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0414, "41 ms"), (1.46, "1.5 s"), (12, "12 s"), (299, "299 s"), (600, "10 min"), (7200, "2 h"), (2e5, "2 d")],
)
def test_durations_are_short(seconds: float, text: str) -> None:
    assert views.duration(seconds) == text


@pytest.mark.parametrize(
    ("heartbeat_s", "ended_at", "trainer", "heard_s"),
    [
        (NOW - 3, 0.0, "alive", 3.0),
        (NOW + 3, 0.0, "alive", 0.0),  # the server's clock was set back
        (NOW - 40, 0.0, "silent", 40.0),
        (0, 0.0, "silent", None),  # not heard of since Redis was lost
        (NOW - 3, NOW - 2, "ended", 3.0),
    ],
)
def test_whether_the_trainer_of_a_run_lives(
    heartbeat_s: float, ended_at: float, trainer: str, heard_s: float | None
) -> None:
    found = fleet()
    run = replace(found.runs["my-run"], heartbeat_ms=int(heartbeat_s * 1000), ended_at=ended_at)
    (view,) = status(replace(found, runs={"my-run": run})).runs
    assert (view.trainer, view.heard_s) == (trainer, heard_s)


def test_a_cache_server_that_does_not_answer_is_a_problem() -> None:
    view = views.status(
        fleet(), group="default", leader="c", lease_left_s=3.0, alive_s=5.0, cache_problem="Redis cannot be reached"
    )
    assert (view.healthy, view.problems) == (False, ["cache server: Redis cannot be reached"])
