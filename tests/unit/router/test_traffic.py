"""What a router process counts for whoever watches the fleet."""

from __future__ import annotations

from typing import Any

from adaptersync.router.traffic import Counts
from adaptersync_core.records import Traffic
from adaptersync_core.rollouts import Row


def row(outcome: str = "ok", **fields: Any) -> Row:
    return Row(
        request_id="r", router="g", path="/v1/completions", asked="run", outcome=outcome, started_at=0.0, **fields
    )


def test_requests_are_counted_by_outcome_and_by_routing_with_their_tokens() -> None:
    counts = Counts()
    counts.ended(row(routing="cold", prompt_tokens=100, cached_tokens=0, completion_tokens=7))
    counts.ended(row(routing="affinity", prompt_tokens=100, cached_tokens=96, completion_tokens=5))
    counts.ended(row("refused", status=404))  # nobody was chosen, and nothing is known of tokens
    assert counts.report({}) == Traffic(
        ended={"ok": 2, "refused": 1},
        routed={"cold": 1, "affinity": 1},
        tokens={"prompt": 200, "cached": 96, "completion": 12},
    )


def test_what_is_in_flight_at_ranks_is_added_up_by_replica() -> None:
    assert Counts().report({"replica-0/0": 2, "replica-0/1": 3, "replica-1": 1}).at == {"replica-0": 5, "replica-1": 1}


def test_a_report_is_of_its_moment() -> None:
    counts = Counts()
    before = counts.report({})
    counts.ended(row())
    assert before.ended == {}
