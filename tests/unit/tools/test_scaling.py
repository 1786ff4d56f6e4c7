"""How many services a host runs: what is asked for, what is done about it, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from adaptersync.coordinator import views
from adaptersync.coordinator.hosts import HostView, host_problems, hosts
from adaptersync_core.config import load_config
from adaptersync_core.errors import ControlError, ControlUnavailable, NameInvalid
from adaptersync_core.records import Fleet, ReplicaReport, RouterReport, SeenReplica, SeenRouter
from adaptersync_core.scaling import SYSTEMD, UP, Scale, check
from adaptersync_core.table import Member, Table
from adaptersync_tools import keeper
from adaptersync_tools.cli.scaling import check_floor, said, wanted
from adaptersync_tools.keeper import Keeper, Step, _idle, let_go, next_step, possible
from adaptersync_tools.systemd import scale as systemd

HOST = "gpu-1"
UNITS = frozenset(
    (
        "adaptersync-agent@0.service",
        "adaptersync-agent@3.service",
        "adaptersync-router.service",
        "adaptersync-x.service",
    )
)
RUNNING = Scale(replicas=2, routers=1, workers=1, keeper=UP)


def report(host: str = HOST, *, draining: bool = False) -> SeenReplica:
    said = ReplicaReport(
        url="http://a", base_model="base", engine_epoch="e", max_loras=4, max_cpu_loras=4, max_lora_rank=8,
        block_size=16, host=host, draining=draining,
    )  # fmt: skip
    return SeenReplica(report=said, age_s=0.1)


def member(state: str = "ready") -> Member:
    return Member(state=state, url="http://a", engine_epoch="e", since=900.0, block_size=16)  # type: ignore[arg-type]


def fleet(members: dict[str, str], *, generation: int = 7, routers: tuple[int, ...] = (7,)) -> Fleet:
    table = Table(
        generation=generation,
        incarnation="i",
        min_ready=1,
        members={name: member(state) for name, state in members.items()},
    )
    seen = {
        f"router-{n}": SeenRouter(report=RouterReport(generation=at, incarnation="i", host=HOST), age_s=0.1)
        for n, at in enumerate(routers)
    }
    return Fleet(
        now=1000.0, table=table, runs={}, published={}, replicas={name: report() for name in members}, acks={},
        routers=seen, requests={},
    )  # fmt: skip


def status_of(fleet: Fleet) -> views.StatusView:
    return views.status(fleet, group="g", leader="c", lease_left_s=3.0, alive_s=5.0)


def view(**more: int | str | None) -> HostView:
    made = HostView(
        host=HOST, keeper=UP, desired=2, joining=0, ready=2, draining=0, other=0, routers=1, routers_desired=1,
        workers=1, workers_desired=1,
    )  # fmt: skip
    return replace(made, **more)


def test_what_is_wanted_is_started_before_what_is_not_is_ended() -> None:
    asked = replace(RUNNING, replicas=1, workers=2)
    assert next_step(asked, RUNNING) == Step("workers", True)
    assert next_step(replace(asked, workers=1), RUNNING) == Step("replicas", False)
    assert next_step(RUNNING, RUNNING) is None


@pytest.mark.parametrize(
    ("members", "routers", "gone"),
    [
        ({"a": "ready"}, (7,), False),  # the coordinator has not taken it out
        ({"a": "draining"}, (7, 7), True),
        ({"a": "draining"}, (7, 6), False),  # one router still serves from an older table
        ({}, (7,), True),
        ({}, (), True),
    ],
)
def test_a_replica_is_let_go_of_when_no_router_may_ask_it(
    members: dict[str, str], routers: tuple[int, ...], gone: bool
) -> None:
    assert let_go(fleet(members, routers=routers), "a", since=7) is gone


def test_a_router_of_another_life_of_redis_has_not_let_go() -> None:
    now = fleet({"a": "draining"})
    assert not let_go(replace(now, table=replace(now.table, incarnation="j")), "a", since=7)


def test_a_host_shows_what_it_was_asked_to_run_beside_what_it_runs() -> None:
    now = fleet({"a": "ready", "b": "joining", "c": "draining", "d": "ejected"})
    placed = status_of(now).replicas
    (shown,) = hosts(now, placed, {HOST: Scale(replicas=4, routers=2, workers=3, keeper=UP)}, {HOST: 1})
    assert shown == view(
        desired=4, ready=1, joining=1, draining=1, other=1, routers_desired=2, workers=1, workers_desired=3
    )
    assert not shown.settled
    assert view().settled
    for more in ({"ready": 1}, {"joining": 1}, {"draining": 1}, {"other": 1}, {"routers": 0}, {"workers": 2}):
        assert not view(**more).settled, more
    assert view(workers=None).settled  # who may not read the queue goes by the rest


def test_too_few_on_a_host_is_a_problem_and_what_drains_is_none() -> None:
    assert list(host_problems([view(ready=1, draining=1)])) == [
        "gpu-1 is to run 2 replicas, and runs 1 (adaptersync scale)"
    ]
    assert list(host_problems([view(ready=1, joining=1), view(draining=1), view(desired=None, ready=0)])) == []


def test_so_are_too_few_routers_or_workers() -> None:
    assert list(host_problems([view(routers=0, workers=0), view(routers=2, workers=2)])) == [
        "gpu-1 is to run 1 routers, and runs 0 (adaptersync scale)",
        "gpu-1 is to run 1 workers, and runs 0 (adaptersync scale)",
        "gpu-1 is to run 1 routers, and runs 2 (adaptersync scale)",  # a worker that was killed counts for a while
    ]
    unknown = view(routers_desired=None, routers=0, workers=None)
    assert list(host_problems([unknown, view(workers_desired=None, workers=0)])) == []


def test_processes_of_one_router_are_one() -> None:
    now = fleet({}, routers=(7, 7))
    other = replace(now.routers["router-1"].report, url="http://gpu-1:8081")
    (shown,) = hosts(now, (), {}, {})
    assert shown.routers == 1
    apart = replace(now, routers={**now.routers, "router-1": SeenRouter(report=other, age_s=0.1)})
    (shown,) = hosts(apart, (), {}, {})
    assert shown.routers == 2


def test_who_left_in_order_is_not_shown_while_its_record_is_kept() -> None:
    now = fleet({"a": "ready"})
    left = replace(now, replicas={**now.replicas, "b": report(draining=True), "c": report()})
    assert [each.replica for each in status_of(left).replicas] == ["a", "c"]


def test_what_was_not_named_stays_as_it_was_asked_for() -> None:
    assert wanted(RUNNING, 4, None, None) == replace(RUNNING, replicas=4)
    assert wanted(RUNNING, None, 2, 0) == replace(RUNNING, routers=2, workers=0)
    assert wanted(None, 4, None, 2) == Scale(replicas=4, routers=None, workers=2, keeper=SYSTEMD)


def test_what_nobody_ever_asked_for_is_not_touched() -> None:
    """A router in its pause before another start is not there to be seen, and a worker that died still is."""
    asked = wanted(None, 1, None, None)
    running = frozenset((*UNITS, "adaptersync-worker.service", "adaptersync-worker@1.service"))
    stopped = ("systemctl", "disable", "--now", "adaptersync-agent@3.service")
    assert systemd.commands(asked, running, engines=False) == [stopped]
    assert systemd.commands(asked, frozenset({"adaptersync-agent@0.service"}), engines=False) == []
    assert systemd.commands(wanted(None, None, 2, None), UNITS, engines=False) == [
        ("systemctl", "enable", "--now", "adaptersync-router@1.service")
    ]
    (shown,) = hosts(fleet({}), (), {HOST: asked}, {HOST: 7})
    assert (shown.routers_desired, shown.workers_desired) == (None, None)
    check(HOST, asked)
    check_floor(replace(status_of(fleet({"a": "ready"})), hosts=[view(ready=1)]), HOST, Scale(routers=1), 9)
    assert next_step(possible(asked, 8), RUNNING) == Step("replicas", False)
    assert next_step(possible(Scale(), 8), RUNNING) is None


def test_what_carries_a_wish_out_says_all_of_it() -> None:
    assert said(RUNNING) == ["adaptersync", "scale", "2", "--routers", "1", "--workers", "1"]
    assert said(Scale(routers=2)) == ["adaptersync", "scale", "--routers", "2"]
    assert said(Scale(replicas=0), force=True) == ["adaptersync", "scale", "0", "--force"]


def test_more_than_a_stack_can_do_is_not_tried() -> None:
    asked = Scale(replicas=9, routers=0, workers=2, keeper=UP)
    assert possible(asked, 4) == replace(asked, replicas=4, routers=1)


@pytest.mark.parametrize(
    ("host", "scale", "said"),
    [
        ("no host", RUNNING, "not the name of a host"),
        (HOST, replace(RUNNING, replicas=65), "0 to 64 replicas"),
        (HOST, replace(RUNNING, workers=-1), "0 to 16 workers"),
        (HOST, replace(RUNNING, routers=0), "goes with the fleet"),
        (HOST, replace(RUNNING, replicas=5, most=4), "can run 4 replicas"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(host: str, scale: Scale, said: str) -> None:
    with pytest.raises((ControlError, NameInvalid), match=said):
        check(host, scale)
    check(HOST, replace(RUNNING, keeper=SYSTEMD, routers=0, replicas=64))


def test_fewer_than_the_floor_wants_a_word_more() -> None:
    status = replace(status_of(fleet({"a": "ready", "b": "ready"})), hosts=[view(), view(host="gpu-2", ready=1)])
    with pytest.raises(ControlError, match=r"1 replicas would be left, coordinator\.min_ready is 2"):
        check_floor(status, HOST, replace(RUNNING, replicas=0), 2)
    check_floor(status, HOST, replace(RUNNING, replicas=1), 2)
    check_floor(status, "gpu-3", replace(RUNNING, replicas=0), 9)  # of more, or of as many, nothing is lost


def test_units_are_started_before_others_are_stopped_highest_first_and_one_at_a_time() -> None:
    asked = Scale(replicas=2, routers=2, workers=0)
    enable, disable = ("systemctl", "enable", "--now"), ("systemctl", "disable", "--now")
    assert systemd.commands(asked, UNITS, engines=True) == [
        (*enable, "adaptersync-replica@1.service", "adaptersync-agent@1.service"),
        (*enable, "adaptersync-router@1.service"),
        (*disable, "adaptersync-replica@3.service", "adaptersync-agent@3.service"),
    ]
    many = frozenset(f"adaptersync-agent@{number}.service" for number in range(12))
    stopped = systemd.commands(replace(asked, replicas=9, routers=0), many, engines=False)
    assert stopped == [(*disable, f"adaptersync-agent@{number}.service") for number in (11, 10, 9)]


def test_units_of_another_host_are_known_by_its_replicas_names() -> None:
    placed = status_of(fleet({"gpu-1-0": "ready", "gpu-1-2": "draining", "gpu-10-5": "ready", "replica-1": "ready"}))
    assert systemd.units_of(placed.replicas, "GPU-1.example.org") == {
        "adaptersync-agent@0.service",
        "adaptersync-agent@2.service",
    }


def test_what_runs_is_asked_of_systemd_itself_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "systemctl"
    tool.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "if 'list-units' in sys.argv: print('adaptersync-agent@1.service loaded active running adaptersync agent 1')\n"
        "else: sys.exit('Access denied: ' + ' '.join(sys.argv[1:]))\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert systemd.running_units() == {"adaptersync-agent@1.service"}
    with pytest.raises(ControlError, match=r"Access denied: enable --now adaptersync-agent@2\.service; ok"):
        # one word: there is no shell
        systemd.run(("systemctl", "enable", "--now", "adaptersync-agent@2.service; ok"), limit_s=50.0)


def test_a_command_that_lasts_too_long_is_an_error_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "systemctl"
    tool.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(60)\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ControlError, match=r"systemctl disable did not end in time \(limit_s=0\.1\); systemd goes on"):
        systemd.run(("systemctl", "disable"), limit_s=0.1)


def test_a_stop_is_waited_for_as_long_as_its_unit_may_take() -> None:
    usual = load_config(environment={})
    assert systemd.patience_s(usual) == 900.0
    for key, value, stop_s in (
        ("jobs.export_path", "/srv/exports", 3620.0),
        ("engine.drain_s", 3600.0, 3640.0),
    ):
        config = load_config(environment={}, overrides={key: value})
        assert systemd.patience_s(config) > stop_s


class Supervisor:
    def __init__(self, *names: str) -> None:
        self.services = dict.fromkeys(names)
        self.retired: list[str] = []

    def retire(self, name: str, *, patience_s: float) -> None:
        del self.services[name]
        self.retired.append(name)


def test_a_replica_that_could_not_be_let_go_of_is_by_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for meanwhile: without its agent it is of no use."""
    supervisor = Supervisor("agent-0", "engine-0", "agent-1", "engine-1")
    urls = {"replica-0": "http://a", "replica-1": "http://b"}
    stack = SimpleNamespace(
        supervisor=supervisor, engine_urls=urls, router_urls=["http://r"], workers=1, most_replicas=8,
        config=load_config(environment={}), add_replica=lambda: urls.setdefault("replica-1", "http://c"),
    )  # fmt: skip
    one, two = (replace(RUNNING, replicas=count) for count in (1, 2))
    late = ControlError("no answer in time")
    answers = iter([late, None, {HOST: one}, late, late, True, {HOST: two}])  # first it says what runs

    def visit(*_: object, **__: object) -> object:
        if isinstance(answer := next(answers), ControlError):
            raise answer
        return answer

    monkeypatch.setattr(keeper.Keeper, "_visit", visit)
    keeping = Keeper(stack, HOST)  # type: ignore[arg-type]
    assert [keeping.follow() for _ in range(3)] == [None] * 3
    assert (supervisor.retired, list(supervisor.services)) == (["agent-1"], ["agent-0", "engine-0", "engine-1"])
    assert keeping.follow() == Step("replicas", True)
    assert supervisor.retired == ["agent-1", "engine-1"]
    assert urls == {"replica-0": "http://a", "replica-1": "http://c"}


