"""One vLLM server, as the agent speaks to it: what it is, whether it lives, and its LoRA registry.

A load that timed out may still happen, and an answer 400 may mean that it already did: callers read the registry again
instead of believing the status. `load_inplace` is never sent: vLLM would read the files again at every step.
"""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec
import orjson
from msgspec import Struct

from adaptersync_core.errors import EngineRefused, EngineUnavailable
from adaptersync_core.headers import RANK
from adaptersync_core.vllm_metrics import Prefills, RequestTotals, Sample, prefills, request_totals, samples

TOKEN_HEADER = "x-adaptersync-token"  # noqa: S105 - the name of a header
WORKER_EXTENSION = "adaptersync.engine.audit.Auditor"
ANSWER_LIMIT = 16 << 20  # bytes of one control answer
NAMED = 8  # tensors named of those that differ; the rest is counted
AUDITED_AT_ONCE = 4 << 20  # bytes of an adapter, some 5 ms: for so long the engine generates nothing
AUDIT_PARTS = 64  # most of them; between two the engine makes a step or more, and a promotion waits for all
AUDITS = 2  # times an adapter is compared in parts before that is done in one, when it loses its slot between two

T = TypeVar("T")


class EngineFacts(Struct, frozen=True, kw_only=True):
    """What a server is. A limit of 0, or no dtype or device, means that it does not say (no development mode).

    `engines` are its ranks, as its metrics count them. `audits` says that its workers carry our extension.
    """

    base_model: str
    root: str
    max_model_len: int
    block_size: int
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int
    version: str
    engines: int = 1
    dtype: str = ""
    device: str = ""
    max_num_seqs: int = 0
    audits: bool = False


class _Card(Struct, frozen=True, kw_only=True):
    """An entry of `/v1/models`; an adapter's has a parent."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Identity(Struct, frozen=True, kw_only=True):
    """What our door in front of a server says: this life of the process, and its adapters' numbers by name."""

    life: str
    numbers: dict[str, int]


class Audit(Struct, frozen=True, kw_only=True):
    """What one worker says of an adapter's slot and the file it came from; see `adaptersync.engine.audit`.

    `slot` is where a part of it was compared, which says nothing of the whole.
    """

    error: str = ""
    resident: bool = False
    slot: int = -1
    compared: int = 0
    differ: tuple[str, ...] = ()
    differing: int = 0
    unused: tuple[str, ...] = ()
    unused_modules: int = 0


def together(parts: Sequence[Audit]) -> Audit:
    """What one worker said of an adapter part by part."""
    differ = [name for part in parts for name in part.differ]
    return Audit(
        resident=True,
        compared=sum(part.compared for part in parts),
        differ=tuple(differ[:NAMED]),
        differing=sum(part.differing for part in parts),
        unused=parts[0].unused,
        unused_modules=parts[0].unused_modules,
    )


class _LoraConfig(Struct, frozen=True, kw_only=True):
    max_loras: int | None = None
    max_cpu_loras: int | None = None
    max_lora_rank: int | None = None


class _ParallelConfig(Struct, frozen=True, kw_only=True):
    worker_extension_cls: str = ""


class _ModelConfig(Struct, frozen=True, kw_only=True):
    dtype: str | None = None


class _DeviceConfig(Struct, frozen=True, kw_only=True):
    device: str | None = None


class _SchedulerConfig(Struct, frozen=True, kw_only=True):
    max_num_seqs: int | None = None


class _ServerConfig(Struct, frozen=True, kw_only=True):
    """What `/server_info` says, as far as it matters here."""

    lora_config: _LoraConfig | None = None
    parallel_config: _ParallelConfig | None = None
    model_config: _ModelConfig = _ModelConfig()
    device_config: _DeviceConfig = _DeviceConfig()
    scheduler_config: _SchedulerConfig = _SchedulerConfig()


