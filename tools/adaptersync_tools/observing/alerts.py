"""What must wake somebody: the alert rules for Prometheus. Each says what it means and what to do first.

`page` wakes somebody, `ticket` is for the next day. Counters here begin at zero for every value of their labels, or
`increase` would miss the first.
"""

from __future__ import annotations

import json
from typing import Literal

from msgspec import Struct


class Alert(Struct, frozen=True, kw_only=True):
    """`hold` is how long the condition must last. Fields in braces of the texts are labels."""

    name: str
    expr: str
    hold: str
    severity: Literal["page", "ticket"]
    summary: str
    fix: str


ALERTS = (
    Alert(
        name="AdapterSyncNoLeader",
        expr="absent(adaptersync_coordinator_leading == 1)",
        hold="1m",
        severity="page",
        summary="no coordinator leads: what is served stays, nothing is promoted",
        fix="adaptersync status; start a coordinator, or mend what its log says it lacks (Redis, the group's store)",
    ),
    Alert(
        name="AdapterSyncVersionStuck",
        expr="max by (run) (adaptersync_coordinator_undecided_seconds) > 300",
        hold="1m",
        severity="page",
        summary="a version of run {run} is neither promoted nor given up",
        fix="adaptersync status: it says which replica is waited for, or that too few are ready",
    ),
    Alert(
        name="AdapterSyncTooFewReady",
        expr='max(adaptersync_coordinator_members{state="ready"}) < max(adaptersync_coordinator_min_ready)',
        hold="2m",
        severity="page",
        summary="fewer replicas are ready than coordinator.min_ready: nothing is promoted",
        fix="adaptersync status; see the log of each replica's agent and engine",
    ),
    Alert(
        name="AdapterSyncReplicaEjected",
        expr='max by (replica) (adaptersync_coordinator_replica{state="ejected"}) > 0',
        hold="2m",
        severity="page",
        summary="replica {replica} is taken out of routing, and does not come back",
        fix="adaptersync status says why; see the log of its agent and engine",
    ),
    Alert(
        name="AdapterSyncEngineAway",
        expr="min by (replica) (adaptersync_agent_engine_reachable) < 1",
        hold="2m",
        severity="page",
        summary="the engine of replica {replica} does not answer its agent",
        fix="see the engine's log; start it again",
    ),
    Alert(
        name="AdapterSyncProbeFailed",
        expr='sum by (replica) (increase(adaptersync_agent_proofs_total{verdict="refuted"}[15m])) > 0',
        hold="0m",
        severity="page",
        summary="replica {replica} was found not to serve a version that it had loaded",
        fix="adaptersync events, and the agent's log, say what differs; do not trust this engine: start it again",
    ),
    Alert(
        name="AdapterSyncAffinityCollapse",
        expr=(
            "sum(rate(adaptersync_router_cached_tokens_total[10m]))"
            " < 0.5 * sum(rate(adaptersync_router_predicted_tokens_total[10m]))"
            " and sum(rate(adaptersync_router_predicted_tokens_total[10m])) > 1"
        ),
        hold="10m",
        severity="page",
        summary="replicas find less than half of the prompt tokens cached that routing counts on",
        fix="see that caches are large enough (vLLM's KV usage), prefix caching is on, and agents follow KV events",
    ),
    Alert(
        name="AdapterSyncLedgerLag",
        expr=(
            "min by (instance) (min_over_time(adaptersync_router_ledger_waiting[5m])) > 0"
            " and max by (instance) (increase(adaptersync_router_ledger_written_total[5m])) == 0"
        ),
        hold="0m",
        severity="page",
        summary="router {instance} has written no ledger row for five minutes, and some wait",
        fix="look at the control server: reachable, memory below its bound, disk not full",
    ),
    Alert(
        name="AdapterSyncArchiveLag",
        expr="max(adaptersync_coordinator_unarchived_seconds) > max(adaptersync_coordinator_archive_late_seconds)",
        hold="0m",
        severity="page",
        summary="the ledger is not archived in the store: it fills the control server's memory",
        fix=(
            "adaptersync jobs: does a worker run, is it at something else, or do its jobs fail? see the worker's log;"
            " or may the leader not see it (its log): make the access list anew"
        ),
    ),
    Alert(
        name="AdapterSyncSpoolFilling",
        expr=(
            "max by (instance)"
            " (adaptersync_router_ledger_spool_bytes / adaptersync_router_ledger_spool_limit_bytes) > 0.5"
        ),
        hold="0m",
        severity="page",
        summary="ledger rows fill half of the spool of router {instance}; full, it refuses requests or loses rows",
        fix="look at the control server; raise router.spool_bytes to gain time",
    ),
    Alert(
        name="AdapterSyncRowsLost",
        expr="sum by (instance) (increase(adaptersync_router_ledger_lost_total[15m])) > 0",
        hold="0m",
        severity="page",
        summary="router {instance} served requests that no ledger row tells of",
        fix="raise router.spool_bytes, or choose router.when_spool_full = refuse",
    ),
    Alert(
        name="AdapterSyncTableOld",
        expr="max by (instance) (adaptersync_router_table_age_seconds) > 20",
        hold="0m",
        severity="page",
        summary="router {instance} cannot read the table; after router.table_max_age_s it refuses all requests",
        fix="look at the control server, and at the way there from this router",
    ),
    Alert(
        name="AdapterSyncRolledBack",
        expr=(
            'sum(increase(adaptersync_coordinator_decided_total{event="version.rolled_back"}[15m])) > 0'
            ' or sum(increase(adaptersync_coordinator_decided_total{event="version.voided"}[15m])) > 0'
        ),
        hold="0m",
        severity="ticket",
        summary="a version was rolled back, or voided after it had been promoted",
        fix="adaptersync events tells which and why",
    ),
    Alert(
        name="AdapterSyncJobsFail",
        expr="max(adaptersync_worker_jobs_failed) > 0",
        hold="5m",
        severity="ticket",
        summary="jobs off the critical path have failed",
        fix="rq info; the worker's log says why, and a job may be asked for again",
    ),
)


def rules() -> str:
    """A rule file. Its texts are JSON strings, which are YAML strings, too."""
    lines = ["# Made by python -m adaptersync_tools.observing: change tools/adaptersync_tools/observing/alerts.py.", ""]
    lines += ["groups:", "  - name: adaptersync", "    rules:"]
    for alert in ALERTS:
        lines += [
            f"      - alert: {alert.name}",
            f"        expr: {json.dumps(alert.expr)}",
            f"        for: {alert.hold}",
            "        labels:",
            f"          severity: {alert.severity}",
            "        annotations:",
            f"          summary: {json.dumps(_templated(alert.summary))}",
            f"          fix: {json.dumps(alert.fix)}",
        ]
    return "\n".join(lines) + "\n"


def _templated(text: str) -> str:
    return text.replace("{", "{{ $labels.").replace("}", " }}")
