"""Queues that pass by themselves, as the decision's books keep them."""

from __future__ import annotations

from adaptersync.router.books import Books
from adaptersync.router.queues import RATE, SECOND_US, Queues

FLEET = ("r0", "r1", "r2", "r3")
BLOCK = 256  # tokens


def prompt(name: str, blocks: int = 16) -> list[str]:
    """4096 tokens: half a second and a bit at the usual rate."""
    return [f"{name}{place}" for place in range(blocks)]


def test_what_was_sent_is_waited_for_and_passes() -> None:
    queues = Queues()
    queues.rates = {"fast": 2 * RATE}
    assert (queues.takes_us("usual", RATE), queues.takes_us("fast", RATE)) == (SECOND_US, SECOND_US // 2)
    queues.join("r0", SECOND_US, now_us=7)
    queues.join("r0", SECOND_US, now_us=7)
    assert [queues.wait_us("r0", now) for now in (7, 7 + SECOND_US, 7 + 3 * SECOND_US)] == [2 * SECOND_US, SECOND_US, 0]
    queues.join("r0", SECOND_US, now_us=9 * SECOND_US)  # idle meanwhile: no more than its own
    assert queues.wait_us("r0", 9 * SECOND_US) == SECOND_US


def test_a_group_stays_together_before_its_first_prefill_ends() -> None:
    books = Books(policy="expected", spill=8)
    went = [books.route(prompt("a"), FLEET, 0, now_us=0, tokens=BLOCK) for _ in range(8)]
    assert [choice.outcome for choice in went] == ["cold"] + ["affinity"] * 7
    assert len({choice.replica for choice in went}) == 1
    assert sum(books.queues.busy_until.values()) == 16 * BLOCK * SECOND_US // RATE  # once


def test_a_spilled_group_has_two_owners() -> None:
    books = Books(policy="expected", spill=8)
    first = books.route(prompt("a"), FLEET, 0, now_us=0, tokens=BLOCK)
    books.queues.join(first.replica, 5 * SECOND_US, now_us=0)  # others' prompts
    second, third = (books.route(prompt("a"), FLEET, 0, now_us=0, tokens=BLOCK) for _ in range(2))
    assert (second.outcome, third.outcome) == ("spill", "affinity")
    assert first.replica != second.replica == third.replica
    later = books.route(prompt("a"), FLEET, 0, now_us=9 * SECOND_US, tokens=BLOCK)
    assert later.outcome == "affinity"


def test_long_prompts_are_spread_by_what_they_take_and_not_by_their_number() -> None:
    books = Books(policy="expected", spill=8)
    books.queues.rates = {"r0": RATE // 4}
    went = [books.route(prompt(f"p{n}-"), ("r0", "r1"), n, now_us=0, tokens=BLOCK).replica for n in range(5)]
    assert went.count("r0") == 1


def test_boilerplate_takes_no_time() -> None:
    books = Books(policy="expected", spill=8)
    system = prompt("system", 12)
    for name in ("a", "b"):
        books.route([*system, *prompt(name, 4)], FLEET, 0, now_us=0, tokens=BLOCK)
    before = sum(books.queues.busy_until.values())
    books.route([*system, *prompt("c", 4)], FLEET, 0, now_us=0, tokens=BLOCK)
    assert sum(books.queues.busy_until.values()) - before == 4 * BLOCK * SECOND_US // RATE


def test_where_a_session_goes_the_queue_is_joined_too() -> None:
    books = Books(policy="expected", spill=8)
    books.queues.join("r2", 9 * SECOND_US, now_us=0)
    assert books.route(prompt("a"), FLEET, 0, kept="r2", now_us=0, tokens=BLOCK).outcome == "session"
    assert books.queues.wait_us("r2", 0) > 9 * SECOND_US
