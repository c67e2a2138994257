"""The Wan pipeline on a mesh: the same latents as on one device."""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from meshes import mesh_of
from wan_models import GOLDEN

import cinetile as ct
from cinetile.models.wan import WanPipeline
from cinetile.models.wan.sharding import weight_spec
from cinetile.parallel.layout import array_layout

PROMPT = "a red ball rolls"
POLICY = ct.SparsityPolicy(
    0.5, dense_steps=((0, 1),), dense_layers=(), block_q=4, block_kv=4, width_multiple=1
)
SIZE = {"height": 48, "width": 32, "num_frames": 9, "num_inference_steps": 2, "seed": 0}


def open_golden(**options: Any) -> WanPipeline:
    return WanPipeline.from_pretrained(GOLDEN / "wan21", dtype="float32", **options)


def generate(pipe: WanPipeline, **options: Any) -> Any:
    options = {"guidance_scale": 4.0, "output_type": "latent", "policy": POLICY, **options}
    return pipe(PROMPT, return_records=True, **SIZE, **options)


@pytest.fixture(scope="module")
def alone() -> Any:
    return generate(open_golden())


@pytest.mark.parametrize(
    ("axes", "weights"),
    [
        ({"data": 2, "heads": 4}, "tensor"),
        ({"data": 2, "sequence": 2, "heads": 2}, "fsdp"),
    ],
    ids=str,
)
def test_as_on_one_device(alone: Any, axes: dict[str, int], weights: Any) -> None:
    pipe = open_golden(mesh=mesh_of(**axes), weights=weights)
    spread = generate(pipe)
    np.testing.assert_allclose(spread.frames, alone.frames, rtol=1e-4, atol=1e-4)
    for found, expected in zip(spread.records, alone.records, strict=True):
        for record, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(record.routes, other.routes)
    weight = pipe.transformer.blocks.ffn.up.weight
    assert weight.sharding.num_devices == math.prod(axes.values())
    assert not weight.is_fully_replicated


def test_dense_and_without_guidance() -> None:
    options = {"policy": None, "guidance_scale": 1.0}
    mesh = mesh_of(sequence=4, heads=2)
    spread, expected = (generate(open_golden(mesh=record), **options) for record in (mesh, None))
    np.testing.assert_allclose(spread.frames, expected.frames, rtol=1e-4, atol=1e-4)


def test_rows_must_divide() -> None:
    pipe = open_golden(mesh=mesh_of(data=2))
    with pytest.raises(ValueError, match="divides the 1 rows of a call with 1 videos without"):
        generate(pipe, guidance_scale=1.0)


def test_rules() -> None:
    layout = array_layout(mesh_of(data=2, sequence=2, heads=2))
    rest = ("data", "sequence")
    for name, shape, spec in (
        ("blocks.attn1.to_q.weight", (3, 64, 32), (None, ("heads",), rest)),
        ("blocks.attn1.to_q.bias", (3, 64), (None, ("heads",))),
        ("blocks.attn2.to_out.weight", (3, 64, 32), (None, rest, ("heads",))),
        ("blocks.ffn.up.weight", (3, 63, 32), (None, None, rest)),  # 63 does not divide
        ("blocks.attn1.norm_q.weight", (3, 64), (None, None)),
        ("condition_embedder.text_embedder.linear_1.weight", (64, 32), (rest, None)),
        ("proj_out.bias", (64,), (None,)),
    ):
        assert weight_spec(name, shape, layout) == jax.sharding.PartitionSpec(*spec), name
    spec = weight_spec("blocks.attn1.to_q.weight", (3, 64, 32), layout, "tensor")
    assert spec == jax.sharding.PartitionSpec(None, ("heads",), None)


def test_every_large_weight_has_a_rule() -> None:
    """Of what is read from a folder, so that new layers do not stay whole unseen."""
    layout = array_layout(mesh_of(data=2, heads=2))
    transformer = WanPipeline.from_pretrained(Path(GOLDEN / "wan21")).transformer
    for path, leaf in jax.tree_util.tree_leaves_with_path(transformer):
        name = ".".join(str(getattr(entry, "name", entry)) for entry in path)
        is_stack = name.startswith("blocks.")
        if name.endswith(".weight") and leaf.ndim == 2 + is_stack:
            assert any(weight_spec(name, leaf.shape, layout)), name
