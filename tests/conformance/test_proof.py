"""The door before an engine, and what its workers hold: what our agent proves a version by."""

import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest

from adaptersync.engine.door import IDENTITY, OPEN, REFUSAL
from adaptersync_core.errors import EngineUnavailable
from adaptersync_core.vllm import AUDITED_AT_ONCE, TOKEN_HEADER, Audit, VllmClient
from support.adapters import ALL_TARGETS
from support.engines import MAX_CPU_LORAS, MAX_LORAS, MODEL, Engine
from support.tiny_model import LAYERS

TOKENS = list(range(40, 120))
SLOT = 2 * LAYERS * len(ALL_TARGETS)  # tensors one adapter has in a slot


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[VllmClient]:
    async with VllmClient(engine.url, timeout_s=30, token=engine.token) as client:
        yield client


@pytest.fixture(autouse=True)
def _emptied(engine: Engine) -> Iterator[None]:
    """Tests count what is resident, so each begins and ends with nothing."""
    _empty(engine)
    yield
    _empty(engine)


def _empty(engine: Engine) -> None:
    for name in engine.listed():
        engine.unload(name)
    for number in engine.resident():
        engine.post("/collective_rpc", {"method": "remove_lora", "args": [number]})


def _number(engine: Engine, name: str) -> int:
    return int(engine.get(IDENTITY).json["adapters"][name]["number"])


def test_identity(engine: Engine, adapter: Callable[..., Path]) -> None:
    """One life until the process ends; of each adapter the number and the path it was loaded from."""
    name, path = engine.fresh("known"), adapter()
    before = engine.get(IDENTITY).json
    engine.load(name, path)
    after = engine.get(IDENTITY).json
    assert before.keys() == after.keys() == {"life", "pid", "adapters"}
    assert before["adapters"] == {}
    assert (before["life"], before["pid"]) == (after["life"], after["pid"])
    (number,) = engine.resident()
    assert after["adapters"] == {name: {"number": number, "path": str(path)}}


@pytest.mark.parametrize(("method", "path"), sorted(OPEN))
def test_open_routes_need_no_token(engine: Engine, method: str, path: str) -> None:
    assert engine.call(method, path, {} if method == "POST" else None, headers={TOKEN_HEADER: ""}).status in (200, 400)


