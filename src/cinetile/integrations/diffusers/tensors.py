"""Sparse attention on PyTorch's tensors, without copies on a CPU."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Int

from cinetile.attention import attend_checked
from cinetile.grid import TokenGrid
from cinetile.kernels.arguments import check_scale
from cinetile.kernels.base import ImplementationChoice
from cinetile.kernels.cpu import CpuImplementation
from cinetile.kernels.cpu.direct import DirectAttention, Operand
from cinetile.layer.layer_plan import CallShape, LayerPlan, plan_layer
from cinetile.layer.record import LayerRecord
from cinetile.policy import SparsityPolicy

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True, eq=False)
class TensorAttention:
    """Attention under a policy on one grid, for tensors in the CPU's memory or torchax's.

    The native kernel is called with the tensors' pointers and strides. Heads are routed by
    `route_heads`, which borrows the tensors through DLPack. Other implementations than the native
    one are given the tensors through DLPack too.

    Attributes:
        grid: the tokens.
        num_steps: denoising steps of the run.
        num_layers: self-attention layers of the model.
        expert: "high_noise" or "low_noise" for the two models of Wan 2.2.
        dtype: of the tensors.
        on_jax: whether the tensors are torchax's, which hold arrays of JAX.
        policy: what is sparse, when and how.
        implementation: as for `ct.attention`.
        seed: of the rows on which heads are routed.
        planned: the layer plan of calls that every implementation takes; made from the rest.
    """

    grid: TokenGrid
    num_steps: int
    num_layers: int
    expert: str | None
    dtype: torch.dtype
    on_jax: bool
    policy: SparsityPolicy
    implementation: ImplementationChoice
    seed: int
    planned: LayerPlan = field(init=False)
    _resolved: "dict[CallShape, _Resolved]" = field(init=False, repr=False)

    def __post_init__(self) -> None:
        planned = plan_layer(
            self.policy,
            self.grid,
            num_steps=self.num_steps,
            num_layers=self.num_layers,
            expert=self.expert,
            dtype=_DTYPES[self.dtype],
            implementation=self.implementation,
        )
        object.__setattr__(self, "planned", planned)
        object.__setattr__(self, "_resolved", {})

    def _resolve(self, shape: CallShape) -> "_Resolved":
        """The plans and the runner of calls of one shape; kept, since planning takes time."""
        if shape not in self._resolved:
            planned = self.planned.for_call(shape)
            self._resolved[shape] = _Resolved(planned, runner_for(planned, self.on_jax))
        return self._resolved[shape]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        step: int,
        layer: int,
        scale: float,
        prompt_length: Int[np.ndarray, " batch"] | None,
    ) -> tuple[torch.Tensor, LayerRecord]:
        """Attends as the policy says for this step and layer.

        Args:
            query: queries `[batch, tokens, heads, head_dim]` in frame-major order, with any
                strides; copied if features are not adjacent.
            key: keys, of the same shape.
            value: values, of the same shape.
            step: index of the denoising step.
            layer: index of the layer.
            scale: factor on the logits.
            prompt_length: text tokens of each batch row that exist; None for all.

        Returns:
            The output `[batch, tokens, heads, head_dim]`, and what was done.
        """
        arrays = (tensor.resolve_neg() for tensor in (query, key, value))
        query, key, value = (
            tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in arrays
        )
        started = time.perf_counter()
        batch, _, heads, head_dim = query.shape
        scale = check_scale(scale, head_dim)
        dtype = _DTYPES[self.dtype]
        resolved = self._resolve(
            CallShape(batch, heads, head_dim, dtype, prompt_length is not None)
        )
        planned, runner = resolved.planned, resolved.runner
        level = int(planned.level_of[step, layer])
        if planned.is_routed(level):
            found = planned.route(
                level,
                borrow(query),
                borrow(key),
                borrow(value),
                planned.random_key(jax.random.key(self.seed), step, layer),
                scale,
                None if prompt_length is None else jnp.asarray(prompt_length, jnp.int32),
            )
            routes, errors = (np.asarray(array) for array in found)
        else:
            only = (planned.levels[level] or (0,))[0]
            routes = np.full((batch, heads), only, np.int32)
            shape = batch, heads, len(planned.pattern_names)
            errors = np.full(shape, np.nan, np.float32)
        routed = time.perf_counter()
        output = runner(query, key, value, routes, scale, prompt_length)
        record = LayerRecord(
            routes,
            errors,
            is_dense=level == 0,
            step=step,
            layer=layer,
            choices=planned.choices,
            patterns=planned.pattern_names,
            shares=planned.shares,
            grid=self.grid,
            implementation=runner.name,
            num_steps=self.num_steps,
            routing_seconds=routed - started,
            attention_seconds=time.perf_counter() - routed,
        )
        return output, record


@runtime_checkable
class Runner(Protocol):
    """Runs the plans of one `LayerPlan` on PyTorch's tensors."""

    name: str
    """What computes, for the summary, such as "cpu (avx2)"."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        routes: Int[np.ndarray, "batch heads"],
        scale: float,
        prompt_length: Int[np.ndarray, " batch"] | None,
    ) -> torch.Tensor:
        """Attends; arguments are checked.

        Args:
            query: queries `[batch, tokens, heads, head_dim]`; features are adjacent.
            key: keys, laid out as `query`.
            value: values, laid out as `query`.
            routes: index into the plans per batch row and head.
            scale: factor on the logits.
            prompt_length: text tokens per batch row that are no padding; None for all.

        Returns:
            The output, shaped as `query` and on its device.
        """
        ...


class _Resolved(NamedTuple):
    """What runs calls of one shape."""

    planned: LayerPlan
    runner: Runner


def runner_for(planned: LayerPlan, on_jax: bool) -> Runner:
    """Returns what runs a layer plan's implementation on tensors.

    Args:
        planned: implementation and plans.
        on_jax: whether the tensors are torchax's.
    """
    chosen = planned.implementation
    if on_jax:
        return JaxRunner(planned, "torchax", _as_torchax)
    if isinstance(chosen, CpuImplementation):
        return DirectRunner(DirectAttention(planned.plans, chosen.path))
    return JaxRunner(planned, "DLPack", _as_tensor)


class DirectRunner:
    """The native kernel on the tensors' own memory, with as many threads as PyTorch has."""

    def __init__(self, attend: DirectAttention) -> None:
        self._attend = attend
        self.name = f"cpu ({attend.path})"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        routes: Int[np.ndarray, "batch heads"],
        scale: float,
        prompt_length: Int[np.ndarray, " batch"] | None,
    ) -> torch.Tensor:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        self._attend(
            _operand(query),
            _operand(key),
            _operand(value),
            _operand(output),
            dtype=_DTYPES[query.dtype],
            head_dim=query.shape[3],
            routes=routes,
            scale=scale,
            num_threads=torch.get_num_threads(),
            prompt_lengths=prompt_length,
        )
        return output


