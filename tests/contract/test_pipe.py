"""The pipelined connection: order, refusals, silence, and coming back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from adaptersync_core.errors import ConfigError, ControlError, ControlUnavailable
from adaptersync_core.pipe import Pipe, ScriptCall
from adaptersync_core.scripts import Script
from adaptersync_tools.servers import RedisServer, Role
from support.proxy import Fault, FaultProxy
from support.redis_servers import server_binary
from support.wait import wait_until

pytestmark = pytest.mark.foreign_keys("plain keys stand for anything")


@pytest.fixture
async def proxy(cache_url: str) -> AsyncIterator[FaultProxy]:
    where = urlsplit(cache_url)
    async with FaultProxy(where.hostname or "", where.port or 0) as proxy:
        yield proxy


@contextlib.asynccontextmanager
async def connected(proxy: FaultProxy, timeout_s: float) -> AsyncIterator[Pipe]:
    pipe = Pipe(f"redis://127.0.0.1:{proxy.port}/0", name="test", timeout_s=timeout_s)
    await pipe.connect()
    yield pipe
    await pipe.close()


@pytest.fixture
async def pipe(proxy: FaultProxy) -> AsyncIterator[Pipe]:
    async with connected(proxy, timeout_s=10.0) as pipe:
        yield pipe


@pytest.fixture
async def hasty(proxy: FaultProxy) -> AsyncIterator[Pipe]:
    """For what is meant not to be answered."""
    async with connected(proxy, timeout_s=0.3) as pipe:
        yield pipe


async def test_replies_belong_to_their_calls(pipe: Pipe) -> None:
    replies = await asyncio.gather(*(pipe.call("ECHO", number) for number in range(500)))
    assert replies == [str(number) for number in range(500)]
    assert await pipe.calls([("SET", "a", "é"), ("GET", "a"), ("MGET", "a", "b")]) == ["OK", "é", ["é", None]]


async def test_calls_of_one_tick_are_written_together(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    line = pipe._line
    assert line is not None
    assert line._transport is not None
    write = line._transport.write

    def noted(data: bytes) -> None:
        written.append(data)
        write(data)

    monkeypatch.setattr(line._transport, "write", noted)
    await asyncio.gather(*(pipe.call("ECHO", number) for number in range(100)))
    assert len(written) == 1


async def test_bytes_that_are_no_text_do_not_end_the_connection(pipe: Pipe) -> None:
    assert await pipe.calls([("ECHO", b"\xff\xfe"), ("ECHO", "next")]) == [r"\xff\xfe", "next"]


async def test_a_refusal_concerns_its_own_call_only(pipe: Pipe) -> None:
    await pipe.call("SET", "text", "x")
    replies: list[object] = await asyncio.gather(
        pipe.call("GET", "text"), pipe.call("LPUSH", "text", 1), pipe.call("GET", "text"), return_exceptions=True
    )
    assert replies[::2] == ["x", "x"]
    assert isinstance(replies[1], ControlError)
    assert "WRONGTYPE" in replies[1].reason
    assert isinstance((await pipe.calls([("LPUSH", "text", 1), ("GET", "text")]))[0], ControlError)


async def test_a_script_the_server_does_not_know_is_sent(pipe: Pipe) -> None:
    script = Script("release")
    await pipe.call("SCRIPT", "FLUSH")
    assert await pipe.script(ScriptCall(script, ("counts",), ("router", "r0", 1))) == 0
    assert await pipe.call("SCRIPT", "EXISTS", script.sha) == [1]


async def test_silence_ends_in_time_and_the_pipe_comes_back(hasty: Pipe, proxy: FaultProxy) -> None:
    proxy.blackhole = True
    started = asyncio.get_running_loop().time()
    failed = await asyncio.gather(*(hasty.call("PING") for _ in range(3)), return_exceptions=True)
    assert all(isinstance(error, ControlUnavailable) for error in failed)
    assert asyncio.get_running_loop().time() - started < 1.0
    with pytest.raises(ControlUnavailable):  # at once, without waiting for a connection
        await asyncio.wait_for(hasty.call("PING"), timeout=0.1)
    proxy.blackhole = False
    await wait_until(lambda: hasty.connected)
    assert await hasty.call("PING") == "PONG"


async def test_who_was_held_up_does_not_take_the_server_for_silent(hasty: Pipe, proxy: FaultProxy) -> None:
    call = asyncio.create_task(hasty.call("PING"))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251 # the loop's own doing, before a byte of it is written
    assert await call == "PONG"
    proxy.blackhole = True
    call = asyncio.create_task(hasty.call("PING"))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251
    with pytest.raises(ControlUnavailable):  # but not for ever
        await asyncio.wait_for(call, timeout=2)
    proxy.blackhole = False


async def test_a_lost_reply_is_never_taken_for_another(hasty: Pipe, proxy: FaultProxy) -> None:
    proxy.arm(Fault.LOSE_REPLY, match=b"INCR")
    lost = await asyncio.gather(hasty.call("INCR", "n"), hasty.call("ECHO", "after"), return_exceptions=True)
    assert all(isinstance(error, ControlUnavailable) for error in lost)
    with pytest.raises(ControlUnavailable):
        await hasty.call("PING")
    await wait_until(lambda: hasty.connected)
    assert await hasty.call("GET", "n") == "1"  # it was done, once, and not repeated


async def test_a_caller_that_leaves_does_not_shift_the_replies(pipe: Pipe) -> None:
    leaving = asyncio.create_task(pipe.call("ECHO", "nobody waits"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await pipe.call("ECHO", "mine") == "mine"


async def test_closing_ends_what_waits(pipe: Pipe, proxy: FaultProxy) -> None:
    proxy.blackhole = True
    waiting = asyncio.create_task(pipe.call("PING"))
    await asyncio.sleep(0)
    await pipe.close()
    with pytest.raises(ControlUnavailable):
        await waiting


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(Role.CACHE, tmp_path, binary=server_binary("redis7"), password="s3cret/@:")
    with server:
        yield server


async def test_a_password_and_a_database_are_sent(guarded: RedisServer) -> None:
    url = f"redis://:s3cret%2F%40%3A@127.0.0.1:{guarded.port}/3"
    pipe = Pipe(url, name="test", timeout_s=2.0)
    await pipe.connect()
    info = await pipe.call("CLIENT", "INFO")
    assert "db=3" in info
    assert "name=test" in info
    await pipe.close()
    assert "s3cret" not in pipe.where
    stranger = Pipe(f"redis://127.0.0.1:{guarded.port}", name="test", timeout_s=2.0)
    with pytest.raises(ControlError, match="NOAUTH"):
        await stranger.connect()
    await stranger.close()


async def test_nobody_there_is_said_at_once() -> None:
    pipe = Pipe("redis://127.0.0.1:1/0", name="test", timeout_s=1.0)
    with pytest.raises(ControlUnavailable):
        await pipe.connect()
    await pipe.close()
    with pytest.raises(ConfigError):
        Pipe("http://127.0.0.1", name="test", timeout_s=1.0)


async def test_the_first_that_is_refused_and_not_waited_for_is_logged(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        pipe.tell("SET", "a")
    assert await pipe.call("ECHO", "next") == "next"
    (record,) = caplog.records
    assert "wrong number of arguments" in record.getMessage()
    await pipe.connect()  # another life of it may be another's fault
    pipe.tell("SET", "a")
    assert await pipe.call("ECHO", "next") == "next"
    assert len(caplog.records) == 2
