"""Small pipelines on disk for tests that do not need Wan's own autoencoder."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "golden" / "wan"
PATCH, CHANNELS = 4, 4


def small_pipeline(folder: Path) -> Path:
    """The golden pipeline with a linear codec: no autoencoder needs to be compiled."""
    shutil.copytree(GOLDEN / "wan21", folder)
    shutil.rmtree(folder / "vae")
    (folder / "vae").mkdir()
    values = PATCH**2 * 3
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((values, CHANNELS)))[0]
    save_file(
        {
            "mean": np.linspace(-0.2, 0.2, values, dtype=np.float32),
            "encoder.weight": np.ascontiguousarray(basis.T.astype(np.float32)),
            "decoder.weight": basis.astype(np.float32),
        },
        folder / "vae" / "diffusion_pytorch_model.safetensors",
    )
    write_json(
        folder / "vae" / "config.json",
        {"_class_name": "LinearVideoCodec", "z_dim": CHANNELS, "patch_size": [1, PATCH, PATCH]},
    )
    write_json(
        folder / "generation.json",
        {
            "height": 16,
            "width": 24,
            "num_frames": 3,
            "num_inference_steps": 3,
            "guidance_scale": 2.0,
            "max_sequence_length": 10,
            "fps": 8,
        },
    )
    return folder


def random_model(build: Callable[[], Any], seed: int = 0) -> Any:
    """A model with random weights, which numpy draws sooner than JAX compiles how to."""
    rng = np.random.default_rng(seed)

    def draw(leaf: Any) -> jax.Array:
        values = rng.normal(size=leaf.shape)
        fan_in = leaf.shape[-1] if leaf.ndim <= 3 else math.prod(leaf.shape[1:])
        values = 1 + 0.1 * values if leaf.ndim == 1 else values * fan_in**-0.5
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.map(draw, eqx.filter_eval_shape(build))


def write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document))


def change_json(path: Path, **changes: object) -> None:
    """Sets fields of a JSON object; None removes one."""
    document = json.loads(path.read_text()) | changes
    write_json(path, {name: value for name, value in document.items() if value is not None})


def rewrite(folder: Path, **changes: np.ndarray | None) -> None:
    """Sets tensors of a folder's safetensors file; None removes one. `__` stands for a dot."""
    path = folder / "diffusion_pytorch_model.safetensors"
    tensors: dict[str, np.ndarray | None] = dict(load_file(path))
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in tensors.items() if value is not None}, path)
