"""What a vLLM worker really holds, compared with what a verified file says it must hold.

vLLM mixes this class into its worker (`--worker-extension-cls adaptersync.engine.audit.Auditor`); `/collective_rpc`
calls it in every worker. `adaptersync_audit` reads the adapter's file again, makes of it what belongs in this worker
(dtype, scaling by alpha, packing of q/k/v and gate/up, the shard of a tensor-parallel worker) and compares that, bit by
bit, with the device slot the next forward pass will read. A load that went wrong without a word is found at any size of
the adapter.

While a worker compares, its engine generates nothing. So a large adapter is compared in parts, a call each, between
which the engine goes on; a slot is written as a whole, when its adapter is activated, and not again. Only the first
part activates it: where every slot is in use, each activation takes one from a version that is running. Whoever asks
sees by `slot` whether all parts were compared with the same one.

A call that goes wrong inside a worker may end the server, so every method answers with plain data, `error` among it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

NAMED = 8  # tensors named in an answer; the rest is counted
PREFIX = "base_model.model."
INACTIVE = -2  # the slot of an adapter that has none


def _answers(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    @functools.wraps(method)
    def guarded(*arguments: Any) -> dict[str, Any]:
        try:
            return method(*arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"[:500]}

    return guarded


class Auditor:
    """Mixed into vLLM's worker, which must not have a method of the same name: hence `adaptersync_`."""

    model_runner: Any

    @_answers
    def adaptersync_held(self) -> dict[str, Any]:
        """Numbers of the adapters this worker has registered, least recently used first, and its limits.

        `scores` is false where vLLM has made the model's head ready for LoRA, as it does for Llama and Qwen3 unless
        `--lora-target-modules` names other modules: log-probabilities of a prompt, asked for beside any other request,
        then end the server.
        """
        manager = self._adaptersync_manager()
        registered = list(manager.list_adapters())
        return {
            "registered": registered,
            "active": [number for number in manager.lora_index_to_id if number is not None],
            "capacity": manager.capacity,
            "slots": manager.lora_slots,
            "scores": not any("lm_head" in name for name in manager.modules),
        }

    @_answers
    def adaptersync_drop(self, number: int) -> dict[str, Any]:
        """Free what an unloaded name, a failed load or a canary left behind.

        Not while a request is running on it: the next step would read its files again, and end the server without them.
        """
        running = len(self.model_runner.input_batch.lora_id_to_request_ids.get(number, ()))
        if running:
            return {"dropped": False, "running": running}
        return {"dropped": bool(self.model_runner.lora_manager.remove_adapter(number)), "running": 0}

    @_answers
    def adaptersync_audit(self, number: int, directory: str, part: int = 0, parts: int = 1) -> dict[str, Any]:
        """Compare slot and file in one module of every `parts`, from number `part` on.

        `differ` are tensors whose bits differ, `unused` those of the file no module took, in whichever part.
        """
        from safetensors import safe_open

        manager = self._adaptersync_manager()
        if number not in manager.list_adapters():
            return {"resident": False}
        if part == 0:
            manager.activate_adapter(number)
        elif number not in manager.lora_index_to_id:  # a request has taken its slot since
            return {"resident": True, "slot": INACTIVE}
        slot = manager.lora_index_to_id.index(number)
        config = json.loads((Path(directory) / "adapter_config.json").read_text())
        with safe_open(Path(directory) / "adapter_model.safetensors", framework="pt") as file:
            pairs = _Pairs(file, config, _renamer(manager.model))
            found = [
                (name, _equal(wanted, held))
                for module in list(manager.modules)[part::parts]
                for name, wanted, held in _slots(manager, module, slot, pairs)
            ]
        differ = [name for name, equal in found if not equal]
        unused = pairs.modules() - {name for module in manager.modules for name in _packed(manager, module)}
        return {
            "resident": True,
            "slot": slot,
            "compared": len(found),
            "differ": differ[:NAMED],
            "differing": len(differ),
            "unused": sorted(unused)[:NAMED],
            "unused_modules": len(unused),
        }

    def _adaptersync_manager(self) -> Any:
        return self.model_runner.lora_manager._adapter_manager


