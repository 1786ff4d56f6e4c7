"""Every name against every state."""

from __future__ import annotations

import msgspec
import pytest

from adaptersync.router.resolve import Ask, Fate, Hold, Target, Wanted, parse, resolve
from adaptersync_core.errors import Unroutable
from adaptersync_core.table import Fate as EndOfVersion
from adaptersync_core.table import LiveState, Table
from support.tables import make_table, version_name

V1, V2, V3, V4, V5 = (version_name(seq) for seq in range(1, 6))
GIVEN_UP = Wanted(run="run-a", adapter_id=V1)  # its record says why
TABLE = make_table(
    {V1: "retiring", V2: "retained", V3: "current", V4: "ready", V5: "staging"}, {}, runs={"empty": None}
)


def outcome(name: str, *, table: Table = TABLE, fate: Fate | None = None, gate: bool = False) -> str | int | Wanted:
    """The target's model, "hold", what is to be asked, or the status of the refusal."""
    try:
        answer = resolve(table, name, base_model="base", fate=fate, gate=gate)
    except Unroutable as error:
        return error.status
    if isinstance(answer, Target):
        return answer.model
    return answer.wanted if isinstance(answer, Ask) else "hold"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("base", "base"),
        ("base@current", Wanted(run="base")),
        (V1, GIVEN_UP),
        (V2, V2),
        (V3, V3),
        (V4, "hold"),
        (V5, "hold"),
        ("run-a", V3),
        ("run-a@current", V3),
        ("run-a@v1", GIVEN_UP),
        ("run-a@v2", V2),
        ("run-a@v3", V3),
        ("run-a@v5", "hold"),
        ("empty", "hold"),
        ("run-a@v9", Wanted(run="run-a", seq=9)),
        (version_name(9), Wanted(run="run-a", adapter_id=version_name(9))),
        ("other", Wanted(run="other")),
        ("other@v1", Wanted(run="other", seq=1)),
        ("run-a@v0", 404),
        ("run-a@v01", 404),
        ("run-a@latest", 404),
        ("run-a@", 404),
        ("Run-A", 404),
        ("a/b", 404),
        ("", 404),
        ("run-a\n", 404),
        (V3 + "\n", 404),
        ("x" * 49, 404),
    ],
)
def test_names_by_the_table(name: str, expected: object) -> None:
    assert outcome(name) == expected


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("", 404),
        ("published", "hold"),
        ("expected", "hold"),
        ("staging", "hold"),
        ("ready", "hold"),
        ("current", "hold"),  # the table will say so in a moment
        ("superseded", 409),
        ("rolled_back", 409),
        ("retiring", 410),
        ("retired", 410),
        ("voided", 410),
    ],
)
@pytest.mark.parametrize("name", [version_name(4, run="run-b"), "run-b@v4"])
def test_names_by_the_records(name: str, state: str, expected: object) -> None:
    table = make_table({version_name(5, run="run-b"): "current"}, {}, runs={"run-b": version_name(5, run="run-b")})
    assert outcome(name, table=table, fate=Fate(state=state, adapter_id=version_name(4, run="run-b"))) == expected


@pytest.mark.parametrize("name", [V5[:-12] + "0" * 12, "other@v9", "other"])
def test_what_nobody_knows_is_unknown(name: str) -> None:
    assert outcome(name, fate=Fate()) == 404


@pytest.mark.parametrize("name", [version_name(6), "run-a@v6", "empty@v1"])
def test_a_number_beyond_what_was_considered_may_be_served_yet(name: str) -> None:
    held = resolve(TABLE, name, base_model="base", fate=Fate())
    assert isinstance(held, Hold)
    assert held.otherwise is not None
    assert held.otherwise.status == 404


def test_one_that_was_considered_and_has_left_no_record_may_not() -> None:
    considered = {"run-a": msgspec.structs.replace(TABLE.runs["run-a"], considered=6)}
    assert outcome("run-a@v6", table=msgspec.structs.replace(TABLE, runs=considered), fate=Fate()) == 404


def test_a_run_that_ended_and_has_nothing_left_is_refused_at_once() -> None:
    def table(state: LiveState | None, ended_at: float) -> Table:
        found = make_table({V5: state} if state else {}, {}, runs={"run-a": V5 if state == "current" else None})
        return msgspec.structs.replace(
            found, runs={"run-a": msgspec.structs.replace(found.runs["run-a"], ended_at=ended_at)}
        )

    with pytest.raises(Unroutable, match="run run-a has ended, and its versions gave up their room") as refusal:
        resolve(table(None, 1.0), "run-a", base_model="base")
    assert refusal.value.status == 410
    assert outcome("run-a@current", table=table("retiring", 1.0)) == 410
    assert outcome("run-a", table=table("staging", 1.0)) == "hold"
    assert outcome("run-a", table=table("current", 1.0)) == V5
    assert outcome("run-a", table=table(None, 0.0)) == "hold"


def test_the_table_wins_over_what_was_read_before() -> None:
    assert outcome(V3, fate=Fate(state="published")) == V3
    assert outcome(V3, fate=Fate()) == V3


@pytest.mark.parametrize("state", ["staging", "ready", "retiring"])
def test_a_run_whose_pointer_is_not_served_is_held_or_refused(state: LiveState) -> None:
    table = make_table({V1: state}, {}, runs={"run-a": V1})
    assert outcome("run-a", table=table) == (GIVEN_UP if state == "retiring" else "hold")


@pytest.mark.parametrize(
    ("ending", "status"), [("retired", 410), ("voided", 410), ("rolled_back", 409), ("superseded", 409)]
)
def test_what_is_given_up_is_refused_by_its_fate(ending: EndOfVersion, status: int) -> None:
    given_up = msgspec.structs.replace(TABLE.versions[V1], fate=ending)
    table = msgspec.structs.replace(TABLE, versions={V1: given_up})
    asked = resolve(table, V1, base_model="base")
    assert isinstance(asked, Ask)
    assert asked.otherwise is not None
    assert outcome(V1, table=table, fate=asked.otherwise) == status
    assert outcome(V1, table=table, fate=Fate()) == status  # the record is gone already
    assert outcome(V1, table=table, fate=Fate(state="current")) == status  # or was read before


def test_a_refusal_says_why_and_what_to_do() -> None:
    with pytest.raises(Unroutable) as caught:
        resolve(
            TABLE, "run-a@v9", base_model="base", fate=Fate(state="voided", adapter_id=version_name(9), reason="nan")
        )
    assert "voided: nan" in str(caught.value)
    assert version_name(9) in str(caught.value)
    assert caught.value.next_step


def test_the_base_is_no_substitute() -> None:
    assert outcome("base-model") != "base"
    assert outcome("run-a", table=make_table({}, {}), fate=Fate()) == 404


def test_a_name_that_could_be_two_things_is_the_version() -> None:
    assert parse(V1) == Wanted(run="run-a", adapter_id=V1)


def test_holding_says_what_it_waits_for() -> None:
    held = resolve(TABLE, V5, base_model="base")
    assert isinstance(held, Hold)
    assert "staging" in held.reason


def test_what_waits_at_the_gate_is_for_the_gate_and_by_its_own_name_only() -> None:
    for name in (V4, "run-a@v4"):
        assert outcome(name) == "hold"
        assert outcome(name, gate=True) == V4
    assert outcome("run-a", gate=True) == V3
    assert outcome(V5, gate=True) == "hold"  # not proved yet
    assert outcome(V1, gate=True) == GIVEN_UP
