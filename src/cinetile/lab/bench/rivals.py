"""PyTorch's attention on the same inputs, to measure beside the library's own.

PyTorch is imported only if a rival is requested.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from cinetile import _checks, _extras
from cinetile.lab.bench.machine import usable_threads
from cinetile.lab.bench.reference import RoundedInputs
from cinetile.masks import Mask
from cinetile.masks.mask import keeps
from cinetile.plans import TileKind, plan_tiles

RIVALS: tuple[str, ...] = ("torch-sdpa", "torch-flex")
_FLEX_BLOCK = 128


@dataclass(frozen=True)
class RivalRow:
    """Measurements of one rival.

    Attributes:
        name: "torch-sdpa" or "torch-flex".
        version: of PyTorch.
        ms_median: median wall time of a call.
        ms_min: shortest.
        ms_max: longest.
        speedup_vs_dense: time of the library's own dense row over this; None where the
            measurement does not support it.
        no_speedup_reason: why `speedup_vs_dense` is None; None where it is not.
        kept_fraction: pairs that it computes and keeps.
        max_abs_error: against the float64 reference of the pairs that it keeps.
        rel_error: the same error, relative.
        rel_error_vs_exact: against the exact mask's reference.
        rel_error_vs_dense: against the dense reference.
    """

    name: str
    version: str
    ms_median: float
    ms_min: float
    ms_max: float
    speedup_vs_dense: float | None
    no_speedup_reason: str | None
    kept_fraction: float
    max_abs_error: float
    rel_error: float
    rel_error_vs_exact: float
    rel_error_vs_dense: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Rival:
    """A rival that is ready to run.

    Attributes:
        name: its name.
        version: of PyTorch.
        mode: the mode whose pairs it keeps, "dense" or "split".
        run: runs it once and returns its output when that is done.
        rows: some frame-major query rows of such an output.
    """

    name: str
    version: str
    mode: str
    run: Callable[[], Any]
    rows: Callable[[Any, Int[np.ndarray, " rows"]], Float[np.ndarray, "batch rows heads head_dim"]]


def check_rivals(names: tuple[str, ...]) -> None:
    """Raises where a rival cannot be measured.

    Raises:
        ValueError: a name is unknown or comes twice.
        ImportError: PyTorch is not installed.
    """
    for name in names:
        _checks.choice("rivals", name, RIVALS)
    if len(set(names)) < len(names):
        raise ValueError(f"rivals must not name one twice, got {', '.join(names)}")
    if names:
        _require_torch()


@contextlib.contextmanager
def rivals_ready(
    names: tuple[str, ...], inputs: RoundedInputs, mask: Mask, dtype: str
) -> Iterator[tuple[Rival, ...]]:
    """Prepares rivals on as many threads as this process may use, and puts that setting back.

    Args:
        names: what to prepare.
        inputs: query, key and value in frame-major order, rounded to `dtype`.
        mask: the pairs that a sparse rival keeps.
        dtype: "float32", "bfloat16" or "float16".
    """
    if not names:
        yield ()
        return
    torch = _require_torch()
    makers = {"torch-sdpa": _sdpa, "torch-flex": _flex}
    threads = torch.get_num_threads()
    torch.set_num_threads(usable_threads())
    try:
        with torch.inference_mode():
            yield tuple(makers[name](torch, inputs, mask, dtype) for name in names)
    finally:
        torch.set_num_threads(threads)


def _require_torch() -> ModuleType:
    return _extras.require(
        "torch", extra="rivals", feature="measuring PyTorch's attention", package="PyTorch"
    )


def _sdpa(torch: Any, inputs: RoundedInputs, mask: Mask, dtype: str) -> Rival:
    """Dense scaled dot-product attention, whatever the mask."""
    order = np.arange(mask.num_tokens)
    query, key, value = (
        _tensor(torch, array, order, dtype) for array in (inputs.query, inputs.key, inputs.value)
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    return Rival(
        name="torch-sdpa",
        version=torch.__version__,
        mode="dense",
        run=lambda: attend(query, key, value),
        rows=lambda output, rows: _rows(torch, output, rows),
    )


def _flex(torch: Any, inputs: RoundedInputs, mask: Mask, dtype: str) -> Rival:
    """Compiled FlexAttention with the exact mask.

    It has no token orders, so its arrays stand in the mask's orders beforehand: unlike the
    library's own times, its time has no moving of tokens in it.
    """
    from torch.nn.attention.flex_attention import flex_attention

    query_order, key_order = (
        order.indices(mask.grid) for order in (mask.query_order, mask.key_order)
    )
    query = _tensor(torch, inputs.query, query_order, dtype)
    key = _tensor(torch, inputs.key, key_order, dtype)
    value = _tensor(torch, inputs.value, key_order, dtype)
    block_mask = _block_mask(torch, mask)
    attend = torch.compile(flex_attention, dynamic=False)
    placed_row = np.argsort(query_order)
    return Rival(
        name="torch-flex",
        version=torch.__version__,
        mode="split",
        run=lambda: attend(query, key, value, block_mask=block_mask),
        rows=lambda output, rows: _rows(torch, output, placed_row[rows]),
    )


def _block_mask(torch: Any, mask: Mask) -> Any:
    """FlexAttention's block lists, read off a split plan: its own way evaluates N x N pairs."""
    from torch.nn.attention.flex_attention import BlockMask

    plan = plan_tiles(mask, _FLEX_BLOCK, _FLEX_BLOCK, "split")
    full = plan.tile_kind == TileKind.FULL
    num_rows, num_columns = plan.geometry.num_q_tiles, plan.geometry.num_kv_tiles

    def listed(chosen: np.ndarray) -> tuple[Any, Any]:
        row, column = plan.tile_q[chosen], plan.tile_kv[chosen]
        counts = np.bincount(row, minlength=num_rows).astype(np.int32)
        starts = np.cumsum(counts) - counts
        indices = np.zeros((num_rows, num_columns), np.int32)
        indices[row, np.arange(row.size) - starts[row]] = column
        return torch.from_numpy(counts)[None, None], torch.from_numpy(indices)[None, None]

    prefix, low, high = (torch.from_numpy(edge.copy()) for edge in mask.row_edges())

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> Any:
        del batch, head
        return keeps(key, prefix[query], low[query], high[query])

    partial_counts, partial_indices = listed(~full)
    full_counts, full_indices = listed(full)
    return BlockMask.from_kv_blocks(
        partial_counts,
        partial_indices,
        full_counts,
        full_indices,
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(mask.num_tokens, mask.num_tokens),
        compute_q_blocks=False,
    )


def _tensor(
    torch: Any,
    array: Float[np.ndarray, "batch tokens heads head_dim"],
    order: Int[np.ndarray, " tokens"],
    dtype: str,
) -> Any:
    """The array as a contiguous torch tensor [batch, heads, tokens, head_dim]."""
    placed = np.ascontiguousarray(array[:, order].swapaxes(1, 2))
    return torch.from_numpy(placed).to(getattr(torch, dtype))


def _rows(
    torch: Any, output: Any, rows: Int[np.ndarray, " rows"]
) -> Float[np.ndarray, "batch rows heads head_dim"]:
    chosen = output[:, :, torch.from_numpy(np.ascontiguousarray(rows))]
    return chosen.transpose(1, 2).to(torch.float32).numpy()