class _Pairs:
    """The pairs of an open adapter file, under the names this model has for its modules."""

    def __init__(self, file: Any, config: Mapping[str, Any], rename: Callable[[str], str]) -> None:
        self._file = file
        self._config = config
        self._names: dict[str, dict[str, str]] = {}
        for name in file.keys():  # noqa: SIM118 - a method of the file's, which is no mapping
            module, half = re.fullmatch(r"(.+)\.(lora_[AB])\.weight", rename(name.removeprefix(PREFIX))).groups()  # type: ignore[union-attr]
            self._names.setdefault(module, {})[half] = name

    def modules(self) -> set[str]:
        return set(self._names)

    def read(self, module: str, a_dtype: Any, b_dtype: Any) -> tuple[Any, Any]:
        """A and B as the engine holds them; None for what the file does not have."""
        names = self._names.get(module)
        if names is None:
            return None, None
        scaling = _scaling(self._config, names["lora_A"].removeprefix(PREFIX))
        a = self._file.get_tensor(names["lora_A"]).to(a_dtype)
        b = self._file.get_tensor(names["lora_B"]).to(b_dtype)
        if scaling != 1:
            b *= scaling  # in the engine's dtype, as vLLM folds it in
        return a, b


def _packed(manager: Any, module: str) -> list[str]:
    """What vLLM has made one module of."""
    parts: list[str] = manager.packed_modules.get(module, [module])
    return parts


def _slots(manager: Any, module_name: str, slot: int, pairs: _Pairs) -> Iterator[tuple[str, Any, Any]]:
    """(tensor name, what must be in the slot or None for nothing, what is in the slot) of one module."""
    module, parts = manager.modules[module_name], _packed(manager, module_name)
    stacked_a, stacked_b = _stacked(module.lora_a_stacked), _stacked(module.lora_b_stacked)
    read = [pairs.read(part, stacked_a[0].dtype, stacked_b[0].dtype) for part in parts]
    a, b = [pair[0] for pair in read], [pair[1] for pair in read]
    if getattr(module, "tp_size", 1) > 1:
        # the layer's own cut: how a tensor is sharded is its business, that it is the right tensor is ours
        a, b = (_cut(module.slice_lora_a, a), _cut(module.slice_lora_b, b))
    for index, part in enumerate(parts):
        yield f"{part}.lora_A", a[index], _held(stacked_a[index][slot])
        yield f"{part}.lora_B", b[index], _held(stacked_b[index][slot])


def _stacked(slots: Any) -> tuple[Any, ...]:
    """Linear layers keep a tensor for each part they pack; the embedding and the head keep one."""
    return slots if isinstance(slots, tuple) else (slots,)


def _held(slot: Any) -> Any:
    """One slot as a matrix; the embedding's A lies there turned over."""
    return slot[0] if slot.dim() == 3 else slot.T


def _cut(cut: Callable[[Any], Any], tensors: list[Any]) -> list[Any]:
    if len(tensors) > 1:
        return list(cut(tensors))
    return tensors if tensors[0] is None else [cut(tensors[0])]


def _equal(wanted: Any, found: Any) -> bool:
    """Whether the slot holds exactly the tensor, and nothing beside it."""
    import torch

    if wanted is None:
        return not bool(found.any())
    rows, columns = wanted.shape
    beside = bool(found[rows:].any()) or bool(found[:rows, columns:].any())
    return not beside and bool(torch.equal(found[:rows, :columns].cpu(), wanted.cpu()))


def _renamer(model: Any) -> Callable[[str], str]:
    """Checkpoint names to this model's names, by the model's own table where it has one."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return lambda name: name
    mapper = mapper.get_rename_mapper()
    return lambda name: mapper._map_name(name) or name


def _scaling(config: Mapping[str, Any], name: str) -> float:
    """PEFT's scaling of one module: alpha over rank, or over its root, with the patterns' exceptions."""
    module = name.rpartition(".lora_")[0]
    rank = _matching(config.get("rank_pattern"), module) or config["r"]
    alpha = _matching(config.get("alpha_pattern"), module) or config["lora_alpha"]
    return float(alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _matching(pattern: Mapping[str, Any] | None, module: str) -> Any:
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return None
