"""Addresses of servers: complete, and never telling a secret."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from adaptersync_core.address import Credentials, complete, credentials, where, without_credentials
from adaptersync_core.config import load_config
from adaptersync_core.errors import ConfigError

FILES = {"password_file": "/p", "ca_file": "/ca", "cert_file": "/c", "key_file": "/k"}


def test_settings_become_part_of_both_addresses(tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(
        '[redis]\ncontrol_url = "rediss://one:1/0"\ncache_url = "rediss://two:2/0"\nuser = "g:agent:a"\n'
        + "".join(f'{name} = "{file}"\n' for name, file in FILES.items())
    )
    config = load_config(settings, environment={})
    for url in (config.redis.control_url, config.redis.cache_url):
        assert credentials(url) == Credentials(user="g:agent:a", file="/p")
        query = dict(parse_qsl(urlsplit(url).query))
        assert query == {"password_file": "/p", "ssl_ca_certs": "/ca", "ssl_certfile": "/c", "ssl_keyfile": "/k"}
    again = load_config(settings, environment={"ADAPTERSYNC_REDIS__CONTROL_URL": config.redis.control_url})
    assert again == config


def test_an_address_that_says_who_it_is_stays_that() -> None:
    url = complete("redis://me:word@host:1/0", user="other", **FILES)
    assert credentials(url) == Credentials(user="me", given="word")
    assert (
        complete("redis://host/0", user="", password_file="", ca_file="", cert_file="", key_file="") == "redis://host/0"
    )
    unix = complete("unix:///run/redis.sock", user="g:agent:a", **FILES)
    assert credentials(unix) == Credentials(user="g:agent:a", file="/p")
    assert urlsplit(without_credentials(unix)).path == "/run/redis.sock"


@pytest.mark.parametrize(
    "url", ["redis://me:w%40rd@host:1/0?password_file=/p", "rediss://:word@host:1/0?ssl_ca_certs=/c"]
)
def test_what_is_told_of_an_address_is_the_server(url: str) -> None:
    assert where(url) == "host:1/0"
    assert "word" not in without_credentials(url)
    assert "password_file" not in without_credentials(url)


def test_a_password_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("one\n")
    known = credentials(f"redis://u@host/0?password_file={file}")
    assert known.password() == "one"
    file.write_text("two\n")
    assert known.password() == "two"


def test_certificates_for_an_address_without_tls_are_a_mistake(tmp_path: Path) -> None:
    for name in ("ca_file", "cert_file"):
        with pytest.raises(ConfigError, match="rediss://"):
            load_config(environment={f"ADAPTERSYNC_REDIS__{name.upper()}": "/x"})
