"""Units rendered from settings, as systemd itself judges them, and where they are put."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace

from adaptersync_core.config import Config, EngineSection, RedisSection, RouterSection, load_config
from adaptersync_core.errors import ConfigError
from adaptersync_tools.cli import main
from adaptersync_tools.systemd.form import own
from adaptersync_tools.systemd.install import OLDEST
from adaptersync_tools.systemd.sandbox import ROLES
from adaptersync_tools.systemd.units import MARK, STEPS_SINCE, UNITS, Host, check_visible, render
from support.source import REPOSITORY

MOST_EXPOSED = 2.0
DEPLOYED = REPOSITORY / "deploy" / "systemd"
CONFIG = Config(engine=EngineSection(model="/srv/models/base"))
HOST = Host(python="/opt/adaptersync/bin/python", version=OLDEST)
PARTS = (
    "coordinator.service",
    "router.service",
    "router@.service",
    "worker.service",
    "worker@.service",
    "agent@.service",
    "replica@.service",
)


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("no systemd-analyze: apt-get install systemd")
    return subprocess.run([tool, "--no-pager", *arguments], capture_output=True, text=True, timeout=50)


def written(directory: Path, config: Config = CONFIG, **changes: str | int) -> list[Path]:
    """All units in a directory, with an interpreter that is there: systemd looks."""
    host = replace(HOST, python=sys.executable, **changes)
    for place, text in render(config, host).items():
        if place.startswith(UNITS):
            (directory / Path(place).name).write_text(text)
    return sorted(directory.iterdir())


def lines(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)


def unit(name: str, config: Config = CONFIG, host: Host = HOST) -> str:
    return render(config, host)[f"{UNITS}/adaptersync{name}"]


def test_systemd_has_no_objection_to_any_unit(tmp_path: Path) -> None:
    files = written(tmp_path)
    assert len(files) == len(PARTS) + 1
    run = analyze("verify", "--recursive-errors=yes", *files)
    assert (run.returncode, run.stderr, run.stdout) == (0, "", "")


def test_systemd_would_object_to_a_wrong_one(tmp_path: Path) -> None:
    files = written(tmp_path)
    router = tmp_path / "adaptersync-router.service"
    router.write_text(router.read_text().replace("WatchdogSec=", "WatchdogSeconds="))
    assert "WatchdogSeconds" in analyze("verify", *files).stderr


@pytest.mark.parametrize("part", [part for part in PARTS if part.endswith("service")])
def test_no_service_is_exposed(tmp_path: Path, part: str) -> None:
    written(tmp_path)
    arguments = ("security", "--offline=true", f"--threshold={MOST_EXPOSED * 10:.0f}")
    run = analyze(*arguments, tmp_path / f"adaptersync-{part}")
    found = re.search(r"exposure level for \S+: ([\d.]+)", run.stdout + run.stderr)
    assert found, run.stderr
    assert float(found[1]) <= MOST_EXPOSED, run.stdout
    assert run.returncode == 0


def test_deployed_units_are_what_install_renders(request: pytest.FixtureRequest) -> None:
    """`pytest --accept-surface` writes them anew."""
    now = {
        place.removeprefix("etc/").removeprefix("systemd/system/"): text for place, text in render(CONFIG, HOST).items()
    }
    if request.config.getoption("accept_surface"):
        shutil.rmtree(DEPLOYED, ignore_errors=True)
        for place, text in now.items():
            (DEPLOYED / place).parent.mkdir(parents=True, exist_ok=True)
            (DEPLOYED / place).write_text(text)
    there = {str(path.relative_to(DEPLOYED)): path.read_text() for path in DEPLOYED.rglob("*") if path.is_file()}
    assert there == now


@pytest.mark.parametrize("part", PARTS)
def test_every_unit_belongs_to_the_target(part: str) -> None:
    text = unit(f"-{part}")
    assert lines(text, "PartOf") == ["adaptersync.target"]
    assert lines(text, "WantedBy") == ["adaptersync.target"]


def test_what_serves_is_watched_and_speaks_for_itself() -> None:
    for part in ("-coordinator.service", "-router.service", "-worker.service", "-agent@.service", "-replica@.service"):
        text = unit(part)
        assert lines(text, "Type") == ["notify"]
        assert lines(text, "NotifyAccess") == ["main"]
        assert lines(text, "WatchdogSec")
        assert lines(text, "Restart") == ["always"]
        assert lines(text, "RestartPreventExitStatus") == ["64 65 77 78"]
        assert lines(text, "StartLimitBurst")


def test_pauses_grow_where_systemd_can() -> None:
    old, new = (
        unit("-router.service", host=replace(HOST, version=version)) for version in (STEPS_SINCE - 1, STEPS_SINCE)
    )
    assert lines(old, "RestartSec") == ["10s"]
    assert not lines(old, "RestartSteps")
    assert (lines(new, "RestartSec"), lines(new, "RestartSteps"), lines(new, "RestartMaxDelaySec")) == (
        ["1s"],
        ["6"],
        ["30s"],
    )


def test_redis_away_for_long_exhausts_no_limit() -> None:
    """So many starts in that time cannot come to pass with the pause there is."""
    for version in (OLDEST, STEPS_SINCE):
        text = unit("-router.service", host=replace(HOST, version=version))
        pause_s = float(lines(text, "RestartSec")[0].rstrip("s"))
        steps = [pause_s]
        if lines(text, "RestartSteps"):
            most_s = float(lines(text, "RestartMaxDelaySec")[0].rstrip("s"))
            steps = [pause_s * (most_s / pause_s) ** (step / 6) for step in range(7)]
        interval_s, starts, elapsed = float(lines(text, "StartLimitIntervalSec")[0].rstrip("s")), 1, 0.0
        while elapsed < interval_s:
            elapsed += steps[min(starts - 1, len(steps) - 1)]
            starts += 1
        assert starts - 1 < int(lines(text, "StartLimitBurst")[0]), (version, starts)


def test_an_agent_goes_with_its_engine_and_stops_before_it() -> None:
    agent = unit("-agent@.service")
    assert lines(agent, "Requires") == ["adaptersync-replica@%i.service"]
    assert "adaptersync-replica@%i.service" in lines(agent, "After")[1].split()


def test_engines_of_others_have_agents_alone() -> None:
    files = render(Config(), HOST)
    assert f"{UNITS}/adaptersync-replica@.service" not in files
    assert "replica@" not in files[f"{UNITS}/adaptersync-agent@.service"]


def test_an_instance_has_the_gpu_of_its_number_and_a_port_after_it() -> None:
    assert "CUDA_VISIBLE_DEVICES=%i" in lines(unit("-replica@.service"), "Environment")
    assert lines(unit("-replica@.service"), "ExecStart")[0].endswith(" replica %i")
    assert lines(unit("-agent@.service"), "ExecStart")[0].split(" --config")[0].endswith(" agent --number %i")


def test_the_store_is_written_by_those_who_must_alone() -> None:
    store = CONFIG.store.path
    for part in ("-coordinator.service", "-worker.service"):
        assert store in lines(unit(part), "ReadWritePaths")
    agent = unit("-agent@.service")
    assert lines(agent, "ReadOnlyPaths") == [store]
    assert store not in lines(agent, "ReadWritePaths")
    for part in ("-router.service", "-replica@.service"):
        assert f"-{store}" in lines(unit(part), "InaccessiblePaths")


def test_an_engine_is_given_no_secret() -> None:
    redis = RedisSection(control_url="redis://user:hush@10.0.0.1/0", cache_url="redis://:hush@10.0.0.2/0")
    config = replace(CONFIG, redis=redis, router=RouterSection(gate_token="hush"))
    for place, text in render(config, HOST).items():
        assert "hush" not in text, place
    replica = unit("-replica@.service", config)
    assert not lines(replica, "LoadCredential")
    assert "-/etc/adaptersync" in lines(replica, "InaccessiblePaths")
    assert lines(replica, "User") == ["adaptersync-engine"]


def test_each_role_is_a_user_of_its_own() -> None:
    """A file that belongs to one, and is nobody else's to read, is kept from all that run beside it."""
    users = {part: lines(unit(f"-{part}"), "User")[0] for part in PARTS}
    assert {part: user for part, user in users.items() if "@" not in part or part == "agent@.service"} == {
        f"{role}{'@' if role == 'agent' else ''}.service": f"adaptersync-{role}" for role in ROLES
    }
    assert len(set(users.values())) == len(ROLES) + 1
    known = render(CONFIG, HOST)["etc/sysusers.d/adaptersync.conf"]
    for part, user in users.items():
        assert lines(unit(f"-{part}"), "Group") == [user]
        assert re.search(rf"^u {user} - ", known, re.MULTILINE), user


