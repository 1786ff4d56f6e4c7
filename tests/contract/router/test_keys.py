"""Who may ask a router for what, and what it shows replicas."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from adaptersync.router import app, guard, outages
from adaptersync_core.errors import ConfigError
from adaptersync_core.headers import GATE
from adaptersync_tools.secrets import add_key, revoke_key
from support.certificates import Authority
from support.router_fleet import V1, V2, Answer, Fleet
from support.upstreams import upstream
from support.wait import wait_until

SCOPES = ("rollout", "publish", "admin")


class Keyed:
    """A router with a key for each scope."""

    def __init__(self, fleet: Fleet, file: Path) -> None:
        self.fleet = fleet
        self.file = file
        self.keys = {scope: add_key(file, f"{scope}-key", (scope,)) for scope in SCOPES}

    async def ask(self, path: str, key: str, body: object = None, **headers: str) -> Answer:
        sent = {"Authorization": f"Bearer {key}", **headers} if key else headers
        if body is None:
            async with self.fleet.session.get(self.fleet.url + path, headers=sent) as answer:
                return Answer(answer.status, answer.headers, await answer.read())
        return await self.fleet.post(path, body, headers=sent)

    async def complete(self, key: str, model: str = V1, **headers: str) -> Answer:
        return await self.ask("/v1/completions", key, {"model": model, "prompt": [1, 2, 3]}, **headers)


@pytest.fixture
async def keyed(fleet: Fleet, tmp_path: Path) -> AsyncIterator[Keyed]:
    made = Keyed(fleet, tmp_path / "api-keys")
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(keys_file=str(made.file), **fleet.settings | {"hold_s": 0.5}):
        yield made


def shown_to_replicas(fleet: Fleet) -> list[str | None]:
    return [seen.headers.get("authorization") for replica in fleet.replicas.values() for seen in replica.seen]


async def test_each_path_wants_its_scope(keyed: Keyed) -> None:
    may = {
        scope: [
            (await keyed.complete(key)).status,
            (await keyed.ask("/tokenize", key, {"model": V1, "prompt": "a"})).status,
            (await keyed.ask("/v1/load_lora_adapter", key, {})).status,
            (await keyed.ask("/v1/models", key)).status,
            (await keyed.ask("/metrics", key)).status,
            (await keyed.ask("/nothing", key)).status,
            (await keyed.ask("/health", key)).status,
        ]
        for scope, key in (keyed.keys | {"none": "", "wrong": keyed.keys["admin"][:-1]}).items()
    }
    stranger = [401, 401, 401, 401, 401, 401, 200]
    assert may == {
        "rollout": [200, 200, 403, 200, 200, 404, 200],
        "publish": [403, 403, 501, 200, 200, 404, 200],
        "admin": [200, 200, 501, 200, 200, 404, 200],
        "none": stranger,
        "wrong": stranger,
    }


async def test_a_refusal_says_why_and_leaves_no_row(keyed: Keyed) -> None:
    refused = await keyed.complete("")
    assert refused.headers["WWW-Authenticate"].startswith("Bearer")
    assert "Authorization: Bearer KEY" in refused.message
    forbidden = await keyed.complete(keyed.keys["publish"])
    assert (forbidden.status, forbidden.message) == (403, "key may not rollout (key=publish-key path=/v1/completions)")
    too_large = await keyed.fleet.post("/v1/completions", b"x" * (17 << 20))
    assert too_large.status == 413
    assert (await keyed.complete(keyed.keys["rollout"])).status == 200
    (row,) = await keyed.fleet.rows(1)  # of the one that was let in
    assert row["outcome"] == "ok"
    told = (await keyed.ask("/metrics", keyed.keys["admin"])).body.decode()
    assert 'adaptersync_router_unauthorized_total{status="401"} 1.0' in told
    assert 'adaptersync_router_unauthorized_total{status="403"} 1.0' in told


async def test_no_replica_is_shown_a_key_of_the_router(keyed: Keyed) -> None:
    assert (await keyed.complete(keyed.keys["rollout"])).status == 200
    assert shown_to_replicas(keyed.fleet) == [None]


async def test_without_keys_nothing_stands_in_the_way_and_headers_go_on(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a look at a header: the guard is not there."""

    def none(*_: object, **__: object) -> None:
        raise AssertionError("a guard was made")

    monkeypatch.setattr(app, "Guard", none)
    monkeypatch.setattr(guard.Guard, "handle", none)
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(**fleet.settings):
        answer = await fleet.post(
            "/v1/completions", {"model": V1, "prompt": [1]}, headers={"Authorization": "Bearer vllm-key"}
        )
        assert answer.status == 200
    assert shown_to_replicas(fleet) == ["Bearer vllm-key"]


async def test_keys_come_and_go_while_the_router_runs(keyed: Keyed) -> None:
    new = add_key(keyed.file, "late", ("rollout",))
    await wait_until(lambda: _let_in(keyed, new), what="the new key is known")
    assert revoke_key(keyed.file, "rollout-key")

    async def out() -> bool:
        return (await keyed.complete(keyed.keys["rollout"])).status == 401

    await wait_until(out, what="the revoked key is nobody's")
    assert await _let_in(keyed, new)


async def _let_in(keyed: Keyed, key: str) -> bool:
    return (await keyed.complete(key)).status == 200


