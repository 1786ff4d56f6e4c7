"""The bench's own parts: what replicas count, what the published rule does, and how it is judged."""

from __future__ import annotations

import random

import click
import msgspec
import pytest

from adaptersync_tools.bench.routers import parties
from adaptersync_tools.bench.routers.cases import CASES
from adaptersync_tools.bench.routers.hf_rule import IMBALANCE, Rule, chain
from adaptersync_tools.bench.routers.judge import promised
from adaptersync_tools.bench.routers.replica import Connection, Counts, Replica
from adaptersync_tools.cli.bench import router
from support.wait import wait_until

CHANCE = random.Random(1)
TEMPLATE = [CHANCE.randrange(1000) for _ in range(32)]


def prompt() -> list[int]:
    return TEMPLATE + [CHANCE.randrange(1000) for _ in range(64)]


class Client(Connection):
    """What a replica says to it."""

    def __init__(self, replica: Replica) -> None:
        super().__init__(replica)
        self.answers: list[bytes] = []

    def write(self, answer: bytes) -> None:
        self.answers.append(answer)

    def post(self, path: str, body: object) -> bytes:
        text = msgspec.json.encode(body)
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-length: {len(text)}\r\n\r\n"
        self.data_received(head.encode() + text)
        return self.answers[-1] if self.answers else b""


def replica(**changes: float) -> Replica:
    settings = {"delay_s": 0.0, "jitter": 0.0, **changes}
    return Replica("replica-0", delay_s=settings["delay_s"], jitter=settings["jitter"], strict=True)


def test_a_prompt_is_warm_where_the_same_adapter_was_asked_for_it() -> None:
    client = Client(measured := replica())
    for adapter in ("one", "two"):
        client.post("/v1/load_lora_adapter", {"lora_name": adapter})
    for adapter, asked in (("one", [1, 2, 3]), ("one", [1, 2, 3]), ("two", [1, 2, 3]), ("one", [1, 2])):
        assert b"200 OK" in client.post("/v1/completions", {"model": adapter, "prompt": asked})
    assert b"200 OK" in client.post("/generate", {"lora_path": "one", "input_ids": [1, 2, 3], "prompt": None})
    assert measured.counts == Counts(requests=5, warm=2)
    client.post("/reset", None)
    client.post("/v1/completions", {"model": "one", "prompt": [1, 2, 3]})
    assert measured.counts == Counts(requests=1)


def test_an_adapter_that_was_not_loaded_is_not_found() -> None:
    client = Client(measured := replica())
    assert b"404 Not Found" in client.post("/v1/completions", {"model": "one", "prompt": [1]})
    assert b"400 Bad Request" in client.post("/v1/completions", {"model": "one"})
    assert (measured.counts.unknown, measured.counts.warm) == (1, 0)


async def test_in_flight_is_what_has_no_answer_yet() -> None:
    measured = replica(delay_s=0.01)
    clients = [Client(measured) for _ in range(3)]
    for client in clients:
        client.post("/v1/completions", {"model": "base", "prompt": [1]})
    assert measured.counts.inflight == measured.counts.largest == 3
    await wait_until(lambda: not measured.counts.inflight)
    assert measured.counts.largest == 3
    assert all(client.answers for client in clients)


def test_the_published_rule_keeps_a_prompt_together() -> None:
    rule = Rule(4)
    rule.choose("adapter", prompt())
    rule.choose("adapter", prompt())  # from here on it is known where prompts differ
    first, second = prompt(), prompt()
    chosen = [rule.choose("adapter", first), rule.choose("adapter", second)]
    assert chosen[0] != chosen[1]
    assert {rule.choose("adapter", first) for _ in range(8)} == {chosen[0]}
    assert {rule.choose("adapter", second) for _ in range(8)} == {chosen[1]}
    assert chain("adapter", first)[0] == chain("adapter", second)[0] != chain("another", first)[0]


def test_the_published_rule_leaves_who_is_too_busy() -> None:
    rule = Rule(4)
    asked = prompt()
    owner = rule.choose("adapter", asked)
    rule.inflight[owner] = IMBALANCE
    assert rule.choose("adapter", asked) == owner
    rule.inflight[owner] += 1
    assert rule.choose("adapter", asked) != owner


def test_a_template_speaks_for_nobody_by_the_published_rule() -> None:
    rule = Rule(4)
    assert {rule.choose("adapter", prompt()) for _ in range(8)} == {0, 1, 2, 3}


def samples(case: str, party: parties.Party, **figures: float) -> dict[tuple[str, str], list[dict[str, float]]]:
    return {(case, party.name): [figures]}


def test_what_is_promised() -> None:
    found = {
        **samples("warmth", parties.OURS, warm_percent=87.2, largest_inflight=44, errors=0),
        **samples("two-routers", parties.OURS, warm_percent=86.8, largest_inflight=40, errors=1),
        **samples("added", parties.OURS, p50_ms=0.5, errors=0),
        **samples("added", parties.DIRECT, p50_ms=0.1, errors=0),
    }
    targets, unjudged = promised(found, [case.name for case in CASES])
    kept = {target.name: target.kept for target in targets}
    assert kept == {
        "warmth: warm": True,
        "warmth: most in flight at one": False,
        "warmth: errors at clients": True,
        "two-routers: fewer warm than through one": False,
        "two-routers: errors at clients": False,
        "added: p50 added": True,
        "added: errors at clients": True,
    }
    assert len(unjudged) == 9
    assert all("there is no" in reason for reason in unjudged)


def test_repetitions_are_compared_one_by_one() -> None:
    """A machine that was slow in one of them was so for all."""

    def rate(requests_per_s: float) -> dict[str, float]:
        return {"requests_per_s": requests_per_s, "router_cpu_us": 100, "errors": 0}

    found = {
        ("throughput", parties.OURS_TWO.name): [rate(each) for each in (1300, 130, 2000)],
        ("throughput", parties.VLLM.name): [rate(each) for each in (1000, 100, 1000)],
    }
    (target,) = (target for target in promised(found, ["throughput"])[0] if "over" in target.name)
    assert target.value == pytest.approx(1.3)


def test_every_case_and_router_can_be_chosen() -> None:
    choices = {option.name: option.type.choices for option in router.params if isinstance(option.type, click.Choice)}
    assert list(choices["cases"]) == [case.name for case in CASES]
    assert set(choices["routers"]) == {party.choice for case in CASES for party in case.parties} - {""}