def test_the_store_is_its_groups_and_what_others_keep_is_theirs_alone() -> None:
    joined = {part: lines(unit(f"-{part}"), "SupplementaryGroups") for part in PARTS}
    assert {part for part, groups in joined.items() if "adaptersync" in groups} == {
        "coordinator.service", "worker.service", "worker@.service",
    }  # fmt: skip
    assert joined["replica@.service"] == ["adaptersync-agent"]
    places = render(CONFIG, HOST)["etc/tmpfiles.d/adaptersync.conf"]
    for place, whose in (
        (CONFIG.store.path, "3775 root adaptersync"),
        (f"{CONFIG.store.path}/.coordinator", "0755 adaptersync-coordinator adaptersync"),
        (f"{CONFIG.store.path}/.ledger", "0755 adaptersync-worker adaptersync"),
        (CONFIG.agent.stage_path, "0750 adaptersync-agent adaptersync-agent"),
        (CONFIG.router.spool_path, "0700 adaptersync-router adaptersync-router"),
    ):
        assert f"d {place} {whose} -\n" in places


def test_no_file_of_secrets_is_seen_by_an_engine() -> None:
    files = {
        "redis.password_file": "/etc/adaptersync/p",
        "redis.key_file": "/srv/tls/key",
        "router.keys_file": "/srv/keys",
    }
    config = load_config(
        environment={}, overrides={**files, "redis.control_url": "rediss://r", "engine.model": "/srv/m"}
    )
    hidden = " ".join(lines(unit("-replica@.service", config), "InaccessiblePaths")).split()
    assert hidden == ["-/var/lib/adaptersync/store", "-/etc/adaptersync", "-/srv/tls/key", "-/srv/keys"]


