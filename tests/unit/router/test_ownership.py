"""The script on the server and the policy in Python are one rule; what the script keeps is bounded and mends itself."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptersync.router.books import OWNERS, Books
from adaptersync.router.policy import EVEN, HEAD, MANY, STEP_US, Block, Choice, Policy
from adaptersync.router.promises import DROPS, FORGET, MOST, PROMPTS
from adaptersync.router.queues import RATE, SECOND_US
from adaptersync_core.blocks import block_hashes
from adaptersync_core.keys import Keys
from adaptersync_core.scripts import Script

KEYS = Keys("test")
VERSION = "run-a-v1-000000000001"
REPLICAS = ("r0", "r1", "r2", "r3")
POLICIES = get_args(Policy)


@pytest.fixture
def cache(cache_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(cache_url, decode_responses=True) as client:
        yield client


Route = Callable[..., Choice]


@pytest.fixture
def route(cache: redis.Redis) -> Route:
    script = Script("route")

    def call(
        hashes: Sequence[str],
        candidates: Sequence[str] = REPLICAS,
        *,
        policy: Policy = "promise",
        spill: int = 8,
        turn: int = 0,
        limit: int = 100_000,
        router: str = "left",
        weight: int = 1,
        alike: int = 1,
        kept: str = "",
        tokens: int = 0,
        now_us: int = 0,
        whole: bool = True,
    ) -> Choice:
        cache.rpush("clock", now_us // SECOND_US, now_us % SECOND_US)
        reply = cache.eval(
            script.source.replace("redis.call('TIME')", "redis.call('LRANGE', 'clock', 0, 1)"),
            5,
            KEYS.owned(VERSION),
            KEYS.inflight,
            KEYS.promises(VERSION),
            KEYS.repeats("run-a"),
            KEYS.queues,
            router,
            policy,
            spill,
            turn,
            limit,
            60,
            60,
            60,
            60,
            60,
            weight,
            alike,
            kept,
            "",
            tokens,
            "1" if whole else "",
            len(candidates),
            *candidates,
            *hashes,
        )
        cache.delete("clock")
        return Choice(replica=reply[0], outcome=reply[1], owned=reply[2], boilerplate=reply[3], known=reply[4])

    return call


# prompts that share beginnings: words of one letter make blocks, so that branches and repeats are frequent
prompts = st.text(alphabet="ab", max_size=8)
steps = st.lists(
    st.tuples(
        prompts,
        st.lists(st.sampled_from(REPLICAS), min_size=1, unique=True),
        st.integers(0, 1000),
        st.booleans(),
        st.sampled_from(((1, 1), (1, 1), (2, 1), (8, 8), (24, 8), (0, 0))),  # sequences, and those of the prompt
        st.sampled_from(("", "", "", *REPLICAS)),  # what the session has, be it a candidate or not
        st.sampled_from((0, 1, 16, 400)),  # tokens in a block
        st.integers(0, 200_000) | st.just(0),  # microseconds since the step before
    ),
    max_size=30,
)
spills = st.integers(0, 3)
rates = st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 50_000))


def hashes_of(prompt: str, version: str = VERSION) -> list[str]:
    return block_hashes(version, list(prompt.encode()), 1, 100)


# what an eviction or a lost script may have left: any owners on any block of some prompts, and blocks without owners
tables = st.lists(
    st.tuples(
        prompts,
        st.sampled_from(("", MANY)),
        st.lists(st.lists(st.sampled_from(REPLICAS), unique=True), min_size=8, max_size=8),
    ),
    max_size=4,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(tables, spills, steps, rates)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_script_and_policy_agree(
    cache: redis.Redis,
    route: Route,
    policy: Policy,
    table: list[tuple[str, str, list[list[str]]]],
    spill: int,
    steps: list[tuple[str, list[str], int, bool, tuple[int, int], str, int, int]],
    rates: dict[str, int],
) -> None:
    cache.flushall()
    books = Books(policy=policy, spill=spill)
    books.queues.rates = rates
    for name, rate in rates.items():
        cache.hset(KEYS.queues, f"{name}|", rate)
        cache.expire(KEYS.queues, 60)
    now_us = 1_800_000_000 * SECOND_US
    for prompt, child, owners_by_block in table:
        for name, owners in zip(hashes_of(prompt), owners_by_block, strict=False):
            books.blocks[name] = Block(child=child, owners=tuple(owners))
            cache.hset(KEYS.owned(VERSION), name, f"{child}:{','.join(owners)}")
            cache.expire(KEYS.owned(VERSION), 60)  # as the script would have left it: no step may follow
    release = Script("release")
    for prompt, candidates, turn, ends, (weight, alike), kept, tokens, later_us in steps:
        hashes = hashes_of(prompt)
        now_us += later_us
        whole = len(candidates) == len(REPLICAS)
        expected = books.route(hashes, candidates, turn, weight, alike, kept, whole=whole, now_us=now_us, tokens=tokens)
        got = route(
            hashes,
            candidates,
            policy=policy,
            spill=spill,
            turn=turn,
            weight=weight,
            alike=alike,
            kept=kept,
            now_us=now_us,
            tokens=tokens,
            whole=whole,
        )
        assert got == expected
        if ends:
            books.release(expected.replica, weight)
            cache.eval(release.source, 1, KEYS.inflight, "left", expected.replica, weight)
    noted = {name: f"{block.child}:{','.join(block.owners)}" for name, block in books.blocks.items()}
    assert cache.hgetall(KEYS.owned(VERSION)) == noted
    assert totals(cache) == {name: count for name, count in books.inflight.items() if count}
    assert_same_promises(cache, books)
    queues = {name: int(until) for name, until in cache.hgetall(KEYS.queues).items() if not str(name).endswith("|")}
    assert queues == books.queues.busy_until


def assert_same_promises(cache: redis.Redis, books: Books) -> None:
    kept = {str(name): str(value) for name, value in cache.hgetall(KEYS.promises(VERSION)).items()}
    first, following = int(kept.pop("#first", 0)), int(kept.pop("#next", 0))
    order = [kept.pop(f"#{place}")[1:] for place in range(first, following)]
    assert int(kept.pop("#again", 0)) == books.promises.again
    prompts = {name[1:]: value for name, value in kept.items() if name.startswith(":")}
    assert order == list(books.promises.prompts)
    assert prompts == {name: f"{each.left}:{each.replica}" for name, each in books.promises.prompts.items()}
    by_replica = {name: int(value) for name, value in kept.items() if not name.startswith(":") and value != "0"}
    assert by_replica == {name: more for name, more in books.promises.by_replica.items() if more}
    repeats = cache.hgetall(KEYS.repeats("run-a"))
    assert int(repeats.get("asked", 0)) == books.repeats.asked
    assert int(repeats.get("prompts", 0)) == books.repeats.prompts


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_and_many_replicas_agree_too(route: Route, policy: Policy) -> None:
    books = Books(policy=policy, spill=1)
    fleet = [f"replica-{place}" for place in range(200)]
    hashes = block_hashes(VERSION, list(range(300)), 1, 300)
    other = block_hashes(VERSION, [*range(130), *range(900, 1000)], 1, 300)
    for turn, asked in enumerate([hashes, other, hashes, other[:200], hashes[:129], hashes] * 4):
        assert route(asked, fleet, policy=policy, spill=1, turn=turn) == books.route(asked, fleet, turn)


def test_long_lives_agree_too(cache: redis.Redis, route: Route) -> None:
    """Until prompts are pushed out and the average has forgotten."""
    books, chance = Books(policy="promise", spill=3), random.Random(1)
    release, running = Script("release"), list[str]()
    for step in range(900):
        number = step // 4 - chance.randrange(12)  # of each, four requests or so, among those of a dozen others
        hashes = block_hashes(VERSION, [7, number + 100, 1], 1, 100)
        choice = books.route(hashes, REPLICAS, step)
        assert route(hashes, spill=3, turn=step) == choice
        running.append(choice.replica)
        while len(running) > (90 if step < 600 else 4):
            ended = running.pop(chance.randrange(len(running)))
            books.release(ended)
            cache.eval(release.source, 1, KEYS.inflight, "left", ended, 1)
    assert_same_promises(cache, books)
    assert int(cache.hget(KEYS.promises(VERSION), "#first") or 0) > 2 * DROPS
    assert len(books.promises.prompts) == PROMPTS[0]
    assert books.repeats.prompts < FORGET


def test_script_and_policy_have_the_same_bounds() -> None:
    """Those too large to be reached above."""
    source = Script("route").source
    assert f"local FEWEST, MOST_PROMPTS = {PROMPTS[0]}, {PROMPTS[1]}\n" in source
    assert f"local STEP_US, RATE = {STEP_US}, {RATE}\n" in source
    for name, bound in {"HEAD": HEAD, "EVEN": EVEN, "MOST": MOST, "FORGET": FORGET, "DROPS": DROPS}.items():
        assert re.search(rf"^local {name} = {bound}\b", source, re.MULTILINE), name


def test_a_spilled_prompt_keeps_its_affinity(route: Route) -> None:
    hashes = hashes_of("abab")
    first = route(hashes, spill=0)
    second = route(hashes, spill=0)
    assert (first.outcome, second.outcome) == ("cold", "spill")
    assert second.replica != first.replica
    assert route(hashes, spill=1).outcome == "affinity"


def test_owned_blocks_are_bounded(cache: redis.Redis, route: Route) -> None:
    for number in range(60):
        route(block_hashes(VERSION, [number, *range(9)], 1, 100), limit=50)
        assert cache.hlen(KEYS.owned(VERSION)) <= 50
    # a prompt longer than everything that may be kept is kept as far as it may
    route(block_hashes(VERSION, list(range(100, 180)), 1, 100), limit=50)
    assert cache.hlen(KEYS.owned(VERSION)) <= 50
    assert route(block_hashes(VERSION, list(range(100, 180)), 1, 100), limit=50).outcome == "affinity"


def test_owners_of_one_block_are_bounded(cache: redis.Redis, route: Route) -> None:
    hashes = hashes_of("a")
    for place in range(40):
        route(hashes, [f"replica-{place}"])
    (value,) = map(str, cache.hvals(KEYS.owned(VERSION)))
    assert len(value.split(",")) == OWNERS
    assert value.endswith("replica-39")


def test_everything_expires(cache: redis.Redis, route: Route) -> None:
    route(hashes_of("ab"))
    assert 0 < cache.ttl(KEYS.owned(VERSION)) <= 60
    for key in (KEYS.inflight, KEYS.promises(VERSION), KEYS.repeats("run-a")):
        assert 0 < cache.ttl(key) <= 60


def count(cache: redis.Redis, router: str, lease_ms: int, **inflight: int) -> int:
    pairs = [part for item in inflight.items() for part in item]
    return int(cache.eval(Script("count").source, 1, KEYS.inflight, router, lease_ms, 60, *pairs))


def totals(cache: redis.Redis) -> dict[str, int]:
    return {str(name): int(value) for name, value in cache.hgetall(KEYS.inflight).items() if "|" not in str(name)}


def test_a_router_that_dies_gives_its_counts_back(cache: redis.Redis, route: Route) -> None:
    count(cache, "left", 60_000)
    count(cache, "right", 1)
    for _ in range(3):
        route(hashes_of("a"), ["r0"], router="right")
    route(hashes_of("a"), ["r0"], router="left")
    assert totals(cache) == {"r0": 4}
    while count(cache, "left", 60_000, r0=1) != 1:  # until the other's millisecond is over
        pass
    assert totals(cache) == {"r0": 1}


def test_a_beat_mends_lost_and_double_counts(cache: redis.Redis, route: Route) -> None:
    count(cache, "right", 60_000, r1=2)
    for _ in range(5):
        route([], ["r0"])
    count(cache, "left", 60_000, r0=1, r2=3)
    assert totals(cache) == {"r0": 1, "r1": 2, "r2": 3}
    cache.flushall()  # the server forgot
    count(cache, "left", 60_000, r0=1)
    assert totals(cache) == {"r0": 1}


def test_leaving_takes_everything_along(cache: redis.Redis, route: Route) -> None:
    count(cache, "left", 60_000, r0=4)
    assert count(cache, "left", 0) == 0
    assert cache.exists(KEYS.inflight) == 0


def test_what_was_given_back_before_is_not_given_back_again(cache: redis.Redis, route: Route) -> None:
    route([], ["r0"], router="left")
    route([], ["r0"], router="right")
    release = Script("release")
    assert cache.eval(release.source, 1, KEYS.inflight, "left", "r0", 3) == 1
    assert totals(cache) == {"r0": 1}


def test_a_full_server_takes_ends_back_and_no_counts(cache: redis.Redis) -> None:
    count(cache, "right", 60_000, r1=2)
    count(cache, "left", 60_000, r0=3)
    before = {name: cache.config_get(name)[name] or "" for name in ("maxmemory-policy", "maxmemory")}
    cache.config_set("maxmemory-policy", "noeviction")
    cache.config_set("maxmemory", 1)
    try:
        with pytest.raises(redis.OutOfMemoryError):
            count(cache, "left", 60_000)
        assert totals(cache) == {"r0": 3, "r1": 2}
        assert cache.eval(Script("release").source, 1, KEYS.inflight, "left", "r0", 2) == 2
        assert totals(cache) == {"r0": 1, "r1": 2}
        assert count(cache, "left", 0) == 1
        assert totals(cache) == {"r1": 2}
    finally:
        for name, value in before.items():
            cache.config_set(name, value)
