"""One suite, two targets: what the simulator claims about vLLM is asked of a real vLLM in the same words.

Both stand behind our door and have our auditor in their workers, as in production; calls show the token by themselves.
Each target is started once for the whole suite. Tests share it, so they use names and prompts of their own.
`-m "not vllm"` leaves the real one out.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from support import engines
from support.adapters import make_adapter
from support.engines import Engine
from support.kv import Listener, listening
from support.tiny_model import build_tiny_model, write_sizes
from support.tiny_tokenizer import build_tokenizer
from support.wait import wait_until_sync

START_TIMEOUT_S = 300
TARGETS = ["simulator", pytest.param("vllm", marks=pytest.mark.vllm)]

AdapterMaker = Callable[..., Path]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test of a target pays for its start."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.timeout(START_TIMEOUT_S))


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("conformance") / "model")


@pytest.fixture(scope="session", params=TARGETS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with started(request, tmp_path_factory) as engine:
        yield engine


@pytest.fixture(scope="session")
def unguarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real vLLM without our door and auditor, with a tokenizer that has merges."""
    model = build_tiny_model(tmp_path_factory.mktemp("unguarded") / "model", architecture="llama")
    build_tokenizer(model)
    with (
        TemporaryDirectory(prefix="engine-") as directory,
        engines.vllm_cpu(Path(directory), model, "--trust-request-chat-template") as engine,
    ):
        yield engine


def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, *, guarded: bool = True) -> Any:
    """A context manager of the engine that `request.param` names, with our door and auditor or without."""
    # Paths of ipc sockets must be short.
    directory = TemporaryDirectory(prefix="engine-")
    request.addfinalizer(directory.cleanup)
    if request.param == "simulator":
        model = write_sizes(tmp_path_factory.mktemp("sizes") / "model")
        blocks = str(engines.NUM_BLOCKS)
        return engines.simulator(Path(directory.name), model, "--num-blocks", blocks, guarded=guarded)
    engines.require_vllm()
    return engines.vllm_cpu(Path(directory.name), request.getfixturevalue("real_model"), guarded=guarded)


@pytest.fixture
def adapter(tmp_path: Path) -> AdapterMaker:
    """Makes an adapter that fits the model, in a directory of its own."""
    made = 0

    def make(**how: Any) -> Path:
        nonlocal made
        made += 1
        return make_adapter(tmp_path / f"adapter{made}", **{"seed": made} | how)

    return make


@pytest.fixture
def loaded(engine: Engine, adapter: AdapterMaker) -> Iterator[Callable[..., str]]:
    """Loads a good adapter and returns its name; unloads it afterwards."""
    names: list[str] = []

    def load(**how: Any) -> str:
        name = engine.fresh("good")
        answer = engine.load(name, adapter(**how))
        assert answer.status == 200, answer.text
        names.append(name)
        return name

    yield load
    for name in names:
        engine.unload(name)


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """Token ids no other test has used: printable ASCII, at random."""
    source = random.Random()

    def make(length: int) -> list[int]:
        return [source.randrange(33, 127) for _ in range(length)]

    return make


@pytest.fixture(scope="session")
def session_listener(engine: Engine) -> Iterator[Listener]:
    fresh = random.Random()

    def heard() -> bool:
        """A subscription takes a moment to arrive: ask until an event does."""
        engine.complete(engines.MODEL, [fresh.randrange(33, 127) for _ in range(2 * engines.BLOCK_SIZE)])
        return listener.pending(0.2)

    with listening(engine.kv_endpoint, engine.replay_endpoint) as listener:
        wait_until_sync(heard, timeout_s=30)
        yield listener


@pytest.fixture
def events(session_listener: Listener) -> Listener:
    """The engine's KV events, from this test on."""
    session_listener.discard()
    return session_listener
