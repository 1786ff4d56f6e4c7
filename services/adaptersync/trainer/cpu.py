"""What TRL's AsyncGRPOTrainer needs to run without a GPU.

TRL asks a CUDA device for its name and fetches a CUDA attention kernel. `enable_cpu` replaces both with what a CPU
can do, and does nothing where there is a CUDA device. Call it before a trainer is made. Loads torch and TRL when
called, not when imported.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def enable_cpu() -> bool:
    """Make TRL's asynchronous GRPO run on this machine's CPU; False when it has a GPU and needs no help."""
    import torch

    if torch.cuda.is_available():
        return False

    from adaptersync.trainer.seams import async_grpo_trainer, packing

    # Peak FLOP/s are looked up by the name of the CUDA device; without one TRL leaves its utilisation metrics out.
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    # Attention over packed rows is a FlashAttention 3 kernel from the Hub.
    kernel = SimpleNamespace(flash_attn_varlen_func=attention_over_segments)
    packing._flash_attn = lambda: kernel
    return True


def attention_over_segments(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_ends: torch.Tensor,
    key_ends: torch.Tensor,
    longest_query: int,
    longest_key: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:
    """FlashAttention's variable-length attention, one segment at a time.

    `query` is (tokens, heads, head size); `key` and `value` may have fewer heads. `query_ends` and `key_ends` are
    cumulative lengths beginning with 0: segment i attends from query_ends[i]:query_ends[i + 1] to the same slice of
    keys. A segment's last query sees its last key, also when it has more keys than queries.
    """
    import torch

    if not causal:
        raise NotImplementedError("TRL packs causal rows only")
    bounds = zip(
        *(ends.tolist() for ends in (query_ends[:-1], query_ends[1:], key_ends[:-1], key_ends[1:])),
        strict=True,
    )
    parts = []
    for query_from, query_to, key_from, key_to in bounds:
        queries, keys = query_to - query_from, key_to - key_from
        # Position of each query counted in keys, minus that of each key: how far back the key lies.
        back = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None, :]
        mask = back >= 0
        if window_size[0] >= 0:
            mask &= back <= window_size[0]
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[query_from:query_to].transpose(0, 1)[None],
            key[key_from:key_to].transpose(0, 1)[None],
            value[key_from:key_to].transpose(0, 1)[None],
            attn_mask=mask,
            scale=softmax_scale,
            enable_gqa=True,
        )
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)
