"""The TPU chips that kernels can be compiled for."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Target:
    """A TPU chip: its names in the compiler and the constants of the estimate.

    Attributes:
        name: value of `cinetile tpu --target`.
        topology: name of a slice for the compiler.
        topology_options: further options of the slice for the compiler.
        chip: name of the chip in Pallas' table of TPUs.
        clock_ghz: bundles per nanosecond.
        matrix_unit: rows and columns of a matrix unit.
        flops_per_bundle: bfloat16 operations of full matrix units per bundle.
        hbm_bytes_per_us: HBM bandwidth in bytes per microsecond.
        vmem_bytes: vector memory per core.
    """

    name: str
    topology: str
    chip: str
    clock_ghz: float
    matrix_unit: int
    flops_per_bundle: int
    hbm_bytes_per_us: float
    vmem_bytes: int
    topology_options: dict[str, Any] = field(default_factory=dict)


# Clocks follow from the published peaks (918, 459 and 2,307 TFLOP/s) and the matrix units. A v5p
# and a tpu7x have two cores; the figures are of one, on which the kernel runs.
TARGETS = {
    target.name: target
    for target in (
        Target(
            "v6e",
            "v6e:1x1",
            "TPU_V6E",
            clock_ghz=1.75,
            matrix_unit=256,
            flops_per_bundle=2 * 4 * 256 * 256,
            hbm_bytes_per_us=1.64e6,
            vmem_bytes=128 << 20,
            topology_options={"chips_per_host_bounds": [1, 1, 1]},
        ),
        Target(
            "v5p",
            "v5p:2x2x1",
            "TPU_V5P",
            clock_ghz=1.75,
            matrix_unit=128,
            flops_per_bundle=2 * 4 * 128 * 128,
            hbm_bytes_per_us=1.38e6,
            vmem_bytes=64 << 20,
        ),
        Target(
            "tpu7x",
            "tpu7x:2x2x1",
            "TPU_7X",
            clock_ghz=2.2,
            matrix_unit=256,
            flops_per_bundle=2 * 4 * 256 * 256,
            hbm_bytes_per_us=3.69e6,
            vmem_bytes=64 << 20,
        ),
    )
}
