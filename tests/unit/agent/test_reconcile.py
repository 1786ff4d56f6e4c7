"""Desired minus observed: what an agent does next."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync.agent.reconcile import Plan, plan
from adaptersync_core.records import Ack

NAMES = ["a-v1", "a-v2", "b-v1", "b-v2"]
YES, NO = Ack(accepted=True, engine_epoch="2"), Ack(accepted=False, engine_epoch="2")
OLD = Ack(accepted=True, engine_epoch="1")


def planned(
    wanted: str = "", loaded: str = "", busy: str = "", resting: str = "", acks: dict[str, Ack] | None = None
) -> Plan:
    return plan(
        wanted=wanted.split(),
        loaded=loaded.split(),
        acks=acks or {},
        engine_epoch="2",
        busy=busy.split(),
        resting=resting.split(),
    )


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(planned(), Plan(), id="nothing wanted, nothing held"),
        pytest.param(planned("x y"), Plan(bring=("x", "y")), id="brought in the order of the table"),
        pytest.param(planned("y x"), Plan(bring=("y", "x")), id="whatever that is"),
        pytest.param(planned("x", "x"), Plan(confirm=("x",)), id="held and not yet said"),
        pytest.param(planned("x", "x", acks={"x": YES}), Plan(), id="held and said"),
        pytest.param(planned("x", "x", acks={"x": OLD}), Plan(confirm=("x",)), id="said in an earlier life"),
        pytest.param(
            planned("x", acks={"x": YES}), Plan(retract=("x",), bring=("x",)), id="said and gone from the engine"
        ),
        pytest.param(planned("x", busy="x", acks={"x": YES}), Plan(), id="said, gone and on its way already"),
        pytest.param(planned("x", acks={"x": OLD}), Plan(bring=("x",)), id="said in an earlier life, and not there"),
        pytest.param(planned("x", acks={"x": NO}), Plan(bring=("x",)), id="refused and rested"),
        pytest.param(planned("x", resting="x", acks={"x": NO}), Plan(), id="refused a moment ago"),
        pytest.param(planned("x", "x", resting="x", acks={"x": NO}), Plan(), id="held and refused a moment ago"),
        pytest.param(planned("x", "x", acks={"x": NO}), Plan(confirm=("x",)), id="held after a refusal"),
        pytest.param(planned("x", busy="x"), Plan(), id="on its way"),
        pytest.param(planned("", "x"), Plan(unload=("x",)), id="held and not wanted"),
        pytest.param(planned("", "", busy="x"), Plan(cancel=("x",)), id="on its way and no longer wanted"),
        pytest.param(planned("", "", acks={"x": YES}), Plan(forget=("x",)), id="said and no longer wanted"),
        pytest.param(
            planned("y", "x", acks={"x": YES}), Plan(bring=("y",), unload=("x",), forget=("x",)), id="one for another"
        ),
    ],
)
def test_cases(seen: Plan, expected: Plan) -> None:
    assert seen == expected


SOME = st.lists(st.sampled_from(NAMES), unique=True)


@given(
    wanted=SOME,
    loaded=SOME,
    busy=SOME,
    resting=SOME,
    acks=st.dictionaries(st.sampled_from(NAMES), st.sampled_from([YES, NO, OLD])),
)
def test_a_plan_is_disjoint_and_touches_nothing_that_is_wanted_and_held(
    wanted: list[str], loaded: list[str], busy: list[str], resting: list[str], acks: dict[str, Ack]
) -> None:
    todo = plan(wanted=wanted, loaded=loaded, acks=acks, engine_epoch="2", busy=busy, resting=resting)
    started = {*todo.bring, *todo.confirm}
    assert started <= set(wanted) - set(busy)
    assert not started & {*todo.unload, *todo.cancel, *todo.forget}
    assert set(todo.unload) == set(loaded) - set(wanted)
    assert set(todo.bring).isdisjoint(loaded)
    # when all of it is done, nothing is left to do
    said = {name: YES for name in wanted if name not in resting or name in loaded}
    held = [name for name in wanted if name in said]
    after = plan(wanted=wanted, loaded=held, acks=said, engine_epoch="2", busy=(), resting=resting)
    assert after == Plan()
