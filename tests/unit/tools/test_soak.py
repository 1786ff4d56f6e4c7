"""The judge of soaks sees whatever grows, and nothing where nothing does."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from adaptersync_core.headers import SUBSTITUTED, VERSION
from adaptersync_tools.cli.common import run_command
from adaptersync_tools.demo.trl_calls import ScriptedTRL
from adaptersync_tools.output import console
from adaptersync_tools.soak import drive
from adaptersync_tools.soak.__main__ import soak
from adaptersync_tools.soak.look import Sample, Server, kind
from adaptersync_tools.soak.processes import Process, processes
from adaptersync_tools.soak.report import Report, document, show
from adaptersync_tools.soak.restarts import planned
from adaptersync_tools.soak.traffic import KINDS, Traffic
from adaptersync_tools.soak.trainers import BY_TRL, ask, total
from adaptersync_tools.soak.trend import growth, slope, sparkline, thin, warm
from adaptersync_tools.soak.verdicts import Bounds, Check, judge, lives, promoted, served, undisturbed
from adaptersync_tools.supervisor import Spec, Supervisor
from support.wait import wait_until_sync

MB = 1 << 20
SECONDS, LOOKS = 1800.0, 360
BOUNDS = Bounds(versions=400, every_s=4.5, runs=3, slots=16, keep_last=8, keep_s=40.0, session_s=60.0, clients=4)
SERVICES = ("engine-0", "agent-0", "router", "redis-control")


def test_the_slope_is_that_of_most_points() -> None:
    line = [(float(at), 100 + 0.5 * at) for at in range(100)]
    assert slope(line) == pytest.approx(0.5)
    wild = [(at, 10_000.0 if at % 5 == 0 else value) for at, value in line]
    assert slope(wild) == pytest.approx(0.5, abs=0.05)
    assert growth(line) == pytest.approx(49.5)
    assert slope([]) == slope([(1.0, 2.0)]) == growth([]) == 0.0
    assert slope([(1.0, 2.0), (1.0, 9.0)]) == 0.0  # of one instant


def test_a_third_of_a_life_is_for_warming_up() -> None:
    assert warm([(float(at), 0.0) for at in range(10, 20)])[0][0] == 13.0
    assert warm([]) == []
    assert thin([(float(at), 0.0) for at in range(1000)], 4) == [(0.0, 0.0), (333.0, 0.0), (666.0, 0.0), (999.0, 0.0)]


def test_a_course_is_drawn_to_scale() -> None:
    assert sparkline([(0, 10.0), (1, 10.5)], width=2, least=4.0) == "▁▂"
    assert sparkline([(0, 10.0), (1, 20.0)], width=2, least=4.0) == "▁█"
    assert sparkline([], width=2, least=4.0) == ""


def steady(**grows: float) -> list[Sample]:
    """Samples of half an hour; `grows` is megabytes by service (with "_" for "-"), in all of it."""
    samples = []
    for number in range(LOOKS):
        at_s, share = number * SECONDS / LOOKS, number / LOOKS
        running = [
            Process(
                service=service,
                role="",
                pid=100 + place,
                # as real ones do, it wavers
                rss=round((50 + grows.get(service.replace("-", "_"), 0.0) * share + (number * 7 % 11) / 20) * MB),
                files=20 + number % 3,
                threads=4,
            )
            for place, service in enumerate(SERVICES)
        ]
        samples.append(
            Sample(
                at_s=at_s,
                published=round(400 * share),
                processes=running,
                servers={
                    "redis-control": Server(
                        used=5 * MB, apart={}, keys={"table": 1, "version:*": 200, "verified:*": 200}
                    ),
                    "redis-cache": Server(used=9 * MB, apart={}, keys={"lane:*": 80}),
                },
                adapters={"replica-0": 4, "replica-1": 5},
                stored=20,
                markers=2000,
                leftovers=0,
                staged={"replica-0": 6},
                disk={"store": MB},
            )
        )
    return samples


def altered(samples: list[Sample], **changes: Any) -> list[Sample]:
    """Each sample changed; a callable is given the share of the time that has passed."""
    made = []
    for number, sample in enumerate(samples):
        values = {name: value(number / LOOKS) if callable(value) else value for name, value in changes.items()}
        made.append(replace(sample, **values))
    return made


def broken(samples: list[Sample]) -> dict[str, str]:
    return {each.what: each.figure for each in judge(samples, lives(samples), BOUNDS) if not each.holds}


def server(used: float, *, apart: float = 0.0, keys: dict[str, int] | None = None) -> Server:
    return Server(used=round(used), apart={"rollouts": round(apart)}, keys=keys or {})


def servers(control: Server | None = None, cache: Server | None = None) -> dict[str, Server]:
    return {"redis-control": control or server(5 * MB), "redis-cache": cache or server(9 * MB)}


def test_what_is_steady_holds() -> None:
    samples = steady()
    assert broken(samples) == {}
    assert all(life.grows == pytest.approx(0.0, abs=0.3) for life in lives(samples))


@pytest.mark.parametrize("service", SERVICES)
def test_a_process_that_grows_is_named(service: str) -> None:
    """Nine megabytes in four hundred versions, of fifty."""
    found = broken(steady(**{service.replace("-", "_"): 9.0}))
    assert list(found) == ["memory of every process"]
    assert f"{service} +2.2" in found["memory of every process"]


def test_growth_within_the_bound_holds() -> None:
    samples = steady(router=4.0)  # one in a hundred versions
    assert broken(samples) == {}
    (life,) = [life for life in lives(samples) if life.service == "router"]
    assert life.grows_100 == pytest.approx(1.0, abs=0.1)
    assert life.bound == pytest.approx(1.5 * 267 / 100, abs=0.1)


def test_a_large_process_may_grow_by_its_share() -> None:
    large = [
        replace(sample, processes=[replace(each, rss=20 * each.rss) for each in sample.processes])
        for sample in steady(agent_0=1.5)  # 30 MB in four hundred versions, of a thousand
    ]
    assert broken(large) == {}


def test_what_fills_in_the_first_third_is_no_leak() -> None:
    samples = steady()
    early = [
        replace(sample, processes=[replace(each, rss=each.rss + min(number, 100) * MB) for each in sample.processes])
        for number, sample in enumerate(samples)
    ]
    assert broken(early) == {}


def test_a_process_that_was_started_again_is_another() -> None:
    samples = steady()
    again = [
        replace(
            sample, processes=[replace(each, pid=each.pid + (1000 if number > 180 else 0)) for each in sample.processes]
        )
        for number, sample in enumerate(samples)
    ]
    assert broken(again) == {}
    assert len(lives(again)) == 2 * len(SERVICES)


def test_a_short_life_is_not_judged_and_a_sort_without_another_is_missing() -> None:
    def short(sample: Sample, number: int) -> Sample:
        return replace(
            sample, processes=[each for each in sample.processes if each.service != "agent-0" or number % 360 < 60]
        )

    samples = [short(sample, number) for number, sample in enumerate(steady(agent_0=90.0))]
    assert broken(samples) == {"judged": "none of agent"}
    (life,) = [life for life in lives(samples) if life.service == "agent-0"]
    assert life.grows is None


def test_a_short_run_may_grow_as_much_as_one_of_a_hundred_versions() -> None:
    few = altered(steady(router=2.0), published=lambda share: round(10 * share))
    assert broken(few) == {}
    assert list(broken(altered(steady(router=9.0), published=lambda share: round(10 * share)))) == [
        "memory of every process"
    ]


def test_the_ledger_in_the_control_server_is_no_leak() -> None:
    def grown(share: float) -> dict[str, Server]:
        return servers(server((5 + 40 * share) * MB, apart=40 * share * MB))

    assert broken(altered(steady(redis_control=40.0), servers=grown)) == {}
    other = altered(steady(redis_control=40.0), servers=lambda share: servers(cache=server(0.0, apart=share)))
    assert list(broken(other)) == [
        "memory of every process"
    ]  # what is left out of one server explains nothing in another


def test_what_the_streams_do_not_explain_is_a_leak() -> None:
    found = broken(altered(steady(), servers=lambda share: servers(server((5 + 40 * share) * MB))))
    assert list(found) == ["memory in use, redis-control"]
    found = broken(altered(steady(), servers=lambda share: servers(cache=server((9 + 40 * share) * MB))))
    assert list(found) == ["memory in use, redis-cache"]
    assert "redis-control" in broken(steady(redis_control=40.0))["memory of every process"]


@pytest.mark.parametrize(("field", "word"), [("files", "files"), ("threads", "threads")])
def test_open_files_and_threads_that_add_up_are_found(field: str, word: str) -> None:
    samples = [
        replace(sample, processes=[replace(each, **{field: 10 + number // 3}) for each in sample.processes])
        for number, sample in enumerate(steady())
    ]
    assert list(broken(samples)) == ["open files and threads"]
    assert f"router: 70 {word}, then 110" in broken(samples)["open files and threads"]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"adapters": {"replica-0": 4, "replica-1": 17}}, "adapters of one engine"),
        ({"adapters": {}}, "adapters of one engine"),  # nobody was asked
        ({"stored": lambda share: round(200 * share)}, "versions in the store"),
        ({"staged": lambda share: {"replica-0": 1 + round(200 * share)}}, "versions on one agent's disk"),
        ({"markers": lambda share: 1 + round(88 * 400 * share)}, "markers in the store"),
        ({"leftovers": 1}, "half versions in the store"),
        ({"servers": servers(server(5 * MB, keys={"version:*": 401}))}, "keys, redis-control"),
        ({"servers": servers(cache=server(9 * MB, keys={"owned:*": 18}))}, "keys, redis-cache"),
        ({"servers": servers(cache=server(9 * MB, keys={"new:*": 17}))}, "keys, redis-cache"),
    ],
)
def test_what_is_beyond_its_bound_is_found(changes: dict[str, Any], what: str) -> None:
    assert list(broken(altered(steady(), **changes))) == [what]


def test_a_request_that_failed_and_a_version_that_did_not_come_are_found() -> None:
    assert served(100, 0).holds
    assert not served(100, 1).holds
    assert not served(0, 0).holds
    events = {"adapter.published": 400, "version.promoted": 398, "version.superseded": 2}
    assert promoted(events, BOUNDS).holds
    for change in (
        {"version.rolled_back": 1},
        {"version.voided": 1},
        {"version.promoted": 397},
        {"adapter.published": 399},
    ):
        assert not promoted(events | change, BOUNDS).holds
    assert undisturbed([]).holds
    assert not undisturbed(["router ended by itself"]).holds


def test_keys_are_counted_by_kind() -> None:
    head = "adaptersync:{group}:"
    names = [f"{head}table", f"{head}version:run-v1-0", "rq:job:verify:x", "rq:workers", "other"]
    assert [kind(name, head) for name in names] == ["table", "version:*", "rq:job:*", "rq:workers", "other"]


def test_restarts_leave_the_last_replica_alone() -> None:
    for seed in range(20):
        restarts = list(planned(seed, seconds=1800, replicas=3))
        assert {restart.number for restart in restarts} <= {0, 1}
        assert {restart.kind for restart in restarts} == {"replica restarted", "agent killed"}
        assert all(0 < restart.at_s < 1700 for restart in restarts)
        assert restarts == list(planned(seed, seconds=1800, replicas=3))
    assert len(list(planned(1, seconds=30, replicas=2))) == 2


def test_every_process_below_a_supervisor_is_measured(tmp_path: Path) -> None:
    child = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    with Supervisor(tmp_path) as supervisor:
        supervisor.start(Spec(name="parent", command=(sys.executable, "-c", child), tier=0))
        wait_until_sync(lambda: len(list(processes(supervisor.services))) == 3)
        found = {process.role: process for process in processes(supervisor.services)}
        assert set(found) == {"keeper", "", "child"}
        assert found["keeper"].pid == supervisor.services["parent"].pid
        assert min(found["keeper"].rss, found[""].rss) > 4 * MB  # interpreters; what they start may just begin
        assert found[""].threads == 1
        assert 3 <= found[""].files < 20
    assert list(processes(supervisor.services)) == []


# traffic


async def _serve(*, status: int = 200, done: bool = True) -> TestServer:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {"x-adaptersync-version": "soak-v1-0123456789ab"}
        if status == 200 and body.get("stream"):
            lines = b'data: {"choices": []}\n\n' + (b"data: [DONE]\n\n" if done else b"")
            return web.Response(body=lines, headers=headers)
        message = {"role": "assistant", "content": "yes"}
        return web.json_response({"choices": [{"message": message}]}, status=status, headers=headers)

    app = web.Application()
    for path in ("/v1/completions", "/v1/chat/completions"):
        app.router.add_post(path, answer)
    server = TestServer(app)
    await server.start_server()
    return server


async def _ask(server: TestServer) -> Traffic:
    traffic = Traffic([str(server.make_url("")).rstrip("/")], "soak", seed=1)

    class Enough(list[str]):
        """The router is drawn once a turn; each kind has had one when all are through."""

        def __getitem__(self, place: Any) -> Any:
            if set(traffic.asked) >= set(KINDS):
                traffic.stop()
            return super().__getitem__(place)

    traffic._routers = Enough(traffic._routers)
    try:
        await traffic.run(1)
    finally:
        await server.close()
    return traffic


async def test_every_kind_is_asked_and_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptersync_tools.soak.traffic.REST_S", 0.0)
    traffic = await _ask(await _serve())
    assert set(traffic.asked) == set(KINDS)
    assert traffic.failed == 0


async def test_refusals_and_streams_without_an_end_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptersync_tools.soak.traffic.REST_S", 0.0)
    traffic = await _ask(await _serve(status=503))
    assert traffic.failed == traffic.asked.total()
    assert "503" in traffic.failures[0].what
    cut = await _ask(await _serve(done=False))
    assert {failure.kind for failure in cut.failures} == {"stream"}


class Answering(ScriptedTRL):
    """TRL whose rollouts get this answer."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        super().__init__("")
        self._answer = status, headers

    async def rollout(self, name: str, prompt: list[int], *, max_tokens: int = 4) -> tuple[int, dict[str, str], Any]:
        return *self._answer, {}


