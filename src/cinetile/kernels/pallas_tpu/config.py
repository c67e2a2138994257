"""Static configuration of the TPU kernel: how a tile is divided into units of work."""

from dataclasses import dataclass
from typing import Literal

Softmax = Literal["fixed", "online"]
Part = Literal["all", "full", "masked"]
Kind = Literal["full", "lower", "upper", "window", "general", "padded"]
KINDS: tuple[Kind, ...] = ("full", "lower", "upper", "window", "general", "padded")

LANES = 128
SUBLANES = 8
_MATRIX_UNIT = 256
_PREFERRED_GROUP = 3
_MAX_GROUP = 5
_MAX_SPAN = 1536
_FULL_TILE_CHUNKS = 10

# Fits v6e (128 MiB), v5p and tpu7x (64 MiB), with room for what the compiler spills.
VMEM_LIMIT_BYTES = 56 << 20
# The compiler takes 1 MiB at most; it needs some of it itself.
SMEM_LIMIT_BYTES = 768 << 10


@dataclass(frozen=True)
class KernelConfig:
    """How the kernel divides tiles; the scores of a chunk pair are a product `[kv_chunk, q_chunk]`.

    Attributes:
        block_q: queries per tile.
        block_kv: keys per tile.
        q_chunk: queries per product; 256 fill the matrix unit.
        kv_chunk: keys per product.
        kv_span: keys per unit; the kernel loops over the spans of a tile.
        group: queries per unit of a masked tile; each unit has its own mask kind.
        full_group: queries per unit of a full tile; more queries increase utilisation and
            compile time.
        softmax: "fixed" (scores are within a known bound, see `guard`) or "online".
        part: the tiles that the kernel computes; another kernel computes the others.
        padding: whether text keys may be padding, from a position known at run time only.
    """

    block_q: int
    block_kv: int
    q_chunk: int
    kv_chunk: int
    kv_span: int
    group: int
    full_group: int
    softmax: Softmax = "fixed"
    part: Part = "all"
    padding: bool = False

    @classmethod
    def for_blocks(
        cls,
        block_q: int,
        block_kv: int,
        softmax: Softmax = "fixed",
        part: Part = "all",
        *,
        padding: bool = False,
    ) -> "KernelConfig":
        """Chunks, groups and spans for the given block sizes.

        A size that is not a multiple of 128 becomes one chunk; only interpret mode accepts it.
        """
        q_chunk = _chunk(block_q)
        kv_chunk = _chunk(block_kv)
        return cls(
            block_q,
            block_kv,
            q_chunk,
            kv_chunk,
            kv_span=kv_chunk * _largest_divisor(block_kv // kv_chunk, _MAX_SPAN // _MATRIX_UNIT),
            group=q_chunk * _group_chunks(block_q // q_chunk),
            full_group=q_chunk * _full_chunks(block_q // q_chunk),
            softmax=softmax,
            part=part,
            padding=padding,
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of units that a masked tile may have, in program order."""
        return KINDS if self.padding else KINDS[:-1]

    @property
    def groups(self) -> int:
        """Units of a masked tile along its queries; the last one may be narrower."""
        return -(-self.block_q // self.group)

    @property
    def spans(self) -> int:
        """Units of a tile along its keys."""
        return self.block_kv // self.kv_span

    @property
    def accumulator_rows(self) -> int:
        """Partial sums per query that are added up at its last tile."""
        return SUBLANES if self.kv_chunk % SUBLANES == 0 else 1

    def vmem_bytes(self, head_dim: int, itemsize: int) -> int:
        """Estimated bytes of vector memory: double-buffered blocks, state and scores in flight."""
        value_rows = head_dim + SUBLANES
        blocks = 2 * self.block_q * head_dim + self.block_kv * (head_dim + value_rows)
        per_query = 2 * 4 * (SUBLANES + SUBLANES)  # edges and log-sum-exp
        state = 4 * self.block_q * (value_rows + 2 * SUBLANES)
        in_flight = 4 * self.q_chunk * self.kv_chunk * 2 * (self.kv_span // self.kv_chunk)
        return 2 * blocks * itemsize + self.block_q * per_query + state + in_flight


def _chunk(block: int) -> int:
    return next((size for size in (_MATRIX_UNIT, LANES) if block % size == 0), block)


def _largest_divisor(number: int, limit: int) -> int:
    return next(size for size in range(min(number, limit), 0, -1) if number % size == 0)


def _full_chunks(chunks: int) -> int:
    """Chunks of a full tile's unit: a divisor of all of them, or all if there is no large one."""
    divisor = _largest_divisor(chunks, _FULL_TILE_CHUNKS)
    return divisor if 2 * divisor >= min(chunks, _FULL_TILE_CHUNKS) else chunks


def _group_chunks(chunks: int) -> int:
    """Chunks of a group: a divisor of all of them that is wide enough, or what comes near one."""
    candidates = range(min(chunks, _PREFERRED_GROUP), min(chunks, _MAX_GROUP) + 1)
    return next((size for size in candidates if chunks % size == 0), candidates[0])
