"""A fleet on Slurm, and as Hugging Face Jobs: the files as they are, with simulated engines on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis
from aiohttp import ClientSession, web

from adaptersync_core.keys import Keys
from adaptersync_tools.demo.synthetic import write_adapter, write_base_model
from adaptersync_tools.up import free_ports
from support.documents import commands
from support.processes import family
from support.source import PACKAGES, REPOSITORY
from support.wait import wait_until_sync

pytestmark = pytest.mark.timeout(150)

DEPLOY = REPOSITORY / "deploy"
READY_S = 60.0
SOME_S = 30.0


class Place:
    """A machine to run scripts on. Whatever they would listen on, it is the loopback, at ports that are free."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = write_base_model(directory / "model")
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.bin = directory / "bin"
        self.bin.mkdir()
        self.program("adaptersync", f'exec {sys.executable} -m adaptersync_tools.cli "$@"')
        self.program("hostname", "echo 127.0.0.1")
        self.program("loopback-redis", 'exec redis-server "$@" --bind 127.0.0.1')
        self.environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(directory),
            "PYTHONPATH": os.pathsep.join(str(root.parent) for root in PACKAGES.values()),
            "PLACE": str(directory),  # see `family`
            "REDIS_SERVER": "loopback-redis",
            "ADAPTERSYNC_ENGINE__KIND": "simulated",
            "ADAPTERSYNC_ENGINE__HOST": "127.0.0.1",
            "ADAPTERSYNC_ROUTER__HOST": "127.0.0.1",
        }

    def program(self, name: str, line: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{line}\n")
        (self.bin / name).chmod(0o755)

    def start(self, name: str, *command: str | Path, **variables: str) -> subprocess.Popen[bytes]:
        with (self.directory / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment | variables)
        self.started[name] = process
        return process

    def run(self, *command: str | Path, **variables: str) -> str:
        ran = subprocess.run(
            command, capture_output=True, text=True, env=self.environment | variables, timeout=60, cwd=self.directory
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr + self.logs()
        return ran.stdout

    def wait(self, condition: Callable[[], object], what: str) -> None:
        try:
            wait_until_sync(condition, timeout_s=READY_S)
        except AssertionError:
            raise AssertionError(f"waited {READY_S:g} s for {what}:\n{self.logs()}") from None

    def logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in self.directory.glob("*.log"))

    def ends(self, name: str) -> int:
        """Asked to, as Slurm does: its status."""
        process = self.started.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(SOME_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"{name} does not end: {self.logs()}") from None

    def gone(self) -> bool:
        return not family(self.directory)

    def stop(self) -> None:
        for name in reversed(list(self.started)):
            with contextlib.suppress(AssertionError):
                self.ends(name)
        for line in family(self.directory):
            os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.stop()


def free(*ports: int) -> bool:
    for port in ports:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                return False
    return True


def job_id(ports: Callable[[int], tuple[int, ...]]) -> int:
    return next(number for number in range(os.getpid() % 9000, 10_000) if free(*ports(number)))


def ask(url: str, key: str) -> tuple[str, str]:
    """The version that answered, and the replica."""
    request = urllib.request.Request(  # noqa: S310 (our own loopback)
        f"{url}/v1/completions",
        data=orjson.dumps({"model": "my-run", "prompt": "1+1=", "max_tokens": 4}),
        headers={"content-type": "application/json", "authorization": f"Bearer {key}"},
    )
    try:
        answer = urllib.request.urlopen(request, timeout=20)  # noqa: S310
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read().decode()}") from None
    with answer:
        return answer.headers["x-adaptersync-version"], answer.headers["x-adaptersync-replica"]


