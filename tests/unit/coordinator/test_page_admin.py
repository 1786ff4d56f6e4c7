"""What may be asked for through a page."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from adaptersync.coordinator.page import admin
from adaptersync_core.errors import NameInvalid
from adaptersync_core.records import Request

V1 = "my-run-v1-0123456789ab"


def body(**fields: Any) -> bytes:
    return orjson.dumps({"kind": "rollback", "run": "my-run", "reason": "fell", "current": V1} | fields)


def test_what_is_asked_reaches_the_coordinator_as_a_command_would() -> None:
    assert admin.read(body()) == Request(kind="rollback", run="my-run", reason="fell", current=V1)
    assert admin.read(body(kind="admit", version=V1)) == Request(kind="admit", run="my-run", version=V1, reason="fell")


@pytest.mark.parametrize(
    "wrong",
    [
        b"{",
        b"[]",
        b'{"kind": ' + b"[" * 100_000,
        body(kind="end"),
        body(run="../x"),
        body(version="latest"),
        body(kind="admit"),
        body(reason=" "),
        body(more=1),
    ],
)
def test_what_cannot_be_asked_is_refused(wrong: bytes) -> None:
    with pytest.raises(NameInvalid):
        admin.read(wrong)


def test_a_reason_is_bounded() -> None:
    assert len(admin.read(body(reason="x" * 5000)).reason) == admin.REASON
