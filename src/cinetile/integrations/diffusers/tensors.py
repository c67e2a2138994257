"""Sparse attention on PyTorch's tensors, without copies on a CPU."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Array, Float, Int

from cinetile.attention import attention
from cinetile.grid import TokenGrid
from cinetile.kernels.cpu import CpuImplementation
from cinetile.kernels.cpu.direct import DirectAttention, Operand
from cinetile.kernels.registry import select_implementation
from cinetile.layer.plans import PolicyPlans, policy_plans, visited_share
from cinetile.policy import SparsityPolicy
from cinetile.routing import route_heads

_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True)
class Attended:
    """What a call gave.

    Attributes:
        output: `[batch, tokens, heads, head_dim]`.
        routes: index of the plan of each head.
        errors: what the routes were chosen by; None where there was no choice.
        visited: share of all pairs that were visited.
        implementation: what computed it.
        routing_seconds: time that the choice took.
        attention_seconds: time that attention took.
    """

    output: torch.Tensor
    routes: Int[np.ndarray, "batch heads"]
    errors: Float[np.ndarray, "batch heads patterns"] | None
    visited: float
    implementation: str
    routing_seconds: float
    attention_seconds: float


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
        planned: the plans; made from the rest.
        runner: what runs them, likewise.
    """

    grid: TokenGrid
    num_steps: int
    num_layers: int
    expert: str | None
    dtype: torch.dtype
    on_jax: bool
    policy: SparsityPolicy
    implementation: str | Sequence[str] | None
    seed: int
    planned: PolicyPlans = field(init=False)
    runner: "DirectRunner | JaxRunner" = field(init=False)
    shares: Float[np.ndarray, " plans"] = field(init=False)

    def __post_init__(self) -> None:
        planned = policy_plans(
            self.policy,
            self.grid,
            num_steps=self.num_steps,
            num_layers=self.num_layers,
            expert=self.expert,
            dtype=_DTYPES[self.dtype],
            implementation=self.implementation,
        )
        chosen = select_implementation(self.implementation, None)
        if self.on_jax:
            runner = JaxRunner(planned, chosen.name, "torchax", _as_torchax)
        elif isinstance(chosen, CpuImplementation):
            runner = DirectRunner(DirectAttention(planned.plans, chosen.variant))
        else:
            runner = JaxRunner(planned, chosen.name, "DLPack", _as_tensor)
        object.__setattr__(self, "planned", planned)
        object.__setattr__(self, "runner", runner)
        object.__setattr__(self, "shares", np.array([visited_share(one) for one in planned.plans]))

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
    ) -> Attended:
        """Attends as the policy says for this step and layer.

        Args:
            query: queries `[batch, tokens, heads, head_dim]` in frame-major order, with any
                strides; copied if features are not adjacent.
            key: keys, likewise.
            value: values, likewise.
            step: index of the denoising step.
            layer: index of the layer.
            scale: factor on the logits.
            prompt_length: text tokens of each batch row that exist; None for all.
        """
        arrays = (one.resolve_neg() for one in (query, key, value))
        query, key, value = (one if one.stride(3) == 1 else one.contiguous() for one in arrays)
        started = time.perf_counter()
        level = int(self.planned.level_of[step, layer])
        plans = np.array(self.planned.levels[level] or (0,), np.int32)
        errors = None
        if plans.size == 1:
            routes = np.full((query.shape[0], query.shape[2]), plans[0], np.int32)
        else:
            rng = jax.random.fold_in(jax.random.fold_in(jax.random.key(self.seed), step), layer)
            found = route_heads(
                borrow(query),
                borrow(key),
                borrow(value),
                self.planned.probes[level],
                num_samples=self.policy.num_samples,
                rng=rng,
                first_tokens=self.policy.first_tokens,
                scale=scale,
                prompt_length=prompt_length,
            )
            chosen = plans[np.asarray(found.routes)]
            routes = np.where(np.asarray(found.are_known), chosen, 0).astype(np.int32)
            errors = np.asarray(found.errors)
        routed = time.perf_counter()
        output = self.runner(query, key, value, routes, scale, prompt_length)
        return Attended(
            output,
            routes,
            errors,
            float(self.shares[routes].mean()),
            self.runner.name,
            routed - started,
            time.perf_counter() - routed,
        )


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
            valid_text=prompt_length,
        )
        return output


class JaxRunner:
    """An implementation in JAX, and the way of its output back to PyTorch."""

    def __init__(
        self,
        planned: PolicyPlans,
        implementation: str,
        way: str,
        give_back: Callable[[Array], torch.Tensor],
    ) -> None:
        self._plans = planned.plans
        self._implementation = implementation
        self._give_back = give_back
        self.name = f"{implementation} through {way}"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        routes: Int[np.ndarray, "batch heads"],
        scale: float,
        prompt_length: Int[np.ndarray, " batch"] | None,
    ) -> torch.Tensor:
        output = attention(
            borrow(query),
            borrow(key),
            borrow(value),
            self._plans,
            routes=routes,
            scale=scale,
            implementation=self._implementation,
            prompt_length=prompt_length,
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
        TypeError: the dtype is neither float32 nor bfloat16.
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
                f"{name} must be float32 or bfloat16, got {tensor.dtype}; load the transformer "
                "with torch_dtype=torch.bfloat16"
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