@pytest.mark.parametrize(
    ("status", "headers", "failed"),
    [
        (200, {VERSION: "soak-relayed-v3-0123456789ab"}, 0),
        (503, {VERSION: "soak-relayed-v3-0123456789ab"}, 1),
        (200, {}, 1),
        (200, {VERSION: "soak-v3-0123456789ab"}, 1),  # another trainer's
        (200, {VERSION: "soak-relayed-v2-0123456789ab", SUBSTITUTED: "trl-policy-v3"}, 1),
    ],
)
async def test_trl_is_to_be_answered_by_its_own_version(status: int, headers: dict[str, str], failed: int) -> None:
    traffic = Traffic([], "soak", seed=1)
    await ask(Answering(status, headers), traffic, "trl-policy-v3", [1, 2])
    assert traffic.asked == {BY_TRL: 1}
    assert traffic.failed == failed


def test_an_agent_that_was_started_again_may_keep_what_it_finds_for_as_long_once_more() -> None:
    fast = replace(BOUNDS, every_s=2.0, versions=60)  # of which it had staged 20 when it was killed, and 20 come until
    assert fast.slots + 2 * 40 / fast.every_s <= fast.staged < fast.slots + fast.versions


def test_every_trainer_publishes() -> None:
    assert [total(versions) for versions in (3, 12, 200)] == [5, 24, 400]


