"""Fixtures and options for every test."""

from __future__ import annotations

import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from hypothesis import HealthCheck, settings

from adaptersync_tools.servers import Role
from support.adapters import ALL_TARGETS
from support.engines import Engine, vllm_cpu
from support.redis_servers import KINDS, RedisServers
from support.strangers import Stranger
from support.tiny_model import build_tiny_model

# a busy machine is no failure
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--accept-surface",
        action="store_true",
        help="rewrite tests/data/surface_*.txt with what the code has now, instead of comparing",
    )


def pytest_configure(config: pytest.Config) -> None:
    # In the background of a script Ctrl-C is ignored, and whatever is started from there ignores it as well.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "mutation: breaks a rule on purpose, in a copy, and wants a named test to fail")
    config.addinivalue_line(
        "markers", "foreign_keys(reason): the test writes keys that are not the product's; no check of keys"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed or logged may hold half a character, which cannot be sent from process to process."""
    report = yield
    report.sections = [(name, text.encode(errors="backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from support.lanes import Lanes

    return Lanes(config, log)


@pytest.fixture(scope="session")
def redis_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServers]:
    servers = RedisServers(tmp_path_factory.mktemp("servers"))
    yield servers
    servers.stop()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> Stranger:
    return Stranger(monkeypatch)


@pytest.fixture(params=KINDS)
def redis_kind(request: pytest.FixtureRequest) -> str:
    """Which server program the test runs on: each test that asks runs on all."""
    kind: str = request.param
    return kind


@pytest.fixture
def redis_url(redis_servers: RedisServers, redis_kind: str, no_leaked_keys: None) -> str:
    """An empty control server: durable, never evicts."""
    return redis_servers.url(redis_kind, Role.CONTROL)


@pytest.fixture
def cache_url(redis_servers: RedisServers, redis_kind: str, no_leaked_keys: None) -> str:
    """An empty cache server: bounded, evicts."""
    return redis_servers.url(redis_kind, Role.CACHE)


@pytest.fixture
def no_leaked_keys(request: pytest.FixtureRequest, redis_servers: RedisServers) -> Iterator[None]:
    """After the test, every key left is one of `adaptersync_core.keys`, on its server, and expires if that says so."""
    yield
    unlisted = redis_servers.unlisted_keys()
    if request.node.get_closest_marker("foreign_keys") is None:
        assert not unlisted, "\n".join(unlisted)


@pytest.fixture
def no_blocking() -> Iterator[BlockBuster]:
    """Any blocking call in the event loop fails the test: for tests of async services."""
    with blockbuster_ctx() as blockbuster:
        yield blockbuster


@pytest.fixture(scope="session")
def real_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real vLLM with a Qwen2 in float32 as we want it started, for all who leave it as empty as they found it."""
    model = build_tiny_model(tmp_path_factory.mktemp("real") / "model")
    with (
        TemporaryDirectory(prefix="engine-") as directory,  # paths of ipc sockets must be short
        vllm_cpu(Path(directory), model, "--lora-target-modules", *ALL_TARGETS, guarded=True) as engine,
    ):
        yield engine
