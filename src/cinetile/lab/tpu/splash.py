"""JAX's stock splash attention, compiled as a rival."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cinetile.lab.tpu.bundles import (
    DumpFormatError,
    dump_file,
    find_regions,
    parse_bundles,
)

if TYPE_CHECKING:
    from cinetile.lab.tpu.aot import SplashJob

_NAME = "splash"


def splash_call(job: "SplashJob") -> tuple[Any, Any]:
    """Returns the call as a function, and the shapes of its arguments."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    block = math.lcm(job.block_q, job.block_kv)
    tokens = -(-job.num_tokens // block) * block
    mask = splash_attention_mask.FullMask((tokens, tokens))
    sizes = splash_attention_kernel.BlockSizes(
        block_q=job.block_q, block_kv=job.block_kv, block_kv_compute=job.kv_chunk
    )
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * job.heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
    )
    shape = jax.ShapeDtypeStruct((job.heads, tokens, job.head_dim), jnp.bfloat16)
    return kernel, (shape, shape, shape)


def read_splash_dump(folder: Path) -> int:
    """Instruction bundles of the stock kernel per tile."""
    bundles = parse_bundles(dump_file(folder, _NAME, "final_bundles").read_text())
    runs = [
        (first, last)
        for first, last in find_regions(bundles)
        if any("= vmatmul" in bundle.text for bundle in bundles[first : last + 1])
    ]
    innermost = [
        run for run in runs if not any(o != run and run[0] <= o[0] and o[1] <= run[1] for o in runs)
    ]
    if len(innermost) != 1:
        raise DumpFormatError(f"{len(innermost)} bodies found in the stock kernel, not one")
    first, last = innermost[0]
    if any("loop exit test" in bundle.text for bundle in bundles[first : last + 1]):
        raise DumpFormatError("the stock kernel's body holds a loop that is counted once")
    return last - first + 1
