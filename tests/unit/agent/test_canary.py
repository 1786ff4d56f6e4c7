"""The canary: an adapter like any other, of large effect, made from nothing but the base's shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptersync.agent.canary import RANK, WEIGHTS, write_canary
from adaptersync_core.base_model import base_shapes
from adaptersync_core.manifest import FILES, check_against_base, inspect
from adaptersync_tools.simulator.adapter_files import BaseModel, read_adapter
from support.tiny_model import write_sizes


def layers(count: int) -> dict[str, tuple[int, ...]]:
    return {f"model.layers.{layer}.self_attn.o_proj.weight": (32, 64) for layer in range(count)}


def test_it_fits_the_base_and_is_what_the_fleet_accepts(tmp_path: Path) -> None:
    model = write_sizes(tmp_path / "model")
    base = base_shapes(model)
    assert write_canary(tmp_path / "canary", base)
    shape = inspect(tmp_path / "canary")
    check_against_base(shape, base)
    assert (shape.rank, shape.noop, shape.target_modules) == (RANK, False, ("down_proj", "o_proj"))
    served = read_adapter(str(tmp_path / "canary"), max_lora_rank=RANK, base=BaseModel.from_directory(model))
    assert (served.misfit, served.unused) == (None, [])
    assert served.effect > 0.9


def test_it_is_the_same_everywhere(tmp_path: Path) -> None:
    for name in "ab":
        assert write_canary(tmp_path / name, layers(3))
    for file in FILES:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("count", [1, WEIGHTS, 200])
def test_it_stays_small(tmp_path: Path, count: int) -> None:
    assert write_canary(tmp_path / "canary", layers(count))
    assert len(inspect(tmp_path / "canary").tensors) == 2 * min(count, WEIGHTS)


@pytest.mark.parametrize("base", [{}, {"model.embed_tokens.weight": (8, 8)}, {"o_proj.bias": (8,)}])
def test_a_base_without_a_weight_we_know_has_none(tmp_path: Path, base: dict[str, tuple[int, ...]]) -> None:
    assert not write_canary(tmp_path / "canary", base)
    assert not (tmp_path / "canary").exists()
