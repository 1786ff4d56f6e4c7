"""Whether an adapter fits: everything that is wrong is said at once, with what to do."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from adaptersync_core.base_model import base_shapes, short_name
from adaptersync_core.fitness import Finding, examine, fleet_findings
from adaptersync_core.manifest import WEIGHTS_FILE, inspect
from adaptersync_core.records import ReplicaReport
from support.adapters import make_adapter
from support.artifacts import REPORT, small_adapter
from support.tiny_model import write_sizes


def fleet(*limits: int, **more: Any) -> dict[str, ReplicaReport]:
    return {f"r{number}": replace(REPORT, max_lora_rank=limit, **more) for number, limit in enumerate(limits)}


def found(directory: Path, limits: tuple[int, ...] = (), **more: Any) -> list[Finding]:
    return list(fleet_findings(inspect(directory), fleet(*limits, **more)))


def test_nothing_is_wrong_with_what_the_fleet_can_serve(tmp_path: Path) -> None:
    base = base_shapes(write_sizes(tmp_path / "base"))
    shape, findings = examine(make_adapter(tmp_path / "a"), base=base, reports=fleet(8, 16))
    assert shape is not None
    assert findings == []


@pytest.mark.parametrize(
    ("limits", "level"),
    [
        ((8,), None),
        ((4,), "error"),
        ((8, 4), "error"),
        ((8, 8, 4), "warning"),
        ((8, 4, 4), "error"),
        ((0,), None),
        ((0, 0, 4), "warning"),
        ((), None),
    ],
    ids=str,
)
def test_a_rank_that_half_of_the_fleet_would_refuse_is_an_error(
    tmp_path: Path, limits: tuple[int, ...], level: str | None
) -> None:
    findings = found(make_adapter(tmp_path / "a", rank=8), limits)
    assert [finding.level for finding in findings] == ([level] if level else [])


@pytest.mark.parametrize(("rank", "start"), [(8, "--max-lora-rank 8"), (20, "--max-lora-rank 32"), (600, "")])
def test_what_to_do_about_a_rank_is_what_vllm_takes(tmp_path: Path, rank: int, start: str) -> None:
    (finding,) = found(small_adapter(tmp_path / "a", rank=rank), (4,))
    assert finding.what == f"rank {rank} is above the limit of 1 of 1 replicas, 4"
    assert "r=4 or less" in finding.fix
    assert start in finding.fix
    assert ("--max-lora-rank" in finding.fix) is bool(start)


@pytest.mark.parametrize(
    ("trained_on", "root", "warns"),
    [
        ("Qwen/Qwen2.5-0.5B", "/models/qwen2.5-0.5b", False),
        ("Qwen/Qwen2.5-0.5B", "/cache/hub/models--Qwen--Qwen2.5-0.5B/snapshots/0a1b2c", False),
        ("/home/me/qwen2.5-0.5B/", "Qwen/Qwen2.5-0.5B", False),
        ("base", "/models/other", False),  # as the fleet calls what it serves
        (None, "/models/other", False),
        ("Qwen/Qwen2.5-0.5B", "", False),
        ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-1.5B", True),
    ],
)
def test_another_base_model_is_a_warning(tmp_path: Path, trained_on: str | None, root: str, warns: bool) -> None:
    directory = make_adapter(tmp_path / "a", config={"base_model_name_or_path": trained_on})
    findings = found(directory, (64,), root=root)
    assert [finding.level for finding in findings] == ["warning"] * warns
    for finding in findings:
        assert str(trained_on) in finding.what
        assert root in finding.what


def test_a_name_is_the_same_wherever_the_model_is() -> None:
    assert (
        short_name("org/Name") == short_name("/x/name/") == short_name("~/hub/models--org--Name/snapshots/0f") == "name"
    )
    assert short_name("gpt2") == short_name("/c/models--gpt2/snapshots/0f/") == "gpt2"


def test_everything_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    config = {"use_dora": True, "modules_to_save": ["lm_head"], "bias": "all"}
    _, findings = examine(make_adapter(tmp_path / "a", config=config), base={}, reports={})
    text = "\n".join(finding.what for finding in findings)
    for name in config:
        assert f"key={name}" in text
    assert all(finding.level == "error" and finding.fix for finding in findings)
    assert len(findings) == 3


def test_errors_of_the_weights_are_said_and_each_once(tmp_path: Path) -> None:
    directory = small_adapter(tmp_path / "a")
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:-4] + struct.pack("<f", float("inf")))
    (finding,) = examine(directory, base={}, reports={})[1]
    assert "not a number" in finding.what
    (finding,) = examine(tmp_path / "nowhere", base={}, reports={})[1]
    assert "adapter_config.json is missing" in finding.what


def test_a_layer_the_base_lacks_is_an_error_when_the_base_is_known(tmp_path: Path) -> None:
    base = base_shapes(write_sizes(tmp_path / "base"))
    directory = make_adapter(tmp_path / "a", layers=3)
    assert examine(directory, base={}, reports={})[1] == []
    (finding,) = examine(directory, base=base, reports={})[1]
    assert "base model has no such weight" in finding.what
    assert "layers.2" in finding.what


def test_an_adapter_that_changes_nothing_is_a_warning(tmp_path: Path) -> None:
    (finding,) = examine(make_adapter(tmp_path / "a", scale=0), base={}, reports={})[1]
    assert finding.level == "warning"
    assert "changes nothing" in finding.what
