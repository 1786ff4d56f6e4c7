"""What engines' own records say."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptersync_tools import evidence
from adaptersync_tools.evidence import Answer

SERVED = 'INFO:     127.0.0.1:50412 - "POST /v1/completions HTTP/1.1" 200 OK\n'


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        (SERVED, 0),
        (SERVED + SERVED.replace("/v1/completions", "/pause?mode=keep"), 1),
        (SERVED + SERVED.replace("/v1/completions", "/pause") * 2, 2),
        (SERVED.replace("POST /v1/completions", "GET /is_paused"), 0),
        ("INFO 11-29 22:17:20 [launcher.py:46] Route: /pause, Methods: POST\n" + SERVED, 0),
        ("INFO 11-29 22:17:20 nothing was asked\n", None),
    ],
)
def test_pauses_are_counted_in_the_access_log(tmp_path: Path, lines: str, count: int | None) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text(lines)
    assert evidence.pauses_in_logs([log]) == count


class Engines:
    """Two replicas that take prompts in turn, and a cache that tells versions apart, or does not."""

    def __init__(self, *, apart: bool) -> None:
        self.apart = apart
        self.asked = 0
        self.seen: set[tuple[str, str, str]] = set()

    def ask(self, router_url: str, model: str, prompt: str) -> Answer:
        replica = f"replica-{self.asked % 2}"
        self.asked += 1
        key = (replica, model if self.apart else "any", prompt)
        cached = 64 if key in self.seen else 0
        self.seen.add(key)
        return Answer(version=model, replica=replica, cached=cached)


def test_a_cache_that_tells_versions_apart_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "ask", Engines(apart=True).ask)
    found = evidence.prefix_cache("http://router", ("a", "b"), seed=1)
    assert found.holds
    assert (found.across_tokens, found.across_answers) == (0, 2 * evidence.PROMPTS)
    assert found.within_tokens == 64 * found.within_answers > 0


def test_a_cache_that_mixes_versions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, "ask", Engines(apart=False).ask)
    found = evidence.prefix_cache("http://router", ("a", "b"), seed=1)
    assert not found.holds
    assert found.across_tokens > 0


def test_a_cache_that_is_never_used_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(router_url: str, model: str, prompt: str) -> Answer:
        return Answer(version=model, replica="replica-0", cached=0)

    monkeypatch.setattr(evidence, "ask", ask)
    assert not evidence.prefix_cache("http://router", ("a", "b"), seed=1).holds
