"""Merging attention over disjoint sets of keys by log-sum-exp."""

from collections.abc import Sequence

import torch

__all__ = ["merge"]


def merge(
    outputs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges the attention of the same queries over several disjoint sets of keys.

    Computed in float32; differentiable. A set that holds no key of a row has a log-sum-exp of
    minus infinity there and any finite output. NaN stays NaN.

    Args:
        outputs: output over each set, `[..., head_dim]`, of any floating dtype.
        lses: natural log-sum-exp of each row's logits over each set, `[...]`, float32.

    Returns:
        The output over all keys and its log-sum-exp, float32; zeros and minus infinity for a
        row without any key.

    Raises:
        ValueError: there is no set, the counts differ, or shapes do not fit each other.
    """
    if not outputs or len(outputs) != len(lses):
        raise ValueError(
            f"outputs and lses must be as many and at least 1, got {len(outputs)} and {len(lses)}"
        )
    for output, lse in zip(outputs, lses, strict=True):
        if output.shape != outputs[0].shape or lse.shape != output.shape[:-1]:
            raise ValueError(
                "outputs must have one shape and lses that without the last axis, got "
                f"{list(output.shape)} and {list(lse.shape)}"
            )
    stacked = torch.stack([lse.float() for lse in lses])
    maximum = stacked.detach().amax(dim=0)
    # A row without any key would subtract minus infinity from itself.
    maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
    weights = torch.exp(stacked - maximum)
    total = weights.sum(dim=0)
    shares = weights / torch.where(total == 0.0, 1.0, total)
    merged = outputs[0].float() * shares[0].unsqueeze(-1)
    for output, share in zip(outputs[1:], shares[1:], strict=True):
        merged = torch.addcmul(merged, output.float(), share.unsqueeze(-1))
    return merged, maximum + torch.log(total)
