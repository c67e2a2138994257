"""The portable implementation: plain JAX, for any platform that XLA compiles for."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cinetile.kernels.base import Implementation
from cinetile.kernels.xla_tiles import tile_attention
from cinetile.placement import place, restore
from cinetile.plans import TilePlan

_SHORT_SEQUENCE = 16_384


class XlaImplementation(Implementation):
    """Online softmax over a plan's tiles, one head after the other."""

    name: ClassVar[str] = "xla"
    requirements: ClassVar[str] = "nothing beyond JAX; any platform"

    def unavailable(self) -> str | None:
        return None

    def default_blocks(self, num_tokens: int, dtype: str) -> tuple[int, int]:
        del dtype
        # Wider tiles spread better over cores, but waste more pairs on a short sequence.
        return (512, 256) if num_tokens < _SHORT_SEQUENCE else (1024, 256)

    def attend(
        self,
        query: Float[Array, "batch tokens heads head_dim"],
        key: Float[Array, "batch tokens heads head_dim"],
        value: Float[Array, "batch tokens heads head_dim"],
        routes: Int[Array, "batch heads"] | None,
        *,
        plans: tuple[TilePlan, ...],
        scale: float,
        prompt_lengths: Int[Array, " batch"] | None = None,
    ) -> tuple[Float[Array, "batch tokens heads head_dim"], Float[Array, "batch tokens heads"]]:
        batch, _, heads, _ = query.shape

        def attend_head(
            plan: TilePlan, query: Array, key: Array, value: Array, prompt_length: Array | None
        ) -> tuple[Array, Array]:
            mask, grid = plan.mask, plan.grid
            output, lse = tile_attention(
                place(query, mask.query_order, grid, axis=0),
                place(key, mask.key_order, grid, axis=0),
                place(value, mask.key_order, grid, axis=0),
                prompt_length,
                plan,
                scale,
            )
            return (
                restore(output, mask.query_order, grid, axis=0),
                restore(lse, mask.query_order, grid, axis=0),
            )

        def routed_head(arguments: tuple[Array, Array, Array]) -> tuple[Array, Array]:
            route, row, head = arguments
            branches = [lambda *arrays, plan=plan: attend_head(plan, *arrays) for plan in plans]
            arrays = (array[row, :, head] for array in (query, key, value))
            prompt_length = None if prompt_lengths is None else prompt_lengths[row]
            return jax.lax.switch(route, branches, *arrays, prompt_length)

        if routes is None:
            routes = jnp.zeros((batch, heads), jnp.int32)
        row, head = (index.reshape(-1) for index in jnp.indices((batch, heads)))
        output, lse = jax.lax.map(routed_head, (routes.reshape(-1), row, head))
        output = output.reshape(batch, heads, *output.shape[1:]).swapaxes(1, 2)
        lse = lse.reshape(batch, heads, lse.shape[1]).swapaxes(1, 2)
        return output, lse
