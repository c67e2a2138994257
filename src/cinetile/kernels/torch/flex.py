"""FlexAttention fed with the tiles of a plan."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, no_type_check

import numpy as np
import torch
from jaxtyping import Bool, Int

from cinetile.kernels.padding import holds_text
from cinetile.kernels.torch.base import Engine, HeadGroup, TensorRequest
from cinetile.kernels.torch.placement import Scatter, place
from cinetile.plans import TileKind, TilePlan, plan_tiles
from cinetile.plans.picture import FULL, SKIPPED

BLOCK = 128
"""FlexAttention's kernels walk tiles of a multiple of this."""

_MIN_HEAD_DIM = 16
# Without compilation FlexAttention builds a matrix of all pairs and looks at the mask only.
_MAX_EAGER_TOKENS = 4096


class FlexEngine(Engine):
    """Any plan through FlexAttention, whose tile lists are taken from the plan, never searched."""

    name: ClassVar[str] = "flex"
    requirements: ClassVar[str] = "PyTorch's FlexAttention (2.10 or newer); on a GPU also Triton"

    def unavailable(self, device: torch.device) -> str | None:
        try:
            from torch.nn.attention.flex_attention import AuxRequest  # noqa: F401
        except ImportError:
            return f"FlexAttention of PyTorch {torch.__version__} has no return_aux"
        if device.type not in ("cpu", "cuda"):
            return f"FlexAttention was not tried on {device.type} tensors"
        if device.type == "cuda":
            from torch.utils._triton import has_triton

            if not has_triton():
                return "FlexAttention needs Triton on a GPU, and PyTorch finds none"
        return None

    def unsupported(self, request: TensorRequest) -> str | None:
        plan = request.plan
        if not is_compiled(request.device, plan):
            return None
        if plan.mode == "aligned" and (plan.block_q % BLOCK or plan.block_kv % BLOCK):
            return (
                f"an aligned plan needs tiles that are multiples of {BLOCK}, "
                f"got {plan.block_q} x {plan.block_kv}"
            )
        if request.return_lse and request.device.type == "cpu":
            return "FlexAttention compiled for a CPU gives no log-sum-exp"
        if request.head_dim < _MIN_HEAD_DIM:
            return (
                f"FlexAttention's compiled kernels need head sizes from {_MIN_HEAD_DIM}, "
                f"got {request.head_dim}"
            )
        return None

    def attend(self, group: HeadGroup) -> None:
        device, plan = group.query.device, group.plan
        compiled = is_compiled(device, plan)
        tables = flex_tables(plan, device, compiled=compiled, mask_prompt=group.absent > 0)
        orders = (plan.mask.query_order, plan.mask.key_order, plan.mask.key_order)
        query, key, value = (
            _placed(tensor, group, order.indices(plan.grid), order.text_range(plan.grid)[1])
            for tensor, order in zip((group.query, group.key, group.value), orders, strict=True)
        )
        output, lse = _flex(compiled, group.lse is not None)(
            query, key, value, tables.block_mask(group.absent), group.scale
        )
        scatter = Scatter(orders[0].indices(plan.grid), group.rows, group.heads, device)
        scatter(group.output, 0, output[0].transpose(0, 1))
        if group.lse is not None:
            scatter(group.lse, 0, lse[0].T)


def is_compiled(device: torch.device, plan: TilePlan) -> bool:
    """Whether FlexAttention is compiled for a plan; short sequences on a CPU are not."""
    return device.type != "cpu" or plan.mask.num_tokens > _MAX_EAGER_TOKENS


def _placed(
    tensor: torch.Tensor, group: HeadGroup, order: Int[np.ndarray, " tokens"], text_stop: int
) -> torch.Tensor:
    """Heads of a group as `[1, group, tokens, head_dim]`, with zeros in place of padding."""
    placed = place(tensor, order, group.rows, group.heads)
    if group.absent:
        # A weight of zero does not silence what is no number.
        if placed.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
            placed = placed.clone()
        placed[text_stop - group.absent : text_stop] = 0
    return placed.transpose(0, 1)[None]


