"""Sparse attention in a pipeline whose tensors are torchax's, on JAX's CPU backend."""

import os
from typing import Any

import numpy as np
import pytest

if "CINETILE_TEST_TORCHAX" not in os.environ:
    pytest.skip(
        "torchax changes PyTorch for the whole process: make test-diffusers runs this by itself",
        allow_module_level=True,
    )
pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("torchax_here")

import torch
from tiny_pipelines import PIPELINES
from torchax_here import torchax

import cinetile as ct
import cinetile.integrations.diffusers as ctd

# torchax hands JAX's arrays, which must not be written to, to torch.from_numpy, and asks JAX for
# integers of 64 bits.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning"),
]

POLICY = ct.SparsityPolicy(
    0.4,
    dense_steps=((0, 1),),
    dense_layers=((0, 1),),
    mode="split",
    block_q=16,
    block_kv=8,
    width_multiple=4,
)


def test_same_as_without_torchax() -> None:
    tiny = PIPELINES[0]
    pipe = tiny.build()
    dense = tiny.run(pipe).numpy()
    with ctd.enable_sparse_attention(pipe, POLICY) as handle:
        expected = tiny.run(pipe).numpy()
    calls = handle.summary().calls
    with torchax.default_env():
        pipe.transformer.to("jax")
        pipe.vae.to("jax")
        arguments: dict[str, Any] = {
            name: value.to("jax") if isinstance(value, torch.Tensor) else value
            for name, value in tiny.arguments().items()
        }
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            found = tiny.run(pipe, **arguments).cpu().numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected - dense).max() > 1e-3
    assert handle.summary().implementations == ("cpu through torchax",)
    assert len(handle.summary().calls) == len(calls)
    for call, before in zip(handle.summary().calls, calls, strict=True):
        assert (call.component, call.step, call.layer) == (
            before.component,
            before.step,
            before.layer,
        )
        np.testing.assert_array_equal(call.routes, before.routes)
