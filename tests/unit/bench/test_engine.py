"""Arithmetic of the engine bench: gaps, rates, ratios of neighbouring windows; and its load, on a server of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from adaptersync_core.errors import AdapterInvalid, Unroutable
from adaptersync_core.manifest import check_against_base, inspect
from adaptersync_tools.bench import streaming
from adaptersync_tools.bench.engine import stage_adapter, write_adapter
from adaptersync_tools.bench.gaps import Span, TokenStream, before, longest_gap, rate, share, spread, tokens_in, within
from adaptersync_tools.bench.machine import BENCH, OTHERS, Meter, read_machine, read_process
from adaptersync_tools.bench.promotions import Experiment, Kind, Window, compare, gap_figures, phases
from adaptersync_tools.bench.streaming import Load
from support.wait import wait_until


def stream(at: list[float], tokens: list[int] | None = None, replica: str = "a") -> TokenStream:
    return TokenStream(replica=replica, at=at, tokens=tokens or list(range(1, len(at) + 1)))


@pytest.mark.parametrize(
    ("span", "longest"),
    [
        pytest.param((0.0, 10.0), 4.0, id="all of it"),
        pytest.param((3.2, 3.4), 4.0, id="inside one gap"),
        pytest.param((1.5, 2.5), 1.0, id="from one gap into the next"),
        pytest.param((2.5, 3.5), 4.0, id="a gap that outlasts it counts whole"),
        pytest.param((6.9, 7.5), 4.0, id="a gap that began before it counts whole"),
        pytest.param((7.1, 7.4), 0.5, id="after the long gap"),
        pytest.param((0.0, 0.5), 0.0, id="the time to the first token is none"),
        pytest.param((7.6, 9.0), 0.0, id="after the last token"),
    ],
)
def test_longest_gap(span: Span, longest: float) -> None:
    assert longest_gap([stream([1.0, 2.0, 3.0, 7.0, 7.5])], span) == longest


def test_a_gap_is_between_tokens_of_one_answer() -> None:
    assert longest_gap([stream([1.0, 2.0]), stream([5.0, 5.5])], (0.0, 9.0)) == 1.0
    assert longest_gap([stream([1.0])], (0.0, 9.0)) == 0.0
    assert longest_gap([], (0.0, 9.0)) == 0.0


def test_tokens_are_counted_once_in_windows_that_touch() -> None:
    """Pieces may bring several tokens."""
    answers = [stream([1.0, 2.0, 3.0], [2, 3, 7]), stream([2.5], [4])]
    assert [tokens_in(answers, span) for span in ((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 9.0))] == [2, 1, 8, 0]
    assert rate(answers, [(0.0, 1.0), (2.0, 3.0)]) == 5.0
    assert rate(answers, []) == 0.0


def test_spans() -> None:
    assert within([(0.0, 2.0), (3.0, 4.0), (8.0, 12.0), (20.0, 21.0)], (1.0, 10.0)) == [
        (1.0, 2.0),
        (3.0, 4.0),
        (8.0, 10.0),
    ]
    assert before((5.0, 7.0)) == (3.0, 5.0)


def test_spread() -> None:
    told = spread([1.0, 2.0, 6.0])
    assert (told.count, told.mean, told.median, told.low, told.high) == (3, 3.0, 2.0, 1.0, 6.0)
    assert told.error == pytest.approx(7**0.5 / 3**0.5)
    assert spread([0.9]).error == 0.0


def test_a_steady_drift_cancels() -> None:
    assert share(95.0, 100.0, 90.0) == 1.0
    assert share(47.5, 100.0, 90.0) == 0.5


def test_shares_of_windows() -> None:
    """Ten tokens a second, none for a tenth of a second in each promotion, on a machine that slows down."""
    at: list[float] = []
    tokens: list[int] = []
    for tick in range(1, 5001):
        now = tick / 100
        if not any(began < now <= began + 0.5 for began in (10.0, 30.0)):
            at.append(now)
            tokens.append((tokens[-1] if tokens else 0) + 1)
    kinds: list[Kind] = ["steady", "paced", "steady", "back to back", "steady"]
    windows = [Window(kind=kind, span=(10.0 * number, 10.0 * number + 10)) for number, kind in enumerate(kinds)]
    promotions = [(10.0, 11.0), (30.0, 31.0), (31.0, 40.5)]
    paced = compare("paced", windows, promotions, [stream(at, tokens)])
    assert (paced.promotions, paced.promotion_s) == (1, 1.0)
    assert paced.busy == pytest.approx(0.1)
    assert paced.over_step.mean == pytest.approx(0.95)
    assert paced.under_way is not None
    assert paced.under_way.mean == pytest.approx(0.5, abs=0.02)
    assert paced.tokens_per_s == pytest.approx(95)
    assert paced.steady_tokens_per_s == pytest.approx(100)
    hurried = compare("back to back", windows, promotions, [stream(at, tokens)])
    assert hurried.promotions == 2
    assert hurried.busy == pytest.approx(1.0)
    assert hurried.over_step.mean == pytest.approx(0.95)


def test_windows_without_a_promotion_have_no_share_under_way() -> None:
    kinds: list[Kind] = ["steady", "paced", "steady"]
    windows = [Window(kind=kind, span=(float(number), number + 1.0)) for number, kind in enumerate(kinds)]
    told = compare("paced", windows, [], [stream([0.5, 1.5, 2.5])])
    assert (told.under_way, told.promotions, told.busy, told.over_step.mean) == (None, 0, 0.0, 1.0)


def test_gaps_belong_to_the_replica_and_to_what_was_done() -> None:
    answers = [stream([0.0, 1.0, 2.0, 3.0, 6.0, 7.0]), stream([0.0, 9.0], replica="b")]
    experiments = [
        Experiment(what="load", replica="a", span=(2.5, 4.5)),
        Experiment(what="proof", replica="a", span=(6.2, 6.8)),
    ]
    told = {figure.name: figure for figure in gap_figures(experiments, answers)}
    assert {name: figure.samples_s for name, figure in told.items()} == {
        "a, before load": (1.0,),
        "a, load": (3.0,),
        "a, before proof": (3.0,),
        "a, proof": (1.0,),
    }
    assert told["a, load"].ratio == 3.0


def test_phases_are_medians_of_acknowledgements() -> None:
    events = [
        {"type": "replica.acked", "replica": "b", "loaded_s": "0.3", "proved_s": "1"},
        {"type": "replica.acked", "replica": "a", "loaded_s": "0.1"},
        {"type": "replica.acked", "replica": "a", "loaded_s": "0.3"},
        {"type": "version.promoted", "version": "x"},
    ]
    assert phases(events) == {"a": {"loaded_s": 0.2}, "b": {"loaded_s": 0.3, "proved_s": 1.0}}


def test_time_of_processes_and_of_the_machine() -> None:
    session, spent = read_process("7 (a) name (b) S 1 7 42 0 -1 0 0 0 0 0 100 200 300 400 20 0")
    assert session == 42
    assert spent == 10 * read_process("7 (a) S 1 7 42 0 -1 0 0 0 0 0 100 0 0 0")[1]
    assert read_machine("cpu 1 2 3 1000 1000 4 5 9999 6 7\ncpu0 1") == read_machine("cpu 15 0 0 5 5 0 0 0 0 0")


async def test_a_busy_machine_is_told_from_our_own_work() -> None:
    spinner = await asyncio.create_subprocess_exec("sh", "-c", "while :; do :; done", start_new_session=True)
    ours, others = Meter({spinner.pid: "agent"}), Meter({})
    try:
        await wait_until(lambda: ours.read().get("agent", 0.0) > 0.1, timeout_s=20)
        told = ours.read()
        assert others.read()[OTHERS] > told[OTHERS]
        assert set(told) == {"agent", BENCH, OTHERS}
    finally:
        spinner.kill()
        await spinner.wait()


def test_cpu_time_of_tokens_and_of_promotions() -> None:
    """Half the tokens for the same time is twice the time a token; half a second of the agent is two promotions'."""
    windows = [
        Window(kind="steady", span=(0.0, 10.0), spent={"engine": 1.0, "agent": 0.2}),
        Window(kind="paced", span=(10.0, 30.0), spent={"engine": 2.0, "agent": 0.9, "router": 9.0, "others": 9.0}),
        Window(kind="steady", span=(30.0, 40.0), spent={"engine": 1.0, "agent": 0.2}),
    ]
    answer = stream([5.0, 20.0, 35.0], [100, 200, 300])
    told = compare("paced", windows, [(10.0, 11.0), (20.0, 21.0)], [answer])
    assert told.engine_cpu is not None
    assert told.engine_cpu.mean == pytest.approx(2.0)
    assert told.cpu_s == {"agent": pytest.approx(0.25)}


BASE = {
    "model.layers.0.self_attn.q_proj.weight": (8, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 16),
    "model.norm.weight": (4,),
}


def test_adapters_fit_the_base_and_differ(tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / str(seed), BASE, seed=seed) for seed in (1, 2))
    check_against_base(inspect(first), BASE)
    manifests = [stage_adapter(each, tmp_path / "stage", seq=1) for each in (first, second)]
    assert len({manifest.adapter_id for manifest in manifests}) == 2
    assert all((tmp_path / "stage" / each.adapter_id / "adapter_config.json").is_file() for each in manifests)
    with pytest.raises(AdapterInvalid):
        write_adapter(tmp_path / "none", {"model.norm.weight": (4,)}, seed=1)


class Upstream:
    """Streams two pieces of two events, one of them torn, unless it is told to fail."""

    def __init__(self) -> None:
        self.status = 200
        self.last = 3
        self.asked = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = await request.json()
        assert body["ignore_eos"]
        assert len(body["prompt"]) == streaming.PROMPT_TOKENS
        answer = web.StreamResponse(status=self.status, headers={"x-adaptersync-replica": "a"})
        await answer.prepare(request)
        for text in (
            'data: {"usage": {"completion_tokens": 0}}\n\ndata: {"usage": {"completion_tokens": 1}}\n\ndata: {"usage"',
            f': {{"completion_tokens":{self.last}}}}}\n\ndata: [DONE]\n\n',
        ):
            await answer.write(text.encode())
            await asyncio.sleep(0.01)
        return answer


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
async def url(upstream: Upstream) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", upstream.answer)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


async def test_load_reads_tokens_and_asks_again(upstream: Upstream, url: str) -> None:
    async with Load(url, "run", concurrency=2, answer_tokens=3) as load:
        await wait_until(lambda: upstream.asked >= 6)
        await load.run_for(0)
    whole = load.streams[0]
    assert (whole.replica, whole.tokens, len(whole.at)) == ("a", [1, 3], 2)
    assert whole.at[0] < whole.at[1]
    assert load.failures == []


@pytest.mark.parametrize("how", ["refused", "cut short"])
async def test_load_tells_of_failures_and_gives_up(
    upstream: Upstream, url: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "PAUSE_S", 0.0)
    if how == "refused":
        upstream.status = 503
    else:
        upstream.last = 2
    async with Load(url, "run", concurrency=8, answer_tokens=3) as load:
        await wait_until(lambda: len(load.failures) >= streaming.GIVE_UP)
        with pytest.raises(Unroutable, match="503" if how == "refused" else "2 of 3"):
            await load.run_for(0)
