"""`attention` on PyTorch tensors: checks, groups of heads, and an engine for each group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int

from cinetile.grid import TokenGrid
from cinetile.kernels.arguments import check_prompt_length, check_scale
from cinetile.kernels.torch.base import DTYPES, HeadGroup, TensorRequest
from cinetile.kernels.torch.registry import select_engine
from cinetile.plans import TilePlan

_AXES = ("batch", "tokens", "heads", "head_dim")


@dataclass(frozen=True, eq=False)
class TensorResult:
    """What a call gave.

    Attributes:
        output: `[batch, tokens, heads, head_dim]` in the dtype of the query.
        lse: natural log-sum-exp of each row's kept logits, `[batch, tokens, heads]`, float32;
            None if it was not asked for.
        engines: what ran the heads of each route that occurs, by index of the plan.
    """

    output: torch.Tensor
    lse: torch.Tensor | None
    engines: dict[int, str]


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: TilePlan | Sequence[TilePlan],
    *,
    routes: Any = None,
    scale: float | None = None,
    implementation: str | Sequence[str] | None = None,
    prompt_length: Any = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Scaled dot-product self-attention over plans, on PyTorch tensors where they are.

    The counterpart of `cinetile.attention`, with the same arguments. Heads that share a plan
    run in one call of the engine. Nothing is differentiable yet.

    Args:
        query: `[batch, tokens, heads, head_dim]` in frame-major order; float32, float16 or
            bfloat16, with any strides whose last is 1.
        key: keys, of the same shape, dtype and device.
        value: values, of the same shape, dtype and device.
        plan: what to visit; one plan, or several on one token grid.
        routes: index into the plans for each head of each batch row, `[batch, heads]`. Read on
            the host: a tensor on a GPU is waited for.
        scale: factor on the logits; `1 / sqrt(head_dim)` by default.
        implementation: None for the first engine that can run, a name of `engines`, or a sequence
            of names.
        prompt_length: text tokens that are not padding, one number or one per batch row; read on
            the host. Output rows of padding are unspecified but finite.
        return_lse: whether to return the log-sum-exp as well.

    Returns:
        The output in the dtype of `query`; with `return_lse` also the natural log-sum-exp of
        each query's scaled and kept logits, float32.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes do not fit each other or the plan's grid, or a value is out of range.
        RuntimeError: a gradient is asked for.
        NotImplementedError: no allowed engine can run some of the heads; says why.
    """
    result = run_attention(
        query,
        key,
        value,
        plan,
        routes=routes,
        scale=scale,
        implementation=implementation,
        prompt_length=prompt_length,
        return_lse=return_lse,
    )
    return result.output if result.lse is None else (result.output, result.lse)


def run_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan: TilePlan | Sequence[TilePlan],
    *,
    routes: Any = None,
    scale: float | None = None,
    implementation: str | Sequence[str] | None = None,
    prompt_length: Any = None,
    return_lse: bool = False,
) -> TensorResult:
    """Does what `attention` does, and says which engines ran.

    Raises:
        TypeError: see `attention`.
        ValueError: see `attention`.
        RuntimeError: see `attention`.
        NotImplementedError: see `attention`.
    """
    plans = check_plans(plan)
    check_tensors(query, key, value, plans[0].grid)
    batch, _, heads, head_dim = query.shape
    scale = check_scale(scale, head_dim)
    routed = _routes(routes, batch, heads, len(plans))
    absent = _absent(prompt_length, batch, plans)
    groups = _groups(routed, absent)
    chosen = {
        (route, hidden): select_engine(
            implementation,
            TensorRequest(
                plans[route], query.device, query.dtype, head_dim, hidden > 0, return_lse
            ),
        )
        for route, hidden in groups
    }
    output = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    lse = None
    if return_lse:
        lse = torch.full(query.shape[:3], -torch.inf, dtype=torch.float32, device=query.device)
    for (route, hidden), (rows, group_heads) in groups.items():
        chosen[route, hidden].attend(
            HeadGroup(
                query, key, value, rows, group_heads, output, lse, plans[route], scale, hidden
            )
        )
    ran = {route: engine.path for (route, _), engine in chosen.items()}
    return TensorResult(output, lse, ran)


