"""Reading the TPU compiler's dump of its final instruction bundles.

The dump is not a stable interface and may change with each compiler. The reader therefore checks
it and raises `DumpFormatError` otherwise: bundles are numbered without a gap, all matrix products
lie in expected bodies, and each body holds the number of products and exponentials of its size.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from cinetile.kernels.pallas_tpu.config import KernelConfig

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s*([A-Z, ]*?)\s*:\s*((?:> ?)*)\s*\{")
_REGION = re.compile(r"(?<!/)\b(Start|End) region (\d+)")
_PRODUCT = re.compile(r"= vmatmul")
_EXPONENTIAL = re.compile(r"vpow2")
_ALLOCATION = re.compile(r"space=(vmem|smem), size = (0x[0-9a-f]+), scoped")
_MIN_BUNDLES = 50
# Weights of one exponential instruction: a vector register of 8 x 128.
_PER_EXPONENTIAL = 1024
_SLOTS = {
    "MXU": "matrix",
    "XLU": "cross_lane",
    "VALU": "vector",
    "VPOP": "pop",
    "EUP": "transcendental",
    "VLOAD": "load",
    "VLOAD:FILL": "fill",
    "VSTORE": "store",
    "VSTORE:SPILL": "spill",
    "SALU": "scalar",
}


class DumpFormatError(RuntimeError):
    """The compiler's dump has an unexpected format; no figure is better than a wrong one."""


@dataclass(frozen=True)
class Body:
    """The instruction bundles of one unit of the kernel.

    Attributes:
        kind: "full tile", or the kind of a unit of a masked tile, see `kernel.KINDS`.
        chunks: query chunks per unit.
        bundles: instruction bundles per run.
        mega_pairs: query-key pairs per run, in units of 2^20.
    """

    kind: str
    chunks: int
    bundles: int
    mega_pairs: float

    @property
    def per_mega_pair(self) -> float:
        return self.bundles / self.mega_pairs


@dataclass(frozen=True)
class KernelDump:
    """The instructions that the compiler emitted for the kernel.

    Attributes:
        bodies: the kernel's units in program order.
        bundles: total number of instruction bundles.
        step_bundles: bundles of each grid step outside all bodies.
        row_bundles: bundles of the first and last step of each query tile.
        vmem_bytes: vector memory that the compiler allocates.
        smem_bytes: scalar memory that the compiler allocates.
        utilisation: busy fraction of each kind of slot in the bodies of full tiles.
    """

    bodies: tuple[Body, ...]
    bundles: int
    step_bundles: int
    row_bundles: int
    vmem_bytes: int
    smem_bytes: int
    utilisation: dict[str, float]


@dataclass(frozen=True)
class _Bundle:
    depth: int
    text: str


def read_dump(folder: Path, kernel_name: str, config: KernelConfig) -> KernelDump:
    """Reads the dump of one kernel.

    Args:
        folder: folder that the compiler wrote to.
        kernel_name: name of the kernel's call.
        config: configuration of the kernel, which determines its bodies.

    Raises:
        DumpFormatError: a part is missing or has an unexpected format.
    """
    bundles = parse_bundles(dump_file(folder, kernel_name, "final_bundles").read_text())
    allocations = dump_file(folder, kernel_name, "pre-finalize-registers-and-allocations")
    slots = dump_file(folder, kernel_name, "final_hlo-static-per-bundle-utilization")
    vmem, smem = parse_allocations(allocations.read_text())
    utilisation = parse_utilisation(slots.read_text(), len(bundles))
    regions = find_regions(bundles)
    products = [len(_PRODUCT.findall(bundle.text)) for bundle in bundles]
    leaves = _leaves(regions, products)
    bodies = _name_bodies(leaves, bundles, products, config)
    idle = _idle_regions(regions, products)
    in_loop = sum(bundle.depth >= 1 for bundle in bundles)
    row_bundles = sum(map(_length, idle))
    rest = in_loop - sum(body.bundles for body in bodies) - row_bundles
    full = [leaf for leaf, body in zip(leaves, bodies, strict=True) if body.kind == "full tile"]
    return KernelDump(
        bodies=bodies,
        bundles=len(bundles),
        step_bundles=max(rest, 0),
        row_bundles=row_bundles,
        vmem_bytes=vmem,
        smem_bytes=smem,
        utilisation=_mean_utilisation(utilisation, full or leaves),
    )


def dump_file(folder: Path, kernel_name: str, stage: str) -> Path:
    """The file of one kernel and one stage of the compiler."""
    found = [
        path
        for path in folder.iterdir()
        if kernel_name in path.name
        and path.name.endswith(f"{stage}.txt")
        and "schedule-analysis" not in path.name
    ]
    if len(found) != 1:
        raise DumpFormatError(
            f"the TPU compiler wrote {len(found)} files {stage!r} of {kernel_name!r}, not one; "
            "its dump has changed, or the kernel was compiled more than once"
        )
    return found[0]


def parse_bundles(text: str) -> list[_Bundle]:
    """Splits a dump into bundles, which must be numbered from 0 without a gap."""
    bundles: list[_Bundle] = []
    lines: list[str] = []
    depth = 0

    def close() -> None:
        if lines:
            bundles.append(_Bundle(depth, "".join(lines)))

    for line in text.splitlines(keepends=True):
        match = _BUNDLE.match(line)
        if match is None:
            if lines:
                lines.append(line)
            continue
        close()
        if int(match.group(1), 16) != len(bundles):
            raise DumpFormatError(
                f"bundle {match.group(1)} stands where {len(bundles):#x} was expected"
            )
        depth, lines = match.group(3).count(">"), [line]
    close()
    if len(bundles) < _MIN_BUNDLES:
        raise DumpFormatError(f"only {len(bundles)} bundles found in the TPU compiler's dump")
    return bundles


