"""Workers as processes: who dies is replaced, who is told to stop stops, and nobody is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import get_args

import pytest

from adaptersync.router.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from adaptersync.router.policy import Outcome
from adaptersync.router.workers import SHARE_BYTES, SLOTS, Shares, reserved
from adaptersync_core.errors import ConfigError
from support.wait import wait_until_sync

PROGRAM = """
import asyncio, contextlib, logging, os, signal, sys
from adaptersync.router import workers
from adaptersync_core.errors import ConfigError

async def work(shares, worker):
    stop = asyncio.Event()
    assert type(asyncio.get_running_loop()).__module__ == "uvloop"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if "fail" in sys.argv:
        raise ConfigError("on purpose", key="k")
    found = shares.get(worker).decode()
    shares.put(worker, b"left by %d" % os.getpid())
    os.write(1, f"began {worker} {os.getpid()} {found}\\n".encode())
    await stop.wait()
    os.write(1, f"ended {worker} {os.getpid()}\\n".encode())

if "ignore" in sys.argv:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if "quick" in sys.argv:
    workers.BEAT_S = 0.2
if "late" in sys.argv:
    setitimer = signal.setitimer
    def last_one(which, seconds, interval=0.0):
        if not seconds:
            os.kill(os.getpid(), signal.SIGALRM)
        setitimer(which, seconds, interval)
    signal.setitimer = last_one
logging.basicConfig(format="%(message)s")
workers.run(work, int(sys.argv[1]))
"""


class Running:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def began(self, count: int) -> dict[str, int]:
        """Process ids by worker."""
        lines = [self.line() for _ in range(count)]
        assert {line[0] for line in lines} == {"began"}
        return {line[1]: int(line[2]) for line in lines}

    def rest(self) -> list[list[str]]:
        """Lines until the last process has ended."""
        assert self.process.stdout is not None
        return [line.split() for line in self.process.stdout]


@contextlib.contextmanager
def running(workers: int, *how: str) -> Iterator[Running]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(workers), *how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()  # its workers end with it


@pytest.mark.parametrize("how", [(), ("ignore",)], ids=["", "started by who ignores SIGCHLD"])
def test_who_dies_is_replaced_and_finds_what_it_had_left(how: tuple[str, ...]) -> None:
    with running(2, *how) as it:
        pids = it.began(2)
        assert it.process.pid not in pids.values()
        os.kill(pids["1"], signal.SIGKILL)
        line = it.line()
        assert line[:2] == ["began", "1"]
        assert line[3:] == ["left", "by", str(pids["1"])]
        it.process.send_signal(signal.SIGTERM)
        assert sorted(it.rest()) == [["ended", "0", str(pids["0"])], ["ended", "1", line[2]]]
        assert it.process.wait(10.0) == 0
        assert it.process.stderr is not None
        assert it.process.stderr.read().splitlines() == [
            f"worker 1 (process {pids['1']}) ended: SIGKILL; another takes its place"
        ]


@contextlib.contextmanager
def _frozen(pid: int) -> Iterator[None]:
    """For 20 s at most, then it is killed here."""
    late = threading.Timer(20.0, os.kill, (pid, signal.SIGKILL))
    os.kill(pid, signal.SIGSTOP)
    late.start()
    try:
        yield
    finally:
        late.cancel()


def test_who_is_frozen_is_replaced_and_nobody_else() -> None:
    with running(2, "quick") as it:
        pids = it.began(2)
        with _frozen(pids["1"]):
            line = it.line()
        assert line[:2] == ["began", "1"]
        assert not _runs(pids["1"])
        it.process.send_signal(signal.SIGTERM)
        assert sorted(it.rest()) == [["ended", "0", str(pids["0"])], ["ended", "1", line[2]]]
        assert it.process.wait(10.0) == 0
        assert it.process.stderr is not None
        assert it.process.stderr.read().splitlines() == [
            f"worker 1 (process {pids['1']}) shows no sign of life: it is killed",
            f"worker 1 (process {pids['1']}) ended: SIGKILL; another takes its place",
        ]


def test_who_is_frozen_does_not_keep_the_router_from_ending() -> None:
    with running(2, "quick") as it:
        pids = it.began(2)
        with _frozen(pids["1"]):
            it.process.send_signal(signal.SIGTERM)
            assert it.rest() == [["ended", "0", str(pids["0"])]]
        assert it.process.wait(10.0) == 0
        assert it.process.stderr is not None
        assert it.process.stderr.read().splitlines() == [
            f"worker 1 (process {pids['1']}) shows no sign of life: it is killed"
        ]


def test_who_was_frozen_together_with_its_parent_goes_on() -> None:
    with running(2, "quick") as it:
        pids = it.began(2)
        everybody = [it.process.pid, *pids.values()]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2.0)  # twice as long as one alone may be
        for pid in everybody:  # the parent first, which looks before they can show anything
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.1)
        time.sleep(1.0)
        it.process.send_signal(signal.SIGTERM)
        assert {line[1]: int(line[2]) for line in it.rest() if line[0] == "ended"} == pids
        assert it.process.wait(10.0) == 0


@pytest.mark.parametrize(("workers", "how"), [(1, signal.SIGTERM), (3, signal.SIGTERM), (3, signal.SIGINT)])
def test_a_signal_ends_all_in_order(workers: int, how: signal.Signals) -> None:
    with running(workers) as it:
        pids = it.began(workers)
        it.process.send_signal(how)
        assert {line[1]: int(line[2]) for line in it.rest() if line[0] == "ended"} == pids
        assert it.process.wait(10.0) == 0


def test_workers_end_in_order_when_their_parent_is_killed() -> None:
    with running(2) as it:
        pids = it.began(2)
        it.process.kill()
        try:
            wait_until_sync(lambda: not [pid for pid in pids.values() if _runs(pid)], timeout_s=10.0)
        finally:
            for pid in filter(_runs, pids.values()):
                os.kill(pid, signal.SIGKILL)
        assert {line[1]: int(line[2]) for line in it.rest()} == pids


def _runs(pid: int) -> bool:
    """Whoever is their parent now may not yet have asked how they ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_workers_that_die_at_once_end_the_router_with_a_reason_and_not_for_ever() -> None:
    with running(2, "fail") as it:
        assert it.process.wait(20.0) == 1
        assert it.rest() == []
        assert it.process.stderr is not None
        said = it.process.stderr.read()
    assert "Traceback" not in said
    assert "on purpose" in said
    assert "ended: exit code 1; that is too often, stopping" in said


