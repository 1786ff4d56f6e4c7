"""The bench of choices measures the script that routers call; how long that takes is not judged here."""

from __future__ import annotations

from pathlib import Path

from adaptersync_tools.bench import choice
from adaptersync_tools.up import Progress


def test_every_choice_is_timed_by_the_server(tmp_path: Path) -> None:
    result = choice.run(choice.Settings(blocks=30_000, prompts=2), tmp_path, Progress())
    named = {figure.name: figure.samples_s for figure in result.figures}
    assert len(named) == 2 * len(choice.TOKENS) * len(choice.REPLICAS) + 8 + len(choice.TOKENS)
    assert all(len(samples) == 2 for samples in named.values())
    assert all(sample > 0 for name, samples in named.items() if name.startswith("server") for sample in samples)
    assert result.memory_bytes > 30_000 * 40
