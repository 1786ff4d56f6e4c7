"""Write what is made from the code into a directory: `python -m adaptersync_tools.observing [deploy]`."""

from __future__ import annotations

import sys
from pathlib import Path

from adaptersync_tools import explain
from adaptersync_tools.observing.alerts import rules
from adaptersync_tools.observing.dashboard import dashboard
from adaptersync_tools.observing.documents import metrics

WRITTEN = {
    "CONFIG.md": explain.document,
    "METRICS.md": metrics,
    "prometheus/alerts.yml": rules,
    "grafana/dashboards/adaptersync.json": dashboard,
}

if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "deploy")
    for name, made in WRITTEN.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(made(), encoding="utf-8")
