"""The ownership table is what the engine has cached: simulated and real vLLM, asked the same."""

from __future__ import annotations

import asyncio

from adaptersync_core.blocks import block_hashes
from adaptersync_core.keys import Keys
from contract.cache.conftest import Watch
from support.engines import BLOCK_SIZE, MODEL, NUM_BLOCKS
from support.wait import wait_until


async def test_what_is_asked_for_is_owned_under_its_version_until_it_is_evicted(watch: Watch) -> None:
    await watch.followed()
    name = await watch.bench.publish()
    await watch.bench.want(name)
    ack = await watch.bench.ack(name, timeout_s=60)
    assert ack.accepted, ack.reason
    tokens = watch.prompt(3)
    for model in (MODEL, name):
        assert await watch.ask(model, tokens) == 0
    await watch.ask(MODEL, watch.prompt(2), cache_salt="s")
    owned = await watch.agrees()
    begun = await watch.report()
    assert begun.gaps <= 1  # what is told before a subscription has reached the engine is a gap, and repeated
    for model in (MODEL, name):
        assert {(model, block) for block in block_hashes(model, tokens, BLOCK_SIZE, 9)} <= owned
    assert await watch.ask(name, tokens) == 3 * BLOCK_SIZE
    for _ in range(-(-NUM_BLOCKS // 10)):  # until the first ones had to give way
        await watch.ask(name, watch.prompt(10))
    later = await watch.agrees()
    assert later
    assert (
        not {(model, block) for model in (MODEL, name) for block in block_hashes(model, tokens, BLOCK_SIZE, 9)} & later
    )
    report = await watch.report()
    assert (report.gaps - begun.gaps, report.losses, report.orphans) == (0, 0, 0)
    assert report.lag_s < 5


async def test_a_version_that_leaves_takes_its_blocks_along(watch: Watch) -> None:
    old, new = [await watch.bench.publish() for _ in range(2)]
    await watch.bench.want(old, new)
    for name in (old, new):
        await watch.bench.ack(name, timeout_s=60)
        await watch.ask(name, watch.prompt(2))
    await wait_until(lambda: {model for model, _ in watch.table()} >= {old, new}, timeout_s=15)
    await watch.bench.want(new)
    await wait_until(lambda: old not in {model for model, _ in watch.table()}, timeout_s=15)
    assert new in {model for model, _ in watch.table()}


async def test_what_happened_while_no_agent_listened_is_made_up_for(watch: Watch) -> None:
    await watch.followed()
    before = watch.prompt(4)
    await watch.ask(MODEL, before)
    await watch.agrees()
    await watch.bench.stop()
    assert watch.table() == set(), "who ends gives up what its replica owned"
    stale, key = block_hashes(MODEL, watch.prompt(4), BLOCK_SIZE, 9), Keys("group").owned(MODEL)
    for block in stale:  # as one that ended without a word
        watch.server.hset(key, block, ":r1")
    watch.server.expire(key, 60)
    for _ in range(-(-NUM_BLOCKS // 12)):
        await watch.ask(MODEL, watch.prompt(12))
    watch.bench.start()
    await wait_until(lambda: bool(watch.table() - {(MODEL, block) for block in stale}), timeout_s=30)
    assert not {(MODEL, block) for block in block_hashes(MODEL, before, BLOCK_SIZE, 9)} & await watch.agrees()


async def test_messages_that_are_lost_on_the_way_are_made_up_for(watch: Watch) -> None:
    """A frozen agent: what it does not take in time is dropped. Here, of the simulator's, by order."""
    await watch.followed()
    engine = watch.lives.engine
    await watch.ask(MODEL, watch.prompt(2))
    await watch.agrees()
    if engine.kind == "simulator":
        assert engine.post("/simulator/faults", {"drop_kv_batches": 2}).status == 200
    for _ in range(3):
        await watch.ask(MODEL, watch.prompt(2))
    await watch.agrees()
    if engine.kind == "simulator":
        await wait_until(lambda: _gaps(watch))
        assert engine.post("/simulator/faults", {"drop_kv_batches": 1}).status == 200
        await watch.ask(MODEL, watch.prompt(2))  # the last message, so that no number shows its loss
        await watch.agrees()
    assert (await watch.report()).losses == 0


async def _gaps(watch: Watch) -> bool:
    return (await watch.report()).gaps == 1


async def test_a_restarted_engine_has_nothing(watch: Watch) -> None:
    await watch.followed()
    await watch.ask(MODEL, watch.prompt(3))
    assert await watch.agrees()
    lost = watch.table()
    await asyncio.to_thread(watch.lives.restart)
    await wait_until(lambda: not watch.table() & lost, timeout_s=30)
    await watch.followed()
    for _ in range(2):
        await watch.ask(MODEL, watch.prompt(2))
    assert len(await watch.agrees()) == 4
