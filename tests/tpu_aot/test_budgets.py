"""Compiles the kernel for TPUs that are not there, and holds it to a budget of instructions.

`make tpu-aot` runs these in an environment with libtpu. After a change for the better,
CINETILE_UPDATE_BUDGETS=1 writes what was found to budgets.json.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import cinetile as ct
from cinetile.kernels.pallas_tpu.config import KernelConfig
from cinetile.kernels.pallas_tpu.implementation import PallasTpuImplementation
from cinetile.lab.tpu.aot import (
    CallJob,
    CompiledKernel,
    KernelJob,
    VmemOverflowError,
    compile_call,
    compile_kernel,
    require_tpu_compiler,
)
from cinetile.lab.tpu.targets import TARGETS

try:
    require_tpu_compiler()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

BUDGETS = Path(__file__).with_name("budgets.json")
TOLERANCE = 1.02
GRID_720P = ct.TokenGrid(21, 45, 80)


def default_job(target: str, softmax: Any) -> KernelJob:
    blocks = PallasTpuImplementation().default_blocks(GRID_720P.num_tokens, "bfloat16")
    plan = ct.plan_tiles(ct.spatial_mask(GRID_720P, 0.35), *blocks)
    config = KernelConfig.for_blocks(*blocks, softmax)
    return KernelJob(target, config, plan, 10, 128, "bfloat16")


def cost(compiled: CompiledKernel) -> dict[str, int]:
    """Instructions for 2^20 pairs in each kind of body, and for the rest of a step and a row."""
    per_body = {f"{b.kind}, {b.chunks} chunks": b.per_mega_pair for b in compiled.dump.bodies}
    per_step = {"step": compiled.dump.step_bundles, "row": compiled.dump.row_bundles}
    return {name: round(number) for name, number in (per_body | per_step).items()}


@pytest.mark.parametrize("softmax", ["fixed", "online"])
@pytest.mark.parametrize("target", sorted(TARGETS))
def test_default_shapes_stay_within_budget(target: str, softmax: str) -> None:
    compiled = compile_kernel(default_job(target, softmax))
    found = cost(compiled)
    budgets = json.loads(BUDGETS.read_text())
    if os.environ.get("CINETILE_UPDATE_BUDGETS"):
        budgets.setdefault(target, {})[softmax] = found
        BUDGETS.write_text(json.dumps(budgets, indent=2, sort_keys=True) + "\n")
    budget = budgets[target][softmax]
    assert found.keys() == budget.keys()
    above = {name: (found[name], budget[name]) for name in found}
    above = {name: both for name, both in above.items() if both[0] > TOLERANCE * both[1]}
    assert not above, f"more instructions than budgeted (found, budget): {above}"
    assert compiled.dump.vmem_bytes < TARGETS[target].vmem_bytes


def test_prompts_of_run_time_length_compile() -> None:
    """Only units that padding overlaps pay for it; the other bodies are as without a prompt."""
    plan = ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(5, 30, 52, text_tokens=256), 0.35), 512, 512)
    costs = [
        cost(compile_kernel(KernelJob("v6e", config, plan, 2, 128, "bfloat16")))
        for config in (
            KernelConfig.for_blocks(512, 512, padding=padding) for padding in (False, True)
        )
    ]
    assert costs[1].keys() - costs[0].keys() == {"padded, 2 chunks"}
    assert all(costs[1][name] <= 1.05 * costs[0][name] for name in costs[0] if "chunks" in name)


def test_too_much_vector_memory_is_an_error_of_its_own() -> None:
    plan = ct.plan_tiles(ct.spatial_mask(GRID_720P, 0.35), 65_536, 1024)
    config = KernelConfig(65_536, 1024, 256, 256, kv_span=512, group=256, full_group=256)
    with pytest.raises(VmemOverflowError):
        compile_kernel(KernelJob("v6e", config, plan, 1, 128, "bfloat16"))


def test_whole_calls_compile() -> None:
    """Routes, known at run time only, between plans of different orders, lengths and tiles."""
    grid = ct.TokenGrid(5, 30, 52)
    plans = (
        ct.plan_tiles(ct.spatial_mask(grid, 0.35), 256, 256),
        ct.plan_tiles(ct.temporal_mask(grid, 0.35), 256, 256),
        ct.plan_tiles(ct.dense_mask(grid), 512, 512),
    )
    compiled = compile_call(CallJob("v6e", plans, 4, 128, "bfloat16"))
    assert compiled.seconds > 0


def test_two_kernels_compile() -> None:
    plan = ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(5, 30, 52), 0.35), 256, 256)
    compiled = compile_call(CallJob("v6e", (plan,), 2, 128, "bfloat16", two_kernels=True))
    assert compiled.seconds > 0


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, "bfloat16"), (256, "bfloat16"), (128, "float32")]
)
def test_other_heads_compile(head_dim: int, dtype: str) -> None:
    plan = ct.plan_tiles(ct.spatial_mask(ct.TokenGrid(5, 30, 52), 0.35), 256, 256)
    compiled = compile_call(CallJob("v6e", (plan,), 2, head_dim, dtype))
    assert compiled.seconds > 0


def test_ranges_of_query_tiles_compile() -> None:
    """1440p in tiles of 1,024 x 512 with four plans: more tables than scalar memory holds."""
    grid = ct.TokenGrid(21, 90, 160)
    masks = ct.spatial_mask(grid, 0.35), ct.temporal_mask(grid, 0.35)
    plans = tuple(ct.plan_tiles(mask, 1024, 512) for mask in (*masks, ct.dense_mask(grid)))
    compiled = compile_call(CallJob("v6e", plans, 4, 128, "bfloat16"))
    assert compiled.seconds > 0
