"""A host as it should be: real servers, and a simulated engine in the place of vLLM."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_core.store_identity import PREFIX
from adaptersync_core.vllm import WORKER_EXTENSION
from adaptersync_tools.servers import RedisServer
from adaptersync_tools.servers import Role as ServerRole
from adaptersync_tools.simulator.engine import EngineConfig
from adaptersync_tools.simulator.http import Simulator, SimulatorConfig, serving
from adaptersync_tools.simulator.publisher import PublisherConfig
from support.doctor import Host
from support.redis_servers import server_binary
from support.whole_fleet import fleet_config


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
