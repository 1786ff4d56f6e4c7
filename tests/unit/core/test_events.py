"""Events: the bytes of each kind are kept in tests/data, and every reader of an older or newer writer copes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync_core import events
from adaptersync_core.events import AnyEvent, Event, from_fields, to_fields

KINDS: tuple[type[Event], ...] = get_args(AnyEvent)
DATA = Path(__file__).parents[2] / "data" / "events"
V7, V6 = "run-v7-0123456789ab", "run-v6-ba9876543210"
EXAMPLES: list[Event] = [
    events.RunBegan(run="run", epoch=2, seq=6, max_staleness=1, trainer="host"),
    events.RunEnded(run="run", epoch=2),
    events.AdapterPublished(
        version=V7,
        run="run",
        seq=7,
        epoch=2,
        digest="0123456789ab" + "0" * 52,
        size=8_000_000,
        rank=8,
        noop=False,
        step=30,
        published_at=1_700_000_000.25,
        stored_s=0.03125,
    ),
    events.VersionStaging(version=V7, generation=9, replicas="r1 r2"),
    events.ReplicaAcked(
        version=V7,
        replica="r1",
        engine_epoch="1700000000.25",
        accepted=True,
        visible_s=0.5,
        staged_s=0.125,
        verified_s=0.0625,
        loaded_s=1.5,
    ),
    events.VersionReady(version=V7, generation=9, replicas="r1 r2"),
    events.VersionHeld(version=V7, generation=10, reason="judge has not said in 90 s"),
    events.VersionPromoted(version=V7, generation=10, replicas="r1 r2", previous=V6, waited_s=2.5),
    events.VersionSuperseded(version=V6, generation=10, reason=f"{V7} came before it was staged"),
    events.VersionRolledBack(version=V7, generation=10, reason="r1: file has the wrong bytes"),
    events.VersionVoided(version=V7, generation=11, reason="bad", current=V6),
    events.VersionRetiring(version=V6, generation=12, reason=f"beyond the window of {V7}"),
    events.VersionRetired(version=V6, generation=13),
    events.VersionVerified(version=V7, ok=False, reason="size"),
    events.ReplicaState(replica="r1", state="ready", generation=4, reason="holds all", engine_epoch="1700000000.25"),
    events.CoordinatorElected(coordinator="c0", token=3, incarnation="00ff"),
    events.ControlRestored(incarnation="00ff", generation=8),
    events.RequestRefused(request="rollback-1", reason="there is no run x"),
]


def as_dict(fields: list[str]) -> dict[str, str]:
    return dict(zip(fields[::2], fields[1::2], strict=True))


def test_there_is_an_example_of_every_kind() -> None:
    assert [type(example) for example in EXAMPLES] == list(KINDS)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__struct_config__.tag)
def test_the_bytes_of_an_event_do_not_change(example: Event, request: pytest.FixtureRequest) -> None:
    path = DATA / f"{example.__struct_config__.tag}.txt"
    lines = "".join(f"{name} {value}\n" for name, value in as_dict(to_fields(example)).items())
    if request.config.getoption("--accept-surface"):
        DATA.mkdir(exist_ok=True)
        path.write_text(lines)
    assert lines == path.read_text()
    kept = dict(line.split(" ", 1) for line in path.read_text().splitlines())
    assert from_fields(kept) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__struct_config__.tag)
def test_a_field_we_do_not_know_is_ignored(example: Event) -> None:
    assert from_fields(as_dict(to_fields(example)) | {"new_in_a_later_release": "1"}) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.__struct_config__.tag)
def test_a_field_that_has_a_default_may_be_missing(example: Event) -> None:
    fields = as_dict(to_fields(example))
    for field in msgspec.structs.fields(example):
        left = {name: value for name, value in fields.items() if name != field.name}
        if field.required:
            with pytest.raises(msgspec.ValidationError):
                from_fields(left)
        else:
            assert getattr(from_fields(left), field.name) == field.default


FIELDS: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(max_size=30),
    int: st.integers(-(2**63), 2**63 - 1),
    bool: st.booleans(),
    float: st.integers(-(10**15), 10**15).map(lambda value: value / 1e6),  # microseconds are kept
}


def strategy(kind: type[Event]) -> st.SearchStrategy[Event]:
    def of(field: msgspec.structs.FieldInfo) -> st.SearchStrategy[Any]:
        options = get_args(field.type) or (field.type,)
        return st.one_of([st.none() if option is type(None) else FIELDS[option] for option in options])

    return st.builds(kind, **{field.name: of(field) for field in msgspec.structs.fields(kind)})


@given(event=st.one_of([strategy(kind) for kind in KINDS]))
def test_an_event_survives_its_journey(event: Event) -> None:
    fields = to_fields(event)
    assert all(isinstance(text, str) for text in fields)
    assert fields[0] == "type"
    again = from_fields(as_dict(fields))
    assert type(again) is type(event)
    for name in event.__struct_fields__:
        assert getattr(again, name) == pytest.approx(getattr(event, name), abs=1e-6)


@pytest.mark.parametrize(
    "fields", [{}, {"type": "nothing.known"}, {"type": ""}, {"version": V7}, {"type": "version.retired", "version": V7}]
)
def test_what_is_no_event_is_an_error(fields: dict[str, str]) -> None:
    with pytest.raises(msgspec.ValidationError):
        from_fields(fields)


@given(value=st.floats(allow_nan=False, min_value=-1e15, max_value=1e15))
def test_a_duration_is_readable_and_exact_to_a_microsecond(value: float) -> None:
    event = events.VersionPromoted(version=V7, generation=1, replicas="r", waited_s=value)
    text = as_dict(to_fields(event))["waited_s"]
    assert "e" not in text
    assert abs(float(text) - value) <= 1e-6
