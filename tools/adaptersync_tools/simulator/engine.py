"""One simulated vLLM engine: adapters, prefix cache and output behind a few calls.

Pure, but for reading adapter files. Has no clock and does no waiting: `scheduler.py` decides when things
happen, `engine.py` what then is true.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec.structs import replace

from adaptersync_tools.simulator.adapter_files import Adapter, BaseModel, WorkerFailure, read_adapter
from adaptersync_tools.simulator.errors import EngineDead, Refused, worker_failure
from adaptersync_tools.simulator.faults import Faults
from adaptersync_tools.simulator.kv_wire import KVEvent
from adaptersync_tools.simulator.lora import LoraRequest, Registry, Slots
from adaptersync_tools.simulator.prefix_cache import PrefixCache, Scope, Table
from adaptersync_tools.simulator.store import View
from adaptersync_tools.simulator.voice import Spoken, Voice, prompt_logprobs, speak

# Bounds the rounding of one log-probability such that the difference of two has the measured 0.058, root mean square.
BFLOAT16_ROUNDING = 0.071


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM's flags of the same names set. Sizes are in tokens or blocks."""

    model: str = "base"
    root: str = "base"
    max_loras: int = 1
    max_cpu_loras: int | None = None  # vLLM: as many as max_loras
    max_lora_rank: int = 16
    block_size: int = 16
    num_blocks: int = 1024
    max_model_len: int = 2048
    max_num_seqs: int = 8
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora_on_head: bool = False  # as vLLM has it for Llama and Qwen3, unless told other target modules
    stop_probability: float = 0.0
    base: BaseModel | None = None

    @property
    def registered_limit(self) -> int:
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


class Request(msgspec.Struct, kw_only=True):
    """One sequence: a prompt and one answer. `n` answers are `n` of these."""

    prompt: list[int]
    max_tokens: int
    lora: LoraRequest | None = None
    seed: int = 0
    salt: str | None = None
    want_prompt_logprobs: bool = False
    ignore_eos: bool = False