def test_an_engine_answers_the_loopback_and_its_peers_alone() -> None:
    engine = EngineSection(model="/srv/m", host="10.1.0.9", peers=("10.1.0.0/24", "fd00::1"))
    replica = unit("-replica@.service", Config(engine=engine))
    assert lines(replica, "IPAddressDeny") == ["any"]
    assert lines(replica, "IPAddressAllow") == ["localhost 10.1.0.0/24 fd00::1"]
    assert lines(unit("-replica@.service"), "IPAddressAllow") == ["localhost"]


@pytest.mark.parametrize(
    ("urls", "allowed"),
    [
        (("redis://127.0.0.1:6379/0", ""), ["localhost"]),
        (("redis://10.0.0.2:6379/0", "rediss://[fd00::2]:6379/0"), ["localhost 10.0.0.2 fd00::2"]),
        (("unix:///run/redis.sock", ""), ["localhost"]),
        (("redis://redis.example:6379/0", ""), []),
        (("redis://[fe80::1%eth0]:6379/0", ""), ["localhost fe80::1"]),  # a zone would be a specifier
    ],
)
def test_who_needs_redis_alone_reaches_redis_alone(urls: tuple[str, str], allowed: list[str]) -> None:
    config = replace(CONFIG, redis=RedisSection(control_url=urls[0], cache_url=urls[1]))
    for part in ("-coordinator.service", "-agent@.service"):
        assert lines(unit(part, config), "IPAddressAllow") == allowed


