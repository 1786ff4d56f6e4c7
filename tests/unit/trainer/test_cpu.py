"""The CPU's stand-in for FlashAttention computes the same attention."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from adaptersync.trainer.cpu import attention_over_segments, enable_cpu

pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]


@pytest.mark.parametrize("window", [-1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_segments_attend_as_plain_softmax_attention_says(trl: ModuleType, kv_heads: int, window: int) -> None:
    import torch

    torch.manual_seed(0)
    heads, size = 4, 8
    segments = [(3, 3), (2, 5), (1, 4)]  # queries, keys: the later ones share a prefix with what came before
    query = torch.randn(sum(queries for queries, _ in segments), heads, size)
    key, value = torch.randn(2, sum(keys for _, keys in segments), kv_heads, size)
    query_ends, key_ends = (torch.tensor([0, *(part[i] for part in segments)]).cumsum(0) for i in (0, 1))

    got = attention_over_segments(
        query, key, value, query_ends, key_ends, 3, 5, softmax_scale=0.3, window_size=(window, 0)
    )

    row = 0
    for number, (queries, keys) in enumerate(segments):
        first = int(key_ends[number])
        for i in range(queries):
            last = first + keys - queries + i  # the position of this query among its keys
            oldest = first if window < 0 else max(first, last - window)
            for head in range(heads):
                shared = head * kv_heads // heads
                scores = torch.stack([query[row, head] @ key[k, shared] * 0.3 for k in range(oldest, last + 1)])
                expected = scores.softmax(0) @ value[oldest : last + 1, shared]
                torch.testing.assert_close(got[row, head], expected)
            row += 1


def test_log_probabilities_of_packed_samples_equal_those_of_each_alone(
    trl: ModuleType, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL packs samples with a common prompt into one tree-shaped row: the path a training step takes."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    from adaptersync.trainer.seams import async_grpo_trainer, packing

    monkeypatch.setattr(packing, "_flash_attn", packing._flash_attn)  # both put back at the end
    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert enable_cpu()
    packing.register_tree_attention()
    tree, eager = (
        AutoModelForCausalLM.from_pretrained(tiny_base, attn_implementation=kind)
        for kind in (packing.TREE_ATTENTION, "eager")
    )

    prompt, answers = [15, 16, 17, 18], [[19, 20, 21], [19, 22], [23, 24, 25, 26]]
    row = packing.TreeRow()
    for answer in answers:
        ids = np.array(prompt + answer)
        trained = np.array([0] * len(prompt) + [1] * len(answer))
        sample = {"input_ids": ids, "completion_mask": trained, "old_log_probs": np.zeros(len(ids)), "advantage": 1.0}
        row.add({**sample, "group_id": 0})
    packed = row.pack()
    tokens = packed["input_ids"]
    assert len(tokens) < sum(len(prompt + answer) for answer in answers)  # something is shared

    with torch.no_grad():
        together = tree(
            input_ids=tokens[None],
            position_ids=packed["position_ids"][None],
            tree_kv_index=packed["tree_kv_index"],
            tree_cu_seqlens_q=packed["tree_cu_seqlens_q"],
            tree_cu_seqlens_k=packed["tree_cu_seqlens_k"],
            tree_max_seqlen_q=int(packed["tree_max_seqlens"][0]),
            tree_max_seqlen_k=int(packed["tree_max_seqlens"][1]),
        ).logits[0][packed["token_index"]]
        alone = torch.cat([eager(torch.tensor([prompt + a])).logits[0, len(prompt) - 1 : -1] for a in answers])
    torch.testing.assert_close(together.log_softmax(-1), alone.log_softmax(-1), atol=2e-6, rtol=0)


def test_a_machine_with_a_gpu_is_left_alone(trl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from adaptersync.trainer.seams import packing

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = packing._flash_attn
    assert not enable_cpu()
    assert packing._flash_attn is before
