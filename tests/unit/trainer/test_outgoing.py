"""What is published next, what is replaced, what is tried again, and what ends it all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync.trainer.outgoing import LONGEST_REST_S, Disposition, Outgoing, disposition
from adaptersync_core.errors import (
    AdapterInvalid,
    AdapterSyncError,
    ControlUnavailable,
    Fenced,
    NameTaken,
    PublicationFailed,
    StoreError,
    StoreGone,
)

AWAY = ControlUnavailable("Redis is away")
INVALID = AdapterInvalid("a tensor is not finite")


def outgoing(*items: int) -> Outgoing[int]:
    """The first is under way, the second waits."""
    made: Outgoing[int] = Outgoing()
    for item in items:
        made.put(item)
        made.take(0.0)
    return made


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (AWAY, Disposition.RETRY),
        (StoreError("disk is full"), Disposition.RETRY),
        (StoreGone("mount is gone"), Disposition.RETRY),
        (NameTaken("name stands for something else"), Disposition.RETRY),
        (OSError(28, "No space left on device"), Disposition.RETRY),
        (INVALID, Disposition.SKIP),
        (Fenced("a newer trainer has begun this run"), Disposition.END),
        (PublicationFailed("publisher is closed"), Disposition.END),
        (TypeError("a mistake"), Disposition.END),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.value,
)
def test_what_can_pass_is_tried_again_and_what_cannot_is_not(error: Exception, wanted: Disposition) -> None:
    assert disposition(error) is wanted


def test_one_is_under_way_and_the_newest_waits() -> None:
    queue = outgoing(1)
    assert [queue.put(item) for item in (2, 3, 4)] == [None, 2, 3]
    assert queue.take(0.0) is None  # until 1 is done
    queue.done()
    assert queue.take(0.0) == 4
    queue.done()
    assert queue.take(0.0) is None
    assert queue.idle


def test_what_failed_is_tried_again_after_ever_longer_rests() -> None:
    queue, now, rests = outgoing(1), 0.0, []
    for _ in range(8):
        assert queue.failed(AWAY, now) is Disposition.RETRY
        assert queue.take(now) is None
        rest = queue.rest_s(now)
        assert rest is not None
        rests.append(rest)
        now += rest
        assert queue.take(now) == 1
    assert rests == [1, 2, 4, 8, 16, *[LONGEST_REST_S] * 3]
    queue.done()
    assert queue.idle


def test_a_newer_one_takes_the_place_of_one_that_failed_and_begins_without_rest() -> None:
    waiting = outgoing(1, 2)
    assert waiting.failed(AWAY, 0.0) is None  # 1 is given up
    assert waiting.take(0.0) == 2

    resting = outgoing(1)
    resting.failed(AWAY, 0.0)
    assert resting.put(2) == 1
    assert resting.rest_s(0.0) is None
    assert resting.take(0.0) == 2
    assert resting.failed(AWAY, 0.0) is Disposition.RETRY
    assert resting.rest_s(0.0) == 1  # its own first rest


def test_what_the_fleet_could_not_serve_is_skipped_and_the_next_is_taken() -> None:
    queue = outgoing(1, 2)
    assert queue.failed(INVALID, 0.0) is Disposition.SKIP
    assert queue.take(0.0) == 2


def test_after_another_trainer_began_nothing_is_taken_and_whoever_submits_hears_why() -> None:
    queue = outgoing(1, 2)
    fenced = Fenced("a newer trainer has begun this run")
    assert queue.failed(fenced, 0.0) is Disposition.END
    assert queue.take(0.0) is None
    with pytest.raises(Fenced):
        queue.put(3)
    assert queue.end(fenced) == [2]


class Trouble(AdapterSyncError):
    pass


@given(st.lists(st.sampled_from(["put", "take", "done", "away", "invalid", "rest"]), max_size=60))
def test_whatever_happens_order_is_kept_and_each_comes_to_one_end(moves: list[str]) -> None:
    queue: Outgoing[int] = Outgoing()
    now, made, taken, ends, busy = 0.0, 0, [], [], None
    for move in moves:
        match move:
            case "put":
                made += 1
                replaced = queue.put(made)
                ends += [replaced] if replaced is not None else []
            case "take" if busy is None:
                busy = queue.take(now)
                taken += [busy] if busy is not None else []
            case "done" if busy is not None:
                queue.done()
                ends.append(busy)
                busy = None
            case "away" | "invalid" if busy is not None:
                found = queue.failed(Trouble("?") if move == "away" else INVALID, now)
                ends += [busy] if found is not Disposition.RETRY else []
                busy = None
            case "rest":
                now += 100.0
    assert taken == sorted(taken)
    assert sorted(ends) == sorted(set(ends))
    left = queue.end(Trouble("closed"))
    assert sorted(ends + left) == list(range(1, made + 1))
    assert len(left) <= 2
    assert not left or left[-1] == made or queue.idle
