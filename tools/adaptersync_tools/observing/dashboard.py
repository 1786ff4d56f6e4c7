"""The Grafana dashboard: panels over the services' metrics, in rows by what one wants to know."""

from __future__ import annotations

from typing import Any

import orjson
from msgspec import Struct

WIDTH, HEIGHT, COLUMNS = 8, 8, 24
UID = "adaptersync"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Panel(Struct, frozen=True, kw_only=True):
    """`queries` by their legend; a legend may name labels in double braces."""

    title: str
    text: str
    queries: dict[str, str]
    unit: str = "short"
    stat: bool = False


def _quantile(share: float, name: str, by: str = "") -> str:
    return f"histogram_quantile({share}, sum by (le{by}) (rate({name}_bucket[$__rate_interval])))"


def _rate(name: str, by: str) -> str:
    return f"sum by ({by}) (rate({name}[$__rate_interval]))"


R, C, A, W = (f"adaptersync_{service}_" for service in ("router", "coordinator", "agent", "worker"))

ROWS: dict[str, tuple[Panel, ...]] = {
    "Is it well": (
        Panel(
            title="Leaders", text="Exactly one coordinator leads.", stat=True,
            queries={"leading": f"sum({C}leading)"},
        ),
        Panel(
            title="Replicas by state", text="Of the table.", stat=True,
            queries={"{{state}}": f"max by (state) ({C}members)"},
        ),
        Panel(
            title="Oldest undecided version", text="Since its publication, by run.", unit="s", stat=True,
            queries={"{{run}}": f"max by (run) ({C}undecided_seconds)"},
        ),
    ),
    "Versions": (
        Panel(
            title="From publication to promotion", text="Of promoted versions.", unit="s",
            queries={
                "p50": _quantile(0.5, f"{C}promotion_seconds"), "p95": _quantile(0.95, f"{C}promotion_seconds"),
            },
        ),
        Panel(
            title="Phases at the replicas", text="95 % of versions were faster.", unit="s",
            queries={"{{phase}}": _quantile(0.95, f"{R}replica_phase_seconds", ", phase")},
        ),
        Panel(
            title="Decisions", text="A minute, by the events they made.",
            queries={"{{event}}": f"60 * {_rate(f'{C}decided_total', 'event')}"},
        ),
        Panel(
            title="Versions in the fleet", text="By run and state.",
            queries={"{{run}} {{state}}": f"max by (run, state) ({C}versions)"},
        ),
        Panel(
            title="Proofs", text="A minute, by verdict.",
            queries={"{{verdict}}": f"60 * {_rate(f'{A}proofs_total', 'verdict')}"},
        ),
        Panel(
            title="Versions waiting at the gate", text="Since when, by run.", unit="s",
            queries={"{{run}}": f"max by (run) ({C}gated_seconds)"},
        ),
    ),
    "Requests": (
        Panel(
            title="Requests", text="A second, by outcome.", unit="reqps",
            queries={"{{outcome}}": _rate(f"{R}requests_total", "outcome")},
        ),
        Panel(
            title="Time of a request", text="From arrival to last byte.", unit="s",
            queries={"p50": _quantile(0.5, f"{R}total_seconds"), "p95": _quantile(0.95, f"{R}total_seconds")},
        ),
        Panel(
            title="First token", text="From sending to a replica; 95 % were faster.", unit="s",
            queries={"{{replica}}": _quantile(0.95, f"{R}first_token_seconds", ", replica")},
        ),
        Panel(
            title="In flight", text="Sequences by replica, over all routers.",
            queries={"{{replica}}": f"sum by (replica) ({R}inflight)", "held": f"sum({R}held)"},
        ),
        Panel(
            title="Imbalance", text="Most sequences at one replica over the mean; 1 is even.",
            queries={"{{instance}}": f"{R}imbalance"},
        ),
        Panel(
            title="Sent elsewhere", text="A second, by reason.",
            queries={"{{reason}}": _rate(f"{R}retries_total", "reason")},
        ),
    ),
    "Caches": (
        Panel(
            title="Choices of a replica", text="A second, by what decided.",
            queries={"{{routing}}": _rate(f"{R}routed_total", "routing")},
        ),
        Panel(
            title="Prompt tokens cached", text="Share of all, as replicas report it, and as routing expected it.",
            unit="percentunit",
            queries={
                "cached": f"sum(rate({R}cached_tokens_total[$__rate_interval]))"
                f" / sum(rate({R}prompt_tokens_total[$__rate_interval]))",
                "expected": f"sum(rate({R}predicted_tokens_total[$__rate_interval]))"
                f" / sum(rate({R}prompt_tokens_total[$__rate_interval]))",
            },
        ),
        Panel(
            title="Caches behind their engines", text="By agents that follow KV events.", unit="s",
            queries={"{{replica}}": f"max by (replica) ({A}cache_lag_seconds)"},
        ),
    ),
    "Ledger, store and jobs": (
        Panel(
            title="Rows waiting for Redis", text="By router.", queries={"{{instance}}": f"{R}ledger_waiting"},
        ),
        Panel(
            title="Spool", text="Share that is taken.", unit="percentunit",
            queries={"{{instance}}": f"{R}ledger_spool_bytes / {R}ledger_spool_limit_bytes"},
        ),
        Panel(
            title="Jobs", text="Of the group's queue.",
            queries={
                "waiting": f"max({W}jobs_waiting)", "running": f"max({W}jobs_running)",
                "failed": f"max({W}jobs_failed)",
            },
        ),
        Panel(
            title="Streams in Redis", text="Entries.",
            queries={"rollouts": f"max({W}rollouts_rows)", "events": f"max({W}events_entries)"},
        ),
        Panel(
            title="Age of routers' tables", text="After router.table_max_age_s they refuse.", unit="s",
            queries={"{{instance}}": f"{R}table_age_seconds"},
        ),
        Panel(
            title="Oldest row that is not archived", text="In Redis, and not yet in the store.", unit="s",
            queries={"oldest": f"max({C}unarchived_seconds)"},
        ),
        Panel(
            title="Agents' last reports", text="Since the coordinator heard of them.", unit="s",
            queries={"{{replica}}": f"max by (replica) ({C}heard_seconds)"},
        ),
    ),
}  # fmt: skip


def queries() -> list[str]:
    return [query for row in ROWS.values() for panel in row for query in panel.queries.values()]


def dashboard() -> str:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_header(len(panels) + 1, title, top))
        top += 1
        for place, panel in enumerate(row):
            across = place % (COLUMNS // WIDTH)
            panels.append(_panel(len(panels) + 1, panel, across * WIDTH, top + HEIGHT * (place // (COLUMNS // WIDTH))))
        top += HEIGHT * -(-len(row) // (COLUMNS // WIDTH))
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    body = {
        "uid": UID,
        "title": "adaptersync",
        "tags": ["adaptersync"],
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [source]},
        "panels": panels,
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode() + "\n"


def _header(number: int, title: str, top: int) -> dict[str, Any]:
    place = {"h": 1, "w": COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, left: int, top: int) -> dict[str, Any]:
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": left, "y": top},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query, "legendFormat": legend}
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }
