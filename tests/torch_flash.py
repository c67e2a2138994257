"""A CPU kernel for PyTorch's operator below `varlen_attn`: FlashAttention's rules in float64."""

import functools
from typing import Any

import torch
from torch.nn.attention import varlen


@functools.cache
def register() -> None:
    """Registers the kernel, once per process."""
    varlen._varlen_attn.register_kernel("cpu")(windowed)


def windowed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *others: Any,
    **more: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sequences in a row, windows aligned at the bottom right, log-sum-exp `[heads, rows]`.

    As FlashAttention 2 it gives plus infinity as the log-sum-exp of a row without a key.
    """
    assert not any(others)
    assert not any(more.values())
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert cu_seq_k is not None
    left, right = window_size or [-1, -1]
    assert is_causal == ((left, right) == (-1, 0))
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    factor = query.shape[2] ** -0.5 if scale is None else scale
    starts = [*cu_seq_q[:-1].tolist()], [*cu_seq_q[1:].tolist()]
    bounds = zip(*starts, cu_seq_k[:-1].tolist(), cu_seq_k[1:].tolist(), strict=True)
    for q0, q1, k0, k1 in bounds:
        assert q1 - q0 <= max_q
        assert k1 - k0 <= max_k
        row, column = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)[None, :]
        shift = (k1 - k0) - (q1 - q0)
        kept = torch.ones((q1 - q0, k1 - k0), dtype=torch.bool)
        if left >= 0:
            kept &= column >= row + shift - left
        if right >= 0:
            kept &= column <= row + shift + right
        logits = torch.einsum("qhd,khd->hqk", query[q0:q1].double(), key[k0:k1].double()) * factor
        logits = torch.where(kept, logits, -torch.inf)
        total = torch.logsumexp(logits, dim=-1)
        weights = torch.exp(logits - torch.where(total == -torch.inf, 0.0, total)[..., None])
        # What is masked out is never read, whatever it holds.
        values = torch.where(kept.any(dim=0)[:, None, None], value[k0:k1].double(), 0.0)
        output[q0:q1] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
        lse[:, q0:q1] = torch.where(total == -torch.inf, torch.inf, total).float()
    return output, lse, torch.zeros(2, dtype=torch.uint64)
