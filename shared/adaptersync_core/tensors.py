"""Names, shapes and types in a safetensors file, without its data; and whether its values are finite.

The `safetensors` library reads a header only together with a framework (numpy at least) or with all the data;
a base model's file is gigabytes, so the header is read here. Format: u64 little-endian length, JSON, data.
"""

from __future__ import annotations

import struct
from math import prod
from typing import Annotated, BinaryIO

import msgspec
from msgspec import Meta, Struct

from adaptersync_core.errors import AdapterInvalid

HEADER_LIMIT = 100_000_000  # bytes; the format's own limit
DIMENSIONS = 16  # of one tensor; far above any, and what keeps a hostile shape's product small
_BITS = (
    dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
    | dict.fromkeys(("I32", "U32", "F32"), 32)
    | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
    | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
)

_SCANNED = 1 << 20  # bytes at a time; a multiple of every width
_EXPONENT = {"F64": (8, 0x7F, 0xF0), "F32": (4, 0x7F, 0x80), "F16": (2, 0x7C, 0x00), "BF16": (2, 0x7F, 0x80)}
"""Width in bytes, and the bits of the last byte and of the one before it that only infinities and NaNs all have."""

Size = Annotated[int, Meta(ge=0)]


class TensorSpec(Struct, frozen=True, kw_only=True):
    """One tensor: safetensors dtype name, shape, and where its bytes lie after the header."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Meta(max_length=DIMENSIONS)]
    data_offsets: tuple[Size, Size]


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
        msgspec.json.decode(fields.pop("__metadata__", b"{}"), type=dict[str, str] | None)
        tensors = {key: msgspec.json.decode(raw, type=TensorSpec) for key, raw in fields.items()}
    except (msgspec.MsgspecError, RecursionError) as error:
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


def finite(file: BinaryIO, tensor: TensorSpec) -> bool:
    """Whether no value of a tensor of floats is an infinity or NaN; `file` stands where the tensor's bytes begin.

    At the speed of slicing: only where a last byte says that a value is huge at least is it looked at by itself.
    """
    width, last, before = _EXPONENT[tensor.dtype]
    suspects = [byte for byte in range(256) if byte & last == last]
    left = tensor.data_offsets[1] - tensor.data_offsets[0]
    while left > 0 and (chunk := file.read(min(_SCANNED, left))):
        left -= len(chunk)
        highest = chunk[width - 1 :: width]
        if any(byte in highest for byte in suspects):
            pairs = zip(highest, chunk[width - 2 :: width], strict=True)
            if any(high & last == last and low & before == before for high, low in pairs):
                return False
    return True
