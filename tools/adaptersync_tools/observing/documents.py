"""`deploy/METRICS.md`: every metric with its meaning, and every alert with what to do."""

from __future__ import annotations

from adaptersync_tools.observing.alerts import ALERTS
from adaptersync_tools.observing.names import TABLES, labels, metric

HEAD = """# Metrics and alerts

Made by `python -m adaptersync_tools.observing` from the services' own tables: change those.

A router has `/metrics` at its own port. Agents, coordinators and workers have it where `agent.metrics_port`,
`coordinator.metrics_port` or `jobs.metrics_port` says, on `telemetry.metrics_host`, the loopback unless told otherwise;
by default nowhere. Whoever reaches it may read it: it tells names of runs, versions and replicas.

- `prometheus/alerts.yml` goes under `rule_files:` of Prometheus; `prometheus/prometheus.yml` is an example of the rest.
- `grafana/provisioning` and `grafana/dashboards` go where Grafana looks for them (`/etc/grafana/provisioning`,
  `/var/lib/grafana/dashboards`).

Labels are bounded: replicas, runs and versions of the fleet's table, and words of our own. Of a histogram there are
`_bucket`, `_sum` and `_count`. An age is a gauge that grows until its service tells anew.
"""


def metrics() -> str:
    lines = [HEAD]
    for service, table in TABLES.items():
        lines += [f"## {service.capitalize()}", "", "| metric | kind | labels | meaning |", "| --- | --- | --- | --- |"]
        for figure in table:
            by = ", ".join(labels(service, figure))
            lines.append(f"| `{metric(service, figure)}` | {figure.kind} | {by} | {figure.text} |")
        lines.append("")
    lines += [
        "## Alerts",
        "",
        "| alert | severity | after | what it means | what to do |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {alert.name} | {alert.severity} | {alert.hold} | {alert.summary} | {alert.fix} |" for alert in ALERTS]
    return "\n".join(lines) + "\n"
