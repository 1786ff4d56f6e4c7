"""Services that are kept running: restarts are bounded, stops are ordered."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_tools import supervisor as module
from adaptersync_tools.supervisor import Spec, StackFailed, Supervisor
from support.wait import wait_until_sync


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "WATCH_S", 0.01)
    with Supervisor(tmp_path / "logs") as running:
        yield running


def spec(name: str, code: str, *, tier: int = 0, restart: bool = True, grace_s: float = 2.0) -> Spec:
    return Spec(name=name, command=(sys.executable, "-c", code), tier=tier, restart=restart, grace_s=grace_s)


def test_a_service_that_ends_is_started_again_and_given_up_after_a_bound(supervisor: Supervisor) -> None:
    service = supervisor.start(spec("falls", "print('my last words'); raise SystemExit(3)"))
    wait_until_sync(lambda: service.given_up, timeout_s=30)
    assert service.restarts == module.RESTARTS
    with pytest.raises(StackFailed, match=r"falls does not stay up: .*my last words"):
        supervisor.check()


def test_a_program_may_end_well(supervisor: Supervisor) -> None:
    service = supervisor.start(spec("ends", "pass", restart=False))
    wait_until_sync(lambda: service.returncode is not None, timeout_s=10)
    supervisor.check()
    assert (service.returncode, service.restarts, service.given_up) == (0, 0, False)


def test_a_program_that_fails_is_not_started_again(supervisor: Supervisor) -> None:
    service = supervisor.start(spec("fails", "raise SystemExit(7)", restart=False))
    wait_until_sync(lambda: service.given_up, timeout_s=10)
    assert (service.returncode, service.restarts) == (7, 0)


def test_a_service_gives_way_as_far_as_its_spec_says(supervisor: Supervisor) -> None:
    says = spec("says", "import os; print('nice', os.nice(0))", restart=False)
    services = [supervisor.start(replace(says, name=f"says-{nice}", nice=nice)) for nice in (0, 3)]
    wait_until_sync(lambda: [service.returncode for service in services] == [0, 0], timeout_s=10)
    for service in services:
        assert f"nice {min(os.nice(0) + service.spec.nice, 19)}" in service.log_path.read_text()


def test_waiting_is_bounded_and_says_for_what(supervisor: Supervisor) -> None:
    with pytest.raises(StackFailed, match="the moon: not ready in time"):
        supervisor.wait_for("the moon", lambda: False, limit_s=0.05, interval_s=0.01)


def test_higher_tiers_stop_first(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = """
import signal, sys, time
def stop(*_):
    open({told!r}, "a").write({name!r} + " ")
    sys.exit()
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(60)
"""
    with Supervisor(tmp_path / "logs") as supervisor:
        for name, tier in (("server", 0), ("service", 2), ("engine", 1)):
            service = supervisor.start(spec(name, code.format(told=str(told), name=name), tier=tier))
            wait_until_sync(lambda service=service: "up" in service.log_path.read_text(), timeout_s=20)  # type: ignore[misc]
    assert told.read_text().split() == ["service", "engine", "server"]


def test_what_is_away_stays_away_until_it_is_to_come_back(supervisor: Supervisor) -> None:
    """Meanwhile the others are watched as ever."""
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); print('up', flush=True)"
    service = supervisor.start(spec("sleeps", f"{code}; time.sleep(60)"))
    wait_until_sync(lambda: "up" in service.log_path.read_text(), timeout_s=20)
    with supervisor.away("sleeps", signal.SIGTERM):
        assert service.returncode == 5  # in order, by the signal that was asked for
        other = supervisor.start(spec("falls", "raise SystemExit(3)"))
        wait_until_sync(lambda: other.restarts > 1, timeout_s=20)
        assert (service.pid, service.restarts) == (None, 0)
    assert service.restarts == 1
    wait_until_sync(lambda: service.log_path.read_text().count("up") == 2, timeout_s=20)
    assert not service.given_up


def test_what_is_away_when_all_is_stopped_does_not_come_back(tmp_path: Path) -> None:
    with Supervisor(tmp_path / "logs") as supervisor:
        service = supervisor.start(spec("sleeps", "import time; time.sleep(60)"))
        with supervisor.away("sleeps"):
            supervisor.stop()
    assert (service.pid, service.restarts) == (None, 0)


def test_a_service_that_retires_finishes_what_it_has_in_hand_and_is_not_started_again(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    ended = tmp_path / "ended"
    code = (
        "import pathlib, signal, sys, time\n"
        "def end(*_): time.sleep(0.3); pathlib.Path(sys.argv[1]).write_text('1'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "print('up', flush=True)\nwhile True: time.sleep(0.01)\n"
    )
    made = Spec(name="ends", command=(sys.executable, "-c", code, str(ended)), tier=0, grace_s=0.01)
    service = supervisor.start(made)
    wait_until_sync(lambda: "up" in service.log_path.read_text(), timeout_s=10)
    supervisor.retire("ends", patience_s=10)
    assert ended.exists()
    assert (service.pid, service.restarts, supervisor.services) == (None, 0, {})


def test_one_that_does_not_retire_is_ended(supervisor: Supervisor) -> None:
    code = "import signal, time\nsignal.signal(signal.SIGTERM, lambda *_: None)\nprint('up', flush=True)\n"
    service = supervisor.start(spec("stays", code + "while True: time.sleep(0.01)", grace_s=0.1))
    wait_until_sync(lambda: "up" in service.log_path.read_text(), timeout_s=10)
    supervisor.retire("stays", patience_s=0.1)
    assert (service.pid, supervisor.services) == (None, {})
