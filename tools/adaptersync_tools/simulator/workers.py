"""What `/collective_rpc` reaches: the one worker of a simulated engine, with or without our extension.

The workers' own methods that the simulator does not have count as lacking: 500, in the words of a real server.
"""

from typing import Any

import msgspec

from adaptersync_core.vllm import WORKER_EXTENSION
from adaptersync_tools.simulator.adapter_files import MODULES, WorkerFailure, read_adapter
from adaptersync_tools.simulator.engine import Engine
from adaptersync_tools.simulator.errors import worker_failure

NAMED = 8  # tensors named in an answer, as in `adaptersync.engine.audit`
_ANY_RANK = 1 << 20


class Call(msgspec.Struct, frozen=True, kw_only=True):
    method: str | None = None
    args: list[Any] = []


def answer(engine: Engine, call: Call, *, extension: str) -> object:
    """The worker's answer; Refused for a method it lacks or arguments that do not fit it."""
    match call.method, call.args:
        case "list_loras", []:
            return engine.list_loras()
        case "remove_lora", [int(number)]:
            return str(engine.remove_lora(number))
        case "pin_lora", [int(number)]:
            return str(engine.pin_lora(number))
    lacks = worker_failure("collective_rpc", f"'CPUWorker' object has no attribute '{call.method}'")
    if extension != WORKER_EXTENSION:
        raise lacks
    match call.method, call.args:
        case "adaptersync_held", []:
            return _held(engine)
        case "adaptersync_drop", [int(number)]:
            running = engine.running_on(number)
            return {"dropped": not running and engine.remove_lora(number), "running": running}
        case "adaptersync_audit", [int(number), str(directory)]:
            return _audit(engine, number, directory)
        case "adaptersync_audit", [int(number), str(directory), int(part), int()]:
            return _audit(engine, number, directory) if part == 0 else _rest(engine, number)
        case (("adaptersync_held" | "adaptersync_drop" | "adaptersync_audit"), _):
            return {"error": "TypeError: wrong arguments"}
    raise lacks


def _held(engine: Engine) -> dict[str, Any]:
    return {
        "registered": engine.list_loras(),
        "active": engine.active_loras(),
        "capacity": engine.config.registered_limit,
        "slots": engine.config.max_loras,
        "scores": not engine.config.lora_on_head,
    }


def _audit(engine: Engine, number: int, directory: str) -> dict[str, Any]:
    held = engine.adapter(number)
    if held is None:
        return {"resident": False}
    base = engine.config.base
    try:
        wanted = read_adapter(directory, max_lora_rank=_ANY_RANK, base=base)
    except (OSError, WorkerFailure) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    names = held.tensors.keys() | wanted.tensors.keys()
    differ = sorted((name for name in names if held.tensors.get(name) != wanted.tensors.get(name)), key=_place)
    return {
        "resident": True,
        "compared": base.slot_tensors() if base else len(names),
        "differ": differ[:NAMED],
        "differing": len(differ),
        "unused": wanted.unused[:NAMED],
        "unused_modules": len(wanted.unused),
    }


def _rest(engine: Engine, number: int) -> dict[str, Any]:
    """Any part but the first, of which everything is said: what is left to compare is nothing."""
    return {"resident": engine.adapter(number) is not None, "compared": 0}


def _place(name: str) -> tuple[int, int, str]:
    """Where a model has a tensor: by layer, then in the order of its modules."""
    *_, layer, _, module, half = name.split(".")
    return int(layer) if layer.isdigit() else 0, MODULES.index(module) if module in MODULES else 0, half
