"""Figures of a service: what is told, what begins at zero, and how they are served."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from adaptersync_core import metrics as metrics_module
from adaptersync_core.errors import ConfigError
from adaptersync_core.metrics import Metric, Metrics, served, text
from support.wait import wait_until_sync

TABLE = (
    Metric(name="jobs", kind="counter", text="Jobs", labels=("end",), words=("well", "badly")),
    Metric(name="spent", kind="histogram", text="Spent", bounds=(0.1, 1.0)),
    Metric(name="held", kind="gauge", text="Held", labels=("run",)),
    Metric(name="looked_seconds", kind="age", text="Since"),
)


@pytest.fixture
def figures() -> Metrics:
    return Metrics("test", TABLE, {"who": "me"})


def said(figures: Metrics) -> dict[str, float]:
    lines = (line for line in text(figures).decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_what_is_counted_begins_at_zero(figures: Metrics) -> None:
    assert said(figures) == {
        'adaptersync_test_jobs_total{end="well",who="me"}': 0.0,
        'adaptersync_test_jobs_total{end="badly",who="me"}': 0.0,
        'adaptersync_test_spent_bucket{le="0.1",who="me"}': 0.0,
        'adaptersync_test_spent_bucket{le="1.0",who="me"}': 0.0,
        'adaptersync_test_spent_bucket{le="+Inf",who="me"}': 0.0,
        'adaptersync_test_spent_count{who="me"}': 0.0,
        'adaptersync_test_spent_sum{who="me"}': 0.0,
    }


def test_figures_are_told(figures: Metrics) -> None:
    figures.count("jobs", "well", by=2)
    for spent in (0.1, 0.5, 7.0):
        figures.observe("spent", spent)
    figures.set("held", True, "one")
    figures.set("held", 4, "two")
    now = said(figures)
    assert now['adaptersync_test_jobs_total{end="well",who="me"}'] == 2
    assert [now[f'adaptersync_test_spent_bucket{{le="{end}",who="me"}}'] for end in ("0.1", "1.0", "+Inf")] == [1, 2, 3]
    assert now['adaptersync_test_spent_sum{who="me"}'] == pytest.approx(7.6)
    assert now['adaptersync_test_held{run="one",who="me"}'] == 1
    figures.forget("held")
    assert not any("held" in name for name in said(figures))


def test_an_age_grows_while_nothing_is_told(figures: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    moment = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: moment)
    figures.since("looked_seconds", 2.0)
    moment = 1005.0
    assert said(figures)['adaptersync_test_looked_seconds{who="me"}'] == 7.0


@pytest.mark.parametrize(
    "call",
    [("count", "held", "one"), ("set", "jobs", 1, "well"), ("set", "held", 1), ("count", "jobs", "well", "more")],
)
def test_what_is_not_in_the_table_is_a_mistake(figures: Metrics, call: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="is a"):
        getattr(figures, call[0])(*call[1:])


@pytest.fixture
def port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        chosen: int = listener.getsockname()[1]
    return chosen


def ask(url: str) -> Any:
    return urllib.request.urlopen(url, timeout=5)  # noqa: S310 (our own loopback)


def test_they_are_served_where_the_setting_says(figures: Metrics, port: int) -> None:
    figures.count("jobs", "well")
    url = f"http://127.0.0.1:{port}"
    with served(figures, host="127.0.0.1", port=port):
        with ask(f"{url}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain")
            assert b'adaptersync_test_jobs_total{end="well",who="me"} 1.0' in answer.read()
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"{url}/other")
        with refused.value:
            assert refused.value.code == 404
        with pytest.raises(ConfigError, match="metrics_port of its own"), served(figures, host="127.0.0.1", port=port):
            pass
    with pytest.raises(urllib.error.URLError):
        ask(f"{url}/metrics")


def test_a_client_that_asks_nothing_keeps_nobody_waiting(figures: Metrics, port: int) -> None:
    with (
        served(figures, host="127.0.0.1", port=port),
        socket.create_connection(("127.0.0.1", port)),
        ask(f"http://127.0.0.1:{port}/metrics") as answer,
    ):
        assert answer.status == 200


@contextlib.contextmanager
def trickling(port: int) -> Iterator[threading.Event]:
    """A client that says its request a byte at a time, for five seconds; the event is set when it is cut off."""
    cut, enough = threading.Event(), threading.Event()

    def trickle(client: socket.socket) -> None:
        until = time.monotonic() + 5.0
        while time.monotonic() < until and not enough.is_set():
            try:
                client.sendall(b"G")
                if not client.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            client.close()  # or who waits for it would wait for ever
            return
        cut.set()

    with socket.create_connection(("127.0.0.1", port), timeout=0.05) as client:
        thread = threading.Thread(target=trickle, args=(client,))
        thread.start()
        try:
            yield cut
        finally:
            enough.set()
            thread.join()


def test_a_client_that_trickles_keeps_nobody_waiting(figures: Metrics, port: int) -> None:
    """Neither another client nor the end of the service."""
    with contextlib.ExitStack() as clients:
        with served(figures, host="127.0.0.1", port=port):
            cut = clients.enter_context(trickling(port))
            with ask(f"http://127.0.0.1:{port}/metrics") as answer:
                assert answer.status == 200
            began = time.monotonic()
        assert time.monotonic() - began < 2.0
        assert cut.wait(2.0)


def test_who_trickles_is_cut_off(figures: Metrics, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "CLIENT_S", 0.2)
    with served(figures, host="127.0.0.1", port=port), trickling(port) as cut:
        assert cut.wait(3.0)


def test_more_clients_than_may_be_are_turned_away(
    figures: Metrics, port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_module, "CLIENTS", 2)
    url = f"http://127.0.0.1:{port}/metrics"

    def answered() -> bool:
        try:
            with ask(url) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    with served(figures, host="127.0.0.1", port=port):
        with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            assert not answered()
        wait_until_sync(answered)  # they have gone
    assert "Traceback" not in capfd.readouterr().err


def test_nobody_listens_by_default(figures: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "_Server", None)
    with served(figures, host="127.0.0.1", port=0):
        pass
