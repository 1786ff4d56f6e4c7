"""`adaptersync publish` and `adaptersync watch` as one types them, on a real Redis."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from msgspec.structs import replace

from adaptersync.trainer.publisher import AdapterPublisher
from adaptersync.trainer.watch import News
from adaptersync_core.config import Config, GroupSection, RedisSection, StoreSection
from adaptersync_core.errors import AdapterInvalid, Fenced
from adaptersync_core.keys import Keys
from adaptersync_core.records import ReplicaReport
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_core.store import ArtifactStore
from adaptersync_core.table import Member, Table
from adaptersync_tools.cli import main
from adaptersync_tools.cli.publishing import _Told
from support.adapters import make_adapter
from support.artifacts import REPORT, small_adapter
from support.tiny_model import write_sizes
from support.wait import wait_until_sync


@pytest.fixture
def redis_kind() -> str:
    return "redis7"


@pytest.fixture
def config(redis_url: str, cache_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    store = tmp_path / "store"
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)
    for name, value in {
        "REDIS__CONTROL_URL": redis_url,
        "REDIS__CACHE_URL": cache_url,
        "STORE__PATH": str(store),
    }.items():
        monkeypatch.setenv(f"ADAPTERSYNC_{name}", value)
    return Config(
        group=GroupSection(),
        redis=RedisSection(control_url=redis_url, cache_url=cache_url),
        store=StoreSection(path=str(store)),
    )


def ready(config: Config, **limits: int) -> None:
    """Replicas that are ready, with these limits of rank."""

    async def write() -> None:
        client = RedisClient(config.redis.control_url, name="test")
        keys = Keys(config.group.name)
        registry = Registry(client, keys)
        for name, limit in limits.items():
            await registry.report_replica(name, replace(REPORT, max_lora_rank=limit, root="/models/served"))
        members = {name: Member(state="ready", url="u", engine_epoch="1", since=0.0, block_size=16) for name in limits}
        await client.command("SET", keys.table, msgspec.json.encode(Table(members=members)))
        await client.close()

    asyncio.run(write())


def said(capsys: pytest.CaptureFixture[str]) -> Any:
    return orjson.loads(capsys.readouterr().out)


# publish --check


def test_a_check_publishes_nothing_and_says_what_fits(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready(config, r1=16, r2=16)
    adapter = make_adapter(tmp_path / "a", base_model="org/served")
    assert main(["publish", str(adapter), "--check", "--json"]) == 0
    answer = said(capsys)
    assert (answer["ok"], answer["replicas"], answer["findings"]) == (True, 2, [])
    assert answer["adapter"]["rank"] == 8
    assert list(ArtifactStore(Path(config.store.path)).versions()) == []


def test_a_check_says_all_that_is_wrong_and_what_to_do(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready(config, r1=4, r2=4)
    assert main(["publish", str(make_adapter(tmp_path / "a", base_model="org/other")), "--check"]) == 65
    out = capsys.readouterr().out
    assert "rank 8 is above the limit of 2 of 2 replicas, 4" in out
    assert "r=4 or less" in out
    assert "trained on org/other" in out
    assert "cannot be served" in out


def test_a_check_against_a_base_model_finds_what_vllm_would_ignore(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = str(write_sizes(tmp_path / "base"))
    adapter = str(make_adapter(tmp_path / "a", layers=3))
    assert main(["publish", adapter, "--check", "--offline", "--base-model", base]) == 65
    assert "base model has no such weight" in capsys.readouterr().out
    assert main(["publish", adapter, "--run", "run", "--no-wait", "--base-model", base]) == 65
    assert "base model has no such weight" in capsys.readouterr().err
    assert list(ArtifactStore(Path(config.store.path)).versions()) == []
    assert main(["publish", adapter, "--check", "--offline", "--base-model", str(tmp_path)]) == 78
    assert "no weights of a base model" in capsys.readouterr().err


def test_a_warning_is_no_reason_to_fail(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["publish", str(small_adapter(tmp_path / "a", scale=0)), "--check", "--json"]) == 0
    (finding,) = said(capsys)["findings"]
    assert finding["level"] == "warning"
    assert "changes nothing" in finding["what"]


def test_offline_no_fleet_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", "redis://127.0.0.1:1/0")
    adapter = str(small_adapter(tmp_path / "a"))
    assert main(["publish", adapter, "--check"]) == 69  # a check that was not made was not passed
    assert main(["publish", adapter, "--check", "--offline"]) == 0
    assert "no fleet was asked" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["publish", "/"], "Missing option '--run'"),
        (["publish", "/", "--offline", "--run", "r"], "--offline is for --check"),
        (["watch", "/", "--run", "r"], "give --preset or --pattern"),
    ],
)
def test_what_is_missing_is_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_what_is_refused_leaves_the_runs_trainer_alone(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ready(config, r1=8)
    base = write_sizes(tmp_path / "base")
    with AdapterPublisher(config, run="run") as trainer:
        for status, adapter, model in (
            (78, make_adapter(tmp_path / "a"), tmp_path),  # no base model is there
            (65, make_adapter(tmp_path / "b", layers=3), base),
            (65, make_adapter(tmp_path / "c", rank=16), base),
            (65, make_adapter(tmp_path / "d", config={"use_dora": True}), base),
        ):
            assert main(["publish", str(adapter), "--run", "run", "--no-wait", "--base-model", str(model)]) == status
        assert "use_dora" in capsys.readouterr().err
        assert trainer.publish(tmp_path / "a").seq == 1
        assert main(["publish", str(tmp_path / "a"), "--run", "run", "--no-wait", "--base-model", str(base)]) == 0
        with pytest.raises(Fenced):
            trainer.publish(tmp_path / "a")


# what every trainer gets


def test_a_publisher_refuses_a_rank_the_fleet_would_refuse(config: Config, tmp_path: Path) -> None:
    ready(config, r1=16, r2=4)
    with AdapterPublisher(config, run="run") as publisher:
        with pytest.raises(AdapterInvalid, match="above the limit of 1 of 2") as refusal:
            publisher.publish(make_adapter(tmp_path / "a", rank=8))
        assert "r=4 or less" in refusal.value.next_step
        assert publisher.newest() is None
        ready(config, r1=16, r2=16)  # restarted with another limit
        assert publisher.publish(tmp_path / "a").seq == 1


def test_a_fleet_is_asked_once_for_adapters_that_are_alike(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[dict[str, ReplicaReport]] = []
    ask = Registry.ready

    async def counted(self: Registry) -> dict[str, ReplicaReport]:
        asked.append(await ask(self))
        return asked[-1]

    monkeypatch.setattr(Registry, "ready", counted)
    with AdapterPublisher(config, run="run") as publisher:
        publisher.publish(make_adapter(tmp_path / "a", seed=1, base_model="org/other"))
        assert asked == [{}]  # nobody is ready: it is asked again
        ready(config, r1=16)
        for seed in (2, 3, 4):
            publisher.publish(make_adapter(tmp_path / str(seed), seed=seed, base_model="org/other"))
        assert [len(reports) for reports in asked] == [0, 1]
        publisher.publish(make_adapter(tmp_path / "b", seed=5, rank=4, base_model="org/other"))
        assert [len(reports) for reports in asked] == [0, 1, 1]
    assert caplog.text.count("trained on org/other") == 2  # once for each kind


# watch


@pytest.mark.parametrize(
    ("what", "failed"), [("bad", True), ("rolled_back", True), ("voided", True), ("superseded", False)]
)
def test_what_gave_way_to_a_newer_version_is_no_failure(what: str, failed: bool) -> None:
    told = _Told(as_json=True)
    told(News(what=what))
    assert told.failed is failed


def test_once_publishes_what_is_there_and_ends(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    for step in (1, 2):
        (small_adapter(out / f"step_{step}", seed=step) / "STABLE").touch()
    arguments = ["watch", str(out), "--preset", "prime-rl", "--run", "run", "--once", "--json", "--interval", "0.05"]
    assert main([*arguments, "--timeout", "0.3"]) == 1  # nobody decides: there is no coordinator
    captured = capsys.readouterr()
    assert "not done in 0.3 s" in captured.err
    lines = [orjson.loads(line) for line in captured.out.splitlines()]
    assert [(news["what"], news["step"]) for news in lines] == [("published", 2), ("passed", 1)]
    assert main(arguments) == 0  # it was published before, and that is all
    assert [orjson.loads(line)["what"] for line in capsys.readouterr().out.splitlines()] == ["passed"]


def test_once_ends_with_a_status_when_a_directory_is_bad(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    make_adapter(out / "step_1", config={"use_dora": True})
    arguments = ["watch", str(out), "--pattern", "step_{step}", "--run", "run", "--once", "--settle", "0.1"]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "step 1" in text
    assert "use_dora" in text
    assert "train with use_dora=False" in text
    shutil.rmtree(out)
    assert main(arguments) == 78
    assert "directory is not there" in capsys.readouterr().err


def told(log: Path, text: str) -> bool:
    return text in log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_runs_until_it_is_told_to_end(config: Config, tmp_path: Path, number: signal.Signals) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    command = [sys.executable, "-m", "adaptersync_tools.cli", "watch", str(out), "--preset", "trl", "--run", "run"]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--interval", "0.05"], stdout=file, stderr=file, env=os.environ)
    try:
        wait_until_sync(partial(told, log, "cannot be read"), timeout_s=30)  # its directory is not there yet
        for step in (10, 20):
            (small_adapter(out / f"checkpoint-{step}", seed=step) / "trainer_state.json").write_text("{}")
            wait_until_sync(partial(told, log, f"step {step}"), timeout_s=30, what=f"step {step} is told")
        process.send_signal(number)
        assert process.wait(timeout=20) == 0
    finally:
        process.kill()
        process.wait()
    store = ArtifactStore(Path(config.store.path))
    assert [store.read_manifest(name).step for name in store.versions()] == [10, 20]
    assert "stopped" in log.read_text()