def find_regions(bundles: list[_Bundle]) -> list[tuple[int, int]]:
    """First and last bundle of each region whose start and end are both marked."""
    start: dict[str, int] = {}
    regions = []
    for index, bundle in enumerate(bundles):
        for event, name in _REGION.findall(bundle.text):
            if event == "Start":
                start[name] = index
            elif name in start:
                regions.append((start.pop(name), index))
    if not regions:
        raise DumpFormatError("no regions found in the TPU compiler's dump")
    return sorted(regions)


def parse_allocations(text: str) -> tuple[int, int]:
    """Bytes of vector memory and of scalar memory that the compiler allocates to a kernel."""
    totals = {"vmem": 0, "smem": 0}
    for space, size in _ALLOCATION.findall(text):
        totals[space] += int(size, 16)
    if not all(totals.values()):
        raise DumpFormatError("no allocations found in the TPU compiler's dump")
    return totals["vmem"], totals["smem"]


def parse_utilisation(text: str, num_bundles: int) -> list[list[float]]:
    """The fraction of the slots of each kind that each bundle uses."""
    lines = text.splitlines()
    header = ", ".join(_SLOTS)
    if header not in lines:
        raise DumpFormatError(f"no columns {header} found in the TPU compiler's slot use")
    numbers = [
        [int(cell) for cell in cells]
        for cells in map(str.split, lines[lines.index(header) + 1 :])
        if len(cells) == len(_SLOTS) and all(cell.isdigit() for cell in cells)
    ]
    if len(numbers) != num_bundles + 1:
        raise DumpFormatError(f"{len(numbers)} rows of slot use found for {num_bundles} bundles")
    capacities, *rows = numbers
    return [[used / slots for used, slots in zip(row, capacities, strict=True)] for row in rows]


def expected_bodies(config: KernelConfig) -> list[tuple[str, int]]:
    """Kind and query chunks of each body, in program order."""

    def sizes(group: int) -> list[int]:
        whole, left = divmod(config.block_q, group)
        return [size // config.q_chunk for size in [group] * (whole > 0) + [left] * (left > 0)]

    bodies = []
    if config.part != "masked":
        bodies += [("full tile", chunks) for chunks in sizes(config.full_group)]
    if config.part != "full":
        bodies += [(kind, chunks) for chunks in sizes(config.group) for kind in config.kinds]
    return bodies


def _length(region: tuple[int, int]) -> int:
    return region[1] - region[0] + 1


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def _sum(values: list[int], region: tuple[int, int]) -> int:
    return sum(values[region[0] : region[1] + 1])


def _leaves(regions: list[tuple[int, int]], products: list[int]) -> list[tuple[int, int]]:
    """Innermost regions with matrix products."""
    busy = [region for region in regions if _sum(products, region)]
    leaves: list[tuple[int, int]] = []
    for region in busy:
        is_outer = any(_inside(other, region) for other in busy)
        shares_an_end = any(region[0] == o[0] or region[1] == o[1] for o in leaves)
        if not is_outer and not shares_an_end:
            leaves.append(region)
    return leaves


def _idle_regions(regions: list[tuple[int, int]], products: list[int]) -> list[tuple[int, int]]:
    """Outermost long regions without products: the start and the end of a query tile."""
    idle = [region for region in regions if not _sum(products, region)]
    return [
        region
        for region in idle
        if _length(region) > 40 and not any(_inside(region, other) for other in idle)
    ]


def _name_bodies(
    leaves: list[tuple[int, int]],
    bundles: list[_Bundle],
    products: list[int],
    config: KernelConfig,
) -> tuple[Body, ...]:
    names = expected_bodies(config)
    if len(leaves) != len(names):
        raise DumpFormatError(f"{len(leaves)} bodies with products found, {len(names)} expected")
    if sum(_sum(products, leaf) for leaf in leaves) != sum(products):
        raise DumpFormatError("matrix products found outside of the kernel's bodies")
    a_chunk = [_sum(products, leaf) / name[1] for leaf, name in zip(leaves, names, strict=True)]
    if max(a_chunk) > 1.02 * min(a_chunk):
        raise DumpFormatError(f"bodies differ in products a query chunk: {sorted(set(a_chunk))}")
    bodies = []
    for leaf, (kind, chunks) in zip(leaves, names, strict=True):
        pairs = chunks * config.q_chunk * config.kv_span
        text = "".join(bundle.text for bundle in bundles[leaf[0] : leaf[1] + 1])
        exponentials = len(_EXPONENTIAL.findall(text)) * _PER_EXPONENTIAL / pairs
        if not 0.98 < exponentials < 1.3:
            raise DumpFormatError(f"{exponentials:.2f} exponentials a pair in the body {kind!r}")
        bodies.append(Body(kind, chunks, _length(leaf), pairs / 2**20))
    return tuple(bodies)


def _mean_utilisation(rows: list[list[float]], regions: list[tuple[int, int]]) -> dict[str, float]:
    inside = [row for first, last in regions for row in rows[first : last + 1]]
    return {
        name: round(sum(row[index] for row in inside) / len(inside), 3)
        for index, name in enumerate(_SLOTS.values())
    }
