"""Each finding of `adaptersync doctor` is provoked, on real servers and directories; a host that is well has none."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Iterator
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
from adaptersync_core.vllm import WORKER_EXTENSION, EngineFacts
from adaptersync_tools.cli import main
from adaptersync_tools.doctor import ROLES, Finding, Role, Verdict, directories, engine, examine, host, servers
from adaptersync_tools.servers import RedisServer
from adaptersync_tools.servers import Role as ServerRole
from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from adaptersync_tools.simulator.publisher import PublisherConfig
from support.redis_servers import server_binary
from support.whole_fleet import fleet_config


class Host(NamedTuple):
    config: Config
    control: RedisServer
    cache: RedisServer


@pytest.fixture(scope="module", params=["redis7", "valkey9"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RedisServer, ...]]:
    """Servers of our own, since they are set up wrongly."""
    directory = tmp_path_factory.mktemp("servers")
    binary = server_binary(request.param)
    with (
        RedisServer(ServerRole.CONTROL, directory / "control", binary=binary) as control,
        RedisServer(ServerRole.CACHE, directory / "cache", binary=binary) as cache,
    ):
        yield control, cache


@pytest.fixture
async def well(pair: tuple[RedisServer, ...], tmp_path: Path) -> AsyncIterator[Host]:
    """A host as it should be: a simulated engine in the place of vLLM."""
    store, token = tmp_path / "store", tmp_path / "token"
    store.mkdir(mode=0o755)
    (store / f"{PREFIX}0123").touch()
    token.touch(mode=0o640)
    token.write_text("the agent's")
    sizes = EngineConfig(max_loras=5, max_cpu_loras=8)
    simulator = Simulator(
        SimulatorConfig(
            engine=sizes,
            token_file=token,
            worker_extension_cls=WORKER_EXTENSION,
            kv_events=PublisherConfig(endpoint="tcp://*:0", replay_endpoint="tcp://*:0"),
        )
    )
    async with serving(simulator) as address:
        config = fleet_config(pair[0].url, pair[1].url, tmp_path)
        agent = replace(
            config.agent,
            engine_url=f"http://127.0.0.1:{address.port}",
            token_file=str(token),
            stage_path=str(tmp_path / "staged"),
            keep_s=600.0,
        )
        coordinator = replace(config.coordinator, deadline_s=120.0)
        router = replace(config.router, connections=100)
        trainer = replace(config.trainer, router_url=agent.engine_url)  # somebody listens there
        yield Host(replace(config, agent=agent, coordinator=coordinator, router=router, trainer=trainer), *pair)


async def look(config: Config, *roles: Role) -> list[Finding]:
    return (await examine(config, frozenset(roles or ROLES))).findings


def said(findings: list[Finding], what: str, level: str = "error") -> bool:
    """Exactly one finding says so, of that level, and what to do."""
    (found,) = [finding for finding in findings if what in finding.what]
    assert found.fix
    assert found.level == level
    assert "\n" not in str(found)
    return True


@contextlib.asynccontextmanager
async def changed(server: RedisServer, **settings: str) -> AsyncIterator[None]:
    """Other settings of a server, and its own again."""
    client = RedisClient(server.url, name="test")
    names = [name.replace("_", "-") for name in settings]
    try:
        before = {name: (await client.command("CONFIG", "GET", name)) for name in names}
        for name, value in zip(names, settings.values(), strict=True):
            await client.command("CONFIG", "SET", name, value)
        yield
        for name, found in before.items():
            await client.command("CONFIG", "SET", name, found[name] if isinstance(found, dict) else found[1])
    finally:
        await client.close()


async def test_a_host_that_is_well(well: Host) -> None:
    assert await look(well.config) == [], "\n".join(map(str, await look(well.config)))


# the servers


@pytest.mark.parametrize(
    ("which", "settings", "what", "level"),
    [
        ("control", {"maxmemory_policy": "allkeys-lru"}, "it evicts what must not be lost", "error"),
        ("control", {"appendonly": "no"}, "it loses what was decided when it ends", "error"),
        ("control", {"appendfsync": "everysec"}, "in the last second may be lost", "warning"),
        ("control", {"maxmemory": "0"}, "its memory is not bounded", "warning"),
        ("control", {"maxmemory": "1100000"}, "MiB are taken", "error"),
        ("cache", {"maxmemory_policy": "noeviction"}, "at its bound it refuses bytes and choices", "error"),
        ("cache", {"maxmemory_policy": "allkeys-lru"}, "it may forget counts that are in use", "warning"),
        ("cache", {"appendonly": "yes"}, "it writes to disk what may be forgotten", "warning"),
    ],
)
async def test_a_server_is_set_up_wrongly(
    well: Host, which: str, settings: dict[str, str], what: str, level: str
) -> None:
    server = well.control if which == "control" else well.cache
    async with changed(server, **settings):
        findings = await look(well.config)
        assert said(findings, what, level)
        assert {finding.about for finding in findings} == {f"{which} server"}


async def test_a_server_is_away(well: Host) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{nobody.getsockname()[1]}/0"
        redis = replace(well.config.redis, control_url=url)
        assert said(await look(replace(well.config, redis=redis)), "Redis cannot be reached")


async def test_one_server_does_for_both(well: Host) -> None:
    redis = replace(well.config.redis, cache_url="")
    assert said(await look(replace(well.config, redis=redis)), "it is the control server", "warning")


@pytest.mark.parametrize(
    ("rules", "what", "level"),
    [
        (("-get",), "this user may not read its keys", "error"),
        (("-hgetall",), "this user may not read records", "error"),
        (("-xrevrange",), "this user may not follow events", "error"),
        (("-evalsha", "-eval"), "this user may not run scripts", "error"),
        (("-time",), "its clock cannot be read", "error"),
        (("-info",), "it does not say how it is set up", "warning"),
        (("-config",), "", ""),
    ],
)
async def test_a_user_lacks_a_right(well: Host, rules: tuple[str, ...], what: str, level: str) -> None:
    client = RedisClient(well.control.url, name="test")
    try:
        await client.command("ACL", "SETUSER", "half", "reset", "on", ">secret", "~*", "+@all", *rules)
        url = well.control.url.replace("redis://", "redis://half:secret@")
        found = await look(replace(well.config, redis=replace(well.config.redis, control_url=url)))
        assert said(found, what, level) if what else found == []
        assert "secret" not in "".join(map(str, found))
    finally:
        await client.command("ACL", "DELUSER", "half")
        await client.close()


@pytest.mark.parametrize("off_s", [-90.0, 90.0])
async def test_a_clock_is_wrong(well: Host, off_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr(servers.time, "time", lambda: real() + off_s)  # type: ignore[attr-defined]
    found = [finding for finding in await look(well.config) if "its clock is" in finding.what]
    assert [finding.about for finding in found] == ["control server", "cache server"]
    assert ("behind" if off_s > 0 else "ahead of") in found[0].what


async def test_a_server_is_far_away(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "FAR_S", 0.0)
    assert said((await look(well.config))[:1], "an answer takes", "warning")


def test_a_server_is_too_old_or_has_a_full_disk() -> None:
    for told, fine in (
        ({"redis_version": "6.2.14"}, False),
        ({"redis_version": "7.0.15"}, True),
        ({"redis_version": "10.1.0"}, True),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.8"}, False),
        ({"redis_version": "7.2.4", "valkey_version": "8.0.1"}, True),
    ):
        verdict = Verdict()
        servers._version(verdict, "control server", told)
        assert verdict.well == fine
        assert fine or said(verdict.findings, "it is too old")


async def test_a_write_to_disk_failed(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    told = servers._told

    async def failed(*arguments: Any) -> dict[str, str]:
        return {**await told(*arguments), "aof_last_write_status": "err"}

    monkeypatch.setattr(servers, "_told", failed)
    assert said(await look(well.config), "its last write to disk failed")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://far:6379/0", {"without encryption": "warning", "without a password": "error"}),
        ("redis://u:p@far:6379/0", {"without encryption": "warning"}),
        ("rediss://u:p@far:6379/0", {}),
        ("redis://127.0.0.1:6379/0", {}),
    ],
)
async def test_a_server_for_everybody(
    well: Host, url: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "RedisClient", lambda _url, **more: RedisClient(well.control.url, **more))
    verdict = Verdict()
    await servers._server(verdict, "control server", url, Keys("group"))
    assert len(verdict.findings) == len(expected)
    assert all(said(verdict.findings, what, level) for what, level in expected.items())


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


async def test_a_secret_for_everybody(well: Host, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("as-key")
    config = replace(well.config, trainer=replace(well.config.trainer, router_key_file=str(tmp_path / "key")))
    for mode, found in ((0o644, True), (0o600, False)):
        chmod(tmp_path / "key", mode)
        findings = await look(config)
        assert bool(findings and said(findings, "the secret of trainer.router_key_file")) is found


async def test_what_may_be_written_where(well: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only engines are, the store is read-only; where adapters are published, it is not."""
    assert said(await look(well.config, "agent"), "can be written to, where adapters are only read", "warning")
    monkeypatch.setattr(directories, "_writable", lambda _: False)
    assert said(await look(well.config, "trainer"), "cannot be written to")
    assert said(await look(well.config, "router"), "cannot be written to")
    found = await look(well.config, "agent")
    assert [finding.about for finding in found] == ["stage"]


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
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
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
