"""What a stack refuses before it starts anything."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from adaptersync_tools.supervisor import StackFailed
from adaptersync_tools.up import Stack, StackSettings


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
