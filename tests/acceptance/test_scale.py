"""A fleet on one machine that grows and shrinks while clients ask, used from outside as an operator uses it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from adaptersync_core.config import Config, load_config
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.rollouts import Row, read_rollouts
from adaptersync_tools.demo.synthetic import write_adapter
from support.processes import family
from support.wait import wait_until_sync

pytestmark = pytest.mark.timeout(150)

CLI = [sys.executable, "-m", "adaptersync_tools.cli"]
HOST = socket.gethostname()
SLOW = """--latency '{"decode_tokens_per_s": 40}'"""  # something is in flight at any moment
ANSWERS = 20  # within each step, so that it was under traffic


class Fleet:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "up.log"
        self.told = directory / "clients.json"
        self.environment = {**os.environ, "UP_IN": str(directory)}
        command = [*CLI, "up", "--simulated", "--replicas", "2", "--router-port", "0", "--state-dir", str(directory)]
        command += ["--engine-arguments", SLOW]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stderr=output, stdout=output, env=self.environment)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "stop        Ctrl-C" in self.log.read_text()

    def adaptersync(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, "ADAPTERSYNC_CONFIG": str(self.directory / "adaptersync.toml")}
        return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=100, env=environment)

    def json(self, *arguments: str) -> Any:
        run = self.adaptersync(*arguments, "--json")
        assert run.returncode == 0, run.stderr + run.stdout
        return orjson.loads(run.stdout)

    def clients(self) -> subprocess.Popen[bytes]:
        url = next(line.split()[1] for line in self.log.read_text().splitlines() if line.startswith("router "))
        command = [sys.executable, "-m", "adaptersync_tools.day.traffic", "--run", "my-run", "--told", str(self.told)]
        return subprocess.Popen([*command, url], env=self.environment)

    def answered(self) -> dict[str, Any]:
        return orjson.loads(self.told.read_bytes()) if self.told.exists() else {"answered": 0}

    def engines(self) -> int:
        return sum("adaptersync_tools.simulator" in line and ".child" not in line for line in family(self.directory))

    def scaled(self, *arguments: str) -> dict[str, Any]:
        """The host, once it is as it was asked to be, and clients were answered since."""
        host: dict[str, Any]
        (host,) = self.json("scale", *arguments)["hosts"]
        before = self.answered()["answered"]
        wait_until_sync(lambda: self.answered()["answered"] >= before + ANSWERS, timeout_s=20)
        return host


async def ledger(config: Config) -> list[Row]:
    client = RedisClient(config.redis.control_url, name="test")
    try:
        return await read_rollouts(Registry(client, Keys(config.group.name)))
    finally:
        await client.close()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    running = Fleet(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()
    wait_until_sync(lambda: not family(tmp_path), timeout_s=40)


def test_a_fleet_is_scaled_2_4_1_under_traffic_and_no_client_sees_an_error(fleet: Fleet, tmp_path: Path) -> None:
    wait_until_sync(fleet.is_up, timeout_s=60, what="the fleet is up")
    adapter = write_adapter(tmp_path / "adapter", base="base", seed=1)
    version = fleet.json("publish", str(adapter), "--run", "my-run")["version"]
    clients = fleet.clients()
    try:
        wait_until_sync(lambda: fleet.answered()["answered"] > 0, timeout_s=30)

        host = fleet.scaled("4", "--routers", "2", "--workers", "2")
        assert (host["host"], host["keeper"], host["desired"], host["ready"]) == (HOST, "up", 4, 4)
        assert (host["routers"], host["workers"]) == (2, 2)
        wait_until_sync(lambda: len(fleet.answered()["replicas"]) == 4, timeout_s=30, what="all four are asked")

        host = fleet.scaled("1", "--routers", "1", "--workers", "1")
        assert (host["desired"], host["joining"], host["ready"], host["draining"], host["other"]) == (1, 0, 1, 0, 0)
        assert (host["routers"], host["workers"]) == (1, 1)
        ended = re.findall(r"ended (replica-\d), (idle|not idle)", fleet.log.read_text())
        assert ended == [("replica-3", "idle"), ("replica-2", "idle"), ("replica-1", "idle")]
        assert fleet.engines() == 1, family(tmp_path)
        status = fleet.json("status")
        assert [replica["replica"] for replica in status["replicas"]] == ["replica-0"]
        assert status["problems"] == []
    finally:
        clients.terminate()
        clients.wait(40)
    told = fleet.answered()
    assert (told["failed"], told["errors"]) == (0, []), told
    assert told["versions"] == {version: told["answered"]}
    rows = asyncio.run(ledger(load_config(tmp_path / "adaptersync.toml")))
    assert len(rows) >= told["answered"]
    # nor was anything hidden from them: no request had to be sent to another replica
    assert [row for row in rows if row.tried or row.outcome != "ok"] == []

    refused = fleet.adaptersync("scale", "0")
    assert refused.returncode == 1
    assert "0 replicas would be left, coordinator.min_ready is 1" in refused.stderr
    assert fleet.json("scale")["hosts"][0]["desired"] == 1  # nothing was asked
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.process.wait(40) == 0
