"""The page in a real browser: what a person sees of a fleet, in light and dark and on a phone, and that it is safe."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from adaptersync_core.api_keys import new_key
from adaptersync_core.errors import ControlUnavailable
from support.browser import Tab, browser
from support.page import HOSTILE, V2, Serve, Served, populate

pytestmark = pytest.mark.timeout(120)
DRAWN = """[...document.querySelectorAll('canvas')].filter((canvas) =>
    canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data.some((value) => value)).length"""
CELLS = """[...document.querySelectorAll('#matrix tbody tr')].map((row) =>
    [...row.querySelectorAll('.cell')].map((cell) => cell.title))"""
BEYOND = """[...document.querySelectorAll('section')].filter((one) =>
    one.getBoundingClientRect().right > innerWidth).map((one) => one.id)"""
GROUND = "getComputedStyle(document.body).backgroundColor"
# text against what lies under it, as WCAG measures it; 4.5 is asked for
CONTRASTS = """(() => {
    const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const linear = (value) => value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
    const weights = [0.2126, 0.7152, 0.0722];
    const luminance = (colour) => rgb(colour).reduce((sum, value, place) => sum + weights[place] * linear(value), 0);
    const under = (node) => {
        for (; node; node = node.parentElement) {
            const colour = getComputedStyle(node).backgroundColor;
            if (!/, 0\\)$|transparent/.test(colour)) return colour;
        }
        return 'rgb(255, 255, 255)';
    };
    const kinds = ['body', 'h2', '.quiet', '.tile span', '.badge.good', '.badge.bad', '.cell.held', '.cell.refused',
        '.cell.awaited', '#events .type', '#events .text', '#events time', '#alarms li', 'td.why'];
    const contrasts = Object.fromEntries(kinds.map((kind) => {
        const node = document.querySelector(kind);
        const [high, low] = [getComputedStyle(node).color, under(node)].map(luminance).sort((a, b) => b - a);
        return [kind, (high + 0.05) / (low + 0.05)];
    }));
    return { ground: rgb(getComputedStyle(document.body).backgroundColor)[0], contrasts };
})()"""
# on how many rows the axis touches the canvas' left edge, when it goes up to HIGH
CUT_OFF = """(async () => {
    const { chart } = await import('DRAW');
    const section = document.body.appendChild(document.createElement('section'));
    const plot = chart(section, [{ label: 'one', colour: '--c1' }]);
    plot.setData([[1, 2, 3], [0, HIGH, HIGH]]);
    await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
    const width = 60, pixels = plot.ctx.getImageData(0, 0, width, plot.ctx.canvas.height).data;
    const painted = [...pixels.keys()].filter((place) => place % 4 == 3 && pixels[place]);
    section.remove();
    return painted.length ? painted.filter((place) => place % (4 * width) == 3).length : -1;
})()"""
SHOWN = "document.querySelectorAll('#matrix tbody tr').length == 2"


@pytest.fixture
def redis_kind() -> str:
    """What a browser shows does not hang on the kind of server."""
    return "valkey9"


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with browser(tmp_path) as tab:
        yield tab
        assert tab.complaints == []


async def test_it_shows_the_fleet_and_events_as_they_come(served: Served, tab: Tab) -> None:
    await populate(served)
    first = await served.happen("the first")
    await tab.open(served.url)
    await tab.until(SHOWN)
    assert await tab.text("#health") == "needs attention"
    assert await tab.text("#leader") == "coordinator-0 leads (told by coordinator-1, standby) · generation 1"
    heads = (await tab.text("#matrix thead")).split()
    assert heads[:8] == ["replica", "state", "run-a", "v2", "current", "run-a", "v1", "retained"]
    assert await tab.evaluate(CELLS) == [
        ["held: proved", "held: proved"],
        [f"refused: refuted: {HOSTILE}", "held: proved"],
    ]
    await tab.until("document.querySelector('#events').innerText.includes('the first')")
    await tab.until("document.getElementById('stream').textContent == 'as they come'")
    await served.happen("a moment ago")
    await tab.until("document.querySelector('#events li.new')?.innerText.includes('a moment ago')")
    times = "[...document.querySelectorAll('#events li')].filter((one) => one.innerText.includes('the first')).length"
    assert await tab.evaluate(times) == 1, first  # once in the document, and not again in the stream
    await tab.until(f"{DRAWN} == 4")
    assert "Redis cannot be reached" not in await tab.text("main")


async def test_names_and_reasons_are_text(served: Served, tab: Tab) -> None:
    await populate(served)
    await served.happen(HOSTILE, replica=HOSTILE)
    await tab.open(served.url)
    await tab.until(SHOWN)
    await tab.until("document.querySelector('#events li .subject')?.textContent.includes('<img')")
    assert HOSTILE in await tab.text("#alarms")
    assert HOSTILE in await tab.text("#matrix")
    assert await tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert await tab.evaluate("document.title") == "! group · adaptersync"
    refused = """(() => {
        try { document.querySelector('main').innerHTML = '<b>x</b>'; } catch (error) { return error.name }
    })()"""
    assert await tab.evaluate(refused) == "TypeError"  # should a later line forget: the browser does not
    tab.complaints = [said for said in tab.complaints if "TrustedHTML" not in said]


async def test_it_fits_and_can_be_read_in_light_and_dark_at_a_desk_and_on_a_phone(
    served: Served, tab: Tab, tmp_path: Path
) -> None:
    await populate(served)
    await served.happen("word " * 200)
    for width, dark in ((1280, False), (1280, True), (390, False), (390, True)):
        await tab.open(served.url, width=width, dark=dark)
        await tab.until(SHOWN)
        await tab.until("document.querySelectorAll('#events li').length >= 3")
        await tab.until(f"{DRAWN} == 4")
        assert await tab.evaluate("document.documentElement.scrollWidth") <= width
        assert await tab.evaluate(BEYOND) == []
        seen = await tab.evaluate(CONTRASTS)
        assert seen["ground"] < 60 if dark else seen["ground"] > 200
        assert min(seen["contrasts"].values()) >= 4.5, seen["contrasts"]
        await tab.screenshot(tmp_path / "page.png")
        assert (tmp_path / "page.png").stat().st_size > 20_000
    before = await tab.evaluate(GROUND)
    await tab.evaluate("document.getElementById('theme').click()")  # outweighs the system, also the next time
    for _ in range(2):
        assert await tab.text("#theme") == "light"
        assert await tab.evaluate(GROUND) != before
        await tab.open(served.url, dark=True)
        await tab.until(SHOWN)


async def test_figures_beside_a_chart_are_whole(served: Served, tab: Tab) -> None:
    await populate(served)
    await tab.open(served.url)
    await tab.until(SHOWN)
    draw = await tab.evaluate("[...performance.getEntries()].find((one) => one.name.endsWith('/draw.js')).name")
    for high in (9.0, 12_000.0, 900_000.0, 900_000_000.0):
        assert await tab.evaluate(CUT_OFF.replace("DRAW", draw).replace("HIGH", str(high))) == 0, high


async def test_a_server_that_is_away_is_said_and_what_was_seen_stays(
    served: Served, tab: Tab, monkeypatch: pytest.MonkeyPatch
) -> None:
    await populate(served)
    await tab.open(served.url)
    await tab.until(SHOWN)

    async def away(**_more: Any) -> Any:
        raise ControlUnavailable("Redis cannot be reached")

    with monkeypatch.context() as patch:
        patch.setattr(served.page.observer, "overview", away)
        await tab.until("!document.getElementById('lost').hidden")
        assert (await tab.text("#lost")).startswith("Redis cannot be reached: what is shown is of ")
        assert await tab.evaluate(SHOWN)
    await tab.until("document.getElementById('lost').hidden")
    tab.complaints = [said for said in tab.complaints if "503" not in said]


async def test_who_has_a_key_asks_and_others_see_no_form(serve: Serve, tab: Tab, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    key, kept = new_key("ada", ["admin"])
    keys.write_text(kept.line())
    async with serve() as served:
        await populate(served)
        await tab.open(served.url)
        await tab.until(SHOWN)
        assert await tab.evaluate("document.getElementById('operate').hidden")
    async with serve(keys_file=str(keys)) as served:
        await tab.open(served.url)
        await tab.until(SHOWN)
        await tab.until("!document.getElementById('operate').hidden")
        await tab.evaluate(
            "(() => { window.confirm = () => true; const form = document.querySelector('#operate form');"
            "form.elements.reason.value = 'reward fell'; "
            f"form.elements.key.value = '{key}'; form.requestSubmit(); }})()"
        )
        await tab.until("document.querySelector('#operate output').textContent.startsWith('asked: rollback-')")
        (request,) = (await served.registry.fleet()).requests.values()
        assert (request.kind, request.run, request.current, request.reason) == ("rollback", "run-a", V2, "reward fell")
    tab.complaints = [said for said in tab.complaints if "ERR_" not in said]  # between the two nobody answered
