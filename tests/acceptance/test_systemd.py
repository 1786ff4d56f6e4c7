"""Our units below a real systemd, used from outside as an operator uses them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import orjson
import pytest

from adaptersync_tools.systemd.sandbox import ROLES
from support.booted import CLI, Host, booted, objection
from support.wait import wait_until_sync

pytestmark = [pytest.mark.timeout(300), pytest.mark.systemd]

SETTINGS = """\
[engine]
model = "/srv/model"
kind = "simulated"
arguments = "--latency '{\\"decode_tokens_per_s\\": 20}'"
drain_s = 10
host = "0.0.0.0"
public_host = "127.0.0.1"
peers = ["10.9.9.1"]

[coordinator]
lease_s = 1.0
metrics_port = 9101

[agent]
metrics_port = 9200

[jobs]
metrics_port = 9102
ledger_s = 1.0

[page]
port = 8090
"""
MODEL = """
from pathlib import Path
from adaptersync_tools.demo.synthetic import write_adapter, write_base_model
write_base_model(Path("/srv/model"))
for number in range(3):
    write_adapter(Path(f"/srv/adapter-{number}"), base="/srv/model", seed=number)
"""
PEER, STRANGER = "10.9.9.1", "10.9.9.2"
SERVICES = ("adaptersync-coordinator", "adaptersync-router", "adaptersync-worker")
AGENTS = ("adaptersync-agent@0", "adaptersync-agent@1")
REPLICAS = ("adaptersync-replica@0", "adaptersync-replica@1")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """With everything installed, enabled and started."""
    if why := objection():
        pytest.skip(why)
    with booted(tmp_path_factory.mktemp("host"), SETTINGS) as host:
        host.run(CLI[0], "-I", "-c", MODEL)
        host.adaptersync("install", "--systemd", "--root", "/")
        host.run("systemd-sysusers")
        host.run("systemd-tmpfiles", "--create", check=False)  # what is not ours may fail in here
        host.systemctl("daemon-reload")
        host.systemctl("start", "redis-server")
        for address in (PEER, STRANGER):
            host.run("ip", "address", "add", f"{address}/32", "dev", "lo")
        units = [f"{name}.service" for name in (*SERVICES, *AGENTS)]
        host.systemctl("enable", *units)
        host.systemctl("start", "adaptersync.target")
        yield host


def replicas(host: Host) -> dict[str, str]:
    """States by instance number."""
    status = orjson.loads(host.adaptersync("status", "--json").stdout)
    return {each["replica"].rpartition("-")[2]: each["state"] for each in status["replicas"]}


def complete(host: Host, tokens: int = 2) -> str:
    body = orjson.dumps({"model": "run", "prompt": [1, 2, 3], "max_tokens": tokens}).decode()
    url = "http://127.0.0.1:8080/v1/completions"
    command = ("curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "-H", "content-type: application/json")
    return host.run(*command, "-d", body, url, timeout_s=60.0).stdout


def test_the_target_starts_all_and_each_is_ready(host: Host) -> None:
    for unit in (*SERVICES, *REPLICAS, *AGENTS):
        host.wait(unit, "ActiveState", "active")
        assert host.shown(unit, "StatusText")
        assert host.shown(unit, "NRestarts") == "0", host.journal()
    assert host.shown("adaptersync-replica@1", "StatusText") == "serves at http://127.0.0.1:8001"


def test_a_version_is_published_proved_served_and_verified_in_the_sandbox(host: Host) -> None:
    host.adaptersync("publish", "/srv/adapter-0", "--run", "run")
    wait_until_sync(lambda: set(replicas(host).values()) == {"ready"}, timeout_s=30.0)
    assert complete(host) == "200"
    for task in ("verify", "tidy", "retention"):
        host.adaptersync("jobs", "--ask", task)
    wait_until_sync(
        lambda: "verified" in host.adaptersync("versions").stdout, timeout_s=30.0, what="a worker has verified it"
    )


def test_the_ledger_is_archived_and_figures_are_served_in_the_sandbox(host: Host) -> None:
    find = ("find", "/var/lib/adaptersync/store", "-name", "*.parquet")
    wait_until_sync(lambda: host.run(*find).stdout != "", timeout_s=30.0, what="the worker has archived rows")
    for port in (9101, 9102, 9200, 9201):
        assert "adaptersync_" in host.run("curl", "-sf", f"http://127.0.0.1:{port}/metrics").stdout, port
    assert "<html" in host.run("curl", "-sf", "http://127.0.0.1:8090/").stdout


def inside(host: Host, unit: str, script: str) -> list[str]:
    """What a service can do, by words that a script says as it; the first is its user."""
    process = host.shown(unit, "MainPID")
    owner = host.run("stat", "-c", "%U", f"/proc/{process}").stdout.strip()
    enter = ("nsenter", "--target", process, "--mount", "setpriv", f"--reuid={owner}", f"--regid={owner}")
    return [owner, *host.run(*enter, "--init-groups", "sh", "-c", script, check=False).stdout.split()]


def test_each_runs_as_it_should_and_sees_what_it_may(host: Host) -> None:
    store, token = "/var/lib/adaptersync/store", "/run/adaptersync/0/token"
    reads = f"test -r {store}/run && echo reads; f={store}/.x-$$; touch $f 2>/dev/null && rm $f && echo writes"
    token_too = f"{reads}; test -r {token} && echo token; test -r /etc/adaptersync/adaptersync.toml && echo settings"
    assert inside(host, "adaptersync-agent@0", token_too) == ["adaptersync-agent", "reads", "token"]
    assert inside(host, "adaptersync-coordinator", reads) == ["adaptersync-coordinator", "reads", "writes"]
    assert inside(host, "adaptersync-worker", reads) == ["adaptersync-worker", "reads", "writes"]
    assert inside(host, "adaptersync-replica@0", token_too) == ["adaptersync-engine", "token"]
    assert inside(host, "adaptersync-router", reads) == ["adaptersync-router"]
    environment = host.run("cat", f"/proc/{host.shown('adaptersync-replica@1', 'MainPID')}/environ").stdout.split("\0")
    assert "CUDA_VISIBLE_DEVICES=1" in environment


def test_a_secret_of_one_service_is_read_by_no_other(host: Host) -> None:
    place = "/etc/adaptersync"
    for role in ROLES:
        host.run("install", "-m", "600", "-o", f"adaptersync-{role}", "/dev/null", f"{place}/{role}.password")
    tried = f"for role in {' '.join(ROLES)}; do test -r {place}/$role.password && echo $role; done"
    for unit in (*SERVICES, AGENTS[0]):
        role = unit.removeprefix("adaptersync-").partition("@")[0]
        assert inside(host, unit, tried) == [f"adaptersync-{role}", role]
    assert inside(host, REPLICAS[0], tried) == ["adaptersync-engine"]


def test_what_a_trainer_published_as_a_user_of_its_own_is_removed_by_a_worker(host: Host) -> None:
    host.run("chmod", "-R", "a+rX", "/srv")
    store_group = host.run("getent", "group", "adaptersync").stdout.split(":")[2]
    trainer = ("setpriv", "--reuid=4242", "--regid=4242", f"--groups={store_group}", *CLI)
    for adapter in ("/srv/adapter-1", "/srv/adapter-2"):
        host.run(*trainer, "publish", adapter, "--run", "trained")
    host.adaptersync("retire", "trained", "--reason", "it was a rehearsal")
    find = ("find", "/var/lib/adaptersync/store/trained", "-maxdepth", "1", "-name", "trained-*", "-printf", "%u %f\\n")
    found = [line.split() for line in host.run(*find).stdout.splitlines()]
    assert [owner for owner, _ in found] == ["4242", "4242"]
    for _, version in found:
        wait_until_sync(
            lambda version=version: host.adaptersync("remove", version, check=False).returncode == 0,  # type: ignore[misc]
            timeout_s=60.0,
            what=f"a worker has removed {version}",
        )
    assert host.run("find", "/var/lib/adaptersync/store/trained", "-mindepth", "1").stdout.split() == [
        "/var/lib/adaptersync/store/trained/.numbers"
    ]


def test_an_engine_hears_its_peers_and_the_loopback_alone(host: Host) -> None:
    def answered(caller: str, port: int) -> bool:
        command = ("curl", "-s", "-o", "/dev/null", "--max-time", "2", "--interface", caller)
        return host.run(*command, f"http://{PEER}:{port}/health", check=False).returncode == 0

    assert answered(PEER, 8000)
    assert not answered(STRANGER, 8000)
    assert host.run("curl", "-sf", "http://127.0.0.1:8000/health").returncode == 0
    host.systemctl("set-property", "--runtime", REPLICAS[0], f"IPAddressAllow={STRANGER}")
    # it was the filter and nothing else; systemd answers before it has put another in its place
    wait_until_sync(lambda: answered(STRANGER, 8000), timeout_s=20.0, what="the stranger has been let in")


def test_an_instance_drains_goes_and_comes_back(host: Host) -> None:
    host.systemctl("stop", REPLICAS[1])
    for unit in (REPLICAS[1], AGENTS[1]):
        assert host.shown(unit, "ActiveState") == "inactive"
        assert host.shown(unit, "Result") == "success", host.journal()
    wait_until_sync(lambda: replicas(host).get("1") in (None, "draining", "gone"), timeout_s=30.0)
    assert complete(host) == "200"
    host.systemctl("start", AGENTS[1])
    wait_until_sync(lambda: replicas(host).get("1") == "ready", timeout_s=60.0, what="replica 1 is back")
    assert host.shown(REPLICAS[1], "ActiveState") == "active"


def test_what_dies_is_started_again(host: Host) -> None:
    host.systemctl("kill", "--signal=KILL", SERVICES[0])
    host.wait(SERVICES[0], "NRestarts", "1")
    host.wait(SERVICES[0], "ActiveState", "active")
    host.adaptersync("publish", "/srv/adapter-1", "--run", "run")
    assert complete(host) == "200"


def test_a_router_that_hangs_is_started_again(host: Host) -> None:
    host.systemctl("kill", "--signal=STOP", SERVICES[1])
    began = time.monotonic()
    host.wait(SERVICES[1], "NRestarts", "1", timeout_s=90.0)
    assert time.monotonic() - began > 15.0  # not at once
    host.wait(SERVICES[1], "ActiveState", "active")
    assert complete(host) == "200"


def test_settings_that_are_wrong_are_not_tried_again(host: Host) -> None:
    host.run("sh", "-c", "echo 'ADAPTERSYNC_ROUTER__PORT=none' > /etc/adaptersync/adaptersync-worker.env")
    host.systemctl("restart", SERVICES[2], check=False)
    host.wait(SERVICES[2], "ActiveState", "failed")
    assert host.shown(SERVICES[2], "ExecMainStatus") == "78"
    host.run("rm", "/etc/adaptersync/adaptersync-worker.env")
    host.systemctl("restart", SERVICES[2])
    assert host.shown(SERVICES[2], "ActiveState") == "active"


def test_the_target_stops_all(host: Host) -> None:
    host.systemctl("stop", "adaptersync.target")
    for unit in (*SERVICES, *REPLICAS, *AGENTS):
        host.wait(unit, "ActiveState", "inactive")
        assert host.shown(unit, "Result") in ("success", "start-limit-hit"), unit
    users = ",".join(f"adaptersync-{role}" for role in (*ROLES, "engine"))
    left = host.run("pgrep", "-u", users, check=False).stdout
    assert left == ""