def test_figures_that_are_read_from_elsewhere_are_let_through() -> None:
    def allowed(host: str, port: int) -> list[list[str]]:
        named = {"telemetry.metrics_host": host, "coordinator.metrics_port": port, "agent.metrics_port": port}
        config = load_config(environment={}, overrides={**named, "engine.model": "/srv/m"})
        return [lines(unit(part, config), "IPAddressAllow") for part in ("-coordinator.service", "-agent@.service")]

    assert allowed("127.0.0.1", 9100) == allowed("10.0.0.1", 0) == [["localhost"]] * 2
    assert allowed("10.0.0.1", 9100) == [[], []]


def test_a_page_for_others_is_let_through() -> None:
    for host, allowed in (("127.0.0.1", ["localhost"]), ("10.0.0.1", [])):
        config = load_config(environment={}, overrides={"page.host": host, "page.port": 8090})
        assert lines(unit("-coordinator.service", config), "IPAddressAllow") == allowed


@pytest.mark.parametrize("variable", ["%h", 'a"b', "a\\b", "--x='y z'"])
def test_any_argument_reaches_the_engine_as_it_is(tmp_path: Path, variable: str) -> None:
    config = Config(engine=EngineSection(model="/srv/m", arguments=variable))
    (word,) = [value for value in lines(unit("-replica@.service", config), "Environment") if "ARGUMENTS" in value]
    inside = word.removeprefix('"').removesuffix('"').replace("%%", "%")
    assert re.sub(r"\\(.)", r"\1", inside) == f"ADAPTERSYNC_ENGINE__ARGUMENTS={variable}"
    assert analyze("verify", *written(tmp_path, config)).stderr == ""


@pytest.mark.parametrize(
    "path", ["/srv/my store", "/srv/%h", '/srv/"', "/srv/a\nUser=root", "/srv/../etc", "/srv/$HOME"]
)
def test_a_path_that_a_unit_would_read_otherwise_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="path cannot stand in a unit"):
        render(load_config(environment={}, overrides={"store.path": path}), HOST)


@pytest.mark.parametrize("key", ["store.path", "agent.stage_path", "router.spool_path"])
@pytest.mark.parametrize("path", ["/", "/etc", "/./etc/", "//usr", "/usr/local/store", "/dev", "/var/lib"])
def test_a_directory_of_the_systems_is_given_to_nobody(key: str, path: str) -> None:
    with pytest.raises(ConfigError, match=f"directory is the system's.*key={key}"):
        render(load_config(environment={}, overrides={key: path}), HOST)


@pytest.mark.parametrize("path", ["/srv/store", "/var/lib/store", "/mnt"])
def test_any_other_directory_is_ours_to_have(path: str) -> None:
    config = load_config(environment={}, overrides={"agent.stage_path": path})
    assert f"d {path} 0750" in render(config, HOST)["etc/tmpfiles.d/adaptersync.conf"]


def test_memory_is_a_disk_like_others_below_its_root() -> None:
    memory = "/dev/shm"  # noqa: S108
    assert own(f"{memory}/staged", "agent.stage_path") == f"{memory}/staged"
    with pytest.raises(ConfigError, match="directory is the system's"):
        own(memory, "agent.stage_path")


def test_settings_with_lines_of_their_own_are_refused() -> None:
    with pytest.raises(ConfigError, match="control characters"):
        render(Config(engine=EngineSection(model="/srv/m", arguments="x\nUser=root")), HOST)


def test_what_units_cannot_see_is_refused() -> None:
    check_visible(CONFIG, HOST)
    with pytest.raises(ConfigError, match="--python"):
        check_visible(CONFIG, replace(HOST, python="/home/me/venv/bin/python"))
    with pytest.raises(ConfigError, match="interpreter itself"):
        check_visible(CONFIG, replace(HOST, real_python="/root/.pyenv/bin/python"))
    with pytest.raises(ConfigError, match=r"engine\.model"):
        check_visible(Config(engine=EngineSection(model="/root/model")), HOST)