def test_a_fleet_on_slurm(place: Place) -> None:
    fleet = place.directory / "fleet"
    printed = place.run(DEPLOY / "slurm" / "prepare", fleet, "2", place.model, "my-run")
    assert "--array=0-1" in printed
    assert [path for path in fleet.rglob("*") if path.is_file() and path.stat().st_mode & 0o077] == []
    assert "agent-replica-1.password" in {path.name for path in (fleet / "passwords").iterdir()}

    control = job_id(lambda number: tuple(20_000 + number * 3 + port for port in range(3)))
    array = job_id(lambda number: tuple(20_000 + number + more + at for more in (0, 11_000, 22_000) for at in (0, 1)))
    here = {
        "ADAPTERSYNC_AGENT__STAGE_PATH": str(place.directory / "staged"),
        "ADAPTERSYNC_ENGINE__RUN_PATH": str(place.directory / "run"),
    }
    place.start("control", DEPLOY / "slurm" / "control.sbatch", fleet, SLURM_JOB_ID=str(control))
    for number in range(2):
        place.start(
            f"replica-{number}",
            DEPLOY / "slurm" / "replica.sbatch",
            fleet,
            SLURM_ARRAY_JOB_ID=str(array),
            SLURM_ARRAY_TASK_ID=str(number),
            **here,
        )
    place.wait((fleet / "address").exists, "the address of control")
    addresses = dict(re.findall(r"export (\w+)=(\S+)", (fleet / "address").read_text()))
    operator = addresses | {
        "ADAPTERSYNC_CONFIG": str(fleet / "adaptersync.toml"),
        "ADAPTERSYNC_REDIS__USER": "default:operator:operator-0",
        "ADAPTERSYNC_REDIS__PASSWORD_FILE": str(fleet / "passwords" / "operator-operator-0.password"),
    }

    stories = redis.Redis.from_url(
        addresses["ADAPTERSYNC_REDIS__CONTROL_URL"],
        username=operator["ADAPTERSYNC_REDIS__USER"],
        password=Path(operator["ADAPTERSYNC_REDIS__PASSWORD_FILE"]).read_text().strip(),
        decode_responses=True,
    )

    def happened(**fields: str) -> bool:
        told: Any = stories.xrange(Keys("default").events)
        return any(fields.items() <= entry.items() for _, entry in told)

    def ready(name: str) -> bool:
        return happened(type="replica.state", replica=name, state="ready")

    place.wait(lambda: ready("replica-0") and ready("replica-1"), "both replicas")
    url, key = addresses["ADAPTERSYNC_TRAINER__ROUTER_URL"], (fleet / "router.key").read_text().strip()
    with pytest.raises(AssertionError, match="401"):
        ask(url, "another")
    published = []
    for seed in (1, 2):
        adapter = write_adapter(place.directory / f"adapter-{seed}", base="base", seed=seed)
        trainer = ("adaptersync", "publish", adapter, "--run", "my-run")
        assert "it is current" in place.run(DEPLOY / "slurm" / "trainer.sbatch", fleet, "my-run", *trainer)
        published.append(ask(url, key)[0])
    first, second = published
    assert first.startswith("my-run-v1-")
    place.run("adaptersync", "rollback", "my-run", "--reason", "reward fell", **operator)
    place.wait(lambda: happened(type="version.retired", version=second), "the voided one to retire")
    events_are_read_as_the_document_says(place, operator, second)

    assert place.ends("replica-0") == 0
    place.wait(lambda: happened(replica="replica-0", state="draining"), "one that drains to be known for it")
    assert ask(url, key) == (first, "replica-1")
    assert place.ends("replica-1") == 0
    stories.close()
    assert place.ends("control") == 0
    place.wait(place.gone, "every process to end")


