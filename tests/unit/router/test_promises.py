"""What is expected of prompts, and when it is no longer."""

from __future__ import annotations

from adaptersync.router.books import Books
from adaptersync.router.policy import Choice
from adaptersync.router.promises import DROPS, FORGET, MOST, PROMPTS, Promises, Repeats

COLD = "cold"


def to(replica: str, outcome: str = "affinity") -> Choice:
    return Choice(replica=replica, outcome=outcome, owned=0)  # type: ignore[arg-type]


def groups_of(count: int) -> Repeats:
    repeats = Repeats()
    repeats.asked, repeats.prompts = count * 40, 40
    return repeats


def held(promises: Promises) -> dict[str, int]:
    kept = {replica: more for replica, more in promises.by_replica.items() if more}
    counted = {replica: 0 for replica in kept}
    for each in promises.prompts.values():
        if each.left:
            counted[each.replica] += each.left
    assert kept == counted
    return kept


def test_a_prompt_promises_the_rest_of_its_group_and_each_repeat_keeps_one() -> None:
    promises, repeats = Promises(), groups_of(4)
    promises.note(["a"], to("r0", COLD), repeats, inflight=1)
    assert held(promises) == {"r0": 3}
    for left in (2, 1):
        promises.note(["a"], to("r0"), repeats, inflight=1)
        assert held(promises) == {"r0": left}
    for _ in range(3):  # more came than was promised
        promises.note(["a"], to("r0"), repeats, inflight=1)
        assert held(promises) == {}


def test_what_is_left_moves_with_the_prompt() -> None:
    promises, repeats = Promises(), groups_of(4)
    promises.note(["a"], to("r0", COLD), repeats, inflight=1)
    promises.note(["a"], to("r1", "spill"), repeats, inflight=1)
    assert held(promises) == {"r1": 2}
    promises.note(["a"], to("r2", COLD), repeats, inflight=1)  # both owners have left: no new group begins
    assert held(promises) == {"r2": 1}
    assert repeats.prompts == 41


def test_a_prompt_that_continues_another_promises_nothing() -> None:
    promises, repeats = Promises(), groups_of(4)
    promises.note(["a", "b"], to("r0", "affinity"), repeats, inflight=1)
    promises.note([], to("r0", COLD), repeats, inflight=1)  # too short to be known again
    assert held(promises) == {}
    assert not promises.prompts
    assert (repeats.asked, repeats.prompts, promises.again) == (160, 40, 0)


def test_the_size_of_groups_is_learned_and_follows_a_change() -> None:
    repeats = Repeats()
    assert repeats.first(0) == 0  # nothing is known, nothing is promised
    for size in (8, 2):
        for _ in range(4 * FORGET):
            expected = repeats.first(size - 1)
        assert expected == size - 1
    assert repeats.prompts < FORGET


def test_a_request_that_brings_its_whole_group_promises_nothing() -> None:
    books = Books(policy="promise", spill=8)
    for number in range(3 * FORGET):
        choice = books.route([f"prompt {number}"], ("r0", "r1"), number, weight=8, alike=8)
        assert held(books.promises) == {}
        books.release(choice.replica, 8)
    # asked for in another way, the group is as large as before
    first = books.route(["in halves"], ("r0", "r1"), 0, weight=4, alike=4)
    assert held(books.promises) == {first.replica: 4}
    books.route(["in halves"], ("r0", "r1"), 0, weight=4, alike=4)
    assert held(books.promises) == {}


def test_a_request_for_many_completions_is_as_much_load_as_they_are() -> None:
    books = Books(policy="threshold", spill=8)
    assert books.route(["a"], ("r0", "r1"), 0, weight=8, alike=8).replica == "r0"
    assert [books.route([name], ("r0", "r1"), 0).replica for name in "bcd"] == ["r1"] * 3
    assert books.inflight == {"r0": 8, "r1": 3}


def test_one_prompt_that_everybody_asks_for_does_not_promise_the_world() -> None:
    repeats = Repeats()
    assert repeats.first(100_000) == MOST


def test_groups_that_never_come_are_pushed_out_by_those_that_do() -> None:
    fewest, most = PROMPTS
    promises = Promises()
    for number in range(fewest):
        promises.note([f"given up {number}"], to("r0", COLD), groups_of(8), inflight=10)
    assert held(promises) == {"r0": 7 * fewest}
    for number in range(fewest):
        promises.note([f"new {number}"], to("r1", COLD), groups_of(8), inflight=10)
    assert held(promises) == {"r1": 7 * fewest}
    for number in range(3 * most):  # however busy the fleet is
        promises.note([f"busy {number}"], to("r2", COLD), groups_of(8), inflight=10 * most)
        assert len(promises.prompts) <= most
    before = len(promises.prompts)
    promises.note(["calm"], to("r2", COLD), groups_of(8), inflight=0)  # and not all at once when it is no longer
    assert len(promises.prompts) == before + 1 - DROPS


def test_when_nothing_is_in_flight_nothing_is_expected() -> None:
    books = Books(policy="promise", spill=8)
    books.repeats = groups_of(8)
    first = books.route(["a"], ("r0", "r1"), 0)
    assert held(books.promises) == {first.replica: 7}
    books.route(["b"], ("r0", "r1"), 0)
    assert len(held(books.promises)) == 2
    for replica in ("r0", "r1"):
        books.release(replica)
    books.route(["c"], ("r0", "r1"), 0)
    assert held(books.promises) == {first.replica: 7}  # of the new one alone


def test_of_those_left_out_nothing_is_concluded() -> None:
    books = Books(policy="promise", spill=8)
    first = books.route(["a"], ("r0", "r1"), 0)
    (other,) = {"r0", "r1"} - {first.replica}
    books.route(["b"], (other,), 0, whole=False)
    assert set(books.promises.prompts) == {"a", "b"}


def test_two_groups_that_begin_at_once_grow_on_two_replicas() -> None:
    for policy, apart in (("promise", 16), ("threshold", 9)):
        books = Books(policy=policy, spill=8)  # type: ignore[arg-type]
        books.repeats = groups_of(16)
        books.inflight.update(r0=0, r1=1)
        assert books.route(["a"], ("r0", "r1"), 0).replica == "r0"
        second = books.route(["b"], ("r0", "r1"), 0).replica
        assert (second == "r1") == (apart == 16)