def test_a_worker_may_write_exports_and_finishes_the_longest_job_it_may_have() -> None:
    assert lines(unit("-worker.service"), "TimeoutStopSec") == ["620s"]
    more = {"jobs.export_path": "/srv/exports", "coordinator.gate": True, "coordinator.gate_function": "m:f"}
    config = load_config(environment={}, overrides={**more, "coordinator.gate_timeout_s": 7200.0})
    worker = unit("-worker.service", config)
    assert lines(worker, "ReadWritePaths") == [CONFIG.store.path, "/srv/exports"]
    assert lines(worker, "TimeoutStopSec") == ["7220s"]
    with pytest.raises(ConfigError, match=r"jobs\.export_path"):
        check_visible(replace(config, jobs=replace(config.jobs, export_path="/home/me")), HOST)


def test_engines_do_not_answer_a_network_that_was_not_named() -> None:
    with pytest.raises(ConfigError, match=r"engine\.peers"):
        load_config(environment={}, overrides={"engine.host": "10.1.0.9"})
    with pytest.raises(ConfigError, match="no address"):
        load_config(environment={}, overrides={"engine.peers": "router-1"})


def test_traces_reach_their_collector() -> None:
    config = load_config(environment={}, overrides={"telemetry.traces_url": "http://10.0.0.9:4318/v1/traces"})
    assert lines(unit("-agent@.service", config), "IPAddressAllow") == ["localhost 10.0.0.9"]


# the command

INSTALL = ("install", "--systemd", "--python", "/usr/bin/python3", "--systemd-version", "252")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("ADAPTERSYNC_CONFIG", raising=False)
    file = tmp_path / "adaptersync.toml"
    file.write_text('[engine]\nmodel = "/srv/models/base"\n')
    return file


def test_a_dry_run_shows_all_and_writes_nothing(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*INSTALL, "--dry-run", "--config", str(settings)]) == 0
    shown = capsys.readouterr().out
    assert f"LoadCredential=adaptersync.toml:{settings}" in shown
    assert shown.count(MARK) == len(PARTS) + 3
    assert main([*INSTALL, "--dry-run", "--json", "--config", str(settings)]) == 0
    host = replace(HOST, python="/usr/bin/python3", settings=str(settings))
    assert orjson.loads(capsys.readouterr().out)["files"] == render(CONFIG, host)
    assert list(settings.parent.iterdir()) == [settings]


def test_nothing_is_written_where_nobody_asked(settings: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*INSTALL, "--config", str(settings)]) == 78
    assert "nowhere to write" in capsys.readouterr().err


def test_below_a_root_it_is_written_once_and_ours_alone(
    settings: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "image"
    command = [*INSTALL, "--json", "--config", str(settings), "--root", str(root)]
    assert main(command) == 0
    states = orjson.loads(capsys.readouterr().out)["states"]
    assert set(states.values()) == {"new"}
    assert {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()} == set(states)
    router = root / UNITS / "adaptersync-router.service"
    before = router.stat().st_mtime_ns
    settings.write_text('[engine]\nmodel = "/srv/models/other"\n')
    assert main(command) == 0
    states = orjson.loads(capsys.readouterr().out)["states"]
    assert {Path(place).name for place, state in states.items() if state == "changed"} == {
        "adaptersync-replica@.service"
    }
    assert router.stat().st_mtime_ns == before
    replica = root / UNITS / "adaptersync-replica@.service"
    replica.write_text("[Service]\nExecStart=/bin/mine\n")
    router.write_text(f"{MARK}\nold")
    assert main(command) == 78
    assert "not ours" in capsys.readouterr().err
    assert router.read_text() == f"{MARK}\nold"


def test_only_root_writes_to_the_system(
    settings: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main([*INSTALL, "--config", str(settings), "--root", "/"]) == 78
    assert "only root" in capsys.readouterr().err
