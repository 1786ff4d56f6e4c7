"""The rules of the house that no reviewer should have to remember."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from adaptersync.coordinator.page.server import Page
from adaptersync.trainer.relay import relay_app
from adaptersync_core.config import Config
from adaptersync_core.keys import Keys
from adaptersync_core.redis import RedisClient
from adaptersync_core.registry import Registry
from adaptersync_tools.cli import adaptersync
from support import surface
from support.source import PACKAGES, REPOSITORY, imports, modules, within

HEAVY = ("torch", "trl", "peft", "vllm", "transformers")

# The modules that exist to use them; each is imported by nothing but its own command.
MAY_LOAD_HEAVY = ("adaptersync.trainer.trl", "adaptersync.trainer.rollout_process", "adaptersync.trainer.seams")

# Modules that may import another's wiring: the command line, which starts services, and the agent on a simulated host.
COMMAND_LINE = ("adaptersync_tools.cli", "adaptersync_tools.simulator.agent")

MAX_LINES = 500

# Beside its own, what a service reads of the settings is what the whole group has alike.
ALIKE = {"group", "redis", "store", "telemetry"}
SETTINGS = {
    "agent": {"agent", "proof"},
    "coordinator": {"coordinator", "jobs", "page"},
    "router": {"router"},
    "trainer": {"trainer", "relay"},
}


def objection(importer: str, name: str) -> str | None:
    """Why a module may not import a name; imports point from tools to services to shared."""
    service = ".".join(importer.split(".")[:2])
    if within(importer, "adaptersync_core"):
        if within(name, "adaptersync") or within(name, "adaptersync_tools"):
            return "shared code imports no service and no tool"
        if any(within(name, heavy) for heavy in HEAVY):
            return "shared code knows nothing of the training and serving libraries"
    if within(importer, "adaptersync"):
        if within(name, "adaptersync_tools"):
            return "a service imports no tool"
        if within(name, "adaptersync") and not within(name, service):
            return "services speak through adaptersync_core only"
    is_wiring = "app" in name.split(".")[1:] and any(within(name, package) for package in PACKAGES)
    if is_wiring and not any(within(importer, command) for command in COMMAND_LINE):
        return "wiring is imported by the command line only"
    if within(name, "trl") and importer != "adaptersync.trainer.seams":
        return "adaptersync.trainer.seams is the only module that knows where TRL keeps its modules"
    if within(name, "redis") and importer != "adaptersync_core.redis":
        return "adaptersync_core.redis is the only module that imports the client"
    return None


@pytest.mark.parametrize("service", SETTINGS)
def test_services_do_not_go_by_each_others_settings(service: str) -> None:
    sections = "|".join(Config.__struct_fields__)
    read = {
        name
        for module in modules()
        if within(module.name, f"adaptersync.{service}")
        for name in re.findall(rf"\bconfig\.({sections})\b", module.path.read_text())
    }
    assert service in read
    assert read <= SETTINGS[service] | ALIKE


def test_imports_point_downwards() -> None:
    found = [
        f"{module.path.relative_to(REPOSITORY)}:{imported.line} imports {imported.name}: {reason}"
        for module in modules()
        for imported in module.imports()
        if (reason := objection(module.name, imported.name))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("adaptersync_core.store", "import adaptersync.agent"),
        ("adaptersync_core.store", "def f():\n    from adaptersync_tools import servers"),
        ("adaptersync_core.store", "from torch import nn"),
        ("adaptersync.agent.engine", "from adaptersync.router import table"),
        ("adaptersync.agent.engine", "from adaptersync import router"),
        ("adaptersync.agent.engine", "from ..router import table"),
        ("adaptersync.agent.engine", "import adaptersync_tools.servers"),
        ("adaptersync.agent.engine", "from .app import run"),
        ("adaptersync.agent.engine", "from redis.asyncio import Redis"),
        ("adaptersync_tools.up", "from adaptersync.agent import app"),
        ("adaptersync.trainer.cpu", "def f():\n    from trl.experimental.async_grpo import packing"),
        ("adaptersync_tools.demo.train", "def f():\n    import trl"),
    ],
)
def test_direction_rule_sees(importer: str, statement: str) -> None:
    (imported,) = imports(statement, importer.rpartition(".")[0])
    assert objection(importer, imported.name)


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("adaptersync.agent.engine", "from .staging import stage"),
        ("adaptersync.agent.engine", "from adaptersync_core.redis import RedisClient"),
        ("adaptersync.agent.app", "import aiohttp.web_app"),
        ("adaptersync_tools.cli", "from adaptersync.agent import app"),
    ],
)
def test_direction_rule_allows(importer: str, statement: str) -> None:
    (imported,) = imports(statement, importer.rpartition(".")[0])
    assert objection(importer, imported.name) is None


def test_modules_are_small() -> None:
    """Our own files, tests included: a longer one is two modules."""
    long = {
        str(path.relative_to(REPOSITORY)): lines
        for root in (*PACKAGES.values(), REPOSITORY / "tests")
        for path in root.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long


def test_tests_that_the_readme_names_exist() -> None:
    tests = REPOSITORY / "tests"
    named = set(re.findall(r"`(test_\w+)`", (tests / "README.md").read_text()))
    there = {name for path in tests.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())}
    assert named
    assert named <= there


def may_load_heavy(name: str) -> bool:
    return any(within(name, module) for module in MAY_LOAD_HEAVY)


def test_imports_are_safe() -> None:
    """Importing any module loads no training or serving library, connects nothing and listens nowhere."""
    names = [module.name for module in modules() if not may_load_heavy(module.name)]
    run = subprocess.run([sys.executable, "-c", _IMPORT_ALL, *names], capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split("\n") == [*names, ""]


_IMPORT_ALL = f"""
import importlib, sys
name = None
def watch(event, arguments):
    if event in ("socket.connect", "socket.bind", "socket.getaddrinfo", "subprocess.Popen", "os.fork"):
        sys.exit(f"importing {{name}} does {{event}} {{arguments[1:]}}")
