"""Records that cannot be read are left out, and said once."""

from __future__ import annotations

import logging

import pytest

from adaptersync_core.records import Ack, _warn, from_json, from_text
from adaptersync_core.records import RunRecord as Run


def test_what_cannot_be_read_is_said_once_for_each_cause(caplog: pytest.LogCaptureFixture) -> None:
    _warn.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert from_json("v1", "{", Ack) is None
            assert from_json("v2", "{", Ack) is None
            assert from_text("v1", {"epoch": "x"}, Run) is None
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [f"record of {name} is left out, it cannot be read" for name in ("v1", "v2", "v1")]
