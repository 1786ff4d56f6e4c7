"""The synthetic model and its adapters are what the product's own readers take for real."""

from __future__ import annotations

from pathlib import Path

from adaptersync_core.manifest import check_against_base, inspect
from adaptersync_core.tensors import read_header
from adaptersync_tools.demo.synthetic import RANK, write_adapter, write_base_model


def test_adapters_fit_the_base_model(tmp_path: Path) -> None:
    base = write_base_model(tmp_path / "base") / "model.safetensors"
    with base.open("rb") as file:
        tensors, _ = read_header(file, size=base.stat().st_size, name=base.name)
    shape = inspect(write_adapter(tmp_path / "adapter", base="base", seed=1))
    check_against_base(shape, {name: tensor.shape for name, tensor in tensors.items()})
    assert (shape.rank, shape.noop, len(shape.tensors)) == (RANK, False, 28)


def test_adapters_differ_by_seed_alone(tmp_path: Path) -> None:
    one, same, other = (
        (write_adapter(tmp_path / name, base="base", seed=seed) / "adapter_model.safetensors").read_bytes()
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert one == same
    assert one != other
