"""What a service says to systemd, on a real socket."""

from __future__ import annotations

import os
import socket

import pytest

from adaptersync_core import notify
from adaptersync_core.notify import Notifier, Pulse
from support.notices import Notices


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(notify, "time", clock)
    return clock


def test_ready_and_stopping_are_said_once_and_a_status_when_it_changes() -> None:
    with Notices() as notices:
        notifier = Notifier.take(dict(notices.environment))
        for _ in range(2):
            notifier.ready()
            notifier.status("serves\n on it")
        notifier.status("else")
        for _ in range(2):
            notifier.stopping()
        assert notices.words == ["READY=1", "STATUS=serves on it", "STATUS=else", "STOPPING=1"]


def test_a_loop_that_turns_asks_for_time_before_it_is_ready_and_feeds_the_watchdog_after(clock: Clock) -> None:
    with Notices(watchdog_s=8.0) as notices:
        notifier = Notifier.take(dict(notices.environment))
        for _ in range(20):
            notifier.alive()
            clock.now += 1.0
        assert notices.words == ["EXTEND_TIMEOUT_USEC=60000000"] * 2
        notifier.ready()
        for _ in range(8):
            notifier.alive()
            clock.now += 1.0
        assert notices.words[2:] == ["READY=1"] + ["WATCHDOG=1"] * 4


def test_without_a_watchdog_nothing_is_fed(clock: Clock) -> None:
    with Notices() as notices:
        notifier = Notifier.take(dict(notices.environment))
        notifier.ready()
        notifier.alive()
        assert notices.words == ["READY=1"]


def test_a_watchdog_for_another_process_is_not_ours() -> None:
    with Notices(watchdog_s=1.0) as notices:
        notifier = Notifier.take({**notices.environment, "WATCHDOG_PID": str(os.getpid() + 1)})
        notifier.ready()
        notifier.alive()
        assert notices.words == ["READY=1"]


def test_children_neither_inherit_the_variables_nor_speak() -> None:
    with Notices(watchdog_s=1.0) as notices:
        environment = {**notices.environment, "WATCHDOG_PID": str(os.getpid()), "OTHER": "1"}
        notifier = Notifier.take(environment)
        assert environment == {"OTHER": "1"}
        child = os.fork()
        if not child:
            notifier.ready()
            os._exit(0)
        os.waitpid(child, 0)
        assert notices.words == []
        notifier.ready()
        assert notices.words == ["READY=1"]


def test_an_abstract_address_is_reached() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        name = f"adaptersync-test-{os.getpid()}"
        listener.bind(f"\0{name}")
        listener.settimeout(5.0)
        Notifier.take({"NOTIFY_SOCKET": f"@{name}"}).ready()
        assert listener.recv(100) == b"READY=1"


@pytest.mark.parametrize("address", ["", "/nowhere/at/all"])
def test_who_is_not_heard_goes_on(address: str) -> None:
    notifier = Notifier(address)
    notifier.status("x")
    notifier.ready()
    notifier.alive()
    notifier.stopping()


def test_a_listener_that_does_not_read_holds_nobody_up(clock: Clock) -> None:
    with Notices(watchdog_s=1.0) as notices:
        notifier = Notifier.take(dict(notices.environment))
        notifier.ready()
        for _ in range(5000):
            clock.now += 1.0
            notifier.alive()


def test_a_pulse_wants_each_of_its_loops(clock: Clock) -> None:
    with Notices(watchdog_s=1.0) as notices:
        notifier = Notifier.take(dict(notices.environment))
        notifier.ready()
        pulse = Pulse(notifier, "a", "b")
        for _ in range(5):
            clock.now += 1.0
            pulse.beat("a")
        assert notices.count("WATCHDOG=1") == 0
        pulse.beat("b")
        clock.now += 1.0
        pulse.beat("b")
        assert notices.count("WATCHDOG=1") == 1
