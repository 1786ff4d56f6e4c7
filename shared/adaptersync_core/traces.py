"""Spans from a version's publication to its first token, for OpenTelemetry, where `telemetry.traces_url` is set.

The trace begins with the publisher, who writes its W3C `traceparent` into the manifest and the event; whoever deals
with the version adds a span when it is done with its part. A version without one is dealt with in silence. Off, nothing
is imported and nothing is made. Knows no global tracer: a service has its own, and a program that traces itself finds
its publications below its own spans.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import time_ns
from typing import Any

from adaptersync_core.config import Config
from adaptersync_core.errors import ConfigError

SCOPE = "adaptersync"
FLUSH_S = 3.0  # how long the last spans may take when a service ends
NS = 1_000_000_000

Value = str | int | float | bool


class Root:
    """What is published; `traceparent` is empty where nothing is traced."""

    traceparent = ""

    def note(self, **attributes: Value) -> None: ...


class Traces:
    """None are made. Spans are named for what happened, and begin and end at wall clock seconds."""

    on = False

    @contextmanager
    def publication(self, **attributes: Value) -> Iterator[Root]:
        yield Root()

    def span(
        self,
        name: str,
        traceparent: str,
        began: float,
        ended: float,
        *,
        parts: Mapping[str, float] | None = None,
        failed: str = "",
        **attributes: Value,
    ) -> None:
        """One part of a version's way; `parts` follow each other up to its end, with the seconds that each took."""

    def close(self) -> None:
        """Send what is left. Blocking."""


def traces(config: Config, service: str, name: str) -> Traces:
    """Those of one service; ConfigError where they are wanted and cannot be made."""
    url = config.telemetry.traces_url
    if not url:
        return Traces()
    if importlib.util.find_spec("opentelemetry") is None:
        raise ConfigError(
            "traces are wanted, and OpenTelemetry is not installed",
            next_step="pip install 'adaptersync[otel]', or leave telemetry.traces_url empty",
        )
    return _OpenTelemetry(_processor(url), service, name, config.group.name)


def _processor(url: str) -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=url))


class _Begun(Root):
    def __init__(self, span: Any) -> None:
        self._span = span
        context = span.get_span_context()
        flags = int(context.trace_flags)
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def note(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))


class _OpenTelemetry(Traces):
    on = True

    def __init__(self, processor: Any, service: str, name: str, group: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        about = {"service.namespace": "adaptersync", "service.name": service, "service.instance.id": name}
        self._processor = processor
        # it ends when its service does, not when the interpreter happens to
        self._provider = TracerProvider(resource=Resource(about | {"adaptersync.group": group}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(SCOPE)

    @contextmanager
    def publication(self, **attributes: Value) -> Iterator[Root]:
        with self._tracer.start_as_current_span("publish", attributes=_named(attributes)) as span:
            yield _Begun(span)

    def span(
        self,
        name: str,
        traceparent: str,
        began: float,
        ended: float,
        *,
        parts: Mapping[str, float] | None = None,
        failed: str = "",
        **attributes: Value,
    ) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        above = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        if not trace.get_current_span(above).get_span_context().is_valid:
            return  # none was begun, or what stands there is no traceparent
        span = self._tracer.start_span(name, above, attributes=_named(attributes), start_time=_ns(began))
        if failed:
            span.set_status(trace.Status(trace.StatusCode.ERROR, failed[:500]))
        within = trace.set_span_in_context(span, above)
        at = ended - sum((parts or {}).values())
        for part, spent in (parts or {}).items():
            self._tracer.start_span(part, within, start_time=_ns(at)).end(min(_ns(at + spent), _ns(ended)))
            at += spent
        span.end(_ns(ended))

    def close(self) -> None:
        self._processor.force_flush(int(FLUSH_S * 1000))
        self._provider.shutdown()


def _named(attributes: Mapping[str, Value]) -> dict[str, Value]:
    return {f"adaptersync.{name}": value for name, value in attributes.items()}


def _ns(moment: float) -> int:
    """Never later than now: a span that ends in the future is refused by some that collect them."""
    return min(int(moment * NS), time_ns())
