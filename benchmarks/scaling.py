"""Strong scaling over two virtual devices of one machine, as a Markdown table.

    python -m benchmarks.scaling
    python -m benchmarks.scaling --exchange halo
    python -m benchmarks.scaling --grid 9x20x32 --repeats 2 --rounds 1

One device alone already uses every processor that it may: the native kernel's tasks run on the
threads of the client, which all its devices share. So strong scaling is told against one device
on one processor, and what is left of it against one device on as many processors as two devices
have; every run is a process of its own that may use those processors alone. "heads" is the whole
layer with routing, "halo" is attention under one exact spatial mask.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import cinetile as ct
from cinetile.parallel import halo_attention, make_mesh, request_cpu_devices

DENSITY = 0.35
ARMS = {
    "one device on one processor": (1, 1),
    "one device on two processors": (1, 2),
    "two devices on two processors": (2, 2),
}


def build_call(options: argparse.Namespace, devices: int) -> Any:
    """A function without arguments that attends once, and waits."""
    frames, height, width = map(int, options.grid.split("x"))
    grid = ct.TokenGrid(frames, height, width)
    mesh = make_mesh({"sequence": devices}) if devices > 1 else None
    shape = 1, grid.num_tokens, options.heads, 128
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16) for _ in range(3)]
    if mesh is not None and grid.num_tokens % devices == 0:
        sharding = NamedSharding(mesh, PartitionSpec(None, "sequence"))
        arrays = [jax.device_put(array, sharding) for array in arrays]
    query, key, value = arrays
    if options.exchange == "heads":
        policy = ct.SparsityPolicy(DENSITY, dense_steps=(), dense_layers=())
        layer = ct.SparseAttention(grid, policy, mesh=mesh, implementation="cpu")
        seed = jax.random.key(0)

        def attend(query: Any, key: Any, value: Any) -> Any:
            return layer(query, key, value, step=1, layer=1, rng=seed)
    else:
        mask = ct.spatial_mask(grid, DENSITY)
        blocks = ct.default_blocks(grid.num_tokens, "bfloat16", "cpu")
        plan = ct.plan_tiles(mask, *blocks)

        def attend(query: Any, key: Any, value: Any) -> Any:
            if mesh is None:
                return ct.attention(query, key, value, plan, implementation="cpu")
            return halo_attention(
                query,
                key,
                value,
                mask,
                mesh=mesh,
                implementation="cpu",
                block_q=blocks[0],
                block_kv=blocks[1],
            )

    run = jax.jit(attend)
    return lambda: run(query, key, value).block_until_ready()


def measure(options: argparse.Namespace) -> None:
    """In a process of its own: prints the seconds of each repeat as JSON."""
    devices, processors = options.child
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])
    request_cpu_devices(devices)
    call = build_call(options, devices)
    call()
    seconds = []
    for _ in range(options.repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    print(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description="Strong scaling over two devices.")
    parser.add_argument("--grid", default="21x45x80", help="latent frames, rows and columns")
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--exchange", choices=("heads", "halo"), default="heads")
    parser.add_argument("--repeats", type=int, default=3, help="in each round")
    parser.add_argument("--rounds", type=int, default=3, help="every arm runs once in each")
    parser.add_argument("--child", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        measure(options)
        return
    usable = len(os.sched_getaffinity(0))
    if usable < 2:
        parser.error(f"two processors are needed, {usable} can be used")
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(options.rounds):
        for name, arm in ARMS.items():
            child = [sys.executable, "-m", "benchmarks.scaling", *sys.argv[1:]]
            found = subprocess.run(
                [*child, "--child", *map(str, arm)], capture_output=True, text=True, check=True
            )
            seconds[name] += json.loads(found.stdout)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    first = next(iter(medians.values()))
    print(f"{options.exchange}, {options.grid}, {options.heads} heads of 128, bfloat16\n")
    print("| run | seconds, median (all) | against one device on one processor |")
    print("|---|---|---|")
    for name, median in medians.items():
        every = f"{min(seconds[name]):.3f} to {max(seconds[name]):.3f}"
        print(f"| {name} | {median:.3f} ({every}) | {first / median:.2f} |")


if __name__ == "__main__":
    main()