class JaxRunner:
    """An implementation in JAX, and the way of its output back to PyTorch."""

    def __init__(
        self, planned: LayerPlan, way: str, give_back: Callable[[Array], torch.Tensor]
    ) -> None:
        self._planned = planned
        self._give_back = give_back
        self.name = f"{planned.implementation.name} through {way}"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        routes: Int[np.ndarray, "batch heads"],
        scale: float,
        prompt_length: Int[np.ndarray, " batch"] | None,
    ) -> torch.Tensor:
        output, _ = attend_checked(
            self._planned.implementation,
            borrow(query),
            borrow(key),
            borrow(value),
            jnp.asarray(routes, jnp.int32) if len(self._planned.plans) > 1 else None,
            None if prompt_length is None else jnp.asarray(prompt_length, jnp.int32),
            self._planned.plans,
            scale,
        )
        return self._give_back(jax.block_until_ready(output))


def is_torchax(tensor: Any) -> bool:
    """Whether a tensor is torchax's: one of PyTorch around an array of JAX."""
    return type(tensor).__module__.split(".")[0] == "torchax"


def borrow(tensor: Any) -> Array:
    """A tensor as an array of JAX on the same memory; copied only where it has gaps."""
    if is_torchax(tensor):
        return tensor.jax()
    return jnp.from_dlpack(tensor.detach().contiguous())


def _as_tensor(array: Array) -> torch.Tensor:
    # JAX's arrays must never change, so what the model may write to is a copy.
    return torch.from_dlpack(array).clone()


def _as_torchax(array: Array) -> Any:
    import torchax.interop

    return torchax.interop.torch_view(array)


def _operand(tensor: torch.Tensor) -> Operand:
    """Address and strides of a tensor, once its memory is known to hold all of its elements."""
    batch, token, head, feature = tensor.stride()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = (tensor.storage_offset() + last + 1) * tensor.element_size()
    size = tensor.untyped_storage().nbytes()
    if tensor.device.type != "cpu" or feature != 1 or not tensor.data_ptr() or end > size:
        raise ValueError(
            "the native kernel takes tensors in the CPU's memory with adjacent features, got "
            f"{list(tensor.shape)} {tensor.dtype} on {tensor.device} with strides "
            f"{list(tensor.stride())}, which end at byte {end:,} of {size:,}"
        )
    return Operand(tensor.data_ptr(), (batch, token, head))


def check_tensors(query: Any, key: Any, value: Any, grid: TokenGrid) -> None:
    """Raises an error unless these can be query, key and value on a grid.

    Raises:
        RuntimeError: gradients are wanted.
        TypeError: the dtype is not float32, bfloat16 or float16.
        NotImplementedError: the tensors are neither in the CPU's memory nor torchax's.
        ValueError: shapes differ, or do not fit the grid.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.device.type != "cpu" and not is_torchax(tensor):
            raise NotImplementedError(
                f"{name} must be on the CPU or torchax's, got {tensor.device}; move the pipeline "
                "there or restore its own attention"
            )
        if tensor.dtype not in _DTYPES:
            raise TypeError(
                f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}; load the "
                "transformer with torch_dtype=torch.bfloat16"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                "sparse attention in diffusers has no gradients; run under torch.no_grad(), or "
                "restore the model's own attention to train"
            )
        if tensor.shape != query.shape or tensor.dtype != query.dtype:
            raise ValueError(
                f"{name} must have the shape and dtype of query, {list(query.shape)} "
                f"{query.dtype}, got {list(tensor.shape)} {tensor.dtype}"
            )
    if query.ndim != 4 or query.shape[1] != grid.num_tokens:
        raise ValueError(
            f"self-attention has {query.shape[1]:,} tokens, but the model was called on a grid "
            f"of {grid}; a sequence with further tokens cannot be made sparse"
        )
