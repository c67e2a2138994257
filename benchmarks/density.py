"""What each density costs and saves: the table of docs/howto/choose-density.md.

Heads of a real clip, half of them spatial and half temporal, attend densely and under policies of
several densities. Errors are relative norms of the whole output against dense attention by the
same kernel; times are medians of interleaved rounds, routing included.

    python -m benchmarks.density [--grid 21x20x20] [--heads 8] [--repeats 3] [--json PATH]
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import cinetile as ct
from cinetile.lab.bench import describe_machine, time_interleaved
from cinetile.lab.inputs import clip_inputs, sample_clip

DENSITIES = (0.2, 0.25, 0.35, 0.5, 0.7)
HEADER = (
    "| density | pairs visited | time / dense | aligned | exact | exact, no sink | all spatial "
    "| all temporal | wrong way round |"
)
KEY = jax.random.key(0)


@dataclass(frozen=True)
class Row:
    """Figures of one density; errors are relative and, but for `aligned`, of exact masks."""

    density: float
    visited: float
    time: float
    aligned: float
    exact: float
    exact_without_sink: float
    all_spatial: float
    all_temporal: float
    wrong_way_round: float

    def line(self) -> str:
        errors = list(asdict(self).values())[3:]
        cells = [
            f"{self.density}",
            f"{self.visited:.1%}",
            f"{self.time:.2f}",
            *(f"{error:.1%}" for error in errors),
        ]
        return "| " + " | ".join(cells) + " |"


def layer(grid: ct.TokenGrid, density: float, **settings: object) -> ct.SparseAttention:
    policy = ct.SparsityPolicy.from_dict(
        {"density": density, "dense_steps": [], "dense_layers": [], **settings}
    )
    return ct.SparseAttention(grid, policy)


def measure(grid: ct.TokenGrid, arrays: list[Array], repeats: int) -> tuple[list[Row], float]:
    """The rows, and how often 64 sampled rows route a head as all rows do."""
    query, key, value = arrays
    dense_plan = layer(grid, 0.5).planned.plans[0]

    def attend_densely() -> Array:
        return ct.attention(query, key, value, dense_plan).block_until_ready()

    dense = np.asarray(attend_densely(), np.float64)

    def error(output: Array) -> float:
        difference = np.asarray(output, np.float64) - dense
        return float(np.linalg.norm(difference) / np.linalg.norm(dense))

    def call(sparse: ct.SparseAttention) -> Callable[[], Array]:
        run = jax.jit(lambda query, key, value: sparse(query, key, value, step=0, layer=0, rng=KEY))
        return lambda: run(query, key, value).block_until_ready()

    def routed(sparse: ct.SparseAttention, routes: Array) -> float:
        plans = sparse.planned.plans[1:]
        return error(ct.attention(query, key, value, plans, routes=routes))

    aligned = {density: layer(grid, density) for density in DENSITIES}
    timings = time_interleaved(
        {"dense": attend_densely, **{str(key): call(sparse) for key, sparse in aligned.items()}},
        repeats,
    )
    rows, agreements = [], []
    for density, sparse in aligned.items():
        exact = layer(grid, density, mode="split")
        routes = jnp.asarray(exact.route(query, key, value, step=0, layer=0, rng=KEY).routes) - 1
        everything = jnp.arange(0, grid.num_tokens, 8)
        thorough = ct.route_heads(query, key, value, exact.planned.plans[1:], rows=everything)
        agreements.append(float(jnp.mean(thorough.routes == routes)))
        work = ct.expected_work(sparse.policy, grid, num_steps=1, num_layers=1)
        rows.append(
            Row(
                density,
                work.visited or 1.0,
                timings[str(density)].median / timings["dense"].median,
                aligned=error(call(sparse)()),
                exact=routed(exact, routes),
                exact_without_sink=error(call(layer(grid, density, mode="split", sink_frames=0))()),
                all_spatial=routed(exact, jnp.zeros_like(routes)),
                all_temporal=routed(exact, jnp.ones_like(routes)),
                wrong_way_round=routed(exact, 1 - routes),
            )
        )
    return rows, float(np.mean(agreements))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", default="21x20x20")
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    frames, height, width = map(int, arguments.grid.split("x"))
    grid = ct.TokenGrid(frames, height, width)
    inputs = clip_inputs(sample_clip(), frames, height, width, arguments.heads, 128)
    arrays = [
        jnp.asarray(array, jnp.bfloat16) for array in (inputs.query, inputs.key, inputs.value)
    ]
    rows, agreement = measure(grid, arrays, arguments.repeats)
    chosen = next(
        sparse for sparse in ct.implementations() if sparse.available and sparse.automatic
    )
    print(f"{grid}, {arguments.heads} heads of 128, bfloat16, {inputs.description}; {chosen.name}")
    print(f"64 rows route as every eighth row does: {agreement:.0%} of the heads")
    print(HEADER)
    print("|" + "---|" * HEADER.count(" | ") + "---|")
    for row in rows:
        print(row.line())
    if arguments.json:
        document = {
            "machine": describe_machine().to_dict(),
            "input": inputs.description,
            "agreement": agreement,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
