"""Names, shapes and types in a safetensors file, without its data.

The `safetensors` library reads a header only together with a framework (numpy at least) or with all the data;
a base model's file is gigabytes, so the header is read here. Format: u64 little-endian length, JSON, data.
"""

from __future__ import annotations

import struct
from math import prod
from typing import BinaryIO

import msgspec
from msgspec import Struct

from adaptersync_core.errors import AdapterInvalid

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
}
_BITS |= {"BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "F4": 4}


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One tensor: safetensors dtype name, shape, and where its bytes lie after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(file: BinaryIO, *, size: int, name: str) -> tuple[dict[str, TensorSpec], int]:
    """Tensors by name, and the offset at which their data begins.

    `size` is the file's size in bytes: the data must fill the file exactly and without gaps, as the format demands,
    so a truncated file is found here.
    """
    head = file.read(8)
    if len(head) < 8:
        raise AdapterInvalid("safetensors file is shorter than its header", file=name, size=size)
    (length,) = struct.unpack("<Q", head)
    if not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise AdapterInvalid("safetensors header length does not fit the file", file=name, header=length, size=size)
    try:
        fields = msgspec.json.decode(file.read(length), type=dict[str, msgspec.Raw])
        tensors = {
            key: msgspec.json.decode(raw, type=TensorSpec) for key, raw in fields.items() if key != "__metadata__"
        }
    except msgspec.MsgspecError as error:
        raise AdapterInvalid(f"safetensors header cannot be read: {error}", file=name) from error
    end = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        first, last = tensor.data_offsets
        bits = _BITS.get(tensor.dtype)
        if bits is None or first != end or (last - first) * 8 != prod(tensor.shape) * bits:
            raise AdapterInvalid("safetensors header contradicts itself", file=name, tensor=key)
        end = last
    if 8 + length + end != size:
        raise AdapterInvalid("safetensors data do not fill the file", file=name, expected=8 + length + end, size=size)
    return tensors, 8 + length
