"""The portable implementation, and what it compiles to."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr
from kernel_suite import KernelSuite

import cinetile as ct


class TestXla(KernelSuite):
    implementation = "xla"


GRID = ct.TokenGrid(6, 8, 16)  # 768 tokens
BLOCKS = 48, 64
LOOPS = {"while", "scan", "cond"}


def compiled_for(plan: ct.TilePlan, heads: int = 1, head_dim: int = 32) -> tuple[Any, Any]:
    """The call as a function of its arrays, and their shapes."""
    shape = jax.ShapeDtypeStruct((1, plan.grid.num_tokens, heads, head_dim), jnp.float32)

    def attend(query: Any, key: Any, value: Any) -> Any:
        return ct.attention(query, key, value, plan, implementation="xla", return_lse=True)

    return attend, (shape, shape, shape)


def children(equation: Any) -> Iterator[Jaxpr]:
    for parameter in equation.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def own_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Equations that run as often as the jaxpr does: through calls, not into loops."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in LOOPS:
            for child in children(equation):
                yield from own_equations(child)


def loop_bodies(jaxpr: Jaxpr) -> Iterator[Jaxpr]:
    """Bodies of all loops and branches, however deep."""
    for equation in jaxpr.eqns:
        for child in children(equation):
            if equation.primitive.name in LOOPS:
                yield child
            yield from loop_bodies(child)


def bodies_with_products(plan: ct.TilePlan) -> list[Jaxpr]:
    attend, shapes = compiled_for(plan)
    return [
        body
        for body in loop_bodies(jax.make_jaxpr(attend)(*shapes).jaxpr)
        if any(equation.primitive.name == "dot_general" for equation in own_equations(body))
    ]


def masks_pairs(jaxpr: Jaxpr, block_q: int, block_kv: int) -> bool:
    """Whether it computes a truth value for more than single rows or keys of a tile."""
    inner = (equation for body in loop_bodies(jaxpr) for equation in own_equations(body))
    return any(
        variable.aval.dtype == bool and variable.aval.size > 2 * max(block_q, block_kv)
        for equation in (*own_equations(jaxpr), *inner)
        for variable in equation.outvars
    )


class TestFullTiles:
    """Tiles that need no mask are computed without one."""

    def plan(self, mode: Any, block_q: int = BLOCKS[0], block_kv: int = BLOCKS[1]) -> ct.TilePlan:
        return ct.plan_tiles(ct.spatial_mask(GRID, width=200), block_q, block_kv, mode)

    def test_naive_masks_every_product(self) -> None:
        """So that what the other tests look for can be seen at all."""
        bodies = bodies_with_products(self.plan("naive"))
        assert any(masks_pairs(body, *BLOCKS) for body in bodies)

    def test_split_has_a_loop_without_a_comparison(self) -> None:
        bodies = bodies_with_products(self.plan("split"))
        assert any(masks_pairs(body, *BLOCKS) for body in bodies)
        assert any(not masks_pairs(body, *BLOCKS) for body in bodies)

    def test_ragged_split_has_a_loop_without_a_comparison(self) -> None:
        plan = self.plan("split", 50, 60)
        assert any(not masks_pairs(body, 50, 60) for body in bodies_with_products(plan))


@pytest.mark.parametrize("mode", ["dense", "naive", "split", "aligned"])
@pytest.mark.parametrize("build", [ct.spatial_mask, ct.temporal_mask])
def test_temporaries_grow_with_the_tokens(build: Any, mode: Any) -> None:
    """Not with the pairs: four times the tokens take about four times the memory."""

    def temporaries(frames: int) -> int:
        mask = build(ct.TokenGrid(frames, 16, 16), density=0.35)
        attend, shapes = compiled_for(ct.plan_tiles(mask, 128, 128, mode))
        analysis = jax.jit(attend).lower(*shapes).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temporaries(8), temporaries(32)
    assert large < 5 * small
    assert large < (32 * 256) ** 2, "less than a byte a pair"
