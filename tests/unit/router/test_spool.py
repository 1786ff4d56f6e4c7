"""The spool: what was appended is there after a death, in order, and never more than fits."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptersync.router.spool import RECORD_BYTES, Record, Spool, own_and_left
from adaptersync_core.errors import StoreError

CAPACITY = 16_384


def payloads(spool: Spool) -> list[bytes]:
    return [spool.payload(record) for record in spool]


def add(spool: Spool, payload: bytes) -> Record:
    record = spool.append(payload)
    assert record is not None
    return record


def abandon(spool: Spool) -> None:
    """As a death leaves it: the lock is gone, the bytes are there, nothing was tidied up."""
    spool._memory.close()
    os.close(spool._file)


def again(spool: Spool) -> Spool:
    abandon(spool)
    taken = Spool.take(spool.path)
    assert taken is not None
    return taken


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool.create(tmp_path / "one.spool", CAPACITY)


def test_what_was_appended_is_found_again(spool: Spool) -> None:
    for number in range(5):
        add(spool, b"row %d" % number)
    assert payloads(again(spool)) == [b"row %d" % number for number in range(5)]


def test_what_is_done_is_not_found_again(spool: Spool) -> None:
    records = [add(spool, b"row %d" % number) for number in range(5)]
    for record in records[:3]:
        record.done = True
    spool.trim()
    assert payloads(again(spool)) == [b"row 3", b"row 4"]


def test_it_holds_no_more_than_fits_and_loses_nothing_of_it(spool: Spool) -> None:
    count = 0
    while spool.append(b"%0100d" % count) is not None:
        count += 1
    assert spool.used <= CAPACITY
    assert count > CAPACITY / 150
    found = again(spool)
    assert payloads(found) == [b"%0100d" % number for number in range(count)]
    assert found.append(b"%0100d" % count) is None


def test_a_record_that_is_too_large_is_refused(spool: Spool) -> None:
    assert spool.append(bytes(RECORD_BYTES)) is None
    assert spool.append(bytes(RECORD_BYTES - 16)) is not None


def test_what_is_kept_does_not_hold_up_the_space_behind_it(spool: Spool) -> None:
    old = add(spool, b"still open")
    old.kept = True
    for number in range(1000):
        add(spool, b"%0100d" % number).done = True
        spool.trim()
    assert spool.used < CAPACITY
    assert spool.payload(old) == b"still open"
    add(spool, b"last")
    found = payloads(again(spool))
    assert found[-1] == b"last"
    assert b"still open" in found


def test_a_record_that_was_cut_short_does_not_count(spool: Spool) -> None:
    add(spool, b"whole")
    torn = add(spool, b"torn in the middle")
    spool._memory[4096 + torn.position + 16 + 4] ^= 0xFF
    assert payloads(again(spool)) == [b"whole"]


@pytest.mark.parametrize("before", [0, 68], ids=["", "across the end of the ring"])
@pytest.mark.parametrize("hit", [(0, 1), (16, 1), (0, 600)], ids=["a head", "a payload", "several records"])
def test_behind_damage_the_rows_are_found_and_what_is_lost_is_told(
    spool: Spool, hit: tuple[int, int], before: int, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(before):
        add(spool, b"%0200d" % number).done = True
        spool.trim()
    records = [add(spool, b"%0200d" % number) for number in range(40)]
    first, end = records[5].position + hit[0], records[5].position + sum(hit)
    for place in range(first, end):
        spool._memory[4096 + place % CAPACITY] ^= 0xFF
    broken = sum(record.position < end for record in records[5:])
    with caplog.at_level(logging.WARNING, logger="adaptersync.router.spool"):
        found = again(spool)
    assert payloads(found) == [b"%0200d" % number for number in range(40) if not 5 <= number < 5 + broken]
    (told,) = caplog.messages
    lost = records[5 + broken].position - records[5].position
    assert f"{spool.path}: {lost} bytes are damaged" in told
    assert found.append(b"next") is not None


def test_damage_at_the_end_is_told_and_an_end_without_damage_is_not(
    spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    add(spool, b"whole")
    spool = again(spool)
    assert caplog.messages == []
    last = add(spool, b"last")
    spool._memory[4096 + last.position + 16] ^= 0xFF
    assert payloads(again(spool)) == [b"whole"]
    assert "24 bytes at the end are damaged" in caplog.text


def test_what_an_earlier_lap_left_is_no_record(spool: Spool) -> None:
    for number in range(500):  # of 128 bytes each, so that every lap's records begin at the same places
        add(spool, b"%0112d" % number).done = True
        spool.trim()
    only = b"%0112d" % 999
    add(spool, only)
    assert payloads(again(spool)) == [only]


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(st.sampled_from(["add", "add", "add", "done", "keep", "die"]), st.integers(1, 900))))
def test_after_any_life_it_holds_what_is_wanted_in_order(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    spool = Spool.create(tmp_path_factory.mktemp("spool") / "one.spool", CAPACITY)
    wanted: dict[bytes, Record] = {}
    for number, (verb, size) in enumerate(steps):
        match verb:
            case "add":
                payload = b"%06d" % number + bytes(size)
                if (record := spool.append(payload)) is not None:
                    wanted[payload] = record
            case "done" if wanted:
                payload = list(wanted)[size % len(wanted)]
                wanted.pop(payload).done = True
                spool.trim()
            case "keep" if wanted:
                wanted[list(wanted)[size % len(wanted)]].kept = True
            case "die":
                spool = again(spool)
                # what was done behind something wanted comes back: it is written to Redis once more
                found = {spool.payload(record): record for record in spool}
                assert wanted.keys() <= found.keys()
                for payload, record in found.items():
                    record.done = payload not in wanted
                wanted = {payload: found[payload] for payload in wanted}
        assert spool.used <= CAPACITY
        for payload, record in wanted.items():
            assert spool.payload(record) == payload
    abandon(spool)


# who owns a file


def test_a_file_in_use_is_not_taken(tmp_path: Path) -> None:
    one, left = own_and_left(tmp_path, "one", CAPACITY)
    two, also_left = own_and_left(tmp_path, "two", CAPACITY)
    assert one.path != two.path
    assert left == also_left == []
    assert Spool.take(one.path) is None


def test_one_that_was_left_is_taken_over_and_the_others_are_named(tmp_path: Path) -> None:
    spools = [own_and_left(tmp_path, name, CAPACITY)[0] for name in ("a", "b")]
    for spool in spools:
        add(spool, spool.path.name.encode())
        abandon(spool)
    own, left = own_and_left(tmp_path, "c", CAPACITY)
    assert payloads(own) == [b"a.spool"]
    assert [payloads(each) for each in left] == [[b"b.spool"]]
    assert len(list(tmp_path.iterdir())) == 2  # dying again and again takes no more disk


def test_one_of_another_size_is_left_to_be_emptied(tmp_path: Path) -> None:
    small, _ = own_and_left(tmp_path, "a", CAPACITY)
    add(small, b"row")
    abandon(small)
    own, left = own_and_left(tmp_path, "b", 2 * CAPACITY)
    assert own.capacity == 2 * CAPACITY
    assert [payloads(each) for each in left] == [[b"row"]]


def test_an_empty_one_is_removed_when_it_is_closed_and_a_full_one_is_not(tmp_path: Path) -> None:
    empty, full = Spool.create(tmp_path / "empty.spool", CAPACITY), Spool.create(tmp_path / "full.spool", CAPACITY)
    add(full, b"row")
    empty.close()
    full.close()
    assert [path.name for path in tmp_path.iterdir()] == ["full.spool"]


@pytest.mark.parametrize("content", [b"", b"short", bytes(CAPACITY + 4096), b"ADSPOOL1" + bytes(CAPACITY)])
def test_what_is_no_spool_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.spool"
    path.write_bytes(content)
    assert Spool.take(path) is None
    assert path.read_bytes() == content


def test_without_room_on_the_disk_it_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"spool cannot be made: .*check router.spool_path"):
        own_and_left(tmp_path, "a", 1 << 60)
    assert list(tmp_path.iterdir()) == []


WRITER = """
import sys
from pathlib import Path
from adaptersync.router.spool import Spool
spool = Spool.create(Path(sys.argv[1]), 1 << 20)
number = 0
while True:
    record = spool.append(b"%08d" % number * (number % 100 + 1))
    if record is not None:
        number += 1
        print(number, flush=True)
    for record in list(spool)[:-50]:
        record.done = True
    spool.trim()
"""


def test_what_was_said_to_be_appended_survives_a_kill_at_any_instant(tmp_path: Path) -> None:
    for turn in range(5):
        path = tmp_path / f"{turn}.spool"
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(200 + 37 * turn):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            said = int((process.stdout.read().split() or [b"0"])[-1]) or 0
        spool = Spool.take(path)
        assert spool is not None
        found = payloads(spool)
        numbers = [int(payload[:8]) for payload in found]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[-1] >= said - 1
        assert all(
            payload == b"%08d" % number * (number % 100 + 1) for number, payload in zip(numbers, found, strict=True)
        )
        spool.close()