async def test_an_admin_may_ask_for_what_waits_at_the_gate(keyed: Keyed) -> None:
    await keyed.fleet.table({V1: "current", V2: "ready"})
    asked = {
        scope: (await keyed.complete(keyed.keys[scope], V2, **{GATE: "1"})).status for scope in ("rollout", "admin")
    }
    assert asked["admin"] == 200
    assert asked["rollout"] != 200


async def test_the_gates_own_word_may_be_in_a_file(fleet: Fleet, tmp_path: Path) -> None:
    (tmp_path / "gate").write_text("sesame\n")
    await fleet.tables.write({V1: "current", V2: "ready"}, fleet.urls)
    async with fleet.router(gate_token_file=str(tmp_path / "gate"), **fleet.settings | {"hold_s": 0.05}):
        asked = {"model": V2, "prompt": [1]}
        assert (await fleet.post("/v1/completions", asked, headers={GATE: "sesame"})).status == 200
        assert (await fleet.post("/v1/completions", asked, headers={GATE: "1"})).status == 503


async def test_each_replica_is_shown_its_own_token(fleet: Fleet, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    first, second = sorted(fleet.replicas)
    (tokens / first).write_text("hf_first\n")
    (tokens / ".hidden").write_text("no replica's name")
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(replica_keys_path=str(tokens), **fleet.settings):
        for number in range(8):
            answer = await fleet.post(
                "/v1/completions", {"model": V1, "prompt": [number] * 40}, headers={"Authorization": "Bearer mine"}
            )
            assert answer.status == 200
        assert (await fleet.get("/v1/models")).status == 200
        shown = {
            name: {seen.headers.get("authorization") for seen in fleet.replicas[name].seen} for name in (first, second)
        }
        assert shown == {first: {"Bearer hf_first"}, second: {"Bearer mine"}}
        assert fleet.replicas[first].shown + fleet.replicas[second].shown in (["Bearer hf_first"], [""])
        (tokens / first).write_text("hf_next\n")

        async def next_token() -> bool:
            await fleet.post("/v1/completions", {"model": V1, "prompt": [os.urandom(1)[0]] * 40})
            return "Bearer hf_next" in {seen.headers.get("authorization") for seen in fleet.replicas[first].seen}

        await wait_until(next_token, what="the token that was replaced is shown")


async def test_a_replica_that_does_not_let_the_router_in_is_left_out(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outages, "SHORTEST_S", 60.0)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    first, second = sorted(fleet.replicas)
    (tokens / first).write_text("hf_old\n")
    fleet.replicas[first].fail = [401] * 100
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router(replica_keys_path=str(tokens), **fleet.settings):
        for number in range(16):
            asked = {"model": V1, "prompt": [number] * 40}
            answer = await fleet.post("/v1/completions", asked, headers={"Authorization": "Bearer mine"})
            assert (answer.status, answer.headers["x-adaptersync-replica"]) == (200, second)
        assert len(fleet.replicas[first].seen) == 3
        health = (await fleet.get("/health")).json["replicas"][first]
        assert "replica answered 401: it does not let this router in" in health["reason"]


async def test_without_keys_of_its_own_a_router_passes_on_what_replicas_say_of_clients(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        for replica in fleet.replicas.values():
            replica.fail = [401] * 100
        for headers in ({}, {"Authorization": "Bearer no"}) * 8:
            answer = await fleet.post("/v1/completions", {"model": V1, "prompt": [1]}, headers=headers)
            assert answer.status == 401
        health = await fleet.get("/health")
        assert (health.status, {each["circuit"] for each in health.json["replicas"].values()}) == (200, {"closed"})


async def test_a_router_with_keys_shows_none_so_it_is_the_one_that_is_not_let_in(keyed: Keyed) -> None:
    for replica in keyed.fleet.replicas.values():
        replica.fail = [401] * 100
    answer = await keyed.complete(keyed.keys["rollout"])
    assert answer.status == 502
    assert answer.message.endswith("; see router.replica_keys_path: which token this replica wants")


async def test_replicas_with_certificates_of_an_own_authority(fleet: Fleet, tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    async with upstream("replica-0", authority.server()) as ours, upstream("replica-1", stranger.server()) as theirs:
        for replica, status in ((ours, 200), (theirs, 502)):
            await fleet.tables.write({V1: "current"}, {replica.name: replica.url})
            async with fleet.router(replica_ca_file=str(authority.ca), **fleet.settings):
                answer = await fleet.complete(V1)
                assert answer.status in (status, 503 if status == 502 else 200), answer.body
                assert len(replica.seen) == (status == 200)
                assert (await fleet.get("/v1/models")).status == (200 if status == 200 else 503)
        await fleet.tables.write({V1: "current"}, {ours.name: ours.url})
        async with fleet.router(**fleet.settings):  # whom this host trusts: not that one
            assert (await fleet.complete(V1)).status in (502, 503)


@pytest.mark.parametrize("name", ["keys_file", "replica_keys_path", "replica_ca_file"])
async def test_a_router_without_what_it_is_to_go_by_does_not_start(fleet: Fleet, tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        async with fleet.router(**{name: str(tmp_path / "gone"), **fleet.settings}):
            pass
    assert "gone" in str(error.value)
