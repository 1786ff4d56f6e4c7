"""Lives of a small fleet told in words, for tests of single rules."""

from __future__ import annotations

from typing import Any

from support.world import World, apply, coordinate, name_of, new_world, report_all, settle

V = ["", *(name_of("run1", seq) for seq in range(1, 20))]


def after(world: World, *actions: str) -> World:
    """Actions as words: "publish run1", "refuse r1", "settle", ..."""
    for action in actions:
        match action.split():
            case ["settle"]:
                world = settle(world)
            case ["coordinate"]:
                world = coordinate(world)
            case ["report"]:
                world = report_all(world)
            case ["works", name]:  # its agent does all it has to do
                before = None
                while world != before:
                    before, world = world, apply(world, ("work", name))
            case ["later", seconds]:  # time passes, and everybody who speaks has spoken since
                world = report_all(apply(world, ("wait", seconds)))
            case words:
                world = apply(world, tuple(words))
    return world


def states(world: World) -> dict[str, str]:
    return {name: version.state for name, version in world.table.versions.items()}


def members(world: World) -> dict[str, str]:
    return {name: member.state for name, member in world.table.members.items()}


def fate(world: World, name: str) -> tuple[str, str]:
    record = world.records[name]
    return record.state, record.reason


def ready(**settings: Any) -> World:
    """A fleet at rest, everybody ready, nothing published."""
    return settle(new_world(**settings))
