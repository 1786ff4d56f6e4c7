"""What is held up, and by whom: the coordinator's own rules, asked instead of carried out. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

from adaptersync.coordinator import gate, promotion, retirement
from adaptersync_core.config import Config
from adaptersync_core.records import Fleet
from adaptersync_core.table import LiveVersion


class WaitView(Struct, frozen=True, kw_only=True):
    """A version waits for something, at most `left_s` longer; None: there is no deadline."""

    version: str
    state: str
    waits_for: str
    left_s: float | None = None


def waits(fleet: Fleet, config: Config) -> list[WaitView]:
    """Everything on its way in or out, with what it waits for; what the next decision deals with is left out."""
    return [*_published(fleet, config), *_on_their_way(fleet, config)]


def _published(fleet: Fleet, config: Config) -> Iterator[WaitView]:
    for run in sorted(fleet.table.runs):
        newer = promotion.unconsidered(fleet, run)
        if newer and (why := promotion.held_back(fleet, config, run)):
            yield WaitView(version=newer[-1].adapter_id, state="published", waits_for=why)


def _on_their_way(fleet: Fleet, config: Config) -> Iterator[WaitView]:
    for name, version in sorted(fleet.table.versions.items()):
        if version.state == "retiring" and not version.drained:
            for wait in retirement.still_used(fleet, config, name):
                yield WaitView(version=name, state="retiring", waits_for=wait.what, left_s=wait.left_s)
        elif version.state == "retiring":
            left_s = max(0.0, config.coordinator.unload_s - (fleet.now - version.since))
            for replica in retirement.holders(fleet, config, name):
                yield WaitView(version=name, state="retiring", waits_for=f"{replica} to unload it", left_s=left_s)
        elif version.state in ("staging", "ready"):
            if few := promotion.too_few(fleet, config):
                yield WaitView(version=name, state=version.state, waits_for=few)
            for replica, left_s in promotion.unanswered(fleet, config, name).items():
                yield WaitView(version=name, state=version.state, waits_for=f"the word of {replica}", left_s=left_s)
            if version.waits_at_gate:
                yield _at_the_gate(fleet, config, name, version)


def _at_the_gate(fleet: Fleet, config: Config, name: str, version: LiveVersion) -> WaitView:
    if name in gate.awaited(fleet.table, config):
        left_s = max(0.0, gate.left_s(fleet, config, version))
        what = f"the gate: {config.coordinator.gate_function}"
        if name in fleet.unasked:
            what += f"; {gate.UNASKED}"
        return WaitView(version=name, state="ready", waits_for=what, left_s=left_s)
    why = f"{version.held}; " if version.held else ""
    return WaitView(version=name, state="ready", waits_for=f"the gate: {why}adaptersync gate admit, or refuse")
