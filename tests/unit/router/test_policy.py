"""Properties of the choice, for any fleet."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from adaptersync.router.policy import EVEN, MANY, STEP_US, Block, Policy, Standing, boilerplate, choose, owned
from adaptersync.router.queues import SECOND_US

POLICIES = get_args(Policy)

standings = st.lists(
    st.builds(
        Standing,
        replica=st.integers(0, 99).map("replica-{}".format),
        owned=st.integers(0, 4),
        inflight=st.integers(0, 12) | st.integers(100, 130),
        promised=st.integers(0, 12),
        wait_us=st.sampled_from((0, STEP_US, 2 * STEP_US)) | st.integers(0, 4 * STEP_US),
        prefill_us=st.integers(0, 4 * STEP_US),
        again_us=st.integers(0, 4 * STEP_US),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda standing: standing.replica,
)
spills = st.integers(0, 9)
turns = st.integers(0, 50)


def near(fleet: list[Standing], policy: Policy, spill: int) -> list[Standing]:
    """Who is not too far ahead, said once more and otherwise."""
    if policy == "threshold":
        return [one for one in fleet if all(one.inflight <= other.inflight + spill for other in fleet)]
    total = sum(one.inflight for one in fleet)
    allowed = max(spill * len(fleet), total // EVEN)
    even = [one for one in fleet if one.inflight * len(fleet) - total <= allowed]
    if policy == "promise":
        return even
    cost = [one.wait_us + one.prefill_us + one.again_us for one in even]
    return [one for one, its in zip(even, cost, strict=True) if all(its <= other + STEP_US for other in cost)]


@pytest.mark.parametrize("policy", POLICIES)
@given(standings, spills, turns)
def test_nobody_who_is_too_far_ahead_is_chosen(policy: Policy, fleet: list[Standing], spill: int, turn: int) -> None:
    choice = choose(fleet, policy=policy, spill=spill, turn=turn)
    (chosen,) = (one for one in fleet if one.replica == choice.replica)
    assert chosen in near(fleet, policy, spill)
    assert choice.owned == chosen.owned


@pytest.mark.parametrize("policy", POLICIES)
@given(standings, spills, turns)
def test_the_words_mean_what_they_say(policy: Policy, fleet: list[Standing], spill: int, turn: int) -> None:
    choice = choose(fleet, policy=policy, spill=spill, turn=turn)
    allowed = near(fleet, policy, spill)
    owners = [one for one in allowed if one.owned]
    assert choice.outcome == ("affinity" if owners else "spill" if any(one.owned for one in fleet) else "cold")
    (chosen,) = (one for one in fleet if one.replica == choice.replica)
    if owners:
        assert choice.owned == max(one.owned for one in owners)
    elif policy != "threshold":
        assert chosen.inflight + chosen.promised == min(one.inflight + one.promised for one in allowed)
    else:
        assert chosen.inflight == min(one.inflight for one in fleet)


@pytest.mark.parametrize("policy", POLICIES)
@given(standings, spills, turns)
def test_ties_alone_depend_on_the_turn(policy: Policy, fleet: list[Standing], spill: int, turn: int) -> None:
    one = choose(fleet, policy=policy, spill=spill, turn=0)
    other = choose(fleet, policy=policy, spill=spill, turn=turn)
    by_name = {standing.replica: standing for standing in fleet}
    (first, second) = (by_name[choice.replica] for choice in (one, other))
    assert one.outcome == other.outcome
    if one.outcome == "affinity":
        assert (first.owned, first.inflight) == (second.owned, second.inflight)
    elif policy != "threshold":
        assert first.inflight + first.promised == second.inflight + second.promised
    else:
        assert first.inflight == second.inflight


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_replicas_share_the_cold_prompts(policy: Policy) -> None:
    fleet = [Standing(replica=f"replica-{n}", owned=0, inflight=0) for n in range(4)]
    names = {choose(fleet, policy=policy, spill=8, turn=turn).replica for turn in range(4)}
    assert names == {s.replica for s in fleet}


def standing(replica: str, owned: int = 0, inflight: int = 0, promised: int = 0) -> Standing:
    return Standing(replica=replica, owned=owned, inflight=inflight, promised=promised)


def test_an_owner_is_measured_by_the_mean_or_by_the_least_loaded() -> None:
    fleet = [standing("r0", 1, 36), standing("r1", 0, 27), standing("r2", 0, 32), standing("r3", 0, 33)]
    assert choose(fleet, policy="promise", spill=8, turn=0).replica == "r0"  # 4 ahead of 32
    assert choose(fleet, policy="threshold", spill=8, turn=0).replica == "r1"  # 9 ahead of 27
    ahead = [standing("r0", 1, 41), *fleet[1:]]
    assert choose(ahead, policy="promise", spill=8, turn=0).outcome == "affinity"  # 7.75 ahead of 33.25
    assert choose([standing("r0", 1, 42), *fleet[1:]], policy="promise", spill=8, turn=0).outcome == "spill"


def test_in_a_busy_fleet_an_eighth_of_the_mean_is_not_far_ahead() -> None:
    fleet = [standing("r0", 1, 140), standing("r1", 0, 125), standing("r2", 0, 125), standing("r3", 0, 122)]
    assert choose(fleet, policy="promise", spill=8, turn=0).replica == "r0"  # 12 ahead of 128
    assert choose([standing("r0", 1, 146), *fleet[1:]], policy="promise", spill=8, turn=0).replica == "r3"


def test_a_cold_prompt_keeps_away_from_what_is_promised() -> None:
    fleet = [standing("r0", 0, 3, 7), standing("r1", 0, 5, 0)]
    assert choose(fleet, policy="promise", spill=8, turn=0).replica == "r1"
    assert choose(fleet, policy="threshold", spill=8, turn=0).replica == "r0"


def test_promises_that_are_not_kept_send_nobody_where_the_load_is() -> None:
    """As where a replica has just joined, or groups are given up half done."""
    fleet = [standing("old", 0, 4, 500), standing("new", 0, 22, 0)]
    assert choose(fleet, policy="promise", spill=8, turn=0).replica == "old"  # the other is 9 ahead of 13


def queued(replica: str, wait_s: float, prefill_s: float = 0, again_s: float = 0, owned: int = 0) -> Standing:
    wait, prefill, again = (round(seconds * SECOND_US) for seconds in (wait_s, prefill_s, again_s))
    return Standing(replica=replica, owned=owned, inflight=0, wait_us=wait, prefill_us=prefill, again_us=again)


def soonest(*fleet: Standing) -> str:
    return choose(fleet, policy="expected", spill=8, turn=0).replica


def test_a_prompt_goes_where_its_first_token_is_expected_soonest() -> None:
    assert soonest(queued("busy", 1.0, 0.5), queued("slow", 0, 2.0), queued("r2", 0.5, 0.5)) == "r2"
    for policy in ("promise", "threshold"):
        fleet = [queued("busy", 1.0, 0.5), queued("r1", 0, 0.5)]
        assert choose(fleet, policy=policy, spill=8, turn=0).replica == "busy"


def test_an_owner_is_waited_for_until_twice_the_prefill_is_less() -> None:
    assert soonest(queued("owner", 0.9, owned=9), queued("r1", 0, 0.5, 0.5)) == "owner"
    assert soonest(queued("owner", 1.1, owned=9), queued("r1", 0, 0.5, 0.5)) == "r1"
    assert soonest(queued("owner", 0.9, 0.5), queued("r1", 0, 0.5)) == "r1"  # what is new is counted once


def test_who_is_a_step_later_is_not_known_to_be_later() -> None:
    step = STEP_US / SECOND_US
    assert soonest(queued("owner", 0.5 + step, owned=9), queued("r1", 0, 0.25, 0.25)) == "owner"
    assert soonest(queued("owner", 0.500_001 + step, owned=9), queued("r1", 0, 0.25, 0.25)) == "r1"


def test_who_is_too_far_ahead_is_not_asked_however_soon_it_answers() -> None:
    fleet = [standing("soon", 0, 20), structs.replace(queued("late", 9.0), inflight=2)]
    assert choose(fleet, policy="expected", spill=8, turn=0).replica == "late"


def block(child: str, *owners: str) -> Block:
    return Block(child=child, owners=owners)


def test_what_branches_is_boilerplate() -> None:
    hashes = ["aaaa1", "bbbb2", "cccc3", "dddd4"]
    known = [block("bbbb", "r0"), block("cccc", "r0"), block("dddd", "r0"), block("", "r0")]
    assert boilerplate(known, hashes) == 0
    assert boilerplate([known[0], block("eeee", "r0")], hashes) == 2  # a second continuation, seen right now
    assert boilerplate([known[0], block(MANY, "r0"), *known[2:]], hashes) == 2
    assert boilerplate([*known[:3], block(MANY, "r0")], hashes) == 0  # the prompt itself, which others continue
    assert boilerplate([], hashes) == 0


def test_owning_counts_without_gaps_and_beyond_the_boilerplate() -> None:
    known = [block("", "r0", "r1"), block("", "r0"), block("", "r0", "r1"), block("", "r1")]
    assert owned(known, 0) == {"r0": 3, "r1": 1}
    assert owned(known, 2) == {"r0": 1, "r1": 2}
    assert owned(known, 4) == {}
    assert owned([], 0) == {}
