"""The collectives of a compiled program, and the bytes that each moves."""

import math
import re
from dataclasses import dataclass

_KINDS = "all-to-all|collective-permute|all-reduce|all-gather|reduce-scatter"
_INSTRUCTION = re.compile(rf" = (?P<result>.+?) (?P<kind>{_KINDS})(?P<start>-start)?\(")
_SHAPE = re.compile(r"\b(pred|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")
_LISTED_GROUPS = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_COUNTED_GROUPS = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}")
# The asynchronous forms of these return their operands beside their results.
_RETURN_OPERANDS = ("collective-permute", "all-gather")


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: "all-to-all", "collective-permute", "all-reduce", "all-gather" or "reduce-scatter".
        devices: devices in one replica group; 2 for a permutation.
        result_bytes: bytes of the result on one device.
        sent_bytes: lower bound of the bytes that one device sends: those of a ring algorithm,
            and of the direct transfer for "all-to-all" and "collective-permute".
    """

    kind: str
    devices: int
    result_bytes: int
    sent_bytes: int


def collectives(hlo: str) -> tuple[Collective, ...]:
    """Reads the collectives from the text of a compiled program.

    A collective inside a loop counts once. Collectives of a single device and permutations that
    move nothing are left out.

    Args:
        hlo: `jax.jit(f).lower(...).compile().as_text()`.

    Raises:
        ValueError: a collective does not say which devices take part.
    """
    found = []
    for line in hlo.splitlines():
        match = _INSTRUCTION.search(line)
        if match is None:
            continue
        kind, devices = match["kind"], _devices(line, match["kind"])
        if devices < 2:
            continue
        sizes = [_bytes(*shape.groups()) for shape in _SHAPE.finditer(match["result"])]
        if match["start"] and kind in _RETURN_OPERANDS:
            data = [size for size in sizes if size > 4]  # the rest are handles
            sizes = data[len(data) // 2 :]
        size = sum(sizes)
        others = devices - 1
        sent = {
            "all-to-all": size * others // devices,
            "collective-permute": size,
            "all-reduce": 2 * size * others // devices,
            "all-gather": size * others // devices,
            "reduce-scatter": size * others,
        }[kind]
        found.append(Collective(kind, devices, size, sent))
    return tuple(found)


def _devices(line: str, kind: str) -> int:
    if kind == "collective-permute":
        pairs = _PAIRS.search(line)
        if pairs is None:
            return 0
        moves = re.findall(r"\{(\d+),(\d+)\}", pairs[1])
        return 2 if any(source != target for source, target in moves) else 1
    if listed := _LISTED_GROUPS.search(line):
        return len(listed[1].split(","))
    if counted := _COUNTED_GROUPS.search(line):
        return int(counted[1])
    if mesh := _MESH_GROUPS.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    raise ValueError(f"hlo must say which devices a collective joins, got {line.strip()[:200]}")


def _bytes(name: str, bits: str | None, dimensions: str) -> int:
    sizes = [int(size) for size in dimensions.split(",") if size]
    return math.prod(sizes) * (1 if name == "pred" else max(1, int(bits or 8) // 8))
