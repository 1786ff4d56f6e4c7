"""Figures of a service for Prometheus, told by its own loop and read by a thread that serves `/metrics`.

A service lists what it counts in a table of `Metric`s; nothing else can be told, and documents, alert rules and
dashboards are made from the same tables. Labels are bounded by what the table of the fleet holds, or words of ours. The
router has figures of its own kind (`router.metrics`): its hot path can afford no lock.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, Literal

from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from adaptersync_core.errors import ConfigError

PREFIX = "adaptersync_"
SPENT = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)  # bounds for seconds
CLIENT_S = 5.0  # how long a client may take, from its connection to its last byte
CLIENTS = 8  # at once; more are turned away

Kind = Literal["counter", "gauge", "age", "histogram"]
Labels = tuple[str, ...]


class Metric(Struct, frozen=True, kw_only=True):
    """One metric. An `age` is a gauge: seconds since a moment, counted on while its service says nothing.

    `words` are the values of its one label that are there from the beginning: what first appears with a value has not
    grown, as far as Prometheus can see.
    """

    name: str
    kind: Kind
    text: str
    labels: Labels = ()
    words: Labels = ()
    bounds: tuple[float, ...] = ()


class Metrics(Collector):
    """What one service has counted. `constant` labels are on every series."""

    def __init__(self, service: str, table: Sequence[Metric], constant: Mapping[str, str] | None = None) -> None:
        self._prefix = f"{PREFIX}{service}_"
        self._table = {figure.name: figure for figure in table}
        self._constant = dict(constant or {})
        self._lock = threading.Lock()
        self._values: dict[str, dict[Labels, float]] = {name: {} for name in self._table}
        self._counts: dict[str, dict[Labels, list[int]]] = {name: {} for name in self._table}
        for figure in table:
            if figure.kind in ("counter", "histogram") and (figure.words or not figure.labels):
                begun: list[Labels] = [(word,) for word in figure.words]
                for labels in begun or [()]:
                    self._add(figure, 0.0, labels)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        self._told(name, "counter", labels, by)

    def observe(self, name: str, value: float, *labels: str) -> None:
        self._told(name, "histogram", labels, value)

    def set(self, name: str, value: float, *labels: str) -> None:
        self._told(name, "gauge", labels, float(value))

    def since(self, name: str, ago_s: float, *labels: str) -> None:
        """It happened so many seconds ago."""
        self._told(name, "age", labels, time.monotonic() - ago_s)

    def forget(self, *names: str) -> None:
        """Drop all series: what they spoke of is not known any more, or told anew."""
        with self._lock:
            for name in names:
                self._values[name].clear()

    def collect(self) -> Iterator[Family]:
        with self._lock:
            values = {name: dict(found) for name, found in self._values.items()}
            counts = {
                name: {labels: list(each) for labels, each in found.items()} for name, found in self._counts.items()
            }
        now = time.monotonic()
        for name, figure in self._table.items():
            named, labels = self._prefix + name, (*self._constant, *figure.labels)
            family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
            if figure.kind == "histogram":
                family = HistogramMetricFamily(named, figure.text, labels=labels)
                ends = [*(str(bound) for bound in figure.bounds), "+Inf"]
                for key, found in counts[name].items():
                    buckets = [(end, float(sum(found[: place + 1]))) for place, end in enumerate(ends)]
                    family.add_metric([*self._constant.values(), *key], buckets, values[name][key])
            else:
                of = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
                family = of(named, figure.text, labels=labels)
                for key, value in values[name].items():
                    told = now - value if figure.kind == "age" else value
                    family.add_metric([*self._constant.values(), *key], told)
            yield family

    def _told(self, name: str, kind: Kind, labels: Labels, value: float) -> None:
        figure = self._table[name]
        if figure.kind != kind or len(labels) != len(figure.labels):
            raise ValueError(f"{name} is a {figure.kind} with labels {figure.labels}")
        with self._lock:
            if kind in ("gauge", "age"):
                self._values[name][labels] = value
            else:
                self._add(figure, value, labels, seen=1)

    def _add(self, figure: Metric, value: float, labels: Labels, *, seen: int = 0) -> None:
        values = self._values[figure.name]
        values[labels] = values.get(labels, 0.0) + value
        if figure.kind == "histogram":
            counts = self._counts[figure.name].setdefault(labels, [0] * (len(figure.bounds) + 1))
            counts[bisect_left(figure.bounds, value)] += seen


def text(collector: Collector) -> bytes:
    """What Prometheus reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)


class _Server(ThreadingTCPServer):
    """A thread for each client, so that none holds up another, nor the end: they are not waited for."""

    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._until: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if len(self._until) >= CLIENTS:
                return False
            self._until[request] = time.monotonic() + CLIENT_S
        return True

    def service_actions(self) -> None:
        """Between two looks for clients."""
        self._cut_off(time.monotonic())

    def server_close(self) -> None:
        super().server_close()
        self._cut_off(math.inf)

    def _cut_off(self, now: float) -> None:
        """Whose time is up, wherever it is."""
        with self._lock:  # so that none is closed meanwhile, and its number another's
            for request, until in self._until.items():
                if now > until:
                    with contextlib.suppress(OSError):  # it went by itself
                        request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._until.pop(request, None)
            super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that went away is no error of ours
            super().handle_error(request, client_address)


@contextlib.contextmanager
def served(collector: Collector, *, host: str, port: int) -> Iterator[None]:
    """Answer `GET /metrics` while the context lasts, in a thread: also when a loop hangs. Port 0: nobody listens."""
    if not port:
        yield
        return

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            told = text(collector)
            self.send_response(HTTPStatus.OK)
            self.send_header("content-type", CONTENT_TYPE_LATEST)
            self.send_header("content-length", str(len(told)))
            self.end_headers()
            self.wfile.write(told)

        def log_message(self, format: str, *arguments: object) -> None: ...

    try:
        server = _Server(host, port, Handler)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served: {error.strerror or error}",
            next_step="give each service of this host a metrics_port of its own",
            host=host,
            port=port,
        ) from error
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
