"""The error tree: one line each, ids as attributes, and every class has its own place."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync_core import errors
from adaptersync_core.errors import AdapterSyncError, EngineRefused, Unroutable

TREE = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, AdapterSyncError)]


def make(kind: type[AdapterSyncError], reason: str, **more: str) -> AdapterSyncError:
    build: Callable[..., AdapterSyncError] = kind
    return build(reason, status=418, **more) if kind in (EngineRefused, Unroutable) else build(reason, **more)


@pytest.mark.parametrize("kind", TREE)
@given(reason=st.text(), step=st.text(), name=st.text())
def test_every_error_is_one_line_with_its_ids(kind: type[AdapterSyncError], reason: str, step: str, name: str) -> None:
    error = make(kind, reason, next_step=step, version=name)
    assert len(str(error).splitlines()) <= 1
    assert error.ids["version"] == name
    assert (error.reason, error.next_step) == (reason, step)
    assert " ".join(f"version={name}".split()) in str(error)


def test_a_line_reads_as_reason_ids_and_next_step() -> None:
    error = errors.StoreError("no space", next_step="make some", version="run-v1-abc", missing=None, size=3)
    assert str(error) == "no space (version=run-v1-abc size=3); make some"
    assert str(errors.StoreError("no space")) == "no space"


def test_codes_are_unique_and_exit_codes_are_not_zero() -> None:
    assert len({kind.code for kind in TREE}) == len(TREE)
    assert all(0 < kind.exit_code < 126 for kind in TREE)
    assert all(400 <= kind.http_status < 600 for kind in TREE)


def test_the_docstring_draws_the_whole_tree() -> None:
    assert errors.__doc__ is not None
    for kind in TREE:
        assert f"{kind.__name__}\n" in errors.__doc__ or f"{kind.__name__} " in errors.__doc__


def test_what_may_succeed_later_says_so() -> None:
    retryable = {kind.__name__ for kind in TREE if kind.retryable}
    assert retryable == {"ControlUnavailable", "Conflict", "EngineUnavailable", "StoreGone"}
