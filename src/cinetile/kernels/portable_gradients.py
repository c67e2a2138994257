"""Gradients for kernels that have none of their own: those of the portable one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from cinetile.kernels.xla import XlaImplementation
from cinetile.plans import TilePlan

Outputs = tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def attend_with_portable_gradients(
    forward: Callable[..., Outputs],
    plans: tuple[TilePlan, ...],
    scale: float,
    query: Float[Array, "batch tokens heads head_dim"],
    key: Float[Array, "batch tokens heads head_dim"],
    value: Float[Array, "batch tokens heads head_dim"],
    routes: Int[Array, "batch heads"] | None,
    prompt_lengths: Int[Array, " batch"] | None,
) -> Outputs:
    """Runs `forward`; its gradients are those of the portable kernel.

    The backward pass repeats the forward one with the portable kernel, whose log-sum-exp its
    gradients need.
    """
    del plans, scale
    return forward(query, key, value, routes, prompt_lengths)


def _forward(
    forward: Callable[..., Outputs], plans: tuple[TilePlan, ...], scale: float, *arguments: Any
) -> tuple[Outputs, Any]:
    return attend_with_portable_gradients(forward, plans, scale, *arguments), arguments


def _backward(
    forward: Callable[..., Outputs],
    plans: tuple[TilePlan, ...],
    scale: float,
    arguments: Any,
    cotangents: Any,
) -> tuple[Any, ...]:
    del forward
    *arrays, routes, prompt_lengths = arguments

    def portable(query: Array, key: Array, value: Array) -> Any:
        return XlaImplementation().attend(
            query, key, value, routes, plans=plans, scale=scale, prompt_lengths=prompt_lengths
        )

    _, pull_back = jax.vjp(portable, *arrays)
    return *pull_back(cotangents), None, None


attend_with_portable_gradients.defvjp(_forward, _backward)
