"""Settings: each source wins in its turn, and whatever is wrong is named by its key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from adaptersync_core.config import Config, as_text, load_config
from adaptersync_core.errors import ConfigError

TLS = ("ca_file", "cert_file", "key_file")  # of Redis: a mistake without rediss://, see test_address
SETTINGS = [
    (section.name, field.name, field.default)
    for section in msgspec.structs.fields(Config)
    for field in msgspec.structs.fields(section.type)
    if section.name != "redis" or field.name not in TLS
]
IDS = [f"{section}.{key}" for section, key, _ in SETTINGS]


def another(key: str, value: Any) -> tuple[Any, Any]:
    """Two other values of the same type that are allowed."""
    if isinstance(value, bool):
        return not value, value
    if key == "table_max_age_s":  # has the largest value it may have
        return value - 1, value - 2
    if isinstance(value, int | float):
        return value + 1, value + 2
    if key == "hosts":
        return ("one",), ("two", "three")
    if key == "promote_on":
        return ("below noise",), ("proved", "not probed")
    if key == "when_spool_full":
        return "serve", "refuse"
    if key == "kv_events":
        return "off", "auto"
    if key == "policy":
        return "threshold", "promise"
    if key == "traces_url":
        return "http://one:4318/v1/traces", "https://two"
    if key in ("control_url", "cache_url"):
        return "redis://one:1/0", "rediss://two"
    if key == "gate_function":
        return "one:judge", "two.three:judge"
    if key == "gate_inconclusive":
        return "admit", "refuse"
    if key.endswith("_cron"):
        return "1 2 * * *", ""
    if key == "hub_url":
        return "http://one", "https://two"
    if key == "kind":
        return "simulated", "vllm"
    if key == "host":
        return "localhost", "127.0.0.2"
    if key == "peers":
        return ("10.0.0.1",), ("10.0.0.0/8", "fd00::1")
    if key in ("path", "model") or key.endswith("_path"):
        return "/one", "/two"
    return "one", "two"


def toml(section: str, key: str, value: Any) -> str:
    value = list(value) if isinstance(value, tuple) else value
    text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
    return f"[{section}]\n{key} = {text}\n"


def value_of(config: Config, section: str, key: str) -> Any:
    return getattr(getattr(config, section), key)


@pytest.mark.parametrize(("section", "key", "default"), SETTINGS, ids=IDS)
def test_defaults_then_file_then_environment_then_options(section: str, key: str, default: Any, tmp_path: Path) -> None:
    one, two = another(key, default)
    path = tmp_path / "settings.toml"
    path.write_text(toml(section, key, one))
    variable, text = f"ADAPTERSYNC_{section.upper()}__{key.upper()}", as_text(two)
    assert value_of(load_config(environment={}), section, key) == default
    assert value_of(load_config(path, environment={}), section, key) == one
    assert value_of(load_config(environment={"ADAPTERSYNC_CONFIG": str(path)}), section, key) == one
    assert value_of(load_config(path, environment={variable: text}), section, key) == two
    assert value_of(load_config(environment={variable: text}), section, key) == two
    options = {"router.host": None, f"{section}.{key}": one}
    assert value_of(load_config(path, environment={variable: text}, overrides=options), section, key) == one


def test_the_file_named_by_hand_wins_over_the_one_in_the_environment(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(f'[group]\nname = "{name}"\n')
    config = load_config(tmp_path / "a", environment={"ADAPTERSYNC_CONFIG": str(tmp_path / "b")})
    assert config.group.name == "a"


def test_foreign_variables_are_left_alone() -> None:
    foreign = {
        "ADAPTERSYNC_VENV": "/x",
        "ADAPTERSYNC_REDIS_BINARY": "/y",
        "ADAPTERSYNC_CONFIG": "",
        "PATH": "/bin",
        "ROUTER__PORT": "1",
    }
    assert load_config(environment=foreign) == Config()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[router]\nport = 'x'\n", "router.port"),
        ("[router]\nprot = 1\n", "prot"),
        ("[ruter]\nport = 1\n", "ruter"),
        ("router = 5\n", "router"),
        ("[router]\nhold_s = -1\n", "router.hold_s"),
        ("[router]\nhold_s = 0\n", "router.hold_s"),
        ("[router]\nhold_s = nan\n", "router.hold_s"),
        ("[router]\nhold_s = inf\n", "router.hold_s"),
        ("[router]\nspill = -1\n", "router.spill"),
        ("[router]\ntable_max_age_s = 60.1\n", "router.table_max_age_s"),
        ("[router]\nconnections = 0\n", "router.connections"),
        ("[router]\nmax_inflight = 0\n", "router.max_inflight"),
        ("[router]\nhead_bytes = 0\n", "router.head_bytes"),
        ("[router]\nbody_bytes = 0\n", "router.body_bytes"),
        ("[router]\nbody_bytes = 1000\narriving_bytes = 999\n", "router.arriving_bytes"),
        ("[group]\nblocks_per_request = 4097\n", "group.blocks_per_request"),
        ("[coordinator]\nmin_ready = 0\n", "coordinator.min_ready"),
        ("[agent]\nstage_path = 'relative'\n", "agent.stage_path"),
        ("[store]\npath = 'relative'\n", "store.path"),
        ("[router]\nspool_path = 'relative'\n", "router.spool_path"),
        ("[router]\nspool_bytes = 16383\n", "router.spool_bytes"),
        ("[router]\nwhen_spool_full = 'panic'\n", "router.when_spool_full"),
        ("[group]\npolicy = 'best'\n", "group.policy"),
        ("[group]\nname = 'A group'\n", "group.name"),
        ("[agent]\nname = 'r1:x'\n", "agent.name"),
        ("[agent]\nname = ''\n", "agent.name"),
        ("[router]\nname = 'r 1'\n", "router.name"),
        ("[coordinator]\nname = '{c}'\n", "coordinator.name"),
        ("[trainer]\nrun = '../run'\n", "trainer.run"),
        ("[jobs]\nverify = 'maybe'\n", "jobs.verify"),
        ("[redis]\ncontrol_url = 5\n", "redis.control_url"),
        ("[redis]\ncontrol_url = 'http://x'\n", "redis://host:port/0 (key=redis.control_url)"),
        ("[redis]\ncontrol_url = ''\n", "redis.control_url"),
        ("[redis]\ncontrol_url = 'redis://x:many/0'\n", "redis.control_url"),
        ("[redis]\ncontrol_url = 'redis://[fe80::1%eth0 any]:6379/0'\n", "redis.control_url"),
        ("[redis]\ncache_url = 'redis://10.0.0.1 any:6379/0'\n", "redis.cache_url"),
        ("[redis]\ncache_url = 'redis://there%20any:6379/0'\n", "redis.cache_url"),
        ("[engine]\npeers = ['fe80::1%eth0 any']\n", "engine.peers"),
        ("[redis]\ncache_url = 'x:6379'\n", "redis.cache_url"),
        ("[router]\nport = 65536\n", "0 to 65535 (key=router.port"),
        ("[relay]\nport = 99999\n", "relay.port"),
        ("[relay]\nmax_inflight = 0\n", "relay.max_inflight"),
    ],
    ids=ascii,
)
def test_a_wrong_setting_is_named(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        load_config(path, environment={})
    assert named in str(refusal.value)
    assert "$" not in str(refusal.value)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("ADAPTERSYNC_ROUTER__PORT", "eighty", "router.port"),
        ("ADAPTERSYNC_ROUTER__HOLD_S", "nan", "router.hold_s"),
        ("ADAPTERSYNC_ROUTER__PROT", "1", "prot"),
        ("ADAPTERSYNC_NOWHERE__X", "1", "nowhere"),
        ("ADAPTERSYNC_ROUTER_PORT", "1", "call it ADAPTERSYNC_ROUTER__PORT"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, value: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load_config(environment={variable: value})


@pytest.mark.parametrize(
    ("variable", "value"),
    [("ADAPTERSYNC_ROUTER__PORT", "eighty"), ("ADAPTERSYNC_ROUTER__PROT", "1"), ("ADAPTERSYNC_NOWHERE__X", "1")],
)
def test_a_wrong_variable_is_not_blamed_on_the_file(variable: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("[router]\nhold_s = 1\n")
    with pytest.raises(ConfigError) as refusal:
        load_config(path, environment={variable: value})
    assert refusal.value.ids == {"variable": variable}
    path.write_text("[router]\nspill = 'x'\n")
    with pytest.raises(ConfigError) as refusal:
        load_config(path, environment={"ADAPTERSYNC_ROUTER__PORT": "80"})
    assert refusal.value.ids == {"file": str(path)}


def test_the_password_of_a_wrong_address_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(environment={"ADAPTERSYNC_REDIS__CONTROL_URL": "http://:secret@x"})
    assert "secret" not in str(refusal.value)


def test_a_section_that_is_none_is_named_also_when_a_variable_sets_it(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("router = 5\n")
    with pytest.raises(ConfigError, match="router"):
        load_config(path, environment={"ADAPTERSYNC_ROUTER__PORT": "1"})


@pytest.mark.parametrize("content", [b"[router", b"\xff\xfe", b"a = \n"], ids=ascii)
def test_a_file_that_is_no_toml_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not TOML") as refusal:
        load_config(path, environment={})
    assert refusal.value.ids["file"] == str(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.toml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as refusal:
            load_config(path, environment={})
        assert refusal.value.ids["file"] == str(path)


def test_every_setting_has_its_section_and_duration_names_their_unit() -> None:
    for section, key, default in SETTINGS:
        assert isinstance(default, str | int | float | bool | tuple), (section, key)
        if isinstance(default, float):
            assert key.endswith("_s"), (section, key)


def test_the_ledger_stays_in_redis_for_as_long_as_routers_may_look_for_it() -> None:
    assert load_config(environment={"ADAPTERSYNC_JOBS__LEDGER_S": "0"}).jobs.ledger_s == 0
    with pytest.raises(ConfigError, match="at least 60"):
        load_config(environment={"ADAPTERSYNC_JOBS__LEDGER_KEPT_S": "59"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("redis.control_url", "redis://user:***@there:6379/0"),
        ("redis.cache_url", "redis://:***@there:6380/0"),
        ("router.gate_token", "***"),
    ],
)
def test_what_stands_for_a_secret_is_none(key: str, value: str) -> None:
    """Else a settings file that was printed would open the gate to whoever has seen one."""
    with pytest.raises(ConfigError, match=rf"left out a secret.*key={key}"):
        load_config(environment={}, overrides={key: value})


def test_a_function_that_answers_at_a_gate_makes_one() -> None:
    assert load_config(environment={}, overrides={"coordinator.gate_function": "m:f"}).coordinator.gate
    assert not load_config(environment={}).coordinator.gate


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("coordinator.gate_function", "judge"),
        ("coordinator.gate_function", "os; import sys:judge"),
        ("jobs.retention_cron", "daily"),
        ("jobs.export_path", "exports"),
        ("jobs.hub_namespace", "a/b"),
        ("jobs.hub_url", "huggingface.co"),
    ],
)
def test_a_setting_of_jobs_that_would_not_do_is_named(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load_config(environment={}, overrides={key: value})