sys.addaudithook(watch)
for name in sys.argv[1:]:
    importlib.import_module(name)
    if loaded := sorted(set({HEAVY}) & set(sys.modules)):
        sys.exit(f"importing {{name}} loads {{', '.join(loaded)}}")
    print(name)
"""


def test_top_level_imports_are_declared() -> None:
    """What a module imports at its top is a dependency of every installation; the rest is imported where used."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    declared = {requirement.split(">")[0].replace("-", "_") for requirement in project["dependencies"]}
    declared = {{"pyzmq": "zmq"}.get(name, name) for name in declared}
    undeclared = {
        f"{module.name} imports {imported.name}"
        for module in modules()
        for imported in module.imports()
        if imported.eager and not may_load_heavy(module.name)
        if (root := imported.name.split(".")[0]) not in declared | sys.stdlib_module_names | PACKAGES.keys()
        if root != "__future__"
    }
    assert undeclared == set()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


def test_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = {name for name in names if name.split("/")[0].endswith(".dist-info")}
    expected = {
        f"{package}/{path.relative_to(root).as_posix()}"
        for package, root in PACKAGES.items()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert names - info == expected
    assert any(name.endswith(".lua") for name in expected)
    assert {f"{package}/py.typed" for package in PACKAGES} <= expected


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel in an environment of its own; third-party packages are borrowed from ours."""
    venv = tmp_path_factory.mktemp("elsewhere") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, timeout=50)
    (site,) = (venv / "lib").glob("python*/site-packages")
    # a path in a .pth file is searched, but .pth files in that path are not read: our editable installation stays out
    (site / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    return venv


def test_wheel_is_imported_without_the_source_tree(installed: Path, tmp_path: Path) -> None:
    for package in PACKAGES:
        python = installed / "bin" / "python"
        found = _output([python, "-c", f"import {package}; print({package}.__file__)"], tmp_path)
        assert Path(found).is_relative_to(installed)


def test_command_of_the_wheel_runs(installed: Path, tmp_path: Path) -> None:
    assert _output([installed / "bin" / "adaptersync", "--help"], tmp_path).startswith("Usage: adaptersync")


def test_redis_keys_are_frozen(request: pytest.FixtureRequest) -> None:
    surface.assert_frozen("redis_keys", surface.redis_keys(), request.config)


def test_event_types_are_frozen(request: pytest.FixtureRequest) -> None:
    surface.assert_frozen("events", surface.event_types(), request.config)


def test_http_routes_are_frozen(request: pytest.FixtureRequest) -> None:
    """Each service that listens adds its application here."""
    page = Page(Config(), Registry(RedisClient("redis://127.0.0.1:1/0", name="nobody"), Keys("nobody")))
    routes = [*surface.http_routes(relay_app(Config()), "relay"), *surface.http_routes(page.application(), "page")]
    surface.assert_frozen("http_routes", routes, request.config)


def test_cli_options_are_frozen(request: pytest.FixtureRequest) -> None:
    surface.assert_frozen("cli", surface.cli_options(adaptersync, "adaptersync"), request.config)


def test_locks_hold_what_the_project_requires() -> None:
    """No lock names a package twice, or anything but exact versions; base and dev cover the declared dependencies."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    locked: dict[str, dict[str, str]] = {}
    for lock in ("base", "cpu", "dev"):
        lines = (REPOSITORY / "deploy" / "locks" / f"{lock}.txt").read_text().splitlines()
        pins = [Requirement(line) for line in lines if line and not line.startswith(("#", "-r "))]
        assert all(str(pin.specifier).startswith("==") for pin in pins)
        locked[lock] = {canonicalize_name(pin.name): str(pin.specifier)[2:] for pin in pins}
        assert len(locked[lock]) == len(pins)
    assert not locked["base"].keys() & (locked["cpu"] | locked["dev"]).keys()
    assert not locked["cpu"].keys() & locked["dev"].keys()

    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for lock, requirements in (
        ("base", [*project["dependencies"], *extras["embedded"]]),
        (
            "cpu",
            [
                package
                for extra in ("trl", "tokenize", "ledger", "otel", "hub", "cpu", "plot")
                for package in extras[extra]
            ],
        ),
        ("dev", extras["dev"]),
    ):
        for requirement in map(Requirement, requirements):
            version = (locked["base"] | locked[lock]).get(canonicalize_name(requirement.name))
            assert version, f"{requirement} is not in deploy/locks/{lock}.txt"
            assert requirement.specifier.contains(version, prereleases=True), f"{requirement}, locked {version}"


@pytest.mark.parametrize("python", ["3.11.2", "3.12.0", "3.13.0"])
@pytest.mark.parametrize("locks", [("base",), ("base", "cpu", "dev")])
def test_locks_are_complete_on_every_python(locks: tuple[str, ...], python: str) -> None:
    """They are installed without dependencies, and some packages require more on an older or newer Python."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    missing_on_purpose = {"torchvision", "torchaudio", "torchcodec"}  # cpu.txt says why
    environment = {"python_full_version": python, "python_version": python.rpartition(".")[0], "extra": ""}

    def apply(lines: list[str]) -> set[str]:
        found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-r "))]
        return {canonicalize_name(one.name) for one in found if not one.marker or one.marker.evaluate(environment)}

    locked = {
        name for lock in locks for name in apply((REPOSITORY / f"deploy/locks/{lock}.txt").read_text().splitlines())
    }
    for name in sorted(locked):
        try:
            needed = apply(importlib.metadata.requires(name) or [])
        except importlib.metadata.PackageNotFoundError:
            continue  # not needed on this Python, or not yet installed here
        assert needed - missing_on_purpose <= locked, f"{name} needs {needed - locked}, which no lock names"


def _output(command: list[str | Path], directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()
