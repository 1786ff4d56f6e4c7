"""A trainer of two processes on gloo: all of them save, one publishes, and an error of one ends both in time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support import trainers
from support.source import REPOSITORY

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(400)]

LONG_S = 300.0  # until both have ended, on a busy machine; most of it is imports
SOON_S = 60.0  # within it an error of one is one of the other


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainers.load_trl()
    return trainers.tiny_model(tmp_path_factory.mktemp("base"))


def run(base: Path, out: Path, kind: str, fault: str = "none", *, processes: int = 2) -> list[dict[str, Any]]:
    """What each process says of itself; nothing when it died."""
    out.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    paths = [str(REPOSITORY / root) for root in ("services", "shared", "tools", "tests")]
    paths = [*filter(None, [os.environ.get("PYTHONPATH", "")]), *paths]  # first what is under test
    children = []
    for rank in range(processes):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | ranks if processes > 1 else {}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"} | rendezvous
        command = [sys.executable, "-m", "support.ranks", str(base), str(out), kind, fault]
        with (out / f"log-{rank}").open("wb") as log:
            children.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=out))
    try:
        for child in children:
            child.wait(LONG_S)
    finally:
        for child in children:
            child.kill()
            child.wait()
    said = [out / f"rank-{rank}.json" for rank in range(processes)]
    return [json.loads(path.read_bytes()) if path.exists() else {} for path in said]


@pytest.fixture(scope="module")
def alone(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of a trainer of one process."""
    (said,) = run(base, tmp_path_factory.mktemp("alone") / "out", "alone", processes=1)
    digests: list[str] = said["digests"]
    assert len(set(digests)) == 2
    return digests


def test_what_is_sharded_is_published_whole_and_is_the_same_bytes(base: Path, tmp_path: Path, alone: list[str]) -> None:
    main, other = run(base, tmp_path / "out", "fsdp2")
    assert (main["raised"], other["raised"]) == ("", "")
    assert (main["sharded"], main["processes"]) == (True, 2)
    assert main["digests"] == alone
    assert other["digests"] == []  # one publishes


def test_two_that_train_publish_once_a_step(base: Path, tmp_path: Path, alone: list[str]) -> None:
    main, other = run(base, tmp_path / "out", "ddp")
    assert (main["raised"], other["raised"]) == ("", "")
    assert (main["processes"], len(set(main["digests"])), other["digests"]) == (2, 3, [])
    assert main["digests"][0] == alone[0]
    state = json.loads((tmp_path / "out" / "checkpoint-2" / "adaptersync.json").read_bytes())
    assert (state["digest"], state["seq"]) == (main["digests"][2], 3)


@pytest.mark.parametrize(
    ("fault", "where", "elsewhere"),
    [
        ("save@1", "OSError: [Errno 28] No space left on device", 0),
        ("submit@2", "Fenced: a newer trainer has begun this run", 1),
    ],
    ids=["saving, on another than the main one", "publishing, on the main one"],
)
def test_an_error_of_one_is_raised_on_both_in_time(
    base: Path, tmp_path: Path, fault: str, where: str, elsewhere: int
) -> None:
    said = run(base, tmp_path / "out", "ddp", fault)
    assert said[1 - elsewhere]["raised"].startswith(where)
    assert said[elsewhere]["raised"].startswith(f"PublicationFailed: another process of this trainer failed: {where}")
    assert all(one["seconds"] < SOON_S for one in said)
    assert len(said[0]["digests"]) == (0 if fault == "save@1" else 2)


def test_that_there_will_be_no_more_samples_is_raised_on_both(base: Path, tmp_path: Path) -> None:
    """Before the first batch, and after it: the main one alone reads samples, the other would wait in a broadcast."""
    main, other = run(base, tmp_path / "out", "ddp", "health@0,1")
    ended = "AdapterSyncError: the rollout process ended: killed"
    assert main["raised"] == f"{ended}; {ended}"
    told = f"PublicationFailed: another process of this trainer failed: {ended} (run=sums)"
    assert other["raised"] == f"{told}; {told}"
    assert len(main["digests"]) == 3  # one batch was trained on
    assert other["seconds"] < SOON_S


def test_when_the_main_one_dies_the_other_ends_too(base: Path, tmp_path: Path) -> None:
    main, other = run(base, tmp_path / "out", "ddp", "exit@2")
    assert main == {}
    assert other["raised"]
    assert other["seconds"] < SOON_S
