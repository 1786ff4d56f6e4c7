"""The auditor by itself, on a manager of device slots that others use between two parts of a comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from adaptersync.engine.audit import Auditor
from adaptersync_core.vllm import AUDITED_AT_ONCE, AUDITS, Audit, VllmClient
from support.adapters import make_adapter

pytestmark = pytest.mark.trl

OURS, ANOTHER = 1, 2
PARTS = 4
SLOTS = 2


class Manager:
    """As many slots as vLLM's has attributes that matter: modules of two layers, adapters read from files."""

    def __init__(self, adapters: dict[int, Path]) -> None:
        import torch

        self.model = SimpleNamespace()
        self.packed_modules: dict[str, list[str]] = {}
        self.lora_index_to_id: list[int | None] = [None] * SLOTS
        self.activations = 0
        self._adapters = adapters
        self.modules = {
            f"model.layers.{layer}.self_attn.{name}": SimpleNamespace(
                lora_a_stacked=(torch.zeros(SLOTS, 1, 8, 128),), lora_b_stacked=(torch.zeros(SLOTS, 1, 128, 8),)
            )
            for layer in range(2)
            for name in ("q_proj", "v_proj")
        }

    def list_adapters(self) -> dict[int, Path]:
        return self._adapters

    def activate_adapter(self, number: int, slot: int | None = None) -> None:
        from safetensors.torch import load_file

        if number in self.lora_index_to_id:
            return
        self.activations += 1
        if slot is None:
            slot = self.lora_index_to_id.index(None) if None in self.lora_index_to_id else 0
        self.lora_index_to_id[slot] = number
        tensors = load_file(self._adapters[number] / "adapter_model.safetensors")
        for name, module in self.modules.items():
            module.lora_a_stacked[0][slot, 0] = tensors[f"base_model.model.{name}.lora_A.weight"]
            module.lora_b_stacked[0][slot, 0] = tensors[f"base_model.model.{name}.lora_B.weight"] * 2


class Engine(VllmClient):
    """`between` happens after every call into the worker, with the number of those that were made."""

    def __init__(self, worker: Auditor, between: Callable[[int], None]) -> None:
        super().__init__("http://nowhere")
        self.calls: list[tuple[Any, ...]] = []
        self._worker, self._between = worker, between

    async def _rpc(self, method: str, *arguments: Any, answer: Any, timeout_s: float) -> Any:
        told = getattr(self._worker, method)(*arguments)
        self.calls.append(arguments[2:])
        self._between(len(self.calls))
        return [msgspec.convert(told, answer)]


@pytest.fixture
def paths(tmp_path: Path) -> dict[int, Path]:
    return {number: make_adapter(tmp_path / str(number), seed=number) for number in (OURS, ANOTHER)}


@pytest.fixture
def manager(paths: dict[int, Path]) -> Manager:
    return Manager(paths)


async def audited(manager: Manager, path: Path, between: Callable[[int], None]) -> tuple[Audit, list[tuple[Any, ...]]]:
    worker = Auditor()
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    engine = Engine(worker, between)
    async with engine:
        (audit,) = await engine.audit(OURS, str(path), size=PARTS * AUDITED_AT_ONCE, timeout_s=1)
        return audit, engine.calls


IN_PARTS = [(part, PARTS) for part in range(PARTS)]
RIGHT = Audit(resident=True, compared=8)


async def test_only_the_first_part_of_a_comparison_activates(manager: Manager, paths: dict[int, Path]) -> None:
    """The slot is then taken for a running version, over and over: compared in one call, it is given up once more."""

    def taken(call: int) -> None:
        manager.lora_index_to_id[:] = [None, ANOTHER]

    audit, calls = await audited(manager, paths[OURS], taken)
    assert (audit, calls) == (RIGHT, [*IN_PARTS[:2] * AUDITS, ()])
    assert manager.activations == AUDITS + 1


async def test_an_adapter_that_was_moved_between_two_parts_is_compared_anew(
    manager: Manager, paths: dict[int, Path]
) -> None:
    """Of each slot a part was compared, and right: what is wrong in the slot that is read now must be seen."""

    def moved(call: int) -> None:
        if call == PARTS - 1:
            manager.lora_index_to_id[:] = [ANOTHER, None]
            manager.activate_adapter(OURS, 1)
            for module in list(manager.modules.values())[:-1]:
                module.lora_b_stacked[0][1] += 1

    audit, calls = await audited(manager, paths[OURS], moved)
    assert audit.differing == PARTS - 1
    assert calls == IN_PARTS * 2


async def test_what_stays_in_its_slot_is_compared_once(manager: Manager, paths: dict[int, Path]) -> None:
    assert await audited(manager, paths[OURS], lambda call: None) == (RIGHT, IN_PARTS)
    assert manager.activations == 1


async def test_what_is_evicted_between_two_parts_is_not_held(manager: Manager, paths: dict[int, Path]) -> None:
    def evicted(call: int) -> None:
        manager.list_adapters().pop(OURS, None)

    audit, calls = await audited(manager, paths[OURS], evicted)
    assert (audit, calls) == (Audit(), IN_PARTS[:2])
