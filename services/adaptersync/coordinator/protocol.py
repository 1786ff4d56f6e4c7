"""What to do next: a pure function of what was read.

Rules are asked in order and the first that has something to do makes the decision; after it is committed everything is
read again. So each rule sees the effect of the one before, and an interrupted coordinator, or the next leader, goes on
from the records alone.
"""

from __future__ import annotations

from collections.abc import Callable

from adaptersync.coordinator import gate, membership, promotion, retirement
from adaptersync.coordinator.draft import Draft
from adaptersync_core.config import Config
from adaptersync_core.records import Decision, Fleet

Rule = Callable[[Fleet, Config], Draft | None]

RULES: tuple[Rule, ...] = (
    promotion.runs,  # a newer trainer fences the older one before anything of it is promoted
    membership.members,  # who counts is settled before anybody is counted
    retirement.requests,
    gate.overdue,  # a verdict that came in time was asked for before
    promotion.conclude,
    retirement.drain,
    retirement.forget,  # makes room for what is taken up
    promotion.take_up,
)


def decide(fleet: Fleet, config: Config) -> Decision | None:
    """The next decision, or None when the fleet is as it should be."""
    for rule in RULES:
        draft = rule(fleet, config)
        if draft is not None:
            return draft.decision(config.coordinator.min_ready)
    return None