CLOSED = [
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/adapters"),
    ("DELETE", "/adapters/x"),
    ("POST", "/collective_rpc"),
    ("POST", "/pause"),
    ("GET", "/is_paused"),
    ("GET", "/server_info"),
    ("GET", "/load"),
    ("POST", "/reset_prefix_cache"),
    ("GET", IDENTITY),
    ("POST", IDENTITY),
    ("GET", "/nowhere"),
    ("DELETE", "/v1/models"),
    ("GET", "/v1/completions"),
    ("HEAD", "/health"),
    ("POST", "/health"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("POST", "/v1//completions"),
    ("POST", "/v1/../collective_rpc"),
    ("POST", "/v1/completions/../../collective_rpc"),
    ("POST", "/%61dapters"),
    ("POST", "/collective%5frpc"),
    ("POST", "/COLLECTIVE_RPC"),
]
WRONG_TOKENS = {"none": None, "empty": "", "another": "the second token", "longer": "the first token, and more"}


@pytest.mark.parametrize("token", WRONG_TOKENS)
@pytest.mark.parametrize(("method", "path"), CLOSED)
def test_everything_else_is_closed(engine: Engine, method: str, path: str, token: str) -> None:
    """Sent as it is written: a client that tidies paths up would hide what the door has to see."""
    connection = HTTPConnection("127.0.0.1", engine.port, timeout=10)
    try:
        shown = WRONG_TOKENS[token]
        connection.putrequest(method, path)
        if shown is not None:
            connection.putheader(TOKEN_HEADER, shown)
        connection.putheader("Content-Length", "2" if method == "POST" else "0")
        connection.endheaders(b"{}" if method == "POST" else None)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    assert answer.status == 403
    if method != "HEAD":
        assert json.loads(body) == REFUSAL


async def test_a_new_token_shuts_out_the_old(engine: Engine, client: VllmClient) -> None:
    assert engine.token_file is not None
    old = engine.token
    assert await client.identity() is not None
    engine.token_file.write_text("the next token")
    try:
        with pytest.raises(EngineUnavailable, match="door is closed"):
            await client.identity()
        async with VllmClient(engine.url, token="the next token") as newer:
            assert await newer.identity() is not None
        engine.token_file.unlink()
        with pytest.raises(EngineUnavailable):
            await client.identity()
    finally:
        engine.token_file.write_text(old)
    assert await client.identity() is not None


async def test_the_extension_is_announced(client: VllmClient) -> None:
    assert (await client.facts()).audits


async def test_held(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    """Registered in the order of use, active those of them that fill a device slot."""
    names = [engine.fresh("held") for _ in range(MAX_CPU_LORAS)]
    for name in names:
        engine.load(name, adapter())
    numbers = [_number(engine, name) for name in names]
    engine.complete(names[0], TOKENS)
    (held,) = await client.held()
    assert (held.error, held.capacity, held.slots) == ("", MAX_CPU_LORAS, MAX_LORAS)
    assert list(held.registered) == numbers[1:] + numbers[:1]
    assert set(held.active) == {numbers[0], numbers[-1]}


async def test_drop_frees_what_has_no_name(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    name = engine.fresh("dropped")
    engine.load(name, adapter())
    number = _number(engine, name)
    engine.unload(name)
    assert engine.resident() == {number}
    await client.drop(number)
    assert engine.resident() == set()
    drop = {"method": "adaptersync_drop", "args": [number]}
    assert engine.post("/collective_rpc", drop).json == {"results": [{"dropped": False, "running": 0}]}


async def _audit(engine: Engine, client: VllmClient, name: str, path: Path) -> Audit:
    """As of a small file; a large one, compared in parts, must come to the same."""
    number = _number(engine, name)
    (audit,) = await client.audit(number, str(path), size=1, timeout_s=30)
    for parts in (2, 5, 50):  # more than there are modules, too
        (again,) = await client.audit(number, str(path), size=parts * AUDITED_AT_ONCE, timeout_s=30)
        assert (again.differing, again.compared, again.unused) == (audit.differing, audit.compared, audit.unused)
        assert len(again.differ) == len(audit.differ)
    return audit


async def test_audit_of_the_right_files(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    for how in (
        {},
        {"targets": ALL_TARGETS},
        {"rank": 3},
        {"scale": 1e-5},
        {"scale": 0.0},
        {"config": {"lora_alpha": 8}},
    ):
        name, path = engine.fresh("right"), adapter(**how)
        assert engine.load(name, path).status == 200
        audit = await _audit(engine, client, name, path)
        assert audit == Audit(resident=True, compared=SLOT), how


async def test_audit_of_other_files(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    name, path = engine.fresh("other"), adapter(targets=["q_proj", "up_proj"])
    engine.load(name, path)
    other = await _audit(engine, client, name, adapter(targets=["q_proj", "up_proj"]))
    assert (other.differing, other.unused_modules) == (8, 0)
    attention, mlp = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"
    assert other.differ[:4] == (f"{attention}.lora_A", f"{attention}.lora_B", f"{mlp}.lora_A", f"{mlp}.lora_B")
    fewer = await _audit(engine, client, name, adapter(targets=["v_proj"]))
    assert fewer.differing == 12


async def test_audit_of_another_alpha(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    name = engine.fresh("alpha")
    engine.load(name, adapter(seed=5, config={"lora_alpha": 16}))
    audit = await _audit(engine, client, name, adapter(seed=5, config={"lora_alpha": 8}))
    assert audit.differing == 4
    assert all(tensor.endswith("lora_B") for tensor in audit.differ)


async def test_audit_of_layers_the_base_lacks(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    name, path = engine.fresh("deep"), adapter(layers=LAYERS + 1)
    engine.load(name, path)
    audit = await _audit(engine, client, name, path)
    assert (audit.differing, audit.unused_modules) == (0, 2)
    assert audit.unused == ("model.layers.2.self_attn.q_proj", "model.layers.2.self_attn.v_proj")


async def test_audit_of_the_evicted(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    """Gone from the workers, still listed; asked for, it is read again."""
    name, path = engine.fresh("evicted"), adapter()
    engine.load(name, path)
    for _ in range(MAX_CPU_LORAS):
        engine.load(engine.fresh("evicting"), adapter())
    assert name in engine.listed()
    assert await _audit(engine, client, name, path) == Audit()
    engine.complete(name, TOKENS)
    assert await _audit(engine, client, name, path) == Audit(resident=True, compared=SLOT)


async def test_audit_without_files_says_so(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    name, path = engine.fresh("lost"), adapter()
    engine.load(name, path)
    audit = await _audit(engine, client, name, path.parent / "absent")
    assert audit.error.startswith("FileNotFoundError: ")
    assert not audit.resident
    assert engine.get("/health").status == 200


def test_the_extension_survives_wrong_arguments(engine: Engine) -> None:
    (answer,) = engine.post("/collective_rpc", {"method": "adaptersync_audit", "args": [1]}).json["results"]
    assert answer["error"].startswith("TypeError: ")
    assert engine.get("/health").status == 200


async def test_log_probabilities(engine: Engine, client: VllmClient, adapter: Callable[..., Path]) -> None:
    """The same to the last bit when asked again; moved by an adapter, in its direction, as far as its size says."""
    base = await client.logprobs(MODEL, TOKENS, timeout_s=30)
    assert base == await client.logprobs(MODEL, TOKENS, timeout_s=30)
    assert len(base) == len(TOKENS) - 1
    assert max(base) < 0
    moved: dict[float, list[float]] = {}
    for alpha in (1, 2):
        name = engine.fresh("scored")
        engine.load(name, adapter(seed=3, scale=0.1, config={"lora_alpha": alpha}))
        version = await client.logprobs(name, TOKENS, timeout_s=30)
        moved[alpha] = [a - b for a, b in zip(version, base, strict=True)]
    ratio = sum(a * b for a, b in zip(moved[1], moved[2], strict=True)) / sum(a * a for a in moved[1])
    assert ratio == pytest.approx(2, rel=0.05)
    assert 1e-5 < math.sqrt(sum(d * d for d in moved[1]) / len(base)) < 0.1
    still = engine.fresh("still")
    engine.load(still, adapter(scale=0.0))
    assert await client.logprobs(still, TOKENS, timeout_s=30) == base
