"""One trace from a publication to the first token under it, over all services of a simulated fleet; off, nothing."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core import traces as traces_module
from adaptersync_core.config import Config, TelemetrySection, load_config
from adaptersync_core.errors import ConfigError
from adaptersync_core.traces import traces
from support.wait import wait_until
from support.whole_fleet import WholeFleet, whole_fleet

pytest.importorskip("opentelemetry.sdk")
PHASES = ["visible", "staged", "verified", "loaded", "proved"]


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What would be sent, of all services."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    memory = InMemorySpanExporter()
    monkeypatch.setattr(memory, "shutdown", lambda: None)  # it is read after a service has ended
    monkeypatch.setattr(traces_module, "_processor", lambda _url: SimpleSpanProcessor(memory))
    return memory


@pytest.fixture
def traced_config(config: Config) -> Config:
    return replace(config, telemetry=TelemetrySection(traces_url="http://127.0.0.1:4318/v1/traces"))


@pytest.fixture
async def traced(traced_config: Config, tmp_path: Path, exported: Any) -> AsyncIterator[WholeFleet]:
    async with whole_fleet(traced_config, tmp_path) as fleet:
        yield fleet


def named(exported: Any, name: str) -> list[Any]:
    return [span for span in exported.get_finished_spans() if span.name == name]


def parent(span: Any) -> str:
    return f"{span.parent.span_id:016x}"


async def test_one_trace_from_publication_to_first_token(traced: WholeFleet, exported: Any) -> None:
    version = await traced.promoted(await traced.trainer())
    assert (await traced.complete(version, stream=True)).status == 200
    assert (await traced.complete(version)).status == 200
    await wait_until(lambda: named(exported, "first token"), timeout_s=10)

    (root,) = named(exported, "publish")
    assert root.attributes["adaptersync.version"] == version
    (told,) = await traced.events("adapter.published")
    manifest = await traced.registry.manifest(version)
    context = root.get_span_context()
    assert told.traceparent.startswith(f"00-{context.trace_id:032x}-{context.span_id:016x}-")
    assert int(told.traceparent[-2:], 16) & 1  # sampled
    assert manifest is not None
    assert manifest.traceparent == told.traceparent
    assert traced.store.read_manifest(version).traceparent == told.traceparent

    spans = exported.get_finished_spans()
    assert {f"{span.get_span_context().trace_id:032x}" for span in spans} == {f"{context.trace_id:032x}"}
    services = {span.name: span.resource.attributes["service.name"] for span in spans}
    assert services["bring"] == "agent"
    assert services["version.promoted"] == "coordinator"
    assert services["first token"] == "router"
    (promoted,), (first,) = named(exported, "version.promoted"), named(exported, "first token")
    brought = named(exported, "bring")
    assert {span.attributes["adaptersync.replica"] for span in brought} == {"replica-0", "replica-1"}
    for span in (promoted, first, *brought):
        assert parent(span) == f"{context.span_id:016x}"
        assert root.start_time <= span.end_time
    assert first.start_time >= max(span.end_time for span in brought)
    for span in brought:
        within = [each for each in spans if each.parent and each.parent.span_id == span.get_span_context().span_id]
        assert [each.name for each in within] == PHASES
        for one, next_one in itertools.pairwise(within):
            assert one.end_time == pytest.approx(next_one.start_time, abs=1000)
        assert within[-1].end_time <= span.end_time


async def test_a_refusal_ends_in_an_error_with_its_reason(traced: WholeFleet, exported: Any) -> None:
    trainer = await traced.trainer()
    for replica in traced.replicas.values():
        replica.faults(corrupt_slot=True)
    publication = await traced.publish(trainer)
    assert (await traced.outcome(publication)).state == "rolled_back"
    await wait_until(lambda: named(exported, "version.rolled_back"), timeout_s=10)
    for span in (*named(exported, "version.rolled_back"), *named(exported, "bring")):
        assert span.status.status_code.name == "ERROR"
        assert "refuted" in span.status.description


async def test_what_was_published_untraced_is_dealt_with_in_silence(
    traced_config: Config, tmp_path: Path, exported: Any
) -> None:
    """A fleet that traces, and a trainer that does not."""
    async with whole_fleet(traced_config, tmp_path) as fleet:
        fleet.config = replace(fleet.config, telemetry=TelemetrySection())
        version = await fleet.promoted(await fleet.trainer())
        assert (await fleet.complete(version)).status == 200
        (told,) = await fleet.events("adapter.published")
        assert told.traceparent == ""
    assert exported.get_finished_spans() == ()


def test_a_publication_stands_below_what_the_program_traces_itself(traced_config: Config, exported: Any) -> None:
    from opentelemetry.sdk.trace import TracerProvider

    mine = TracerProvider().get_tracer("trainer")
    ours = traces(traced_config, "trainer", "run")
    with mine.start_as_current_span("step") as step, ours.publication(run="run") as root:
        assert root.traceparent[3:35] == f"{step.get_span_context().trace_id:032x}"
    (span,) = named(exported, "publish")
    assert parent(span) == f"{step.get_span_context().span_id:016x}"


@pytest.mark.parametrize("traceparent", ["", "garbage", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "00-zz-1-01"])
def test_what_is_no_traceparent_begins_no_trace(traced_config: Config, exported: Any, traceparent: str) -> None:
    traces(traced_config, "agent", "replica-0").span("bring", traceparent, 1.0, 2.0)
    assert exported.get_finished_spans() == ()


def test_off_nothing_is_imported() -> None:
    code = (
        "import sys\n"
        "from adaptersync_core.config import Config\n"
        "from adaptersync_core.traces import traces\n"
        "off = traces(Config(), 'router', 'r')\n"
        "with off.publication(run='x') as root: assert root.traceparent == ''\n"
        "off.span('bring', '00-1-1-01', 1.0, 2.0); off.close()\n"
        "assert not off.on\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_wanted_and_not_installed(traced_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces_module.importlib.util, "find_spec", lambda _: None)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"adaptersync\[otel\]"):
        traces(traced_config, "agent", "replica-0")


def test_an_address_is_one() -> None:
    with pytest.raises(ConfigError, match="http://host:4318"):
        load_config(environment={"ADAPTERSYNC_TELEMETRY__TRACES_URL": "collector:4317"})


def test_spans_are_sent_where_the_setting_says(traced_config: Config) -> None:
    """The real exporter, to a port of ours."""
    from http.server import BaseHTTPRequestHandler, HTTPServer
    from threading import Thread

    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        ours = traces(replace(traced_config, telemetry=TelemetrySection(traces_url=url)), "trainer", "run")
        with ours.publication(run="the-run"):
            pass
        ours.close()
        server.shutdown()
        thread.join()
    ((path, body),) = got
    assert path == "/v1/traces"
    assert body
