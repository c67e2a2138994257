"""One of several processes: a layer on a mesh over all of them, many times; the first one saves.

python -m cinetile.parallel.launch --processes 4 tests/devices/worker.py OUT CALLS
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import cinetile as ct
from cinetile.files import replace_file
from cinetile.parallel import joined_processes, make_mesh
from cinetile.parallel.layout import replicated

# 105 tokens and 3 heads: what neither 2 nor 4 divide.
GRID = ct.TokenGrid(5, 3, 7)
POLICY = ct.SparsityPolicy(
    0.5, dense_steps=(), dense_layers=(), block_q=20, block_kv=10, width_multiple=4
)
SHAPE = 1, GRID.num_tokens, 3, 16


def attend(layer: ct.SparseAttention, calls: int) -> np.ndarray:
    """Calls the layer again and again, each time with what came out before."""
    query, key, value = np.random.default_rng(0).standard_normal((3, *SHAPE), np.float32)
    rng = jax.random.key(0)
    everywhere = None
    if layer.mesh is not None:
        everywhere = NamedSharding(layer.mesh, PartitionSpec())
        query, key, value, rng = replicated((query, key, value, rng), layer.mesh)

    def run(query: jax.Array, key: jax.Array, value: jax.Array, rng: jax.Array) -> jax.Array:
        return layer(query, key, value, step=1, layer=1, rng=rng)

    compiled = jax.jit(run, out_shardings=everywhere)
    for call in range(calls):
        query = compiled(query, key, value, rng)
        query.block_until_ready()
        if call < 3:
            print(f"call {call} of process {jax.process_index()}, pid {os.getpid()}", flush=True)
    return np.asarray(query)


def main() -> None:
    """Attends, and saves what came out, whole or not at all."""
    out, calls = Path(sys.argv[1]), int(sys.argv[2])
    with joined_processes(timeout_seconds=10):
        mesh = make_mesh({"sequence": jax.device_count()})
        found = attend(ct.SparseAttention(GRID, POLICY, mesh=mesh), calls)
        if jax.process_index() == 0:
            replace_file(out, lambda file: np.save(file, found))


if __name__ == "__main__":
    main()
