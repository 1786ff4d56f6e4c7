"""Each finding of `adaptersync doctor` is provoked, on real servers and directories; a host that is well has none."""

from __future__ import annotations

import ast
import asyncio
import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from msgspec.structs import replace

import adaptersync_tools.doctor
from adaptersync.router.app import serving as serving_router
from adaptersync_core.config import Config
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.store_identity import PREFIX
from adaptersync_core.table import Member, Table
from adaptersync_core.vllm import EngineFacts
from adaptersync_tools.cli import main
from adaptersync_tools.doctor import Finding, Verdict, directories, engine, host
from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from support.doctor import Host, look, said


async def test_a_host_that_is_well(well: Host) -> None:
    assert await look(well.config) == [], "\n".join(map(str, await look(well.config)))


# directories


async def test_the_store_is_not_there_or_another(well: Host, tmp_path: Path) -> None:
    gone = replace(well.config, store=replace(well.config.store, path=str(tmp_path / "nothing")))
    assert said(await look(gone), "is no directory")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "photo").touch()
    other = replace(well.config, store=replace(well.config.store, path=str(tmp_path / "other")))
    assert said(await look(other), "holds files and is no store")


def chmod(path: str | Path, mode: int) -> None:
    Path(path).chmod(mode)


async def test_directories_for_everybody(well: Host, tmp_path: Path) -> None:
    chmod(well.config.store.path, 0o777)
    assert said(await look(well.config), "everybody on this host may write to")
    chmod(well.config.store.path, 0o755)
    (tmp_path / "staged").mkdir()
    chmod(tmp_path / "staged", 0o777)
    assert said(await look(well.config), "everybody on this host may write to")


async def test_a_token_for_everybody(well: Host) -> None:
    chmod(well.config.agent.token_file, 0o644)
    assert said(await look(well.config), "everybody on this host may read")