# the report


@pytest.fixture
def made() -> Report:
    samples = steady(router=9.0)
    known = lives(samples)
    return Report(
        seed=7,
        minutes=30.0,
        versions=200,
        replicas=3,
        routers=2,
        checks=list(judge(samples, known, BOUNDS)),
        lives=known,
        asked={"group": 4},
        failures=[],
        restarts=[],
        first=samples[0],
        last=samples[-1],
    )


def test_the_report_shows_what_grew(made: Report, capsys: pytest.CaptureFixture[str]) -> None:
    show(made, console())
    shown = capsys.readouterr().out
    assert "BROKEN" in shown
    assert "▁" in shown
    assert "tools/soak --minutes 30 --versions 200 --seed 7" in shown
    assert document(made)["sound"] is False


@pytest.mark.parametrize("holds", [True, False])
def test_the_status_says_whether_all_holds(
    made: Report, holds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checks = [Check(what="x", figure="1", bound="2", holds=holds)]
    monkeypatch.setattr(drive, "run", lambda **_: replace(made, checks=checks))
    where = tmp_path / "soak.json"
    assert run_command(soak, ["--json", str(where)], "soak") == (0 if holds else 1)
    assert (b'"sound": true' in where.read_bytes()) is holds


def test_more_versions_than_a_trainer_can_publish_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(soak, ["--minutes", "1", "--versions", "60"], "soak") == 2
    assert "more than one in 1.5 s" in capsys.readouterr().err
