"""Every rollout that was asked for leaves exactly one row, however it ended."""

from __future__ import annotations

from support.router_fleet import V1, V2, Fleet


async def test_a_row_says_what_served_it(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        answer = await fleet.complete("run-a", list(range(40)))
        (row,) = await fleet.rows(1)
        assert row["request_id"] == answer.headers["x-adaptersync-request-id"]
        assert row["replica"] == answer.headers["x-adaptersync-replica"]
        expected = {
            "asked": "run-a",
            "run": "run-a",
            "version": V1,
            "digest": "000000000001" + "0" * 52,
            "engine_epoch": f"{row['replica']}-life-1",
            "outcome": "ok",
            "status": "200",
            "routing": "cold",
            "attempts": "1",
            "generation": "1",
            "path": "/v1/completions",
            "prompt_tokens": "20",
            "completion_tokens": "1",
            "cached_tokens": "16",
        }
        assert {name: row[name] for name in expected} == expected
        assert row["router"].startswith("router-0-")
        phases = {name: float(row[name]) for name in ("hold_s", "route_s", "first_byte_s", "total_s")}
        assert 0 <= phases["hold_s"] + phases["route_s"] + phases["first_byte_s"] <= phases["total_s"]


async def test_a_row_says_which_name_a_relay_was_asked_for(fleet: Fleet) -> None:
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        body = {"model": V1, "prompt": [1]}
        await fleet.post("/v1/completions", body, headers={"x-adaptersync-substituted": "trl-policy-v2"})
        await fleet.complete(V1)
        marked, plain = await fleet.rows(2)
        assert (marked["version"], marked["substituted"]) == (V1, "trl-policy-v2")
        assert "substituted" not in plain


async def test_each_request_leaves_one_row(fleet: Fleet) -> None:
    await fleet.tables.record(V2, "retired")
    await fleet.tables.write({V1: "current"}, fleet.urls)
    async with fleet.router():
        await fleet.complete("run-a")
        await fleet.complete("base")
        await fleet.complete(V2)
        await fleet.complete("nobody")
        await fleet.post("/v1/completions", b"{")
        for replica in fleet.replicas.values():
            replica.fail = [500]
        await fleet.complete(V1)
        await fleet.post("/v1/chat/completions", {"model": V1, "messages": [], "stream": True})
        rows = await fleet.rows(7)
        assert [(row["outcome"], row["status"]) for row in rows] == [
            ("ok", "200"),
            ("ok", "200"),
            ("refused", "410"),
            ("refused", "404"),
            ("refused", "400"),
            ("upstream_error", "500"),
            ("ok", "200"),
        ]
        assert len({row["request_id"] for row in rows}) == 7
        assert rows[1]["version"] == "base"
        assert "run" not in rows[1]
        assert rows[2]["asked"] == V2