class KvSource(Struct, frozen=True, kw_only=True):
    """Where one rank of a server publishes its KV events; an entry of `/kv_event_sources`."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str
    replay_endpoint: str | None = None


class Held(Struct, frozen=True, kw_only=True):
    """Numbers of the adapters one worker has in memory, least recently used first, and how many fit.

    `scores` says that prompts may be scored beside other requests without ending the server.
    """

    error: str = ""
    registered: tuple[int, ...] = ()
    active: tuple[int, ...] = ()
    capacity: int = 0
    slots: int = 0
    scores: bool = False


class Dropped(Struct, frozen=True, kw_only=True):
    """Whether one worker freed an adapter; it keeps one that requests are `running` on."""

    error: str = ""
    dropped: bool = False
    running: int = 0


class VllmClient:
    """Control calls to one server. EngineUnavailable when it does not answer, EngineRefused when it says no."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 5.0,
        token: str = "",
        headers: Mapping[str, str] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`token` is for our door, `headers` for the server itself; `tls` says whom to trust with https."""
        self.url = url.rstrip("/")
        self._headers = {**(headers or {}), **({TOKEN_HEADER: token} if token else {})}
        self._timeout_s = timeout_s
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=8, ssl=tls or True))

    async def __aenter__(self) -> VllmClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def adapters(self) -> dict[str, str]:
        """Registered LoRA names and their directories; says what may be asked for, not what is in memory."""
        return {card.id: card.root or "" for card in await self._cards() if card.parent}

    async def load(self, name: str, path: str, *, timeout_s: float) -> None:
        await self._call(
            "POST", "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path}, timeout_s=timeout_s
        )

    async def unload(self, name: str) -> None:
        """Forget a name; not knowing it is fine."""
        try:
            await self._call("POST", "/v1/unload_lora_adapter", json={"lora_name": name})
        except EngineRefused as error:
            if error.status != 404:
                raise

    async def alive(self, *, timeout_s: float) -> None:
        """EngineUnavailable unless the engine itself (not only its HTTP front) answers in time.

        `/is_paused` makes a round trip through the engine; without development mode the front's word must do.
        """
        try:
            await self._call("GET", "/is_paused", timeout_s=timeout_s)
        except EngineRefused as error:
            if error.status != 404:
                raise EngineUnavailable(f"engine does not answer: {error.reason}", engine=self.url) from error
            await self._call("GET", "/health", timeout_s=timeout_s)

    async def healthy(self, *, timeout_s: float) -> None:
        """EngineUnavailable unless its front answers and takes its engine for well; the door lets anybody ask."""
        try:
            await self._call("GET", "/health", timeout_s=timeout_s)
        except EngineRefused as error:
            raise EngineUnavailable(f"engine is not well: {error.reason}", engine=self.url) from error

    async def epoch(self) -> str:
        """What changes when the server process is started anew: its start time, to the hundredth of a second."""
        values = [value for name, _, value in await self.metrics() if name == "process_start_time_seconds"]
        if not values:
            raise EngineRefused("server does not say when it started", status=200, engine=self.url)
        return f"{values[0]:.2f}"

    async def identity(self) -> Identity | None:
        """What our door says; None when the server was started without it."""
        try:
            told = await self._json("GET", "/adaptersync/engine")
        except EngineRefused as error:
            if error.status == 404:
                return None
            raise
        try:
            numbers = {name: int(entry["number"]) for name, entry in told["adapters"].items()}
            return Identity(life=str(told["life"]), numbers=numbers)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise EngineRefused(f"identity cannot be read: {error!r}", status=200, engine=self.url) from error

    async def audit(self, number: int, path: str, *, size: int, timeout_s: float) -> list[Audit]:
        """Have every worker compare slot and file; only where `EngineFacts.audits`.

        `size`, bytes of the file, decides in how many calls: between two of them the engine generates. What takes the
        adapter's slot then has the comparison begin anew, in the end in one call.
        """
        parts = min(-(-size // AUDITED_AT_ONCE) or 1, AUDIT_PARTS)
        for calls in (*(parts,) * AUDITS, 1):
            told = await self._audit(number, path, parts=calls, timeout_s=timeout_s)
            if told is not None:
                return told
        raise AssertionError("within one call a slot stays what it is")

    async def _audit(self, number: int, path: str, *, parts: int, timeout_s: float) -> list[Audit] | None:
        """None when the slot was another one, or none, before all of it was compared."""
        told: list[list[Audit]] = []
        for part in range(parts):
            which = (part, parts) if parts > 1 else ()
            told.append(await self._rpc("adaptersync_audit", number, path, *which, answer=Audit, timeout_s=timeout_s))
            if any(worker.error or not worker.resident for worker in told[-1]):
                return told[-1]
            if [worker.slot for worker in told[-1]] != [worker.slot for worker in told[0]]:
                return None
        return [together(each) for each in zip(*told, strict=True)]

    async def held(self) -> list[Held]:
        """What every worker has in memory; only where `EngineFacts.audits`."""
        return await self._rpc("adaptersync_held", answer=Held, timeout_s=self._timeout_s)

    async def drop(self, number: int) -> None:
        """Free what an unloaded name left in the engine, unless a request is running on it; where it audits."""
        await self._rpc("adaptersync_drop", number, answer=Dropped, timeout_s=self._timeout_s)

    async def logprobs(
        self, model: str, tokens: Sequence[int], *, timeout_s: float, rank: int | None = None
    ) -> list[float]:
        """Log-probabilities of tokens[1:], on the path that rollouts use, without a prefix that was cached before.

        `rank` is which of several engines behind the address answers; None leaves that to the server.

        Only where `Held.scores`: a vLLM with LoRA on its head ends when it scores a prompt beside another request.
        """
        body = {
            "model": model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": 0,
            "cache_salt": secrets.token_hex(8),
        }
        asked = {} if rank is None else {RANK: str(rank)}
        text = await self._call("POST", "/v1/completions", json=body, headers=asked, timeout_s=timeout_s)
        try:
            scored = orjson.loads(text)["choices"][0]["prompt_logprobs"][1:]
            return [float(place[str(token)]["logprob"]) for token, place in zip(tokens[1:], scored, strict=True)]
        except (ValueError, LookupError, TypeError) as error:
            raise EngineRefused(f"log-probabilities cannot be read: {error!r}", status=200, engine=self.url) from error

    async def metrics(self) -> list[Sample]:
        text = await self._call("GET", "/metrics")
        try:
            return samples(text)
        except ValueError as error:
            raise EngineRefused(f"metrics cannot be read: {error}", status=200, engine=self.url) from error

    async def prefills(self) -> Prefills | None:
        return prefills(await self.metrics())

    async def request_totals(self) -> RequestTotals | None:
        return request_totals(await self.metrics())

    async def kv_event_sources(self) -> dict[int, KvSource]:
        """By rank, where the server publishes what its cache holds; empty when it does not."""
        try:
            text = await self._call("GET", "/kv_event_sources")
            return msgspec.json.decode(text, type=dict[int, KvSource], strict=False)
        except EngineRefused as error:
            if error.status == 404:
                return {}
            raise
        except msgspec.MsgspecError as error:
            raise EngineRefused(f"KV event sources cannot be read: {error}", status=200, engine=self.url) from error

    async def busy(self) -> bool:
        """Whether a request is running or waiting."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        return any(value > 0 for name, _, value in await self.metrics() if name in names)

    async def facts(self) -> EngineFacts:
        cards = await self._cards()
        base = next((card for card in cards if not card.parent), None)
        if base is None:
            raise EngineRefused("server lists no base model", status=200, engine=self.url)
        caches = [labels for name, labels, _ in await self.metrics() if name == "vllm:cache_config_info"]
        sizes = [labels.get("block_size", "") for labels in caches]
        version = await self._json("GET", "/version")
        try:
            info = (await self._json("GET", "/server_info", params={"config_format": "json"})).get("vllm_config")
        except EngineRefused as error:
            if error.status != 404:
                raise
            info = None
        try:
            config = msgspec.convert(info or {}, _ServerConfig)
        except msgspec.ValidationError as error:
            raise EngineRefused(f"configuration cannot be read: {error}", status=200, engine=self.url) from error
        lora = config.lora_config or _LoraConfig()
        return EngineFacts(
            base_model=base.id,
            root=base.root or "",
            max_model_len=base.max_model_len or 0,
            block_size=int(sizes[0]) if sizes and sizes[0].isdigit() else 0,
            max_loras=lora.max_loras or 0,
            max_cpu_loras=lora.max_cpu_loras or lora.max_loras or 0,
            max_lora_rank=lora.max_lora_rank or 0,
            version=str(version.get("version", "")),
            engines=len({labels.get("engine", "") for labels in caches}) or 1,
            dtype=(config.model_config.dtype or "").removeprefix("torch."),
            device=config.device_config.device or "",
            max_num_seqs=config.scheduler_config.max_num_seqs or 0,
            audits=config.parallel_config is not None
            and config.parallel_config.worker_extension_cls == WORKER_EXTENSION,
        )

    async def _cards(self) -> list[_Card]:
        answer = await self._json("GET", "/v1/models")
        try:
            return msgspec.convert(answer.get("data"), type=list[_Card])
        except msgspec.ValidationError as error:
            raise EngineRefused(f"models cannot be read: {error}", status=200, engine=self.url) from error

    async def _rpc(self, method: str, *arguments: str | int, answer: type[T], timeout_s: float) -> list[T]:
        """One answer from every worker. A call that goes wrong inside one may end the server."""
        body = {"method": method, "args": list(arguments)}
        text = await self._call("POST", "/collective_rpc", json=body, timeout_s=timeout_s)
        try:
            return msgspec.json.decode(text, type=dict[str, list[answer]])["results"]  # type: ignore[valid-type]
        except (msgspec.MsgspecError, KeyError) as error:
            raise EngineRefused(f"{method} cannot be read: {error}", status=200, engine=self.url) from error

    async def _json(self, method: str, path: str, *, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        text = await self._call(method, path, params=params)
        try:
            return msgspec.json.decode(text, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise EngineRefused(f"answer to {path} is no JSON object", status=200, engine=self.url) from error

    async def _call(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        json: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> str:
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)
        try:
            async with self._session.request(
                method,
                self.url + path,
                params=params,
                json=json,
                headers={**self._headers, **(headers or {})},
                timeout=timeout,
            ) as answer:
                body = bytearray()
                async for chunk in answer.content.iter_any():
                    body += chunk
                    if len(body) > ANSWER_LIMIT:
                        raise EngineRefused("answer is larger than the limit", status=answer.status, engine=self.url)
                text = body.decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise EngineUnavailable(f"engine does not answer {path}: {reason}", engine=self.url) from error
        if answer.status != 200:
            kind, message = _error(text)
            if (answer.status, kind) == (403, "PermissionDenied"):  # says nothing of a version; a newer agent may speak
                raise EngineUnavailable(
                    "engine's door is closed to this token",
                    next_step="check agent.token_file; if another agent stands beside this engine, stop one",
                    engine=self.url,
                )
            raise EngineRefused(message, status=answer.status, kind=kind, engine=self.url)
        return text


def _error(text: str) -> tuple[str, str]:
    try:
        error = orjson.loads(text)["error"]
        return str(error.get("type", "")), str(error.get("message", ""))[:500]
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return "", text[:500]
