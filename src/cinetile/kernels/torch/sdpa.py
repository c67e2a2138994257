"""Dense attention by PyTorch's own best kernel."""

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812

from cinetile.kernels.torch.base import Engine, HeadGroup, TensorRequest
from cinetile.kernels.torch.placement import Scatter, place
from cinetile.kernels.torch.windows import mask_windows
from cinetile.masks import dense_mask


class SdpaEngine(Engine):
    """Heads that a policy leaves dense, by `scaled_dot_product_attention`."""

    name: ClassVar[str] = "sdpa"
    requirements: ClassVar[str] = "nothing; dense plans only"

    def unavailable(self, device: torch.device) -> str | None:
        del device
        return None

    def unsupported(self, request: TensorRequest) -> str | None:
        if request.plan.stats.kept_pairs != request.plan.mask.num_tokens**2:
            return "scaled_dot_product_attention runs dense plans only"
        if request.return_lse:
            return "scaled_dot_product_attention gives no log-sum-exp"
        return None

    def attend(self, group: HeadGroup) -> None:
        windows = mask_windows(dense_mask(group.plan.grid))
        scatter = Scatter(windows.query_order, group.rows, group.heads, group.query.device)
        query = place(group.query, windows.query_order, group.rows, group.heads)
        key, value = (
            place(tensor, windows.key_order, group.rows, group.heads)
            for tensor in (group.key, group.value)
        )
        end = group.plan.mask.num_tokens - group.absent
        key, value = (tensor[:end].transpose(0, 1)[None] for tensor in (key, value))
        for rows in windows.without_last_keys(group.absent):
            part = query[rows.start : rows.stop].transpose(0, 1)[None]
            output = F.scaled_dot_product_attention(part, key, value, scale=group.scale)
            scatter(group.output, rows.start, output[0].transpose(0, 1))