def events_are_read_as_the_document_says(place: Place, operator: dict[str, str], version: str) -> None:
    """Each command of deploy/EVENTS.md, on this fleet; every field that the document shows is there."""
    password = Path(operator["ADAPTERSYNC_REDIS__PASSWORD_FILE"]).read_text().strip()
    server = operator["ADAPTERSYNC_REDIS__CONTROL_URL"].removeprefix("redis://")
    for block in re.findall(r"^```console\n(.*?)^```$", (DEPLOY / "EVENTS.md").read_text(), re.MULTILINE | re.DOTALL):
        command, _, shown = block.removeprefix("$ ").partition("\n")
        words = shlex.split(command)
        assert words[0] == "redis-cli"
        words = [re.sub(r"my-run-v\d+-[0-9a-f]{12}", version, word) for word in words[1:]]
        words = ["100" if word == "3" else word for word in words]
        said = place.run("redis-cli", "-u", f"redis://default%3Aoperator%3Aoperator-0:{password}@{server}", *words)
        assert "ERR" not in said
        assert "NOPERM" not in said
        fields = [name for at, name in re.findall(r'(\d+)\) "([a-z_]+)"$', shown, re.MULTILINE) if int(at) % 2]
        assert [field for field in fields if field not in said.split()] == [], command
        assert said.strip(), command


