"""Settings as people read them."""

from __future__ import annotations

import tomllib

import msgspec

from adaptersync_core.config import Config, load_config
from adaptersync_tools import explain


def test_every_setting_is_explained_with_its_default_and_variable() -> None:
    found = {key.name: key for key in explain.keys(Config())}
    expected = [f"{section}.{key}" for section, keys in msgspec.to_builtins(Config()).items() for key in keys]
    assert list(found) == expected
    key = found["coordinator.deadline_s"]
    assert key.variable == "ADAPTERSYNC_COORDINATOR__DEADLINE_S"
    assert key.default == key.value == Config().coordinator.deadline_s
    assert key.meaning.startswith("How long a version may take")


def test_what_needs_words_has_them() -> None:
    """A name or an address explains itself; a duration or a bound does not."""
    silent = [key.name for key in explain.keys(Config()) if not key.meaning]
    self_evident = {"name", "host", "port", "router_url", "connect_timeout_s"}
    assert {name.partition(".")[2] for name in silent} <= self_evident


def test_what_is_shown_can_be_read_again() -> None:
    config = load_config(environment={"ADAPTERSYNC_ROUTER__PORT": "9", "ADAPTERSYNC_GROUP__NAME": "blue"})
    text = explain.to_toml({key.name: key.value for key in explain.keys(config)})
    assert msgspec.convert(tomllib.loads(text), Config) == config
