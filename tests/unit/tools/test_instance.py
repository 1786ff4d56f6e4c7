"""What follows from an instance number."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from adaptersync_core.config import AgentSection, Config, EngineSection
from adaptersync_core.errors import ConfigError
from adaptersync_core.identity import check_name
from adaptersync_tools.instance import LAST, ReplicaSlot
from adaptersync_tools.replica import spec

CONFIG = Config(engine=EngineSection(model="/srv/models/base"), agent=AgentSection(metrics_port=9200))


def test_ports_paths_and_name_follow_from_the_number() -> None:
    at = ReplicaSlot.of(CONFIG, 3, hostname="gpu-7.cluster.example")
    assert (at.port, at.events_port, at.replay_port, at.metrics_port) == (8003, 5560, 5660, 9203)
    assert ReplicaSlot.of(Config(), 3).metrics_port == 0
    assert at.name == "gpu-7-3"
    assert at.engine_url == at.public_url == "http://127.0.0.1:8003"
    assert at.token_file == Path("/run/adaptersync/3/token")
    assert at.stage_path == Path("/var/lib/adaptersync/staged/3")


def test_no_two_instances_of_a_host_share_anything() -> None:
    every = [ReplicaSlot.of(CONFIG, number, hostname="h").overrides() for number in range(20)]
    for setting in every[0]:
        assert len({instance[setting] for instance in every}) == len(every), setting


@pytest.mark.parametrize("hostname", ["GPU7", "a_b.c", "-x-", "ünï", "h" * 70, "1", "."])
def test_any_hosts_name_makes_a_name_that_is_taken(hostname: str) -> None:
    name = ReplicaSlot.of(CONFIG, LAST, hostname=hostname).name
    assert check_name("replica", name) == name


def test_beyond_the_loopback_routers_are_told_the_hosts_name() -> None:
    engine = replace(CONFIG.engine, host="10.0.0.7", peers=("10.0.0.0/24",))
    at = ReplicaSlot.of(replace(CONFIG, engine=engine), 1, hostname="gpu-7.example")
    assert (at.engine_url, at.public_url) == ("http://10.0.0.7:8001", "http://gpu-7.example:8001")
    everywhere = replace(engine, host="::", public_host="fd00::7")
    at = ReplicaSlot.of(replace(CONFIG, engine=everywhere), 1)
    assert (at.engine_url, at.public_url) == ("http://127.0.0.1:8001", "http://[fd00::7]:8001")


def test_a_number_without_a_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="no port is left"):
        ReplicaSlot.of(Config(engine=EngineSection(port=65500)), 36)


def test_the_engine_has_what_its_instance_says_and_arguments_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptersync_tools.replica.gpu_count", lambda: 8)
    engine = replace(CONFIG.engine, arguments="--max-loras 9 --override '{\"a\": 1}'")
    made = spec(replace(CONFIG, engine=engine), ReplicaSlot.of(CONFIG, 3), {"CUDA_VISIBLE_DEVICES": "5"})
    assert made.command[-4:] == ("--max-loras", "9", "--override", '{"a": 1}')
    assert made.command[made.command.index("--port") + 1] == "8003"
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert made.environment["ADAPTERSYNC_DOOR_TOKEN_FILE"] == "/run/adaptersync/3/token"
    assert spec(CONFIG, ReplicaSlot.of(CONFIG, 3), {}).environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_without_a_model_there_is_no_engine() -> None:
    with pytest.raises(ConfigError, match=r"set engine\.model"):
        spec(Config(), ReplicaSlot.of(Config(), 0), {})