@contextlib.asynccontextmanager
async def proxy(to: str, token: str) -> AsyncIterator[str]:
    """The address of what lets in who shows the token, as the proxy of Jobs does."""

    async def pass_on(request: web.Request) -> web.Response:
        if request.headers.get("authorization") != f"Bearer {token}":
            return web.Response(status=401)
        async with (
            ClientSession() as session,
            session.request(
                request.method,
                to + request.path_qs,
                data=await request.read(),
                headers={"content-type": request.headers.get("content-type", "")},
            ) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[attr-defined]
    finally:
        await runner.cleanup()


def image(place: Place) -> Path:
    """What the Dockerfile puts beside our package."""
    text = (DEPLOY / "containers" / "Dockerfile").read_text()
    copied = re.search(r"^COPY (.+) /opt/adaptersync/$", text, re.MULTILINE)
    assert copied is not None
    target = place.directory / "opt"
    target.mkdir()
    for source in copied[1].split():
        shutil.copy(REPOSITORY / source, target)
    return target


async def test_jobs_of_hugging_face(place: Place) -> None:
    job, token = image(place) / "job", "hf_token-of-the-namespace"
    users = ("coordinator:coordinator-0", "router:router-0", "worker:worker-0", "agent:replica-0", "trainer:my-run")
    passwords = place.directory / "passwords"
    place.run("adaptersync", "acl", "--out", place.directory / "users.acl", "--passwords", passwords, *users)
    server, router, engine, heard, replayed = free_ports(5)
    place.start(
        "redis", "redis-server", "--port", str(server), "--bind", "127.0.0.1", "--save", "", "--dir", place.directory,
        "--aclfile", place.directory / "users.acl",
    )  # fmt: skip
    (place.directory / "store").mkdir()

    def secrets(*names: str) -> dict[str, str]:
        return {
            f"PASSWORD_{name.partition('-')[0].upper()}": (passwords / f"{name}.password").read_text() for name in names
        }

    shared = {
        "ADAPTERSYNC_REDIS__CONTROL_URL": f"redis://127.0.0.1:{server}/0",
        "ADAPTERSYNC_STORE__PATH": str(place.directory / "store"),
        "ADAPTERSYNC_ENGINE__MODEL": str(place.model),
        "ADAPTERSYNC_ENGINE__PORT": str(engine),
        "ADAPTERSYNC_ENGINE__EVENTS_PORT": str(heard),
        "ADAPTERSYNC_ENGINE__REPLAY_PORT": str(replayed),
    }
    homes = {kind: str(place.directory / f"home-{kind}") for kind in ("control", "replica", "trainer")}
    loopback = 'case "$1" in router) set -- "$@" --host 127.0.0.1; esac'  # whatever `job` says
    place.program("adaptersync", f'{loopback}\nexec {sys.executable} -m adaptersync_tools.cli "$@"')
    async with proxy(f"http://127.0.0.1:{engine}", token) as public:
        place.start(
            "control", job, "control", HF_TOKEN=token, PORT=str(router), REPLICAS="2", FLEET_HOME=homes["control"],
            **shared, **secrets("coordinator-coordinator-0", "router-router-0", "worker-worker-0"),
        )  # fmt: skip
        place.start(
            "replica", job, "replica", "replica-0", PUBLIC_URL=public, FLEET_HOME=homes["replica"],
            **shared, **secrets("agent-replica-0"),
        )  # fmt: skip
        adapter = write_adapter(place.directory / "adapter", base="base", seed=1)
        said = await asyncio.to_thread(
            place.run, job, "trainer", "my-run", "adaptersync", "publish", adapter, "--run", "my-run",
            FLEET_HOME=homes["trainer"], HF_TOKEN=token, **shared, **secrets("trainer-my-run"),
        )  # fmt: skip
        assert "it is current" in said
        # whatever a client shows, the proxy is shown the router's own token
        version, replica = await asyncio.to_thread(ask, f"http://127.0.0.1:{router}", "hf_token-of-a-client")
        assert (version[:10], replica) == ("my-run-v1-", "replica-0")
        await asyncio.to_thread(secrets_are_files, place, homes, token)
        for name in ("replica", "control"):
            assert await asyncio.to_thread(place.ends, name) == 0
    await asyncio.to_thread(place.ends, "redis")
    await asyncio.to_thread(place.wait, place.gone, "every process to end")


def secrets_are_files(place: Place, homes: dict[str, str], token: str) -> None:
    """That nobody else reads; and in the environment of no service, nor its arguments."""
    for home in homes.values():
        kept = [
            path
            for path in Path(home).rglob("*")
            if path.suffix in (".password", ".toml") or path.parent.name == "replica-keys"
        ]
        assert kept
        assert [path for path in (Path(home), *kept) if path.stat().st_mode & 0o077] == []
    services = [line for line in family(place.directory) if "adaptersync_tools" in line]
    assert len(services) >= 5
    for line in services:
        given = b"".join(Path(f"/proc/{line.split()[0]}/{name}").read_bytes() for name in ("environ", "cmdline"))
        assert b"PASSWORD_ROUTER" not in given
        assert b"REDIS__CONTROL_URL" not in given
        assert token.encode() not in given


@pytest.mark.parametrize(
    ("first", "status"), [("exit 0", 1), ("exit 7", 7), ("kill -KILL $$", 137)], ids=["ends", "fails", "is killed"]
)
def test_when_one_ends_all_do(tmp_path: Path, first: str, status: int) -> None:
    script = f"""
        source {DEPLOY}/containers/together.sh
        begin bash -c 'trap "echo older >>ended; exit" TERM; echo >up; while :; do sleep 0.05; done'
        until [[ -f up ]]; do sleep 0.01; done
        begin bash -c '{first}'
        together"""
    assert subprocess.run(["bash", "-c", script], timeout=20, cwd=tmp_path).returncode == status
    assert (tmp_path / "ended").read_text() == "older\n"


def test_who_is_asked_to_end_asks_the_youngest_first(tmp_path: Path) -> None:
    one = f"trap 'echo %s >>{tmp_path}/ended; exit' TERM; echo >{tmp_path}/up-%s; while :; do sleep 0.05; done"
    (tmp_path / "older").write_text(one.replace("%s", "older"))
    (tmp_path / "younger").write_text(one.replace("%s", "younger"))
    script = f"source {DEPLOY}/containers/together.sh; cd {tmp_path}; begin bash older; begin bash younger; together"
    process = subprocess.Popen(["bash", "-c", script])
    wait_until_sync(lambda: (tmp_path / "up-older").exists() and (tmp_path / "up-younger").exists(), timeout_s=SOME_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SOME_S) == 0
    assert (tmp_path / "ended").read_text() == "younger\nolder\n"


def test_the_document_reads_events_with_nothing_but_redis() -> None:
    assert len(commands("deploy/EVENTS.md")) >= 4
