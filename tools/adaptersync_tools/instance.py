"""Replica number N of a host: its ports, its name, its paths. Everything is a function of settings and number."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

from msgspec import Struct

from adaptersync_core.config import Config
from adaptersync_core.config_check import is_loopback
from adaptersync_core.errors import ConfigError

PORTS = 65536
LAST = 999  # instance number


class ReplicaSlot(Struct, frozen=True, kw_only=True):
    """`name` is unique among hosts, `number` on one."""

    number: int
    name: str
    port: int
    events_port: int
    replay_port: int
    engine_url: str
    public_url: str
    metrics_port: int
    token_file: Path
    stage_path: Path

    @classmethod
    def of(cls, config: Config, number: int, *, hostname: str = "") -> ReplicaSlot:
        engine = config.engine
        ports = [first + number for first in (engine.port, engine.events_port, engine.replay_port)]
        metrics_port = config.agent.metrics_port and config.agent.metrics_port + number
        if max(*ports, metrics_port) >= PORTS:
            raise ConfigError("no port is left for this instance", next_step="lower engine.port", number=number)
        hostname = hostname or socket.gethostname()
        public = HOST if is_loopback(engine.host) else hostname
        return cls(
            number=number,
            name=f"{host_word(hostname)}-{number}",
            port=ports[0],
            events_port=ports[1],
            replay_port=ports[2],
            engine_url=_url(HOST if engine.host in EVERYWHERE else engine.host, ports[0]),
            public_url=_url(engine.public_host or public, ports[0]),
            metrics_port=metrics_port,
            token_file=Path(engine.run_path) / str(number) / "token",
            stage_path=Path(config.agent.stage_path) / str(number),
        )

    def overrides(self) -> dict[str, Any]:
        """Of the agent's settings."""
        return {
            "agent__name": self.name,
            "agent__engine_url": self.engine_url,
            "agent__public_url": self.public_url,
            "agent__metrics_port": self.metrics_port,
            "agent__token_file": str(self.token_file),
            "agent__stage_path": str(self.stage_path),
        }


HOST = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with


def host_word(hostname: str) -> str:
    """A host's short name as part of one of ours."""
    word = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in hostname.split(".")[0].lower())
    return word.strip("-_")[:40] or "host"


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
