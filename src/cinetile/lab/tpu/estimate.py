"""From instruction bundles to milliseconds: the static estimate.

    time = max(sum over grid steps of (bundles / clock + 0.66 us), HBM bytes / bandwidth)

One bundle issues per clock cycle; the bundles of masked bodies count 1.21 times. `calibration`
compares the estimate with published times.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from cinetile.kernels.pallas_tpu.config import KernelConfig
from cinetile.kernels.pallas_tpu.kernel import unit_cases
from cinetile.kernels.pallas_tpu.tables import (
    FULL,
    MASKED,
    NAIVE,
    ROW_START,
    tile_words,
    unit_extremes,
    unpack_words,
)
from cinetile.lab.tpu.bundles import KernelDump
from cinetile.lab.tpu.calibration import BAND_MASKED, BAND_UNMASKED
from cinetile.lab.tpu.targets import Target
from cinetile.plans import TilePlan

STEP_MS = 0.66e-3
_MASKED_FACTOR = 1.21
# Scalar bundles with which a unit of a masked tile determines its kind.
_CASE_BUNDLES = 60
_PASSES = {"bfloat16": 1, "float32": 6}  # one float32 product is six bfloat16 products


@dataclass(frozen=True)
class Estimate:
    """Static time of one plan.

    Attributes:
        static_ms: time of all heads.
        compute_ms: part of `static_ms` in the kernel's bodies.
        steps_ms: part of `static_ms` in the overhead of grid steps.
        memory_ms: time of the HBM traffic; it is hidden if it is below the rest.
        error_band: expected relative error of `static_ms`.
        bodies: how often each kind of body runs per head.
    """

    static_ms: float
    compute_ms: float
    steps_ms: float
    memory_ms: float
    error_band: float
    bodies: dict[str, int]


def count_bodies(plan: TilePlan, config: KernelConfig) -> Counter[tuple[str, int]]:
    """How often each (kind, query chunks) body runs per head; `empty` units are skipped."""
    row, column, flags = unpack_words(tile_words(plan, config).astype(np.int64))
    counts: Counter[tuple[str, int]] = Counter()
    unmasked = int(np.count_nonzero(flags & FULL)) * config.spans
    whole, left = divmod(config.block_q, config.full_group)
    counts["full tile", config.full_group // config.q_chunk] += unmasked * whole
    if left:
        counts["full tile", left // config.q_chunk] += unmasked
    masked = (flags & MASKED) != 0
    extremes = unit_extremes(plan, config).astype(np.int64)[row[masked]]
    naive = (flags[masked] & NAIVE) != 0
    for group in range(config.groups):
        queries = min(config.group, config.block_q - group * config.group)
        for span in range(config.spans):
            key_start = column[masked] * config.block_kv + span * config.kv_span
            edges = list(extremes[:, group].T)
            cases = unit_cases(edges, key_start, config.kv_span, naive)
            found = 0
            for kind in config.kinds:
                number = int(np.count_nonzero(cases[kind]))
                counts[kind, queries // config.q_chunk] += number
                found += number
            counts["empty", queries // config.q_chunk] += key_start.size - found
    return counts


def estimate(
    dump: KernelDump,
    plan: TilePlan,
    config: KernelConfig,
    target: Target,
    heads: int,
    head_dim: int,
    itemsize: int,
) -> Estimate:
    """Static time of one plan on all heads in one kernel."""
    cost = {(body.kind, body.chunks): body.bundles for body in dump.bodies}
    counts = count_bodies(plan, config)
    bundles = 0.0
    for (kind, chunks), number in counts.items():
        if kind != "full tile":
            bundles += number * _CASE_BUNDLES
        if kind != "empty" and number:
            factor = 1 if kind in ("full tile", "full") else _MASKED_FACTOR
            bundles += number * cost[kind, chunks] * factor
    _, column, flags = unpack_words(tile_words(plan, config))
    rows, steps = int(np.count_nonzero(flags & ROW_START)), column.size
    bundles += rows * dump.row_bundles
    compute_ms = heads * bundles / (target.clock_ghz * 1e6)
    steps_ms = heads * steps * STEP_MS
    tile_bytes = config.block_kv * (2 * head_dim + 8) * itemsize
    row_bytes = 2 * config.block_q * head_dim * itemsize
    memory_ms = heads * (steps * tile_bytes + rows * row_bytes) / target.hbm_bytes_per_us / 1e3
    kinds = Counter[str]()
    for (kind, _), number in counts.items():
        kinds[kind] += number
    masked_share = plan.mode in ("naive", "split")
    return Estimate(
        static_ms=max(compute_ms + steps_ms, memory_ms),
        compute_ms=compute_ms,
        steps_ms=steps_ms,
        memory_ms=memory_ms,
        error_band=BAND_MASKED if masked_share else BAND_UNMASKED,
        bodies=dict(kinds),
    )


def floor_ms(kept_pairs: int, target: Target, heads: int, head_dim: int, dtype: str) -> float:
    """Lower bound in ms: the time that the matrix units need for `kept_pairs`.

    The first product contracts over head_dim, padded to a multiple of the matrix unit's size. The
    second streams head_dim rows.
    """
    contracted = -(-head_dim // target.matrix_unit) * target.matrix_unit
    flops = 2 * heads * kept_pairs * (contracted + head_dim) * _PASSES[dtype]
    return flops / target.flops_per_bundle / (target.clock_ghz * 1e6)