def check_plans(plan: TilePlan | Sequence[TilePlan]) -> tuple[TilePlan, ...]:
    """Returns plans as a tuple.

    Raises:
        TypeError: one is no plan.
        ValueError: there is none, or their grids differ.
    """
    plans = tuple(plan) if isinstance(plan, Sequence) else (plan,)
    if not plans:
        raise ValueError("plan must be a tile plan or a non-empty sequence of them, got none")
    for entry in plans:
        if not isinstance(entry, TilePlan):
            raise TypeError(f"plan must be a tile plan, got {type(entry).__name__}")
        if entry.grid != plans[0].grid:
            raise ValueError(f"plans must be on one grid, got {plans[0].grid}, {entry.grid}")
    return plans


def check_tensors(query: Any, key: Any, value: Any, grid: TokenGrid) -> None:
    """Raises an error unless these can be query, key and value of self-attention on `grid`.

    Raises:
        TypeError: one is no tensor, or has a dtype that attention does not take.
        ValueError: shapes, dtypes, devices or strides do not fit each other or the grid.
        RuntimeError: a gradient is asked for.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a PyTorch tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} must be one of {', '.join(DTYPES.values())}, got {tensor.dtype}"
            )
        if tensor.ndim != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} must have the axes {_AXES}, none of them empty, got {list(tensor.shape)}"
            )
        facts = tuple(tensor.shape), tensor.dtype, tensor.device
        if facts != (tuple(query.shape), query.dtype, query.device):
            raise ValueError(
                f"{name} must have the shape, dtype and device of query, {list(query.shape)} "
                f"{query.dtype} {query.device}, got {list(tensor.shape)} {tensor.dtype} "
                f"{tensor.device}"
            )
        if tensor.stride(3) != 1 and tensor.shape[3] != 1:
            raise ValueError(f"{name} must have adjacent features, got strides {tensor.stride()}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"{name} requires a gradient, and attention on PyTorch tensors has none; run "
                "under torch.no_grad()"
            )
    if query.shape[1] != grid.num_tokens:
        raise ValueError(
            f"query, key and value must have the tokens of the plan's grid, {grid}, "
            f"got {query.shape[1]:,}; only self-attention can be sparse"
        )


def _on_host(array: Any) -> np.ndarray:
    return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)


def _routes(routes: Any, batch: int, heads: int, count: int) -> Int[np.ndarray, "batch heads"]:
    if routes is None:
        if count > 1:
            raise ValueError(f"routes must say which of {count} plans each head takes, got None")
        return np.zeros((batch, heads), np.int64)
    found = _on_host(routes)
    if not np.issubdtype(found.dtype, np.integer):
        raise TypeError(f"routes must be integers, got {found.dtype}")
    if found.shape != (batch, heads):
        raise ValueError(f"routes must have the shape {(batch, heads)}, got {found.shape}")
    if found.min() < 0 or found.max() >= count:
        raise ValueError(
            f"routes must lie in [0, {count}), got {int(found.min())} to {int(found.max())}"
        )
    return found.astype(np.int64)


def _absent(prompt_length: Any, batch: int, plans: tuple[TilePlan, ...]) -> list[int]:
    """Text tokens of each batch row that are padding."""
    if prompt_length is None:
        return [0] * batch
    if isinstance(prompt_length, torch.Tensor):
        prompt_length = _on_host(prompt_length)
    valid = check_prompt_length(prompt_length, batch, [plan.mask for plan in plans])
    return (plans[0].grid.text_tokens - np.asarray(valid)).tolist()


def _groups(
    routes: Int[np.ndarray, "batch heads"], absent: list[int]
) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """Batch rows and heads of each pair of a route and a number of absent text tokens."""
    hidden = np.broadcast_to(np.array(absent)[:, None], routes.shape)
    groups = {}
    for key in sorted(set(zip(routes.ravel().tolist(), hidden.ravel().tolist(), strict=True))):
        groups[key] = np.nonzero((routes == key[0]) & (hidden == key[1]))
    return groups
