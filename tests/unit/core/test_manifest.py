"""Reading an adapter directory: what vLLM can serve is described, what it cannot is refused with the reason."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.manifest import (
    BASE_LIMIT,
    CHUNK,
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterShape,
    FileEntry,
    Manifest,
    check_against_base,
    content_digest,
    hash_file,
    inspect,
)
from support.adapters import make_adapter, write_safetensors
from support.artifacts import manifest_of, small_adapter

STEM = "base_model.model.model.layers.0.self_attn.q_proj"
Tensors = dict[str, tuple[tuple[int, ...], bytes]]


def pair(stem: str = STEM, *, rank: int = 2, rank_b: int | None = None, size: int = 4) -> Tensors:
    other = rank if rank_b is None else rank_b
    return {
        f"{stem}.lora_A.weight": ((rank, size), struct.pack(f"<{rank * size}f", *range(rank * size))),
        f"{stem}.lora_B.weight": ((size, other), struct.pack(f"<{other * size}f", *range(other * size))),
    }


def written(directory: Path, tensors: Tensors, **config: Any) -> Path:
    make_adapter(directory, rank=2, layers=1, config=config)
    write_safetensors(directory / WEIGHTS_FILE, tensors)
    return directory


def test_an_adapter_is_described(tmp_path: Path) -> None:
    directory = make_adapter(tmp_path / "a", rank=4, hidden=16, layers=2, targets=("v_proj", "q_proj"), base_model="b")
    shape = inspect(directory)
    assert (shape.rank, shape.alpha, shape.target_modules) == (4, 8, ("q_proj", "v_proj"))
    assert (shape.base_model, shape.dtype, shape.noop) == ("b", "F32", False)
    assert shape.tensors[f"{STEM}.lora_A.weight"] == (4, 16)
    assert shape.tensors[f"{STEM}.lora_B.weight"] == (16, 4)
    assert len(shape.tensors) == 8


@pytest.mark.parametrize(
    ("config", "key"),
    [
        pytest.param({"use_dora": True}, "use_dora", id="dora"),
        pytest.param({"bias": "all"}, "bias", id="bias"),
        pytest.param({"bias": "lora_only"}, "bias", id="bias of lora"),
        pytest.param({"lora_bias": True}, "lora_bias", id="lora_bias"),
        pytest.param({"modules_to_save": ["lm_head"]}, "modules_to_save", id="modules_to_save"),
        pytest.param({"target_parameters": ["experts.w"]}, "target_parameters", id="target_parameters"),
        pytest.param({"peft_type": "LOHA"}, "peft_type", id="another method"),
        pytest.param({"peft_type": None}, "peft_type", id="no method"),
        pytest.param({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights", id="pissa"),
        pytest.param({"init_lora_weights": "OLoRA"}, "init_lora_weights", id="olora"),
        pytest.param({"init_lora_weights": "something new"}, "init_lora_weights", id="unknown initialization"),
        pytest.param({"alora_invocation_tokens": [1]}, "alora_invocation_tokens", id="alora"),
        pytest.param({"layer_replication": [[0, 4]]}, "layer_replication", id="layer_replication"),
        pytest.param({"use_bdlora": {"x": 1}}, "use_bdlora", id="bdlora"),
        pytest.param({"use_qalora": True}, "use_qalora", id="qalora"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_with_the_key_and_the_way_out(
    tmp_path: Path, config: dict[str, Any], key: str
) -> None:
    with pytest.raises(AdapterInvalid, match="vLLM cannot serve") as refusal:
        inspect(make_adapter(tmp_path / "a", config=config))
    assert refusal.value.ids["key"] == key
    assert refusal.value.next_step


@pytest.mark.parametrize(
    "config",
    [
        {"init_lora_weights": True},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"modules_to_save": []},
        {"rank_pattern": {}},
        {"target_modules": "all-linear"},
        {"use_rslora": True},
        {"something_new": {"a": [1]}},
        {"base_model_name_or_path": None},
        {"lora_alpha": 0.5},
    ],
    ids=str,
)
def test_what_vllm_can_serve_is_not_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    shape = inspect(make_adapter(tmp_path / "a", layers=1, config=config))
    assert msgspec.json.decode(msgspec.json.encode(shape), type=AdapterShape) == shape


def test_a_base_models_name_is_a_line_and_bounded(tmp_path: Path) -> None:
    named = "org/m\n\x00[31m" + "x" * 10_000
    shape = inspect(written(tmp_path / "a", pair(), base_model_name_or_path=named))
    assert shape.base_model.startswith(r"org/m\n\x00[31mxxx")
    assert len(shape.base_model) == BASE_LIMIT
    assert inspect(written(tmp_path / "b", pair(), base_model_name_or_path="örg/m")).base_model == "örg/m"


@pytest.mark.parametrize(
    "config",
    [
        {"r": None},
        {"r": 0},
        {"r": -1},
        {"r": True},
        {"r": "8"},
        {"r": 8.0},
        {"lora_alpha": None},
        {"lora_alpha": "16"},
        {"lora_alpha": True},
        {"target_modules": None},
        {"target_modules": []},
        {"target_modules": [1]},
        {"target_modules": ["q_proj", 1]},
        {"target_modules": {"q_proj": 1}},
        {"base_model_name_or_path": 5},
        {"rank_pattern": {"q_proj": "8"}},
        {"rank_pattern": {"q_proj": [8]}},
        {"rank_pattern": [8]},
    ],
    ids=str,
)
def test_a_config_of_the_wrong_form_is_refused_and_says_where(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(AdapterInvalid, match="is not a LoRA configuration") as refusal:
        inspect(make_adapter(tmp_path / "a", config=config))
    assert next(iter(config)) in str(refusal.value)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"r":' + b"[" * 50_000 + b"]" * 50_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, text: bytes) -> None:
    directory = small_adapter(tmp_path / "a")
    (directory / CONFIG_FILE).write_bytes(text)
    with pytest.raises(AdapterInvalid, match="adapter_config"):
        inspect(directory)


@pytest.mark.parametrize("name", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    directory = small_adapter(tmp_path / "a")
    (directory / name).unlink()
    with pytest.raises(AdapterInvalid, match=f"{name} is missing"):
        inspect(directory)
    with pytest.raises(AdapterInvalid):
        inspect(tmp_path / "nowhere")


def test_files_beyond_their_limits_are_not_read(tmp_path: Path) -> None:
    directory = small_adapter(tmp_path / "a")
    with (directory / WEIGHTS_FILE).open("r+b") as file:
        file.truncate((4 << 30) + 1)  # sparse
    with pytest.raises(AdapterInvalid, match="larger than the limit"):
        inspect(directory)
    (directory / CONFIG_FILE).write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(AdapterInvalid, match="larger than the limit"):
        inspect(directory)


BAD_TENSORS: dict[str, Callable[[], Tensors]] = {
    "none": dict,
    "A alone": lambda: {name: one for name, one in pair().items() if "lora_A" in name},
    "B alone": lambda: {name: one for name, one in pair().items() if "lora_B" in name},
    "one of two pairs half": lambda: {**pair(), f"{STEM}2.lora_A.weight": ((2, 4), bytes(32))},
    "once with PEFT's prefix and once without": lambda: pair() | pair(STEM.removeprefix("base_model.model.")),
    "rank of neither config nor pattern": lambda: pair(rank=3),
    "halves of different rank": lambda: pair(rank=2, rank_b=4),
    "three dimensions": lambda: {
        f"{STEM}.lora_A.weight": ((2, 2, 2), bytes(32)),
        f"{STEM}.lora_B.weight": ((4, 2), bytes(32)),
    },
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_tensors_that_are_no_lora_pairs_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AdapterInvalid):
        inspect(written(tmp_path / "a", BAD_TENSORS[name](), r=2, rank_pattern={"k_proj": 4}))


@pytest.mark.parametrize("stem", [STEM, STEM.removeprefix("base_model.model."), "lm_head"])
def test_names_may_lack_pefts_prefix(tmp_path: Path, stem: str) -> None:
    """As in what PRIME-RL broadcasts; vLLM takes both."""
    shape = inspect(written(tmp_path / "a", pair(stem), r=2))
    check_against_base(shape, {f"{stem.removeprefix('base_model.model.')}.weight": (4, 4)})


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        (f"{STEM}.lora_magnitude_vector.weight", "use_dora=False"),
        (f"{STEM}.lora_magnitude_vector", "use_dora=False"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "leave them out of target_modules"),
        ("base_model.model.model.embed_tokens.lora_embedding_B", "leave them out of target_modules"),
        ("base_model.model.model.embed_tokens.weight", "save_embedding_layers=False"),
        ("base_model.model.model.embed_tokens.base_layer.weight", "save_embedding_layers=False"),
        ("base_model.model.lm_head.modules_to_save.weight", "drop modules_to_save"),
        ("base_model.model.lm_head.weight", "drop modules_to_save"),
        (f"{STEM}.lora_B.bias", "bias='none'"),
        (f"{STEM}.bias", "bias='none'"),
        (f"{STEM}.lora_A.default.weight", "save_pretrained"),
        ("module.model.layers.0.self_attn.q_proj.lora_A.weight", "save_pretrained"),
        ("base_model.model._orig_mod.model.layers.0.q_proj.lora_A.weight", "take _orig_mod out"),
        ("_orig_mod.model.layers.0.q_proj.lora_A.weight", "take _orig_mod out"),
        (
            "base_model.model.model.layers.0._fsdp_wrapped_module.q_proj.lora_B.weight",
            "take _fsdp_wrapped_module out",
        ),
        (
            "base_model.model.model.layers.0._checkpoint_wrapped_module.q_proj.lora_B.weight",
            "take _checkpoint_wrapped_module out",
        ),
        ("base_model.layers.0.q_proj.lora_A.weight", "names begin with base_model.model."),
    ],
)
def test_a_tensor_the_fleet_cannot_serve_is_refused_with_what_to_do(tmp_path: Path, name: str, fix: str) -> None:
    tensors = pair() | {name: ((2, 4), bytes(32))}
    with pytest.raises(AdapterInvalid, match="not a LoRA weight") as refusal:
        inspect(written(tmp_path / "a", tensors, r=2))
    assert refusal.value.ids["tensor"] == name
    assert fix in refusal.value.next_step


def test_a_rank_counts_as_vllm_counts_it_be_it_of_no_module(tmp_path: Path) -> None:
    assert inspect(written(tmp_path / "a", pair(rank=2), r=64, rank_pattern={"q_proj": 2})).rank == 64
    assert inspect(written(tmp_path / "b", pair(rank=2), r=2, rank_pattern={"nothing": 32})).rank == 32


def test_a_type_that_is_no_float_is_refused(tmp_path: Path) -> None:
    directory = written(tmp_path / "a", pair(), r=2)
    path = directory / WEIGHTS_FILE
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(AdapterInvalid, match="type vLLM cannot serve"):
        inspect(directory)


def test_a_rank_pattern_is_followed(tmp_path: Path) -> None:
    tensors = pair(rank=2) | pair(STEM.replace("q_proj", "k_proj"), rank=8)
    assert inspect(written(tmp_path / "a", tensors, r=2, rank_pattern={"k_proj": 8})).rank == 8


@pytest.mark.parametrize("where", [None, 0, CHUNK - 1, CHUNK, 2 * CHUNK, -1], ids=str)
def test_an_adapter_changes_nothing_only_if_every_byte_of_every_b_is_zero(tmp_path: Path, where: int | None) -> None:
    width = 600_000  # a B of 4.8 MB: several chunks
    zeros = bytearray(width * 2 * 4)
    if where is not None:
        zeros[where] = 1
    tensors = {
        f"{STEM}.lora_A.weight": ((2, 4), b"\1" * 32),
        f"{STEM}.lora_B.weight": ((width, 2), bytes(zeros)),
        **{name.replace("q_proj", "v_proj"): (shape, bytes(len(raw))) for name, (shape, raw) in pair().items()},
    }
    assert inspect(written(tmp_path / "a", tensors, r=2)).noop is (where is None)


@pytest.mark.parametrize(("raw", "noop"), [(b"\0\0\0\x80", True), (b"\0\0\x80\0", False), (b"\0\0\1\x80", False)])
def test_negative_zero_is_zero(tmp_path: Path, raw: bytes, noop: bool) -> None:
    tensors = pair() | {f"{STEM}.lora_B.weight": ((4, 2), raw * 8)}
    assert inspect(written(tmp_path / "a", tensors, r=2)).noop is noop


def base_of(shape: AdapterShape) -> dict[str, tuple[int, ...]]:
    stems = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in shape.tensors}
    return {f"{stem}.weight": (8, 8) for stem in stems}


def test_an_adapter_fits_its_base(tmp_path: Path) -> None:
    shape = inspect(small_adapter(tmp_path / "a"))
    check_against_base(shape, base_of(shape) | {"lm_head.weight": (99, 8)})


@pytest.mark.parametrize("size", [(4, 8), (8, 4), (16, 16), (8,), (), (8, 8, 1)], ids=str)
def test_an_adapter_of_another_size_is_refused(tmp_path: Path, size: tuple[int, ...]) -> None:
    shape = inspect(small_adapter(tmp_path / "a"))
    with pytest.raises(AdapterInvalid, match="does not fit") as refusal:
        check_against_base(shape, dict.fromkeys(base_of(shape), size))
    assert "lora_" in str(refusal.value.ids["tensor"])


def test_an_adapter_for_layers_the_base_lacks_is_refused(tmp_path: Path) -> None:
    shape = inspect(small_adapter(tmp_path / "a"))
    with pytest.raises(AdapterInvalid, match="no such weight"):
        check_against_base(shape, {"model.layers.7.self_attn.q_proj.weight": (8, 8)})


def test_every_byte_and_every_name_is_in_the_digest(tmp_path: Path) -> None:
    directory = small_adapter(tmp_path / "a")
    entries = tuple(hash_file(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE))
    digest = content_digest(entries)
    assert content_digest(entries[::-1]) == digest
    one, two = entries
    swapped = (msgspec.structs.replace(one, name=two.name), msgspec.structs.replace(two, name=one.name))
    assert content_digest(swapped) != digest
    (directory / CONFIG_FILE).write_text(json.dumps({}))
    assert content_digest((hash_file(directory / CONFIG_FILE), entries[1])) != digest


@given(content=st.binary(max_size=100))
def test_a_file_is_hashed_as_sha256_does(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    from hashlib import sha256

    path = tmp_path_factory.getbasetemp() / "hashed"
    path.write_bytes(content)
    assert hash_file(path) == FileEntry(name="hashed", size=len(content), sha256=sha256(content).hexdigest())


def test_a_manifest_survives_its_journey(tmp_path: Path) -> None:
    manifest = manifest_of(small_adapter(tmp_path / "a"), run="my-run", seq=7, step=3)
    again = msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
    assert again == manifest
    assert again.adapter_id == f"my-run-v7-{manifest.digest[:12]}"
    assert again.size == sum(path.stat().st_size for path in (tmp_path / "a").iterdir())


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "", ".", "..", "manifest.json", "x\0"], ids=ascii)
def test_a_manifest_that_names_other_files_is_not_read(tmp_path: Path, name: str) -> None:
    manifest = msgspec.to_builtins(manifest_of(small_adapter(tmp_path / "a")))
    manifest["files"][0]["name"] = name
    with pytest.raises(msgspec.ValidationError, match="files may be"):
        msgspec.json.decode(msgspec.json.encode(manifest), type=Manifest)