def test_a_look_that_was_due_at_the_end_does_not_end_it_otherwise() -> None:
    with running(2, "late") as it:
        it.began(2)
        it.process.terminate()
        assert it.process.wait(20.0) == 0


# what they leave for each other


def test_a_share_is_what_was_last_put_whole() -> None:
    shares = Shares(3)
    assert [shares.get(worker) for worker in range(3)] == [b"", b"", b""]
    for number in range(5):
        shares.put(1, b"%d" % number * (number + 1))
        assert shares.get(1) == b"%d" % number * (number + 1)
    shares.put(2, b"two")
    assert shares.others(0) == [b"44444", b"two"]
    assert shares.others(1) == [b"two"]


def test_what_was_being_written_when_its_writer_died_is_as_if_it_had_not_been(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptersync.router.workers.SHARE_BYTES", 4096)
    shares = Shares(2)
    _tear(shares, 1, b"first")
    assert shares.get(1) == b""
    shares.put(1, b"second")
    _tear(shares, 1, b"third")
    assert shares.get(1) == b"second"
    shares.put(1, b"fourth")
    assert shares.get(1) == b"fourth"
    assert shares.get(0) == b""


def _tear(shares: Shares, worker: int, data: bytes) -> None:
    """Put, and lose the last byte of what was put."""
    before = shares._memory[:]
    shares.put(worker, data)
    after = shares._memory[:]
    changed = [place for place, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    shares._memory[changed[-1] : changed[-1] + 1] = b"\0"


def test_figures_of_a_thousand_replicas_and_four_versions_fit() -> None:
    metrics, shares = Metrics(), Shares(1)
    replicas = [f"replica-of-a-large-group-{number:04}" for number in range(1000)]
    versions = [f"a-run-of-that-group-v{number}-0123456789ab" for number in range(4)]
    words = {"replica": replicas, "version": versions, "routing": get_args(Outcome)}
    for name, (_, labels) in COUNTERS.items():
        for each in product(*(words.get(label, ["affinity"]) for label in labels)):
            metrics.count(name, *each, by=1e6 + len(each))
    for name, (_, labels, _) in HISTOGRAMS.items():
        for each in product(*(words.get(label, ["loaded"]) for label in labels)):
            metrics.observe(name, 0.1, *each)
    for name, (_, labels, _) in GAUGES.items():
        for replica in replicas if labels else ():
            metrics.gauge(name, 1, replica)
    figures = metrics.encode()
    shares.put(0, figures)
    assert shares.get(0) == figures


def test_a_share_has_its_bounds(caplog: pytest.LogCaptureFixture) -> None:
    shares = Shares(2)
    assert len(shares._memory) == 2 * SLOTS * SHARE_BYTES
    largest = b"x" * (SHARE_BYTES - 16)
    shares.put(0, largest)
    shares.put(1, b"one")
    assert shares.get(0) == largest
    for _ in range(3):
        shares.put(0, largest + b"x")
        assert (shares.get(0), shares.get(1)) == (b"", b"one")  # what was before is not taken for what is
    assert caplog.text.count("too many to be shared") == 1
    shares.put(0, b"few")
    assert shares.get(0) == b"few"


# the port that they share


def test_a_port_is_reserved_for_workers_and_stays_theirs() -> None:
    with reserved("127.0.0.1", 0) as (port, _):
        assert port
        with socket.socket() as worker, socket.socket() as stranger:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind(("127.0.0.1", port))
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))


def test_a_port_is_no_other_routers_before_and_while_somebody_listens() -> None:
    with reserved("127.0.0.1", 0) as ours:
        complaint = "another router of this host has the port"
        with pytest.raises(ConfigError, match=complaint) as raised, reserved("127.0.0.1", ours.port):
            pass
        assert raised.value.ids == {"key": "router.port", "value": ours.port}
        with socket.socket() as worker:
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                worker.setsockopt(socket.SOL_SOCKET, option, 1)
            worker.bind(("127.0.0.1", ours.port))
            worker.listen()
            for host in ("127.0.0.1", "0.0.0.0"):  # noqa: S104
                with pytest.raises(ConfigError, match="in use"), reserved(host, ours.port):
                    pass
    with reserved("127.0.0.1", ours.port) as again:
        assert again.port == ours.port


def test_a_port_that_is_taken_is_an_error_of_ours() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="in use") as raised, reserved("127.0.0.1", port):
            pass
        assert raised.value.ids == {"key": "router.port", "value": port}
    with pytest.raises(ConfigError, match="cannot listen") as raised, reserved("no such host", 0):
        pass
    assert raised.value.ids["key"] == "router.host"


def test_all_serve_when_each_does_and_no_longer_when_one_is_started_anew() -> None:
    shares = Shares(2)
    assert not shares.all_serve
    shares.serves(0)
    assert not shares.all_serve
    shares.serves(1)
    assert shares.all_serve
    shares.serves(0, now=False)
    assert not shares.all_serve
