"""The gate: what waits there, for whom, and what becomes of it when nobody can say. Pure.

An operator answers, or a function of the operator's that a worker asks. Both do it by a request; a worker that never
comes back is not waited for beyond `gate_timeout_s`.
"""

from __future__ import annotations

from msgspec.structs import replace

from adaptersync.coordinator.draft import Draft
from adaptersync_core.config import Config
from adaptersync_core.events import VersionHeld, VersionRolledBack
from adaptersync_core.records import Fleet, Request
from adaptersync_core.table import LiveVersion, Table

UNASKED = "no worker has begun to ask it: they do other jobs, or none runs"


def awaited(table: Table, config: Config) -> list[str]:
    """Versions on which the gate's function is to say something."""
    return [name for name, version in table.versions.items() if config.coordinator.gate_function and version.unanswered]


def left_s(fleet: Fleet, config: Config, version: LiveVersion) -> float:
    """Until the function's time is up."""
    return config.coordinator.gate_timeout_s - (fleet.now - version.since)


def overdue(fleet: Fleet, config: Config) -> Draft | None:
    """Do without the function's verdict on a version when its time is up."""
    for name in awaited(fleet.table, config):
        if left_s(fleet, config, fleet.table.versions[name]) < 0:
            draft = Draft(fleet)
            reason = f"{config.coordinator.gate_function} has not said in {config.coordinator.gate_timeout_s:g} s"
            if name in fleet.unasked:
                reason += f", for {UNASKED}"
            inconclusive(draft, config, name, reason)
            return draft
    return None


def inconclusive(draft: Draft, config: Config, name: str, reason: str) -> None:
    """Nobody can say whether the version is good: the settings say what is done then."""
    match config.coordinator.gate_inconclusive:
        case "admit":
            draft.versions[name] = replace(draft.versions[name], admitted=True)
        case "refuse":
            refuse(draft, name, f"inconclusive: {reason}")
        case _:
            draft.versions[name] = replace(draft.versions[name], held=reason)
            draft.events.append(VersionHeld(version=name, generation=draft.generation, reason=reason))


def refuse(draft: Draft, name: str, reason: str) -> None:
    draft.give_up(name, reason, fate="rolled_back")
    draft.events.append(VersionRolledBack(version=name, generation=draft.generation, reason=reason))


def not_there(fleet: Fleet, request: Request) -> str:
    """Why a version cannot be answered for; nothing, when it can."""
    version = fleet.table.versions.get(request.version)
    if version is None or version.run != request.run:
        return f"{request.version or 'no version'} is not on its way in run {request.run}"
    return "" if version.state == "ready" else f"{request.version} is {version.state}, not at the gate"
