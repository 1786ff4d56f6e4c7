"""Properties of the choice, for any fleet."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from adaptersync.router.policy import MANY, Block, Standing, boilerplate, choose, owned

standings = st.lists(
    st.builds(
        Standing,
        replica=st.integers(0, 99).map("replica-{}".format),
        owned=st.integers(0, 4),
        inflight=st.integers(0, 12),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda standing: standing.replica,
)
spills = st.integers(0, 9)
turns = st.integers(0, 50)


@given(standings, spills, turns)
def test_the_choice_is_never_more_than_the_spill_ahead(fleet: list[Standing], spill: int, turn: int) -> None:
    choice = choose(fleet, spill=spill, turn=turn)
    by_name = {standing.replica: standing for standing in fleet}
    least = min(standing.inflight for standing in fleet)
    assert by_name[choice.replica].inflight - least <= spill
    assert choice.owned == by_name[choice.replica].owned


@given(standings, spills, turns)
def test_the_words_mean_what_they_say(fleet: list[Standing], spill: int, turn: int) -> None:
    choice = choose(fleet, spill=spill, turn=turn)
    least = min(standing.inflight for standing in fleet)
    owners = [standing for standing in fleet if standing.owned]
    near = [standing for standing in owners if standing.inflight - least <= spill]
    assert choice.outcome == ("affinity" if near else "spill" if owners else "cold")
    if near:
        assert choice.owned == max(standing.owned for standing in near)
    else:
        assert min(standing.inflight for standing in fleet if standing.replica == choice.replica) == least


@given(standings, spills, turns)
def test_ties_alone_depend_on_the_turn(fleet: list[Standing], spill: int, turn: int) -> None:
    one, other = choose(fleet, spill=spill, turn=0), choose(fleet, spill=spill, turn=turn)
    by_name = {standing.replica: (standing.owned, standing.inflight) for standing in fleet}
    assert one.outcome == other.outcome
    if one.outcome == "affinity":
        assert by_name[one.replica] == by_name[other.replica]


def test_equal_replicas_share_the_cold_prompts() -> None:
    fleet = [Standing(replica=f"replica-{n}", owned=0, inflight=0) for n in range(4)]
    assert {choose(fleet, spill=8, turn=turn).replica for turn in range(4)} == {s.replica for s in fleet}


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