@dataclass(frozen=True, eq=False)
class FlexTables:
    """A plan as FlexAttention wants it, on a device.

    Attributes:
        counts: masked and full key tiles of each query tile, `[1, 1, q_tiles]`.
        indices: which key tiles they are, `[1, 1, q_tiles, kv_tiles]`.
        blocks: queries and keys in a tile.
        num_tokens: tokens of the sequence.
        text_stop: one past the last key that is text.
        keeps: whether a pair is kept, given query, key and the first key that is padding.
    """

    counts: tuple[torch.Tensor, torch.Tensor]
    indices: tuple[torch.Tensor, torch.Tensor]
    blocks: tuple[int, int]
    num_tokens: int
    text_stop: int
    keeps: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

    def block_mask(self, absent: int) -> Any:
        """FlexAttention's mask; the last `absent` text keys are never attended."""
        from torch.nn.attention.flex_attention import BlockMask

        device = self.counts[0].device
        hole_start = torch.tensor(self.text_stop - absent, dtype=torch.int32, device=device)
        keeps = self.keeps

        @no_type_check  # FlexAttention traces it: no checks of annotations inside
        def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
            del batch, head
            return keeps(query, key, hole_start)

        return BlockMask.from_kv_blocks(
            self.counts[0],
            self.indices[0],
            self.counts[1],
            self.indices[1],
            BLOCK_SIZE=self.blocks,
            mask_mod=mask_mod,
            seq_lengths=(self.num_tokens, self.num_tokens),
            compute_q_blocks=False,
        )


@functools.lru_cache(maxsize=32)
def flex_tables(
    plan: TilePlan, device: torch.device, *, compiled: bool, mask_prompt: bool
) -> FlexTables:
    """Builds the tables of a plan; exact plans whose tiles FlexAttention cannot walk are cut anew.

    Args:
        plan: what to visit.
        device: where the tables are needed.
        compiled: whether compiled kernels read them, which take the tile lists at their word;
            otherwise the mask tells skipped and full tiles too.
        mask_prompt: whether some text may be padding, so that tiles with text must be masked.
    """
    if compiled and (plan.block_q % BLOCK or plan.block_kv % BLOCK):
        plan = plan_tiles(plan.mask, BLOCK, BLOCK, "dense" if plan.mode == "dense" else "split")
    geometry = plan.geometry
    masked = plan.tile_kind != TileKind.FULL
    if mask_prompt:
        masked = masked | holds_text(plan, plan.tile_kv)
    masked_count, masked_index = _lists(plan, masked, device)
    full_count, full_index = _lists(plan, ~masked, device)
    prefix, low, high = (torch.tensor(edge.copy()).to(device) for edge in plan.row_edges())
    text_stop = plan.mask.key_order.text_range(plan.grid)[1]
    tiles = torch.tensor(plan.tile_map()).to(device)
    blocks = (geometry.block_q, geometry.block_kv)

    @no_type_check
    def follows_edges(query: Any, key: Any, hole_start: Any) -> Any:
        kept = (key < prefix[query]) | ((low[query] <= key) & (key < high[query]))
        return kept & ((key < hole_start) | (key >= text_stop))

    @no_type_check
    def follows_tiles(query: Any, key: Any, hole_start: Any) -> Any:
        state = tiles[query // blocks[0], key // blocks[1]]
        kept = (key < prefix[query]) | ((low[query] <= key) & (key < high[query]))
        exists = (key < hole_start) | (key >= text_stop)
        return (state != SKIPPED) & ((state == FULL) | kept) & exists

    keeps = follows_edges if compiled else follows_tiles
    return FlexTables(
        (masked_count, full_count),
        (masked_index, full_index),
        blocks,
        plan.mask.num_tokens,
        text_stop,
        keeps,
    )


def _lists(
    plan: TilePlan, chosen: Bool[np.ndarray, " tiles"], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many chosen key tiles each query tile has, and which, as a padded table."""
    rows, columns = plan.geometry.num_q_tiles, plan.geometry.num_kv_tiles
    row, column = plan.tile_q[chosen], plan.tile_kv[chosen]
    count = np.bincount(row, minlength=rows).astype(np.int32)
    index = np.zeros((rows, columns), np.int32)
    first = np.cumsum(count) - count
    index[row, np.arange(row.size) - first[row]] = column
    counts, indices = (torch.tensor(table[None, None]).to(device) for table in (count, index))
    return counts, indices


@functools.cache
def _flex(compiled: bool, return_lse: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    def attend(query: Any, key: Any, value: Any, block_mask: Any, scale: float) -> Any:
        output, aux = flex_attention(
            query,
            key,
            value,
            block_mask=block_mask,
            scale=scale,
            return_aux=AuxRequest(lse=return_lse),
        )
        return output, aux.lse

    return torch.compile(attend, dynamic=False) if compiled else _quietly(attend)


def _quietly(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Without PyTorch's advice to compile, which does not pay on short sequences."""

    def quiet(*arguments: Any) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="flex_attention called without")
            return attend(*arguments)

    return quiet
