"""Which adapters an engine holds: the API process's names, and the worker's two LRU maps.

They are separate on purpose, as in vLLM: unloading forgets the name and frees nothing; eviction frees the
weights and leaves the name listed. Knows no tokens and no HTTP; reads files only through its reader.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from adaptersync_tools.simulator.adapter_files import Adapter, WorkerFailure
from adaptersync_tools.simulator.errors import Refused, not_found, user_error, worker_failure

AdapterReader = Callable[[str], Adapter]


class LoraRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded name. Requests in flight keep theirs after an unload."""

    name: str
    int_id: int
    path: str
    inplace: bool = False


class Slots:
    """The worker: adapters in host memory (`registered`), of which some fill a device slot (`active`)."""

    def __init__(self, read: AdapterReader, *, max_loras: int, max_cpu_loras: int) -> None:
        self._read = read
        self._max_active = max_loras
        self._max_registered = max_cpu_loras
        self._registered: OrderedDict[int, Adapter] = OrderedDict()
        self._active: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()

    def ensure(self, lora: LoraRequest) -> Adapter:
        """Make the adapter resident and active, evicting the least recently used without a word.

        Raises FileNotFoundError or WorkerFailure. A tensor too large for the base fails last, when the
        adapter is already registered: it stays, under an id that no name leads to.
        """
        adapter = self._registered.get(lora.int_id)
        misfit = None
        if adapter is None or lora.inplace:
            adapter = self._read(lora.path)
            misfit = adapter.misfit
            self.remove(lora.int_id)
            if len(self._registered) + 1 > self._max_registered:
                self.remove(self._oldest(self._registered))
            self._registered[lora.int_id] = adapter
        self._registered.move_to_end(lora.int_id)
        self._activate(lora.int_id)
        if misfit is not None:
            raise WorkerFailure(misfit)
        return adapter

    def touch(self, int_id: int) -> None:
        """What each step does for a resident adapter in use: newest in both maps, back in a device slot."""
        if int_id in self._registered:
            self._registered.move_to_end(int_id)
            self._activate(int_id)

    def remove(self, int_id: int) -> bool:
        self._active.pop(int_id, None)
        self._pinned.discard(int_id)
        return self._registered.pop(int_id, None) is not None

    def pin(self, int_id: int) -> None:
        if int_id not in self._registered:
            raise WorkerFailure(f"Pinning failed. LoRA {int_id} is not registered.")
        self._activate(int_id)
        self._pinned.add(int_id)

    def registered(self) -> list[int]:
        return list(self._registered)

    def adapter(self, int_id: int) -> Adapter | None:
        return self._registered.get(int_id)

    def active(self) -> list[int]:
        return list(self._active)

    def _activate(self, int_id: int) -> None:
        if int_id not in self._active and len(self._active) >= self._max_active:
            del self._active[self._oldest(self._active)]
        self._active[int_id] = None
        self._active.move_to_end(int_id)

    def _oldest(self, ids: Iterable[int]) -> int:
        for int_id in ids:
            if int_id not in self._pinned:
                return int_id
        raise WorkerFailure("All items are pinned, cannot remove oldest from the cache.")


class Registry:
    """The API process: names, their paths and the counter that numbers load attempts."""

    def __init__(self, slots: Slots, *, base_name: str) -> None:
        self._slots = slots
        self._base_name = base_name
        self._attempts = 0
        self._by_name: dict[str, LoraRequest] = {}

    def check(self, name: str, path: str, *, inplace: bool) -> None:
        """Refuse what vLLM refuses before it asks the engine."""
        if not name or not path:
            raise user_error("Both 'lora_name' and 'lora_path' must be provided.")
        if name == self._base_name:
            raise user_error(f"The lora adapter '{name}' conflicts with a served base model.")
        if name in self._by_name and not inplace:
            raise user_error(
                f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in "
                "place, set 'load_inplace' to True."
            )

    def load(self, name: str, path: str, *, inplace: bool = False, failure: Refused | None = None) -> None:
        """Load an adapter; `failure` is raised in the place where the engine would fail."""
        self.check(name, path, inplace=inplace)
        known = self._by_name.get(name)
        if known is None:
            self._attempts += 1
        lora = LoraRequest(name=name, int_id=known.int_id if known else self._attempts, path=path, inplace=inplace)
        if failure is not None:
            raise failure
        try:
            self._slots.ensure(lora)
        except FileNotFoundError as error:
            raise not_found(f"Loading lora {name} failed: No adapter found for {path}") from error
        except WorkerFailure as error:
            raise worker_failure("add_lora", str(error)) from error
        self._by_name[name] = lora

    def unload(self, name: str) -> None:
        if not name:
            raise user_error("'lora_name' needs to be provided to unload a LoRA adapter.")
        if name not in self._by_name:
            raise not_found(f"The lora adapter '{name}' cannot be found.")
        del self._by_name[name]

    def listed(self) -> list[LoraRequest]:
        return list(self._by_name.values())

    def resolve(self, model: str | None) -> LoraRequest | None:
        """The adapter a request names; None is the base. An unknown name uses up an id, as in vLLM."""
        if not model or model == self._base_name:
            return None
        if model not in self._by_name:
            self._attempts += 1
            raise not_found(f"The model `{model}` does not exist. Valid aliases: {self._base_name}.", param="model")
        return self._by_name[model]
