"""Windows and dense prefixes by FlashAttention, merged by log-sum-exp."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from cinetile.kernels.torch.base import Engine, HeadGroup, TensorRequest
from cinetile.kernels.torch.merge import merge
from cinetile.kernels.torch.placement import Scatter, place
from cinetile.kernels.torch.windows import (
    NotWindows,
    Piece,
    RowGroup,
    SingleKeys,
    Window,
    mask_windows,
)
from cinetile.masks import Mask, dense_mask
from cinetile.plans import TilePlan

OPERATOR = "torch_attn::_varlen_attn"
ARGUMENTS = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k")
OPTIONS = ("return_aux", "scale", "window_size")
"""What is passed to PyTorch's `varlen_attn`, by position and by name."""

_MAX_HEAD_DIM = 256
# Elements of a merge in float32 at a time: 16 MiB per temporary.
_MERGED_AT_ONCE = 1 << 22


class WindowPairEngine(Engine):
    """Exact masks from windows that the best dense kernel of the card runs.

    A spatial mask is a window over the keys behind the first frame and a dense prefix; a
    temporal one is the same in token-major order, with windows of their own for the queries of
    the first frame and with single keys where the width is no multiple of the frames.
    """

    name: ClassVar[str] = "window_pair"
    requirements: ClassVar[str] = (
        "PyTorch's varlen_attn with windows (2.11 or newer) and an NVIDIA GPU since Ampere"
    )

    @property
    def path(self) -> str:
        current = getattr(torch.nn.attention, "current_flash_attention_impl", lambda: None)()
        return f"{self.name} ({current or 'FA2'})"

    def unavailable(self, device: torch.device) -> str | None:
        problem = operator_problem()
        if problem:
            return problem
        if device.type == "cuda":
            if torch.version.hip:
                return "FlashAttention's windows were not tried on AMD GPUs"
            major, minor = torch.cuda.get_device_capability(device)
            if major < 8:
                return f"FlashAttention needs compute capability 8.0, got {major}.{minor}"
            return None
        if not has_kernel(device):
            return f"PyTorch has no FlashAttention for {device.type} tensors"
        return None

    def unsupported(self, request: TensorRequest) -> str | None:
        if request.device.type == "cuda":
            if request.dtype == torch.float32:
                return "FlashAttention takes float16 or bfloat16, got float32"
            if request.head_dim % 8 or request.head_dim > _MAX_HEAD_DIM:
                return (
                    f"FlashAttention takes head sizes that are multiples of 8 up to "
                    f"{_MAX_HEAD_DIM}, got {request.head_dim}"
                )
        if not (request.plan.is_exact or request.plan.mode == "dense"):
            return "an aligned plan keeps whole tiles, which are no windows; plan with mode='split'"
        try:
            mask_windows(mask_of(request.plan))
        except NotWindows as reason:
            return f"the {request.plan.mask.name} mask is not made of windows: {reason}"
        return None

    def attend(self, group: HeadGroup) -> None:
        windows = mask_windows(mask_of(group.plan))
        placed = Placed(
            place(group.query, windows.query_order, group.rows, group.heads),
            place(group.key, windows.key_order, group.rows, group.heads),
            place(group.value, windows.key_order, group.rows, group.heads),
            group.scale,
        )
        scatter = Scatter(windows.query_order, group.rows, group.heads, group.query.device)
        for rows in windows.without_last_keys(group.absent):
            for start, output, lse in attend_rows(placed, rows):
                scatter(group.output, start, output)
                if group.lse is not None:
                    scatter(group.lse, start, lse)


def mask_of(plan: TilePlan) -> Mask:
    """The mask whose pairs an exact or dense plan computes."""
    return dense_mask(plan.grid) if plan.mode == "dense" else plan.mask


def operator_problem() -> str | None:
    """Why PyTorch's `varlen_attn` is not what this engine calls; None if it is."""
    try:
        varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return f"PyTorch {torch.__version__} has no torch.nn.attention.varlen"
    parameters = list(inspect.signature(varlen.varlen_attn).parameters)
    missing = [name for name in (*ARGUMENTS, *OPTIONS) if name not in parameters]
    if tuple(parameters[: len(ARGUMENTS)]) != ARGUMENTS or missing:
        return f"varlen_attn of PyTorch {torch.__version__} takes other arguments: {parameters}"
    return None


