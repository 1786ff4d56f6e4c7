"""Rows of the ledger's stream, for tests that look at them as text."""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from adaptersync_core.rollouts import FIELD


def as_text(fields: Mapping[str, str]) -> dict[str, str]:
    return {name: _text(value) for name, value in orjson.loads(fields[FIELD]).items()}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6f}" if isinstance(value, float) else str(value)
