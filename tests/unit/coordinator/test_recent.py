"""What is kept of events and of routers' reports: bounded, in order, and told as rates."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from adaptersync.coordinator import recent
from adaptersync.coordinator.overview import line
from adaptersync.coordinator.recent import Recent, grown_by, imbalance
from adaptersync_core.records import Fleet, RouterReport, SeenRouter, Traffic
from support.tables import make_table, version_name

NOW = 1_700_000_000.0
V1, V2 = version_name(1), version_name(2)
URLS = {"replica-0": "http://a", "replica-1": "http://b"}


def entry(place: int, kind: str, **fields: str) -> tuple[str, dict[str, str]]:
    return f"{int(NOW * 1000) + place}-0", {"type": kind, **fields}


def fleet(at_s: float, **routers: Traffic) -> Fleet:
    return Fleet(
        now=NOW + at_s,
        table=make_table({V1: "current"}, URLS),
        runs={},
        published={},
        replicas={},
        acks={},
        routers={
            name: SeenRouter(report=RouterReport(generation=1, traffic=traffic), age_s=0.1)
            for name, traffic in routers.items()
        },
        requests={},
    )


def traffic(requests: int, **more: Any) -> Traffic:
    return replace(Traffic(ended={"ok": requests}), **more)


def test_an_event_is_taken_once_and_in_its_order() -> None:
    kept = Recent()
    assert [each.type for each in kept.happened([entry(1, "a"), entry(2, "b")])] == ["a", "b"]
    assert kept.happened([entry(1, "a"), entry(2, "b")]) == []  # read again after a loss
    assert [each.type for each in kept.happened([entry(2, "b"), entry(10, "c")])] == ["c"]
    assert [each.type for each in kept.after(entry(2, "")[0])] == ["c"]


def test_places_are_numbers_and_not_text() -> None:
    kept = Recent()
    kept.happened([("999-9", {"type": "a"}), ("999-10", {"type": "b"}), ("1000-0", {"type": "c"})])
    assert [each.type for each in kept.after("999-9")] == ["b", "c"]


def test_events_and_versions_and_points_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "VERSIONS", 3)
    kept = Recent()
    for seq in range(1, recent.EVENTS + 50):
        kept.happened([entry(seq, "adapter.published", version=version_name(seq))])
    assert len(kept.events) == recent.EVENTS
    newest = [version_name(recent.EVENTS + 49 - behind) for behind in range(3)]
    assert [each.version for each in kept.promotions()] == newest
    for step in range(recent.POINTS + 10):
        kept.seen(fleet(step * recent.STEP_S))
    assert len(kept.points) == recent.POINTS


def test_acks_without_end_do_not_push_out_what_became_of_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent, "WORDS", 5)
    kept = Recent()
    kept.happened([entry(1, "adapter.published", version=V1), entry(2, "version.staging", version=V1)])
    acks = [entry(10 + n, "replica.acked", version=V1, replica=f"r{n}", accepted="true") for n in range(20)]
    kept.happened([*acks, entry(100, "version.promoted", version=V1)])
    (way,) = kept.promotions()
    assert (way.outcome, way.accepted) == ("promoted", 3)
    assert way.promoted_s == pytest.approx(0.099)


def test_the_way_of_a_version_grows_with_what_is_said_of_it() -> None:
    kept = Recent()
    kept.happened([entry(0, "adapter.published", version=V1), entry(100, "version.staging", version=V1)])
    assert [(way.version, way.outcome) for way in kept.promotions()] == [(V1, "staging")]
    kept.happened(
        [
            entry(500, "replica.acked", version=V1, replica="replica-0", accepted="true", loaded_s="0.3"),
            entry(700, "replica.acked", version=V1, replica="replica-1", accepted="true", loaded_s="0.4"),
            entry(800, "version.promoted", version=V1),
        ]
    )
    (way,) = kept.promotions()
    assert (way.outcome, way.slowest, way.accepted) == ("promoted", "replica-1", 2)
    assert way.promoted_s == pytest.approx(0.8)
    spans = {span.phase: (round(span.start_s, 3), round(span.seconds, 3)) for span in way.spans}
    assert spans == {"taken up": (0, 0.1), "noticed": (0.1, 0.2), "loaded": (0.3, 0.4), "committed": (0.7, 0.1)}
    kept.happened([entry(900, "version.voided", version=V1, reason="reward fell")])
    assert [(way.outcome, way.reason) for way in kept.promotions()] == [("voided", "reward fell")]


def test_rates_are_what_was_added_between_two_looks() -> None:
    kept = Recent()
    kept.seen(fleet(0, a=traffic(100), b=traffic(1000)))
    kept.seen(
        fleet(
            4,
            a=Traffic(
                ended={"ok": 120, "refused": 4, "upstream_error": 2, "client_gone": 8},
                routed={"affinity": 30, "cold": 2},
                tokens={"prompt": 400, "cached": 300, "completion": 40},
                at={"replica-0": 3},
            ),
            b=traffic(1000, at={"replica-1": 1}),
        )
    )
    series = kept.series()
    assert series["at"] == [NOW, NOW + 4]
    assert {name: line[1] for name, line in series.items() if name != "at"} == {
        "requests_s": 34 / 4,
        "refused_s": 1.0,
        "failed_s": 0.5,
        "prompt_tokens_s": 100.0,
        "completion_tokens_s": 10.0,
        "cached": 0.75,
        "affinity_s": 7.5,
        "session_s": 0.0,
        "cold_s": 0.5,
        "spill_s": 0.0,
        "local_s": 0.0,
        "in_flight": 4,
        "imbalance": 1.5,
        "ready": 2,
        "behind": 0,
    }
    assert series["requests_s"][0] is None  # there was nothing to compare with
    assert kept.series(since=NOW)["at"] == [NOW + 4]


def test_looks_of_many_make_no_more_points() -> None:
    kept = Recent()
    for at_s in (0, 0.1, 0.5, 1.0, 2.0, 2.1, 3.9):
        kept.seen(fleet(at_s))
    assert kept.series()["at"] == [NOW, NOW + 2.0, NOW + 3.9]


@pytest.mark.parametrize(
    "before",
    [None, traffic(50)],
    ids=["one that was not seen before", "one whose counts fell: another process has its name"],
)
def test_who_began_to_count_meanwhile_counts_nothing_yet(before: Traffic | None) -> None:
    assert grown_by(before, traffic(40)) == Traffic()
    assert grown_by(traffic(40), traffic(50)).ended == {"ok": 10}


def test_a_router_that_left_takes_nothing_back() -> None:
    kept = Recent()
    kept.seen(fleet(0, a=traffic(10), b=traffic(90)))
    kept.seen(fleet(2, a=traffic(12)))
    assert kept.series()["requests_s"][1] == 1.0


def test_imbalance_counts_idle_replicas_and_no_other() -> None:
    assert imbalance({"a": 6}, ["a", "b", "c"]) == 3.0
    assert imbalance({"a": 2, "b": 2, "gone": 50}, ["a", "b"]) == 1.0
    assert imbalance({}, ["a"]) is None
    assert imbalance({"a": 1}, []) is None


@pytest.mark.parametrize(
    ("fields", "bad"),
    [
        ({"type": "replica.acked", "accepted": "false"}, True),
        ({"type": "replica.acked", "accepted": "true"}, False),
        ({"type": "version.verified", "ok": "false"}, True),
        ({"type": "version.voided"}, True),
        ({"type": "version.promoted"}, False),
    ],
)
def test_what_should_not_be_is_marked(fields: dict[str, str], bad: bool) -> None:
    (event,) = Recent().happened([("1-0", fields)])
    assert event.bad is bad


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"version": "no adapter id"},
        {"version": V1, "stored_s": "soon"},
        {"version": V1, "size": "large"},
        {"x" * 9999: "y" * 999_999, "version": "z" * 99_999},
        {str(n): "x" for n in range(9999)},
    ],
)
@pytest.mark.parametrize("kind", ["adapter.published", "replica.acked", "version.promoted", "whatever"])
def test_nonsense_in_the_stream_is_told_and_stops_nothing(fields: dict[str, str], kind: str) -> None:
    kept = Recent()
    (event,) = kept.happened([entry(1, kind, **fields)])
    assert len(msgspec.json.encode(line(event))) < 50_000
    assert all(way.version == V1 for way in kept.promotions())
    kept.happened([entry(2, "adapter.published", version=V2), entry(3, "version.promoted", version=V2)])
    assert kept.promotions()[0].outcome == "promoted"
