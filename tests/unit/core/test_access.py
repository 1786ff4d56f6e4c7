"""Rules of Redis' users: who owns which names. What a server makes of them: tests/contract/core/test_access.py."""

from __future__ import annotations

import hashlib
from fnmatch import fnmatchcase

import pytest

from adaptersync_core.access import OWNS, RedisUser, acl_file, owned, parse, rules
from adaptersync_core.errors import NameInvalid
from adaptersync_core.identity import adapter_id
from adaptersync_core.keys import EVERYBODY, SPECS, Keys, KeySpec

HEAD = "adaptersync:{test}:"


def spec(pattern: str) -> KeySpec:
    return next(each for each in SPECS if each.pattern == pattern)


def mine(instance: RedisUser, pattern: str, key: str) -> bool:
    return any(fnmatchcase(key, f"{HEAD}{name}") for name in owned(spec(pattern), instance))


def test_each_key_has_somebody_who_writes_it_and_nobody_reads_what_he_has_no_use_for() -> None:
    for each in SPECS:
        assert each.access, f"{each.pattern}: say in keys.SPECS which role needs which commands (see access.py)"
        assert set(each.access) | set(each.readers) <= set(EVERYBODY)


def test_an_instance_owns_keys_of_its_own_name_only() -> None:
    keys = Keys("test")
    agent, router = RedisUser("agent", "replica-1"), RedisUser("router", "router-1")
    assert mine(agent, "acks:{replica}", keys.acks("replica-1"))
    assert not mine(agent, "acks:{replica}", keys.acks("replica-10"))
    assert not mine(agent, "acks:{replica}", keys.acks("replica"))
    assert mine(router, "router:{router}", keys.router("router-1-0a1b2c"))
    assert not mine(router, "router:{router}", keys.router("router-1-b-0a1b2c"))  # of the router router-1-b


@pytest.mark.parametrize("seq", [1, 9, 10, 999_999_999])
def test_a_trainer_owns_the_versions_of_its_run_and_of_no_run_that_is_called_alike(seq: int) -> None:
    trainer, keys = RedisUser("trainer", "a"), Keys("test")
    digest = "0123456789ab" * 6
    assert mine(trainer, "manifest:{version}", keys.manifest(adapter_id("a", seq, digest[:64])))
    for other in ("a-v1-b", f"a-v{seq}-b", "a-v1-0123456789ab.c", "b", "aa"):
        assert not mine(trainer, "manifest:{version}", keys.manifest(adapter_id(other, seq, digest[:64])))


def test_the_file_has_hashes_and_no_password() -> None:
    text = acl_file(
        "test", {RedisUser("agent", "replica-0"): "a secret", RedisUser("reader", "eye"): "two"}, admin="root"
    )
    assert "a secret" not in text
    assert f"#{hashlib.sha256(b'a secret').hexdigest()}" in text
    assert text.splitlines()[0] == "user default off resetpass resetkeys resetchannels -@all"
    assert [line.split()[1] for line in text.splitlines()] == [
        "default",
        "admin",
        "test:agent:replica-0",
        "test:reader:eye",
    ]


@pytest.mark.parametrize("role", EVERYBODY)
def test_a_server_has_rights_to_its_own_keys_only(role: str) -> None:
    instance = RedisUser(role, "x")  # type: ignore[arg-type]
    control, cache = (" ".join(rules("test", instance, server=server)) for server in ("control", "cache"))
    assert f"{HEAD}owned" not in control
    assert f"{HEAD}table" not in cache
    assert "rq:" not in cache


def test_roles_and_names_are_read() -> None:
    assert parse("agent:replica-0") == RedisUser("agent", "replica-0")
    for wrong in ("agent", "agent:", "boss:replica-0", "agent:a b", "agent:a*", "router:x:y"):
        with pytest.raises(NameInvalid):
            parse(wrong)
    assert set(OWNS) <= set(EVERYBODY)