def test_while_redis_is_away_no_engine_ends_under_routers_that_go_on_without_it() -> None:
    """However long, and whatever an engine is given to become idle."""
    supervisor = Supervisor("agent-0", "engine-0", "agent-1", "engine-1")
    away = {"redis.control_url": "redis://127.0.0.1:1/0", "engine.drain_s": 5.0}
    stack = SimpleNamespace(
        supervisor=supervisor, engine_urls={"replica-0": "http://a", "replica-1": "http://b"},
        config=load_config(environment={}, overrides=away),
    )  # fmt: skip
    keeping = Keeper(stack, HOST)  # type: ignore[arg-type]
    with pytest.raises(ControlUnavailable):
        keeping._take(Step("replicas", False))
    assert keeping.follow() is None
    assert supervisor.retired == ["agent-1"]


async def test_an_engine_that_does_not_answer_is_not_waited_for_longer_than_one_that_does() -> None:
    asked = []

    async def gone() -> Fleet:
        asked.append(True)
        return fleet({})

    registry = SimpleNamespace(fleet=gone)
    assert not await _idle(registry, "a", "http://127.0.0.1:1", limit_s=0.3)  # type: ignore[arg-type]
    assert len(asked) > 1


def test_a_numbered_router_has_a_name_and_a_port_of_its_own() -> None:
    code = (
        "import adaptersync.router.app as app; from adaptersync_tools.cli import main\n"
        "app.run_router = lambda config: print(config.router.name, config.router.port)\n"
        "main(['router', '--name', 'router-a', '--port', '8080', '--number', '2'])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert run.stdout == "router-a-2 8082\n", run.stderr
