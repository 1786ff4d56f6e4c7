"""A server that wants a key, over https: as an agent asks it."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web

from adaptersync_core.api_keys import bearer
from adaptersync_core.errors import ConfigError, EngineRefused, EngineUnavailable
from adaptersync_core.tls import trusting
from adaptersync_core.vllm import VllmClient
from support.certificates import Authority


async def test_a_key_is_shown_to_whom_the_authority_vouches_for_and_to_nobody_else(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    (tmp_path / "key").write_text("hf_word\n")
    shown: list[str] = []

    async def models(request: web.Request) -> web.Response:
        shown.append(request.headers.get("Authorization", ""))
        if shown[-1] != "Bearer hf_word":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return web.json_response({"data": [{"id": "base", "root": "/model"}]})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=authority.server()).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        ours = trusting(str(authority.ca), key="agent.engine_ca_file")
        async with VllmClient(url, headers=bearer(str(tmp_path / "key")), tls=ours) as client:
            assert await client.adapters() == {}
        async with VllmClient(url, tls=ours) as client:
            with pytest.raises(EngineRefused):
                await client.adapters()
        assert shown == ["Bearer hf_word", ""]
        for wrong in (trusting(str(stranger.ca), key="agent.engine_ca_file"), None):
            async with VllmClient(url, headers=bearer(str(tmp_path / "key")), tls=wrong) as client:
                with pytest.raises(EngineUnavailable, match=r"(?i)certificate"):
                    await client.adapters()
        assert len(shown) == 2
    finally:
        await runner.cleanup()


def test_certificates_that_cannot_be_read_are_a_mistake_in_the_settings(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name in ("gone", "empty"):
        with pytest.raises(ConfigError, match="certificates cannot be read"):
            trusting(str(tmp_path / name), key="agent.engine_ca_file")
    assert trusting("", key="x") is None
