"""What a stack refuses before it starts anything."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path

import pytest

from adaptersync_tools import up
from adaptersync_tools.supervisor import StackFailed
from adaptersync_tools.up import Progress, Stack, StackSettings


def test_a_port_that_routers_of_another_fleet_share_is_not_joined(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        settings = StackSettings(model=tmp_path, state_dir=tmp_path / "state", simulated=True, router_port=port)
        with pytest.raises(StackFailed, match=f"Address already in use.*port={port}.*--router-port"), Stack(settings):
            pass
    assert not list((tmp_path / "state" / "logs").iterdir())


def test_a_directory_in_use_is_waited_for_with_one_line_and_named_by_its_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Told(Progress):
        def waiting(self, what: str) -> None:
            told.append(what)

    monkeypatch.setattr(up, "LOCK_S", 0.7)
    with (tmp_path / "lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        settings = StackSettings(model=tmp_path, state_dir=tmp_path, simulated=True)
        with pytest.raises(StackFailed, match="pid=4711"), Stack(settings, Told()):
            pass
    assert told == ["the last fleet of this directory to be gone"]


def test_who_uses_a_directory_says_so_in_it(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("123456789")
    stack = Stack(StackSettings(model=tmp_path, state_dir=tmp_path, simulated=True))
    stack._lock()
    assert (tmp_path / "lock").read_text() == str(os.getpid())
    stack._cleanup.close()
