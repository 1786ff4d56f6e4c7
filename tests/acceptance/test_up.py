"""A whole fleet on one machine, used from outside as an operator uses it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from adaptersync.trainer import AdapterPublisher
from adaptersync_core.config import load_config
from adaptersync_core.keys import ROUTER_TTL_S
from adaptersync_tools.demo.synthetic import write_adapter
from support.processes import family
from support.wait import wait_until_sync

pytestmark = pytest.mark.timeout(150)

CLI = [sys.executable, "-m", "adaptersync_tools.cli"]
READY_S = 60.0
GONE_S = 40.0


class Fleet:
    """`adaptersync up --simulated` in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "up.log"
        self.config = directory / "adaptersync.toml"
        environment = {
            **os.environ,
            "UP_IN": str(directory),  # inherited by everything it starts: see `family`
            "ADAPTERSYNC_REDIS__CONTROL_URL": "redis://127.0.0.1:1/0",  # of another fleet: not this one's
        }
        command = [*CLI, "up", "--simulated", "--replicas", "2", "--router-port", "0", "--state-dir", str(directory)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, stderr=output, stdout=output, env=environment)

    def wait(self) -> None:
        wait_until_sync(self.is_up, timeout_s=READY_S, what=f"the fleet is up: {self.log.read_text()}")

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()
        return "stop        Ctrl-C" in self.log.read_text()

    def adaptersync(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "ADAPTERSYNC_CONFIG": str(self.config)}
        return subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=60, env=environment)

    def json(self, *arguments: str) -> Any:
        run = self.adaptersync(*arguments, "--json")
        assert run.returncode == 0, run.stderr + run.stdout
        return orjson.loads(run.stdout)

    def complete(self, model: str) -> tuple[dict[str, Any], str]:
        url = re.search(r"router +(http://\S+)", self.log.read_text())
        assert url is not None
        body = orjson.dumps({"model": model, "prompt": "1+1=", "max_tokens": 4})
        request = urllib.request.Request(  # noqa: S310 (our own loopback)
            f"{url[1]}/v1/completions", data=body, headers={"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310
            return orjson.loads(answer.read()), answer.headers["x-adaptersync-version"]

    def gone(self) -> bool:
        return not family(self.directory)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    running = Fleet(tmp_path)
    yield running
    if running.process.poll() is None:
        running.process.kill()
        running.process.wait()
    wait_until_sync(running.gone, timeout_s=GONE_S)


def test_a_fleet_from_start_to_stop(fleet: Fleet, tmp_path: Path) -> None:
    fleet.wait()
    # its worker may yet be on its way
    wait_until_sync(lambda: fleet.adaptersync("status").returncode == 0, timeout_s=READY_S, what="healthy")
    status = fleet.json("status")
    assert status["healthy"], status["problems"]
    assert [replica["state"] for replica in status["replicas"]] == ["ready", "ready"]
    wait_until_sync(
        lambda: all(replica["cache"]["followed"] for replica in fleet.json("status")["replicas"]),
        timeout_s=READY_S,
        what="the agents to follow their engines' caches",
    )

    looked = fleet.adaptersync("doctor", "--json")
    assert looked.returncode == 0, looked.stdout
    assert not [each for each in orjson.loads(looked.stdout)["findings"] if each["about"] in ("engine", "token")]

    page = re.search(r"page +(http://\S+)", fleet.log.read_text())
    assert page is not None
    with urllib.request.urlopen(f"{page[1]}/api/fleet", timeout=20) as answer:  # noqa: S310 (our own loopback)
        told = orjson.loads(answer.read())
    assert (told["told_by"], told["leader"]) == ("coordinator-0", "coordinator-0")
    assert told["replicas"][0].keys() == status["replicas"][0].keys()
    assert fleet.json("top").keys() == told.keys()

    adapter = write_adapter(tmp_path / "adapter", base="base", seed=1)
    published = fleet.json("publish", str(adapter), "--run", "my-run", "--step", "3")
    assert published["state"] == "current"
    version = published["version"]

    answer, served = fleet.complete("my-run")
    assert served == version
    assert answer["choices"][0]["text"]

    (shown,) = fleet.json("versions", "my-run")
    assert (shown["version"], shown["state"], shown["step"]) == (version, "current", 3)
    assert {replica: ack["accepted"] for replica, ack in shown["acks"].items()} == {
        "replica-0": True,
        "replica-1": True,
    }
    assert fleet.json("verify", version)["ok"]

    events = [
        orjson.loads(line) for line in fleet.adaptersync("events", "--since", "10min", "--json").stdout.splitlines()
    ]
    told = [event["type"] for event in events if event.get("version") == version]
    assert told[:2] == ["adapter.published", "version.staging"]
    assert sorted(told[2:5]) == ["replica.acked", "replica.acked", "version.promoted"]
    assert "version.verified" in told
    assert version in fleet.adaptersync("events").stdout

    another = write_adapter(tmp_path / "another", base="base", seed=2)
    assert fleet.json("publish", str(another), "--run", "my-run")["state"] == "current"
    undone = fleet.adaptersync("rollback", "my-run", "--reason", "reward fell")
    assert undone.returncode == 0, undone.stderr
    _, served = fleet.complete("my-run")
    assert served == version

    run = fleet.adaptersync("versions", "other-run")
    assert (run.returncode, run.stderr) == (
        64,
        "adaptersync: error: no such run (run=other-run); known runs: my-run\n",
    )

    fleet.process.send_signal(signal.SIGINT)
    assert fleet.process.wait(GONE_S) == 0
    assert fleet.gone(), family(fleet.directory)
    assert fleet.log.read_text().rstrip().endswith("stopped")


def test_a_rollback_serves_the_version_before(fleet: Fleet, tmp_path: Path) -> None:
    fleet.wait()
    with AdapterPublisher(load_config(fleet.config), run="my-run") as publisher:
        good = publisher.publish(write_adapter(tmp_path / "good", base="base", seed=1))
        assert good.wait(30).state == "current"
        bad = publisher.publish(write_adapter(tmp_path / "bad", base="base", seed=2))
        assert bad.wait(30).state == "current"
    assert fleet.complete("my-run")[1] == bad.adapter_id

    run = fleet.adaptersync("rollback", "my-run", "--reason", "answers in riddles")
    assert (run.returncode, run.stdout) == (0, f"voided {bad.adapter_id}; {good.adapter_id} is current\n"), run.stderr
    assert fleet.complete("my-run")[1] == good.adapter_id
    shown = {version["version"]: version for version in fleet.json("versions")}
    assert (shown[bad.adapter_id]["state"], shown[bad.adapter_id]["reason"]) == ("voided", "answers in riddles")

    run = fleet.adaptersync("rollback", "my-run", "--reason", "once more")
    assert run.returncode == 1
    assert run.stderr.startswith("adaptersync: error: coordinator refused: ")


def test_a_killed_fleet_leaves_no_process_and_comes_back_as_it_was(fleet: Fleet, tmp_path: Path) -> None:
    fleet.wait()
    adapter = write_adapter(tmp_path / "adapter", base="base", seed=1)
    version = fleet.json("publish", str(adapter), "--run", "my-run")["version"]
    fleet.process.kill()
    fleet.process.wait()
    again = Fleet(tmp_path)  # at once: it waits for what is left of the other
    try:
        again.wait()
        wait_until_sync(
            lambda: fleet.adaptersync("status").returncode == 0,
            timeout_s=ROUTER_TTL_S + 25,  # its router may have found no Redis to say goodbye to
            what="healthy after the restart",
        )
        assert again.complete("my-run")[1] == version
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(GONE_S) == 0
    finally:
        if again.process.poll() is None:
            again.process.kill()
            again.process.wait()
    assert fleet.gone(), family(tmp_path)


def test_an_interrupt_during_the_start_leaves_no_process(fleet: Fleet) -> None:
    wait_until_sync(lambda: "2 simulated replicas" in fleet.log.read_text(), timeout_s=READY_S)
    fleet.process.send_signal(signal.SIGINT)
    assert fleet.process.wait(GONE_S) == 130
    assert fleet.gone(), family(fleet.directory)


def test_a_simulated_quickstart_is_sound(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "adaptersync_tools.quickstart",
        "--simulated",
        "--steps",
        "5",
        "--out",
        str(tmp_path),
    ]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "UP_IN": str(tmp_path)}
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the run was sound" in run.stdout
    found = orjson.loads((tmp_path / "latest" / "summary.json").read_bytes())
    assert (found["sound"], found["mode"], found["steps"], found["pauses"]) == (True, "simulated", 5, 0)
    assert found["versions"]["published"] == 6
    assert found["rollouts"]["ok"] == 5 * 32
    assert found["prefix_cache"]["across_tokens"] == 0
    assert found["prefix_cache"]["within_tokens"] > 0
    assert found["reward"] is None
    assert not family(tmp_path)
