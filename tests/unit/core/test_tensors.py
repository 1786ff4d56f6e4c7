"""The safetensors header reader, against the library whose format it is: what we accept, it accepts, and equally."""

from __future__ import annotations

import io
import json
import math
import random
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from adaptersync_core.errors import AdapterInvalid
from adaptersync_core.tensors import DIMENSIONS, TensorSpec, finite, read_header

WIDTHS = {"BOOL": 1, "U8": 1, "F8_E4M3": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "F64": 8, "C64": 8}
SHAPES = st.lists(st.integers(0, 5), max_size=3)


def file_of(header: bytes | dict[str, Any], data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def ours(raw: bytes) -> dict[str, TensorSpec]:
    return read_header(io.BytesIO(raw), size=len(raw), name="file")[0]


def theirs(raw: bytes) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    read: Any = deserialize  # it has no types
    return {name: (one["dtype"], tuple(one["shape"]), bytes(one["data"])) for name, one in read(raw)}


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A valid file."""
    names = draw(st.lists(st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"), unique=True))
    header: dict[str, Any] = {}
    if draw(st.booleans()):
        header["__metadata__"] = draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
    data = b""
    for name in names[:6]:
        dtype, shape = draw(st.sampled_from(sorted(WIDTHS))), draw(SHAPES)
        size = WIDTHS[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + size]}
        data += random.Random(len(data)).randbytes(size)
    return file_of(json.dumps(header).encode() + b" " * draw(st.integers(0, 8)), data)


def agree(raw: bytes) -> None:
    """Whatever we accept, the library accepts and reads the same."""
    try:
        found, start = read_header(io.BytesIO(raw), size=len(raw), name="file")
    except AdapterInvalid:
        return
    assert {
        name: (spec.dtype, spec.shape, raw[start + spec.data_offsets[0] : start + spec.data_offsets[1]])
        for name, spec in found.items()
    } == theirs(raw)


@given(raw=files())
def test_a_valid_file_reads_as_the_library_reads_it(raw: bytes) -> None:
    assert len(ours(raw)) == len(theirs(raw))
    agree(raw)


@given(raw=files(), data=st.data())
def test_a_file_with_flipped_bytes_is_read_as_the_library_does_or_refused(raw: bytes, data: st.DataObject) -> None:
    changed = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    agree(bytes(changed))


@given(raw=files(), data=st.data())
def test_a_truncated_or_longer_file_is_refused(raw: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(AdapterInvalid):
        ours(raw[:cut])
    with pytest.raises(AdapterInvalid):
        ours(raw + b"\0")


@given(raw=st.binary(max_size=200))
def test_garbage_is_refused_with_a_reason_and_nothing_else(raw: bytes) -> None:
    agree(raw)


NUMBERS = st.integers(-3, 10) | st.sampled_from([2**63, 2**64, 2**64 - 1, 2**70])


@given(
    header=st.dictionaries(
        st.sampled_from(["a", "b", "__metadata__", ""]),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "BF16", "F4", "F6_E2M3", "F8_E8M0", "FOO", ""]),
                "shape": st.lists(NUMBERS, max_size=3),
                "data_offsets": st.lists(NUMBERS, min_size=2, max_size=2),
            },
            optional={"more": st.none()},
        )
        | st.none()
        | st.dictionaries(st.text(max_size=2), st.text(max_size=2), max_size=1),
    ),
    size=st.integers(0, 24),
)
@example(header={"a": {"dtype": "F32", "shape": [-2, -3], "data_offsets": [0, 24]}}, size=24)
def test_a_header_that_lies_is_refused_where_the_library_refuses_it(header: dict[str, Any], size: int) -> None:
    agree(file_of(header, bytes(size)))


def spec(first: int, last: int, shape: Sequence[float] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(last - first) // 4] if shape is None else shape, "data_offsets": [first, last]}


@pytest.mark.parametrize(
    ("header", "size"),
    [
        pytest.param({"a": spec(0, 8), "b": spec(4, 12)}, 12, id="overlap"),
        pytest.param({"a": spec(0, 8), "b": spec(0, 8)}, 8, id="same place twice"),
        pytest.param({"a": spec(0, 4), "b": spec(8, 12)}, 12, id="gap"),
        pytest.param({"a": spec(4, 8)}, 8, id="gap at the start"),
        pytest.param({"a": spec(8, 4, [1])}, 8, id="backwards"),
        pytest.param({"a": spec(0, 24, [-2, -3])}, 24, id="negative shape"),
        pytest.param({"a": spec(0, 4, [2])}, 4, id="shape larger than its bytes"),
        pytest.param({"a": spec(0, 4, [1], "F99")}, 4, id="unknown type"),
        pytest.param({"a": spec(0, 4, [True])}, 4, id="boolean dimension"),
        pytest.param({"a": spec(0, 4, [1.0])}, 4, id="float dimension"),
        pytest.param({"a": spec(0, 4, [1] * (DIMENSIONS + 1))}, 4, id="more dimensions than any tensor has"),
        pytest.param({"a": {"dtype": "F32", "shape": [1]}}, 4, id="no offsets"),
        pytest.param({"a": None}, 0, id="no tensor"),
        pytest.param({"__metadata__": {"a": 1}}, 0, id="metadata that is no text"),
        pytest.param(b"[]", 0, id="list"),
        pytest.param(b"nonsense", 0, id="no JSON"),
        pytest.param(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", 0, id="deep"),
        pytest.param(b'{"\xff":1}', 0, id="no UTF-8"),
    ],
)
def test_refused(header: bytes | dict[str, Any], size: int) -> None:
    with pytest.raises(AdapterInvalid, match="safetensors") as refusal:
        ours(file_of(header, bytes(size)))
    assert refusal.value.ids["file"] == "file"


@pytest.mark.parametrize("length", [0, 1, 3, 100_000_001, 2**63, 2**64 - 1])
def test_a_header_length_that_does_not_fit_is_refused_before_it_is_read(length: int) -> None:
    raw = struct.pack("<Q", length) + b"{}"
    with pytest.raises(AdapterInvalid, match="header length"):
        ours(raw)
    with pytest.raises(SafetensorError):
        theirs(raw)


def test_a_shape_with_a_huge_product_costs_nothing() -> None:
    header = b'{"a":{"dtype":"F32","shape":[' + b",".join([b"9" * 18] * 1_000_000) + b'],"data_offsets":[0,0]}}'
    with pytest.raises(AdapterInvalid):
        ours(file_of(header))


def test_where_the_data_begins() -> None:
    raw = file_of({"a": spec(0, 8, [2])}, struct.pack("<2f", 1.5, -2.5))
    tensors, start = read_header(io.BytesIO(raw), size=len(raw), name="file")
    assert struct.unpack("<2f", raw[start:]) == (1.5, -2.5)
    assert tensors["a"] == TensorSpec(dtype="F32", shape=(2,), data_offsets=(0, 8))


def decoded(dtype: str, raw: bytes) -> tuple[float, ...]:
    if dtype == "BF16":  # the upper half of a float32
        raw = b"".join(b"\0\0" + raw[place : place + 2] for place in range(0, len(raw), 2))
    code = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}[dtype]
    return struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw)


@given(dtype=st.sampled_from(["F64", "F32", "F16", "BF16"]), values=st.lists(st.binary(min_size=8, max_size=8)))
@example(dtype="F32", values=[struct.pack("<ff", 1.0, math.inf)])
@example(dtype="F32", values=[struct.pack("<ff", 3.4e38, -3.4e38)])
@example(dtype="F64", values=[struct.pack("<d", -math.nan)])
@example(dtype="F64", values=[struct.pack("<d", 1.7e308)])
@example(dtype="F16", values=[struct.pack("<4e", 65504, 1, -math.inf, 2)])
@example(dtype="F16", values=[struct.pack("<4e", 65504, -65504, 0, 2)])
@example(dtype="BF16", values=[struct.pack("<f", math.nan)[2:] * 4])
@example(dtype="BF16", values=[struct.pack("<f", 3.38e38)[2:] * 4])
@example(dtype="BF16", values=[bytes(1 << 20), bytes(6) + struct.pack("<f", -math.inf)[2:]])  # beyond one chunk
def test_finite(dtype: str, values: list[bytes]) -> None:
    """By the interpreter's own decoding; what lies around the tensor is not looked at."""
    raw = b"".join(values)
    around = b"\xff" * 8
    file = io.BytesIO(around + raw + around)
    file.seek(8)
    tensor = TensorSpec(dtype=dtype, shape=(len(raw),), data_offsets=(3, 3 + len(raw)))
    assert finite(file, tensor) == all(math.isfinite(value) for value in decoded(dtype, raw))