class Running:
    """An admitted request. `spoken` is what it will say; `table` holds its blocks until `finish`."""

    def __init__(self, request: Request, table: Table, spoken: Spoken, scored: list[float] | None) -> None:
        self.request = request
        self.table = table
        self.spoken = spoken
        self.prompt_logprobs = scored
        self.text = request.prompt + spoken.tokens

    def blocks_still_needed(self, block_size: int) -> int:
        """The last token said is never computed, hence the -1."""
        return max(0, -(-(len(self.text) - 1) // block_size) - len(self.table.blocks))


class Engine:
    def __init__(self, config: EngineConfig, mount: View | None = None) -> None:
        """`mount` is where it looks for the adapters it is told to load; None: the file system itself."""
        self.config = config
        self._mount = mount
        self.faults = Faults()
        self.cache = PrefixCache(block_size=config.block_size, blocks=config.num_blocks)
        self._slots = Slots(self._read, max_loras=config.max_loras, max_cpu_loras=config.registered_limit)
        self.registry = Registry(self._slots, base_name=config.model)
        self._running: list[Running] = []
        self._base_voice = config.model.encode()
        self._read_before: Adapter | None = None

    def load(self, name: str, path: str, *, inplace: bool = False, failure: Refused | None = None) -> None:
        self._touch_running()
        try:
            self.registry.load(name, path, inplace=inplace, failure=failure)
            if self.faults.drop_on_load and (lora := self.registry.resolve(name)) is not None:
                self._slots.remove(lora.int_id)
        finally:
            self._touch_running()

    def fits(self, request: Request) -> bool:
        """Whether the scheduler could admit it now: a sequence, an adapter slot and blocks to the end."""
        if len(self._running) >= self.config.max_num_seqs:
            return False
        promised = sum(r.blocks_still_needed(self.config.block_size) for r in self._running)
        longest = -(-(len(request.prompt) + request.max_tokens) // self.config.block_size)
        return longest <= self.cache.free - promised

    def slot_for(self, lora: LoraRequest | None) -> bool:
        """False if it would be one adapter more than fit a step; vLLM then lets later requests pass."""
        ids = {r.request.lora.int_id for r in self._running if r.request.lora}
        return lora is None or lora.int_id in ids or len(ids) < self.config.max_loras

    def admit(self, request: Request) -> Running:
        """Start a request: its adapter is made resident, its prompt is looked up and its blocks cached.

        Raises EngineDead if the adapter was evicted and cannot be read again, and where a prompt is scored in one batch
        with another request while the head has LoRA.
        """
        scored = request.want_prompt_logprobs or any(r.request.want_prompt_logprobs for r in self._running)
        if self.config.lora_on_head and scored and self._running:
            raise EngineDead
        adapter = None
        if request.lora is not None:
            try:
                adapter = self._slots.ensure(request.lora)
            except (FileNotFoundError, WorkerFailure) as error:
                raise EngineDead from error
        lora = request.lora
        scope = Scope(
            lora_name=lora.name if lora else None,
            lora_path=lora.path if lora else None,
            lora_id=lora.int_id if lora else None,
            salt=request.salt,
        )
        voice = self.voice(adapter)
        table = self.cache.open(request.prompt, scope, look_up=not request.want_prompt_logprobs)
        self.cache.extend(table, request.prompt, len(request.prompt))
        spoken = speak(
            voice,
            request.prompt,
            limit=request.max_tokens,
            seed=request.seed,
            stop_probability=0.0 if request.ignore_eos else self.config.stop_probability,
        )
        values = prompt_logprobs(voice, request.prompt) if request.want_prompt_logprobs else None
        running = Running(request, table, spoken, values)
        self._running.append(running)
        return running

    def advance(self, running: Running, said: int) -> Iterator[None]:
        """Account for `said` tokens of the answer: all but the last of them have been computed.

        Yields after each block that this fills, as a step of vLLM fills and publishes one at a time.
        """
        start = len(running.request.prompt)
        computed = start + max(0, said - 1)
        size = self.config.block_size
        for boundary in range(size * (start // size + 1), computed, size):
            self.cache.extend(running.table, running.text, boundary)
            yield
        self.cache.extend(running.table, running.text, computed)
        yield

    def unstarted(self, request: Request) -> Running:
        """What became of a request that was aborted before it was admitted: nothing said, nothing held."""
        table = Table(Scope(), [], [], self.config.block_size)
        return Running(request, table, Spoken(tokens=[], logprobs=[], ended=False), None)

    def finish(self, running: Running) -> None:
        self._running.remove(running)
        self.cache.close(running.table)

    def cached_tokens(self, running: Running) -> int:
        return running.table.hit_blocks * self.config.block_size

    def voice(self, adapter: Adapter | None) -> Voice:
        rounding = BFLOAT16_ROUNDING if self.config.dtype == "bfloat16" else 0.0
        if adapter is None or not adapter.identity or self.faults.serve_base:
            return Voice(base=self._base_voice, rounding=rounding)
        return Voice(base=self._base_voice, identity=adapter.identity, effect=adapter.effect, rounding=rounding)

    def list_loras(self) -> list[int]:
        return self._slots.registered()

    def active_loras(self) -> list[int]:
        return self._slots.active()

    def remove_lora(self, int_id: int) -> bool:
        return self._slots.remove(int_id)

    def adapter(self, int_id: int) -> Adapter | None:
        """What a resident adapter has in its slot."""
        return self._slots.adapter(int_id)

    def running_on(self, int_id: int) -> int:
        return sum(r.request.lora is not None and r.request.lora.int_id == int_id for r in self._running)

    def pin_lora(self, int_id: int) -> bool:
        try:
            self._slots.pin(int_id)
        except WorkerFailure as error:
            raise worker_failure("collective_rpc", str(error)) from error
        return True

    def take_events(self) -> Sequence[KVEvent]:
        return self.cache.take_events()

    @property
    def running(self) -> int:
        return len(self._running)

    def _read(self, path: str) -> Adapter:
        """What a load puts into the slot: the files' adapter, unless a fault has it otherwise."""
        if self._mount is not None and not self._mount.exists(Path(path) / "adapter_config.json"):
            raise FileNotFoundError(path)
        adapter = read_adapter(path, max_lora_rank=self.config.max_lora_rank, base=self.config.base)
        before, self._read_before = self._read_before, adapter
        if self.faults.stale and before is not None:
            adapter = before
        if self.faults.wrong_alpha:
            scaled = {name: held + b"*2" if name.endswith("B") else held for name, held in adapter.tensors.items()}
            adapter = replace(adapter, effect=min(1.0, 2 * adapter.effect), tensors=scaled)
        if self.faults.corrupt_slot and adapter.tensors:
            adapter = replace(adapter, tensors=adapter.tensors | {min(adapter.tensors): b"corrupt"})
        return adapter

    def _touch_running(self) -> None:
        """Every step touches the adapters in use: a load evicts one only if nothing else is left."""
        for lora in {r.request.lora.int_id: r.request.lora for r in self._running if r.request.lora}.values():
            self._slots.touch(lora.int_id)
