"""Sparse attention in a pipeline whose tensors are torchax's, on JAX's CPU backend."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("torchax")

import torch

try:
    import torchax
except AttributeError as error:
    pytest.skip(f"this torchax does not run with this PyTorch: {error}", allow_module_level=True)

from types import SimpleNamespace

from tiny_pipelines import PIPELINES

import cinetile as ct
import cinetile.diffusers as ctd

# torchax hands JAX's arrays, which must not be written to, to torch.from_numpy.
pytestmark = pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")

POLICY = ct.SparsityPolicy(
    0.4,
    dense_steps=((0, 1),),
    dense_layers=((0, 1),),
    mode="split",
    block_q=16,
    block_kv=8,
    width_multiple=4,
)


def run(pipe: Any, device: str) -> Iterator[np.ndarray]:
    """What the transformer gives at each step of a schedule."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 16, 5, 8, 10, generator=generator).to(device)
    text = torch.randn(1, 8, 32, generator=generator).to(device)
    pipe.scheduler.set_timesteps(3)
    for time in pipe.scheduler.timesteps:
        with torch.no_grad():
            (output,) = pipe.transformer(
                hidden_states=latents,
                timestep=time.expand(1).to(device),
                encoder_hidden_states=text,
                return_dict=False,
            )
        yield output.cpu().numpy()


def test_same_as_without_torchax() -> None:
    tiny = PIPELINES[0].build()
    pipe = SimpleNamespace(transformer=tiny.transformer, scheduler=tiny.scheduler)
    dense = list(run(pipe, "cpu"))
    with ctd.enable_sparse_attention(pipe, POLICY) as handle:
        expected = list(run(pipe, "cpu"))
    routes = [call.routes for call in handle.summary().calls]
    with torchax.default_env():
        pipe.transformer.to("jax")
        with ctd.enable_sparse_attention(pipe, POLICY) as handle:
            found = list(run(pipe, "jax"))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert np.abs(np.array(expected) - dense).max() > 1e-3
    assert handle.summary().implementations == ("cpu through torchax",)
    for call, before in zip(handle.summary().calls, routes, strict=True):
        np.testing.assert_array_equal(call.routes, before)
