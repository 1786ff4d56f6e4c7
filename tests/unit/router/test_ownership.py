"""The script on the server and the policy in Python are one rule; what the script keeps is bounded and mends itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptersync.router.policy import HEAD, MANY, Block, Choice, Standing, boilerplate, choose, owned
from adaptersync_core.blocks import block_hashes
from adaptersync_core.keys import Keys
from adaptersync_core.scripts import Script

KEYS = Keys("test")
VERSION = "run-a-v1-000000000001"
REPLICAS = ("r0", "r1", "r2", "r3")
OWNERS = 16


class Model:
    """What the script keeps, in Python."""

    def __init__(self) -> None:
        self.blocks: dict[str, Block] = {}
        self.inflight: Counter[str] = Counter()

    def route(self, hashes: Sequence[str], candidates: Sequence[str], *, spill: int, turn: int) -> Choice:
        known: list[Block] = []
        for name in hashes:
            if name not in self.blocks:
                break
            known.append(self.blocks[name])
        common = boilerplate(known, hashes)
        depth = owned(known, common)
        choice = choose(
            [Standing(replica=r, owned=depth.get(r, 0), inflight=self.inflight[r]) for r in candidates],
            spill=spill,
            turn=turn,
        )
        self.inflight[choice.replica] += 1
        for place, name in enumerate(hashes):
            before = known[place] if place < len(known) else Block(child="", owners=())
            following = hashes[place + 1][:HEAD] if place + 1 < len(hashes) else ""
            child = before.child
            if not child:
                child = following
            elif following and child != following:
                child = MANY
            owners = before.owners
            if place >= common and choice.replica not in owners:
                owners = (*owners, choice.replica)[-OWNERS:]
            self.blocks[name] = Block(child=child, owners=owners)
        return choice


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
        spill: int = 8,
        turn: int = 0,
        limit: int = 100_000,
        router: str = "left",
    ) -> Choice:
        reply = cache.eval(
            script.source,
            2,
            KEYS.owned(VERSION),
            KEYS.inflight,
            router,
            spill,
            turn,
            limit,
            60,
            60,
            len(candidates),
            *candidates,
            *hashes,
        )
        return Choice(replica=reply[0], outcome=reply[1], owned=reply[2])

    return call


# prompts that share beginnings: words of one letter make blocks, so that branches and repeats are frequent
prompts = st.text(alphabet="ab", max_size=8)
steps = st.lists(
    st.tuples(
        prompts,
        st.lists(st.sampled_from(REPLICAS), min_size=1, unique=True),
        st.integers(0, 3),
        st.integers(0, 1000),
        st.booleans(),
    ),
    max_size=30,
)


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


@given(tables, steps)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_script_and_policy_agree(
    cache: redis.Redis,
    route: Route,
    table: list[tuple[str, str, list[list[str]]]],
    steps: list[tuple[str, list[str], int, int, bool]],
) -> None:
    cache.flushall()
    model = Model()
    for prompt, child, owners_by_block in table:
        for name, owners in zip(hashes_of(prompt), owners_by_block, strict=False):
            model.blocks[name] = Block(child=child, owners=tuple(owners))
            cache.hset(KEYS.owned(VERSION), name, f"{child}:{','.join(owners)}")
            cache.expire(KEYS.owned(VERSION), 60)  # as the script would have left it: no step may follow
    release = Script("release")
    for prompt, candidates, spill, turn, ends in steps:
        hashes = hashes_of(prompt)
        expected = model.route(hashes, candidates, spill=spill, turn=turn)
        assert route(hashes, candidates, spill=spill, turn=turn) == expected
        if ends:
            model.inflight[expected.replica] -= 1
            cache.eval(release.source, 1, KEYS.inflight, "left", expected.replica, 1)
    kept = {name: f"{block.child}:{','.join(block.owners)}" for name, block in model.blocks.items()}
    assert cache.hgetall(KEYS.owned(VERSION)) == kept
    counts = {name: int(value) for name, value in cache.hgetall(KEYS.inflight).items() if "|" not in name}
    assert counts == {name: count for name, count in model.inflight.items() if count}


def test_a_long_prompt_and_many_replicas_agree_too(route: Route) -> None:
    model, fleet = Model(), [f"replica-{place}" for place in range(200)]
    hashes = block_hashes(VERSION, list(range(300)), 1, 300)
    other = block_hashes(VERSION, [*range(130), *range(900, 1000)], 1, 300)
    for turn, asked in enumerate([hashes, other, hashes, other[:200], hashes[:129], hashes] * 4):
        assert route(asked, fleet, spill=1, turn=turn) == model.route(asked, fleet, spill=1, turn=turn)


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
    assert 0 < cache.ttl(KEYS.inflight) <= 60


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