def has_kernel(device: torch.device) -> bool:
    """Whether PyTorch's operator has a kernel for a device other than a GPU."""
    keys = {"cpu": "CPU"}
    key = keys.get(device.type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(OPERATOR, key)


@dataclass(frozen=True, eq=False)
class Placed:
    """Query, key and value of a group in an engine's orders, `[tokens, group, head_dim]`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float


def attend_rows(placed: Placed, rows: RowGroup) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Attention of a run of rows, in parts of bounded size: first row, output, log-sum-exp."""
    partials = [_partial(placed, piece) for piece in rows.pieces]
    if not partials:
        return  # text that the prompt leaves unused was all that these rows keep
    first = partials[0]
    if (
        len(partials) == 1
        and isinstance(first, _Rows)
        and (first.start, first.stop) == (rows.start, rows.stop)
    ):
        yield rows.start, first.output, first.lse
        return
    _, heads, head_dim = placed.query.shape
    step = _rows_at_once(heads, head_dim)
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        parts = [part for tensor in partials if (part := tensor.between(start, stop)) is not None]
        if parts:
            output, lse = merge([part[0] for part in parts], [part[1] for part in parts])
            yield start, output, lse


@dataclass(frozen=True, eq=False)
class _Rows:
    """Attention of some rows over a window."""

    start: int
    stop: int
    output: torch.Tensor
    lse: torch.Tensor

    def between(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Output and log-sum-exp of rows `[start, stop)`; None if it has none of them."""
        first, end = max(start, self.start), min(stop, self.stop)
        if end <= first:
            return None
        output = self.output[first - self.start : end - self.start]
        lse = self.lse[first - self.start : end - self.start]
        if end - first == stop - start:
            return output, lse
        full_output = output.new_zeros((stop - start, *output.shape[1:]))
        full_lse = lse.new_full((stop - start, *lse.shape[1:]), -torch.inf)
        full_output[first - start : end - start] = output
        full_lse[first - start : end - start] = lse
        return full_output, full_lse


@dataclass(frozen=True, eq=False)
class _Singles:
    """Attention of some rows to one key each: the value, and the logit as log-sum-exp."""

    placed: Placed
    keys: SingleKeys

    def between(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        first, end = np.searchsorted(self.keys.rows, [start, stop])
        if end <= first:
            return None
        query, key, value = self.placed.query, self.placed.key, self.placed.value
        row, at = (
            torch.tensor(index[first:end].astype(np.int64)).to(query.device)
            for index in (self.keys.rows, self.keys.keys)
        )
        logits = torch.einsum("thd,thd->th", query[row].float(), key[at].float())
        output = value.new_zeros((stop - start, *value.shape[1:]))
        lse = logits.new_full((stop - start, value.shape[1]), -torch.inf)
        output[row - start] = value[at]
        lse[row - start] = logits * self.placed.scale
        return output, lse


def _partial(placed: Placed, piece: Piece) -> "_Rows | _Singles":
    if isinstance(piece, SingleKeys):
        return _Singles(placed, piece)
    query = placed.query[piece.row_start : piece.row_stop]
    key, value = (tensor[piece.key_start : piece.key_stop] for tensor in (placed.key, placed.value))
    if piece.stride > 1:
        output, lse = _side_by_side_keys(query, key, value, piece, placed.scale)
    else:
        output, lse = _flash(query, key, value, piece, placed.scale)
    return _Rows(piece.row_start, piece.row_stop, output, lse)


def _side_by_side_keys(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: Window, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows of tokens that hold several keys: each lane of keys as heads of its own, merged."""
    rows, heads, head_dim = query.shape
    lanes = slice(window.lane_start, window.lane_stop)
    count = window.lane_stop - window.lane_start
    key, value = (
        tensor.reshape(-1, window.stride, heads, head_dim)[:, lanes].flatten(1, 2)
        for tensor in (key, value)
    )
    query = query[:, None].expand(rows, count, heads, head_dim).flatten(1, 2)
    output, lse = _flash(query, key, value, window, scale)
    output, lse = output.unflatten(1, (count, heads)), lse.unflatten(1, (count, heads))
    merged, total = torch.empty_like(output[:, 0]), torch.empty_like(lse[:, 0])
    for start in range(0, rows, step := _rows_at_once(heads, head_dim)):
        part = slice(start, start + step)
        merged[part], total[part] = merge(output[part].unbind(1), lse[part].unbind(1))
    return merged, total


def _rows_at_once(heads: int, head_dim: int) -> int:
    """Rows that are merged at a time, so that temporaries in float32 stay small."""
    return max(1, _MERGED_AT_ONCE // (heads * head_dim))


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: Window, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls `varlen_attn`: output `[rows, heads, head_dim]` and log-sum-exp `[rows, heads]`."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    rows, keys = query.shape[0], key.shape[0]
    starts = torch.tensor([[0, rows], [0, keys]], dtype=torch.int32).to(query.device)
    reach = (-1, -1)
    if window.left is not None and window.right is not None:
        reach = (window.left, window.right)
    output, lse = varlen_attn(
        query,
        key,
        value,
        starts[0],
        starts[1],
        rows,
        keys,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=reach,
    )
    # PyTorch documents [rows, heads] and gives [heads, rows].
    return output, lse if lse.shape == (rows, query.shape[1]) and rows != query.shape[1] else lse.T