async def test_what_may_be_written_where(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only engines are, the store is read-only; where adapters are published, it is not."""
    assert said(await look(well.config, "agent"), "can be written to, where adapters are only read", "warning")
    monkeypatch.setattr(directories, "_writable", lambda _: False)
    assert said(await look(well.config, "trainer"), "cannot be written to")
    assert said(await look(well.config, "worker"), "cannot be written to")
    assert said(await look(well.config, "router"), "cannot be written to")
    found = await look(well.config, "agent")
    assert [finding.about for finding in found] == ["stage"]


async def test_what_a_service_wrote_elsewhere_it_may_write_here(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """The root is its group's; what coordinators and workers keep in it is of one user, by number."""
    journal, archive = (Path(well.config.store.path) / name for name in (".coordinator", ".ledger"))
    own = journal / well.config.group.name
    own.mkdir(parents=True)
    archive.mkdir()
    assert await look(well.config) == []
    others = (own, archive)
    real = directories._writable
    monkeypatch.setattr(directories, "_writable", lambda directory: directory not in others and real(directory))
    assert said(await look(well.config, "coordinator"), f"{own} cannot be written to")
    assert said(await look(well.config, "worker"), f"{archive} cannot be written to")
    assert await look(well.config, "trainer") == []


async def test_a_store_that_is_new_has_what_systemd_made_in_it(well: Host) -> None:
    store = Path(well.config.store.path)
    (store / f"{PREFIX}0123").unlink()
    for name in (".coordinator", ".ledger"):
        (store / name).mkdir()
    assert await look(well.config, "coordinator", "worker") == []
    (store / "photo").touch()
    assert said(await look(well.config, "worker"), "holds files and is no store")


async def test_a_worker_has_what_it_archives_with(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "installed", lambda: False)
    assert said(await look(well.config, "worker"), "pyarrow is not installed")
    assert await look(well.config, "router") == []
    without = replace(well.config, jobs=replace(well.config.jobs, ledger_s=0.0))
    assert await look(without, "worker") == []


def test_writing_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    assert directories._writable(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert not directories._writable(tmp_path / "nothing")
    assert not directories._writable(Path("/proc"))


async def test_the_store_cannot_be_read(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories.os, "access", lambda *_: False)  # type: ignore[attr-defined]
    assert said(await look(well.config, "worker"), "cannot be read")


async def test_there_is_little_room(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directories, "STORE_ROOM", 1 << 60)
    assert said(await look(well.config), "GiB are free under", "warning")
    real = os.statvfs

    class NoInodes(NamedTuple):
        f_bavail: int
        f_frsize: int
        f_favail: int
        f_files: int

    monkeypatch.setattr(
        directories.os, "statvfs", lambda path: NoInodes(real(path).f_bavail, real(path).f_frsize, 0, 10)  # type: ignore[attr-defined]
    )  # fmt: skip
    assert said(await look(well.config, "router"), "no inodes are left")


@pytest.mark.parametrize(("kind", "fine"), [("nfs4", False), ("fuse.s3fs", False), ("ext4", True), ("tmpfs", True)])
async def test_the_stage_is_another_hosts(
    well: Host, tmp_path: Path, kind: str, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 0:20 / / rw shared:1 - ext4 /dev/sda rw\n"
        f"30 22 0:30 / {tmp_path} rw shared:2 master:1 - {kind} somewhere rw\n"
        f"31 22 0:31 / {tmp_path}-other rw - xfs /dev/sdb rw\n"
    )
    monkeypatch.setattr(directories, "MOUNTS", mounts)
    found = await look(well.config)
    assert found == [] if fine else said(found, "engines would read adapters over the network", "warning")


# the engine

GOOD = EngineFacts(
    base_model="base", root="", max_model_len=100, block_size=32, max_loras=5, max_cpu_loras=8, max_lora_rank=16,
    version="1", audits=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what", "level"),
    [
        ({"base_model": "other"}, "it serves other, and the group is of base", "error"),
        ({"max_loras": 0}, "it does not say that it serves LoRA", "error"),
        ({"max_loras": 3}, "--max-loras is 3: a window of trainer.max_staleness = 2", "error"),
        ({"max_cpu_loras": 5}, "--max-cpu-loras is 5: loading past it evicts", "warning"),
        ({"audits": False}, "its workers cannot say what they hold", "error"),
    ],
)
def test_an_engine_is_started_wrongly(change: dict[str, Any], what: str, level: str) -> None:
    verdict = Verdict()
    config = Config()
    engine.judge(verdict, config, GOOD, door=True, events=True)
    assert verdict.findings == []
    engine.judge(verdict, config, replace(GOOD, **change), door=True, events=True)
    assert said(verdict.findings, what, level)


def test_what_cannot_be_proved_is_no_error_where_it_may_be_promoted() -> None:
    verdict = Verdict()
    config = replace(Config(), proof=replace(Config().proof, promote_on=("proved", "not probed")))
    engine.judge(verdict, config, replace(GOOD, audits=False), door=True, events=True)
    assert said(verdict.findings, "its workers cannot say what they hold", "warning")


async def test_an_engine_without_door_and_events(well: Host) -> None:
    async with serving(Simulator(SimulatorConfig(engine=EngineConfig(max_loras=5, max_cpu_loras=8)))) as address:
        agent = replace(well.config.agent, engine_url=f"http://127.0.0.1:{address.port}")
        found = await look(replace(well.config, agent=agent))
        assert said(found, "it has no door of ours", "warning")
        assert said(found, "it does not say what it caches", "warning")
        quiet = await look(replace(well.config, agent=replace(agent, kv_events="off")))
        assert not any("caches" in finding.what for finding in quiet)


async def test_an_engine_that_is_away(well: Host) -> None:
    agent = replace(well.config.agent, engine_url="http://127.0.0.1:1")
    assert said(await look(replace(well.config, agent=agent)), "engine does not answer")


async def test_looking_does_not_shut_the_agent_out(well: Host) -> None:
    await look(well.config)
    assert await asyncio.to_thread(Path(well.config.agent.token_file).read_text) == "the agent's"


async def test_a_token_that_cannot_be_read(well: Host, tmp_path: Path) -> None:
    agent = replace(well.config.agent, token_file=str(tmp_path))
    assert said(
        [f for f in await look(replace(well.config, agent=agent)) if "may read" not in f.what], "Is a directory"
    )


# the host


async def test_a_port_is_taken(well: Host) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        other.listen()
        router = replace(well.config.router, port=port)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host, "ANSWER_S", 0.2)
            assert said(await look(replace(well.config, router=router), "router"), "is taken by another program")


@pytest.mark.parametrize(
    ("name", "fine"),
    [("router-0", True), ("router-0-0a1b2c", True), ("router-9-0a1b2c", False), ("router-0-other", False)],
)
def test_a_port_that_a_router_has(name: str, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_at", lambda *_: name)
    verdict = Verdict()
    host._router(verdict, Config())
    assert any("is taken" in finding.what for finding in verdict.findings) != fine


async def test_the_port_of_a_router_that_runs(well: Host) -> None:
    """A real one, with the name that it gives itself."""
    async with serving_router(replace(well.config, router=replace(well.config.router, port=0)), drain_s=0.1) as router:
        settings = replace(well.config.router, port=int(router.url.rpartition(":")[2]))
        config = replace(well.config, router=settings)
        other = replace(well.config, router=replace(settings, name="router-9"))

        def looked(config: Config) -> list[Finding]:
            return asyncio.run(look(config, "router"))  # a command has a loop of its own, which may wait

        assert await asyncio.to_thread(looked, config) == []
        assert said(await asyncio.to_thread(looked, other), "is taken by router-0")


async def test_too_few_open_files(well: Host) -> None:
    router = replace(well.config.router, connections=1 << 30)
    assert said(await look(replace(well.config, router=router), "router"), "router.connections = 1073741824 needs")


async def test_two_services_want_one_port(well: Host) -> None:
    config = replace(well.config, jobs=replace(well.config.jobs, metrics_port=9100))
    config = replace(config, coordinator=replace(config.coordinator, metrics_port=9100))
    assert said(await look(config), "coordinator.metrics_port and jobs.metrics_port are both 9100")
    assert await look(config, "coordinator") == []


@pytest.mark.parametrize(
    ("section", "change", "what"),
    [
        ("agent", {"heartbeat_s": 2.0}, "one lost word ejects it"),
        ("agent", {"keep_s": 1.0}, "staged files go after agent.keep_s = 1"),
        ("coordinator", {"deadline_s": 12.0}, "ends before agent.visible_timeout_s"),
    ],
)
async def test_settings_that_do_not_go_together(well: Host, section: str, change: dict[str, Any], what: str) -> None:
    config = replace(well.config, **{section: replace(getattr(well.config, section), **change)})
    assert said(await look(config), what, "warning")


async def test_replicas_that_a_router_cannot_reach(well: Host) -> None:
    member = Member(state="ready", url=well.config.agent.engine_url, engine_epoch="e", since=1.0, block_size=32)
    away = replace(member, url="http://127.0.0.1:1")
    members = {"replica-0": member, "replica-1": away, "replica-2": replace(away, state="joining")}
    client, key = RedisClient(well.control.url, name="test"), Keys(well.config.group.name).table
    try:
        await client.command("SET", key, msgspec.json.encode(Table(generation=1, members=members)))
        (found,) = await look(well.config, "router")
        assert found.what.startswith("replica-1 cannot be reached from here: ")
        assert await look(well.config, "worker") == []
    finally:
        await client.command("DEL", key)
        await client.close()


async def test_a_router_that_a_trainer_cannot_reach(well: Host) -> None:
    trainer = replace(well.config.trainer, router_url="http://127.0.0.1:1")
    config = replace(well.config, trainer=trainer)
    assert said(await look(config, "trainer"), "http://127.0.0.1:1 cannot be reached from here", "warning")
    assert await look(config, "coordinator") == []


# the command


@pytest.mark.parametrize("wrong", [False, True])
async def test_the_command_tells_by_its_exit_status(
    well: Host, wrong: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a host for trainers, whose store is there or not."""
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CONTROL_URL", well.control.url)
    monkeypatch.setenv("ADAPTERSYNC_REDIS__CACHE_URL", well.cache.url)
    monkeypatch.setenv("ADAPTERSYNC_STORE__PATH", "/nowhere" if wrong else well.config.store.path)
    monkeypatch.setenv("ADAPTERSYNC_TRAINER__ROUTER_URL", well.config.trainer.router_url)
    monkeypatch.setenv("COLUMNS", "60")
    status = await command(["doctor", "--role", "trainer"])
    text = capsys.readouterr().out
    assert status == int(wrong)
    if wrong:
        lines = text.splitlines()
        assert lines[0] == "error store: /nowhere is no directory; mount the store, or set store.path"
    else:
        assert "nothing found" in text
    assert await command(["doctor", "--role", "trainer", "--json"]) == int(wrong)
    assert f'"well":{"false" if wrong else "true"}' in capsys.readouterr().out


async def command(arguments: list[str]) -> int:
    """A command has a loop of its own."""
    return await asyncio.to_thread(main, arguments)


def test_every_finding_is_provoked_here() -> None:
    """Of each look's text, some part stands in a test."""
    mine: set[str] = {
        str(node.value)
        for path in Path(__file__).parent.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 5
    }
    for path in Path(adaptersync_tools.doctor.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or len(node.args) < 4:
                continue
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called != "check":
                continue
            what = node.args[2]
            constants = [str(each.value).strip() for each in ast.walk(what) if isinstance(each, ast.Constant)]
            parts = [part for part in constants if len(part) > 5]
            named = isinstance(what, ast.Name | ast.Attribute)  # of a text made before, or an error's own
            assert named or any(part in said or said in part for part in parts for said in mine), (
                f"{path}:{node.lineno}"
            )
