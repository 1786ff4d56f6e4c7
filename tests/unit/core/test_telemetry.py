"""What strangers send to a port is told in one line, and not each time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from adaptersync_core import telemetry
from adaptersync_core.telemetry import Garbage

NOISE = b"GET / HTTP/1.1\r\nbad header\x00: \r\n\r\n"


async def _noise(times: int) -> None:
    """So often to a server as the relay is one."""
    runner = web.AppRunner(web.Application())
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        for _ in range(times):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(NOISE)
            assert b" 400 " in await reader.readline()
            writer.close()
            await writer.wait_closed()
    finally:
        await runner.cleanup()


@pytest.fixture
def garbage() -> Garbage:
    return Garbage()


@pytest.fixture(autouse=True)
def _filtered(garbage: Garbage) -> Iterator[None]:
    log = logging.getLogger("aiohttp.server")
    log.addFilter(garbage)
    yield
    log.removeFilter(garbage)


async def test_what_is_no_http_is_one_line_in_the_log_and_not_one_each(caplog: pytest.LogCaptureFixture) -> None:
    await _noise(5)
    (record,) = [record for record in caplog.records if record.name == "aiohttp.server"]
    assert (record.exc_info, record.levelname) == (None, "WARNING")
    assert "\n" not in record.getMessage()
    assert "Error handling request from 127.0.0.1: " in record.getMessage()


def test_the_next_line_says_how_many_were_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    filtered = Garbage()
    told = []
    for at in (1000.0, 1001.0, 1002.0, 1000.0 + telemetry.GARBAGE_S):
        now = at
        record = _record()
        if filtered.filter(record):
            told.append(record.getMessage())
    assert len(told) == 2
    assert "more like it" not in told[0]
    assert "; 2 more like it since the last such line" in told[1]


def _record() -> logging.LogRecord:
    error = BadHttpMessage("no\nsuch\rheader")
    return logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "Error handling %s", ("it",), (None, error, None))  # type: ignore[arg-type]


def test_errors_of_our_own_are_told_whole(garbage: Garbage) -> None:
    error = ValueError("ours")
    record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 0, "failed", (), (ValueError, error, None))
    assert garbage.filter(record)
    assert record.exc_info is not None
    assert garbage.filter(record)
