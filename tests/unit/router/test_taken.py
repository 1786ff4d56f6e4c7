"""What is kept of the rows that Redis has taken: nothing that it lost goes unnoticed, and the oldest give way."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from adaptersync.router.spool import PAYLOAD_BYTES, Spool
from adaptersync.router.taken import Taken, TakenRows

CAPACITY = 16_384


@pytest.fixture
def ring(tmp_path: Path) -> Spool:
    return Spool.create(tmp_path / "one.spool", CAPACITY)


def entry(number: int) -> str:
    return f"{int(time.time() * 1000)}-{number}"


def batch(*numbers: int) -> list[tuple[str, bytes]]:
    return [(entry(number), b'{"row": %d}' % number) for number in numbers]


def looked_up(rows: TakenRows, *, lost: set[int]) -> list[Taken]:
    """Look up until nothing is unsure, in a stream that has lost some entries; what is to be written again."""
    found = []
    for _ in range(100):
        asked = rows.questions()
        found += rows.answered(asked, [int(each.entry.split("-")[1]) not in lost for each in asked])
        if not rows.unsure:
            break
    return found


def numbers(taken: list[Taken]) -> list[int]:
    return [int(each.entry.split("-")[1]) for each in taken]


def test_while_the_stream_has_the_newest_nothing_else_is_looked_up(ring: Spool) -> None:
    rows = TakenRows(ring)
    assert rows.questions() == []
    rows.take(batch(1, 2, 3))
    rows.take(batch(4, 5))
    assert numbers(rows.questions()) == [3, 5]
    assert looked_up(rows, lost={1}) == []


def test_what_the_stream_lost_is_found_and_once_only(ring: Spool) -> None:
    rows = TakenRows(ring)
    rows.take(batch(1, 2))
    rows.take(batch(3, 4))
    assert numbers(looked_up(rows, lost={2, 3, 4})) == [2, 3, 4]
    assert looked_up(rows, lost={2, 3, 4}) == []


def test_a_loss_within_a_batch_shows_by_the_batch_before(ring: Spool) -> None:
    rows = TakenRows(ring)
    rows.take(batch(1, 2))
    rows.take(batch(3, 4))  # emptied after 3 was written: 4 is there
    assert numbers(looked_up(rows, lost={1, 2, 3})) == [1, 2, 3]


def test_what_was_lost_and_written_again_may_be_lost_again(ring: Spool) -> None:
    rows = TakenRows(ring)
    rows.take(batch(1))
    (lost,) = looked_up(rows, lost={1})
    lost.record.done = True
    rows.take(batch(2))  # the same row, in its new place
    assert numbers(looked_up(rows, lost={1, 2})) == [2]


def test_the_next_process_looks_everything_up(tmp_path: Path, ring: Spool) -> None:
    rows = TakenRows(ring)
    rows.take(batch(*range(1, 11)))
    rows.close()
    own, left = Spool.take(ring.path), Spool.create(tmp_path / "two.spool", CAPACITY)
    assert own is not None
    other = TakenRows(left)
    other.take(batch(11))
    found = looked_up(TakenRows(own, [left]), lost={9, 10, 11})
    assert sorted(numbers(found)) == [9, 10, 11]
    assert sorted(each.spool.payload(each.record).partition(b" ")[2] for each in found) == [
        b'{"row": 10}',
        b'{"row": 11}',
        b'{"row": 9}',
    ]


def test_the_oldest_give_way_and_what_is_lost_does_not(ring: Spool) -> None:
    rows = TakenRows(ring)
    for number in range(1, 1001):
        rows.take(batch(number))
    assert ring.used <= CAPACITY
    lost = looked_up(rows, lost=set(range(1, 2000)))
    assert numbers(lost) == list(range(1001 - len(lost), 1001))
    assert len(lost) > CAPACITY / 100
    for number in range(1001, 2000):  # nothing else is kept while they wait
        rows.take(batch(number))
    assert [each.spool.payload(each.record).partition(b" ")[2] for each in lost] == [
        b'{"row": %d}' % number for number in numbers(lost)
    ]


def test_the_next_process_sees_a_loss_before_it_has_written_anything(ring: Spool) -> None:
    rows = TakenRows(ring)
    rows.take(batch(*range(1, 11)))
    rows.close()
    own = Spool.take(ring.path)
    assert own is not None
    rows = TakenRows(own)
    assert looked_up(rows, lost=set()) == []
    assert numbers(rows.questions()) == [10]
    assert numbers(looked_up(rows, lost={9, 10})) == [9, 10]


def test_a_row_that_is_too_long_is_not_kept_and_nothing_gives_way_to_it(ring: Spool) -> None:
    rows = TakenRows(ring)
    rows.take(batch(1, 2))
    rows.take([(entry(3), b'{"row": "' + b"x" * PAYLOAD_BYTES + b'"}')])
    assert numbers(looked_up(rows, lost={1, 2, 3})) == [1, 2]


async def test_what_was_left_long_ago_is_removed(tmp_path: Path) -> None:
    for name, at_ms in (("old", 1_000_000_000_000), ("young", int(time.time() * 1000))):
        spool = Spool.create(tmp_path / f"{name}.spool", CAPACITY * 2)
        TakenRows(spool).take([(f"{at_ms}-0", b"{}")])
        spool._memory.close()
        os.close(spool._file)
    rows = await TakenRows.at(tmp_path, name="new", capacity=CAPACITY)
    assert sorted(os.listdir(tmp_path)) == ["new.spool", "young.spool"]
    assert numbers(rows.questions()) == [0, 0]  # the newest, and all there is
    rows.close()


async def test_without_room_nothing_is_kept(tmp_path: Path) -> None:
    rows = await TakenRows.at(tmp_path / "kept", name="new", capacity=0)
    rows.take(batch(1))
    assert rows.questions() == []
    assert os.listdir(tmp_path) == []


async def test_without_room_nothing_stays_but_what_another_process_has(tmp_path: Path) -> None:
    gone, alive = [await TakenRows.at(tmp_path, name=name, capacity=CAPACITY) for name in ("gone", "alive")]
    for rows in (gone, alive):
        rows.take(batch(1))
    gone.close()
    await TakenRows.at(tmp_path, name="new", capacity=0)
    assert os.listdir(tmp_path) == ["alive.spool"]
    alive.close()


async def test_an_own_ring_of_long_ago_is_begun_anew(tmp_path: Path) -> None:
    before = await TakenRows.at(tmp_path, name="one", capacity=CAPACITY)
    before.take([("1000000000000-0", b"{}")])
    before.close()
    after = await TakenRows.at(tmp_path, name="one", capacity=CAPACITY)
    assert after.questions() == []
    after.close()
    assert os.listdir(tmp_path) == []


def test_what_was_trimmed_away_is_not_lost_and_no_longer_kept(ring: Spool) -> None:
    rows = TakenRows(ring)
    made = [(f"{number}-0", b"{}") for number in range(1, 7)]
    rows.take(made[:4])
    rows.take(made[4:])
    again = []
    for _ in range(2):
        asked = rows.questions()
        # 1 to 3 were trimmed, and 5 and 6 lost since
        again += rows.answered(asked, [each.entry == "4-0" for each in asked], trimmed="4-0")
    assert [each.entry for each in again] == ["5-0", "6-0"]
    rows.trim()
    assert [ring.payload(record).split()[0] for record in ring] == [b"4-0", b"5-0", b"6-0"]
