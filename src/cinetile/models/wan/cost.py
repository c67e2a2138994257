"""What a call costs, estimated from shapes: memory and operations, and the time they take here."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from cinetile.models.wan.caller import warn_caller
from cinetile.models.wan.folder import GenerationDefaults, PipelineParts
from cinetile.models.wan.size import VideoSize
from cinetile.models.wan.transformer_config import WanTransformerConfig

# Side of the square matrices whose product is timed.
_PROBE = 1024


@dataclass(frozen=True)
class CallCost:
    """An estimate of denoising with dense attention.

    Attributes:
        tokens: tokens of one video.
        memory: bytes of weights and intermediate arrays.
        operations: floating-point operations of all steps.
    """

    tokens: int
    memory: int
    operations: int

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, about {self.memory / 2**30:.1f} GiB of memory"


def call_cost(
    parts: PipelineParts, size: VideoSize, *, videos: int, steps: int, guided: bool
) -> CallCost:
    """Estimates the cost of denoising with dense attention.

    A layer multiplies each token with its weights, which costs 2 operations for each weight, and
    takes two products of tokens x tokens x dim, which cost 2 operations for each factor pair:

        operations = rows * steps * layers * (2 * tokens * weights + 4 * tokens^2 * dim)

    Intermediate arrays take about 8 * ffn_dim + 6 * dim bytes for each token: XLA's plans for CPUs
    with 192 and 1536 channels are within 6 % of that, in float32 and bfloat16.
    """
    config: WanTransformerConfig = parts.transformer.config
    tokens, bits = size.grid.num_tokens, jnp.dtype(parts.transformer.dtype).itemsize
    weights = 8 * config.dim**2 + 2 * config.dim * config.ffn_dim
    experts = 1 if parts.transformer_2 is None else 2
    per_token = 8 * config.ffn_dim + 6 * config.dim
    operations = 2 * tokens * weights + 4 * tokens**2 * config.dim
    return CallCost(
        tokens=tokens,
        memory=experts * config.num_layers * weights * bits + videos * tokens * per_token,
        operations=videos * (1 + guided) * steps * config.num_layers * operations,
    )


def operations_per_second(dtype: str) -> float:
    """Times a product of two square matrices on the default device."""
    matrix = jnp.ones((_PROBE, _PROBE), dtype)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    started = time.perf_counter()
    product(matrix, matrix).block_until_ready()
    return 2 * _PROBE**3 / (time.perf_counter() - started)


def warn_if_untrained(
    parts: PipelineParts, defaults: GenerationDefaults, size: VideoSize, cost: CallCost
) -> None:
    """Warns if a checkpoint was not trained at a size, and tells what the call would cost."""
    if size.is_trained(defaults):
        return
    trained = " or ".join(
        f"{frames} frames of {width}x{height}" for frames, height, width in defaults.trained_sizes
    )
    seconds = cost.operations / operations_per_second(parts.transformer.dtype)
    warn_caller(
        f"the checkpoint was trained at {trained} only: expect noise at {size}. Denoising takes "
        f"{cost}, and about {duration(seconds)} with dense attention on this device"
    )


def duration(seconds: float) -> str:
    """A rough time in words."""
    if seconds < 1:
        return "a second"
    for limit, unit, name in ((120, 1, "seconds"), (7200, 60, "minutes"), (172800, 3600, "hours")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:,.0f} days"
