"""What a fleet is started from, in whichever order."""

from __future__ import annotations

from support.whole_fleet import WholeFleet

PARTS = ("coordinator", "replicas", "router", "trainer")


async def start_part(fleet: WholeFleet, part: str) -> None:
    """Any of `PARTS` but the trainer, of which each test has its own."""
    match part:
        case "coordinator":
            fleet.start_coordinator()
        case "replicas":
            for replica in fleet.replicas.values():
                await replica.start()
        case "router":
            await fleet.start_router()
        case _:
            raise ValueError(part)
