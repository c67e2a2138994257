"""Parity with diffusers: the same tests for the golden files and for models made on the spot."""

import functools
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from cinetile.models.wan import (
    FlowMatchEulerDiscreteScheduler,
    Tiling,
    UMT5EncoderModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)

PROMPT, NEGATIVE = "a red  ball &amp;amp; rolls to the right", "dark"
FLOW_SHIFT, STEPS = 3.0, 5
PIXELS: dict[str, Any] = {"height": 32, "width": 32, "num_frames": 9, "num_inference_steps": STEPS}
# What the requirement allows.
TIGHT, LOOSE = 1e-4, 1e-3

Expected = dict[str, np.ndarray]


def largest_difference(ours: object, theirs: np.ndarray) -> float:
    array = np.asarray(ours)
    assert array.shape == theirs.shape
    return float(np.abs(array - theirs).max())


def two_experts(folder: Path, tmp_path: Path) -> Path:
    """The folder of a pipeline with a second expert and Euler's method."""
    target = tmp_path / "experts"
    shutil.copytree(folder / "wan21", target)
    shutil.copytree(folder / "wan22" / "transformer_2", target / "transformer_2")
    index = target / "model_index.json"
    text = index.read_text().replace('"boundary_ratio": null', '"boundary_ratio": 0.8')
    before, after = text.split('"transformer_2": [')
    index.write_text(
        before + '"transformer_2": ["diffusers", "WanTransformer3DModel"]' + after.split("]", 1)[1]
    )
    return target


@functools.cache
def load_expected(folder: Path) -> Expected:
    return load_file(folder / "expected.safetensors")


@functools.cache
def load_pipeline(folder: Path) -> WanPipeline:
    return WanPipeline.from_pretrained(folder / "wan21")


class WanParity:
    """Inherited with a fixture `folder` that holds what `make_wan.make` wrote."""

    def test_transformer(self, folder: Path):
        expected = load_expected(folder)
        model = WanTransformer3DModel.load(folder / "wan21" / "transformer")
        names = ("hidden_states", "timestep", "encoder_hidden_states")
        hidden, timestep, text = (jnp.asarray(expected[f"transformer.{name}"]) for name in names)
        output = eqx.filter_jit(model)(hidden, timestep.astype(jnp.int32), text)
        assert largest_difference(output, expected["transformer.output"]) <= TIGHT

    def test_text_encoder(self, folder: Path):
        expected = load_expected(folder)
        model = UMT5EncoderModel.load(folder / "wan21" / "text_encoder")
        ids, mask = expected["text.input_ids"], expected["text.attention_mask"] > 0
        output = eqx.filter_jit(model)(jnp.asarray(ids, jnp.int32), jnp.asarray(mask))
        theirs = expected["text.output"]
        assert largest_difference(np.asarray(output)[mask], theirs[mask]) <= LOOSE

    @pytest.mark.parametrize("case", ["1", "5", "9", "tiled"])
    def test_vae(self, folder: Path, case: str):
        vae, expected = load_pipeline(folder).vae, load_expected(folder)
        tiling = Tiling(32, 32, 24, 24) if case == "tiled" else None
        video, latents, decoded = (
            expected[f"vae.{case}.{name}"] for name in ("video", "latents", "decoded")
        )
        assert largest_difference(vae.encode(video, tiling=tiling), latents) <= LOOSE
        assert largest_difference(vae.decode(latents, tiling=tiling), decoded) <= LOOSE

    @pytest.mark.parametrize(
        ("name", "scheduler"),
        [
            ("euler", FlowMatchEulerDiscreteScheduler(FLOW_SHIFT)),
            ("unipc", UniPCMultistepScheduler(FLOW_SHIFT)),
            ("unipc3", UniPCMultistepScheduler(FLOW_SHIFT, solver_order=3)),
            ("uncorrected", UniPCMultistepScheduler(FLOW_SHIFT, disable_corrector=(1,))),
        ],
    )
    def test_scheduler(self, folder: Path, name: str, scheduler):
        expected = load_expected(folder)

        def theirs(what: str) -> np.ndarray:
            return expected[f"scheduler.{name}.{what}"]

        schedule = scheduler.schedule(STEPS)
        assert largest_difference(schedule.timesteps, theirs("timesteps")) <= 2e-4
        assert largest_difference(schedule.sigmas, theirs("sigmas")) <= 1e-6
        samples = [jnp.asarray(theirs("samples")[0])]
        state = scheduler.init(samples[0])
        for row, output in zip(schedule.coefficients, theirs("outputs"), strict=True):
            sample, state = scheduler.step(row, state, jnp.asarray(output), samples[-1])
            samples.append(sample)
        assert largest_difference(jnp.stack(samples), theirs("samples")) <= TIGHT

    @pytest.mark.parametrize("case", ["unipc", "frames", "unguided"])
    def test_pipeline(self, folder: Path, case: str):
        pipe, expected = load_pipeline(folder), load_expected(folder)
        negative = None if case == "unguided" else expected["pipeline.negative_prompt_embeds"]
        output = pipe(
            **PIXELS,
            latents=expected["pipeline.latents"],
            prompt_embeds=expected["pipeline.prompt_embeds"],
            negative_prompt_embeds=negative,
            guidance_scale=1.0 if case == "unguided" else 5.0,
            output_type="np" if case == "frames" else "latent",
        )
        tolerance = LOOSE if case == "frames" else TIGHT
        assert largest_difference(output.frames, expected[f"pipeline.{case}"]) <= tolerance

    def test_pipeline_from_text(self, folder: Path):
        pipe, expected = load_pipeline(folder), load_expected(folder)
        output = pipe(
            PROMPT,
            NEGATIVE,
            **PIXELS,
            latents=expected["pipeline.latents"],
            guidance_scale=4.0,
            max_sequence_length=12,
        )
        assert largest_difference(output.frames, expected["pipeline.text"]) <= LOOSE

    def test_two_experts(self, folder: Path, tmp_path: Path):
        expected = load_expected(folder)
        pipe = WanPipeline.from_pretrained(two_experts(folder, tmp_path))
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(FLOW_SHIFT)
        arguments: dict[str, Any] = {
            "latents": expected["pipeline.latents"],
            "prompt_embeds": expected["pipeline.prompt_embeds"],
            "negative_prompt_embeds": expected["pipeline.negative_prompt_embeds"],
            "output_type": "latent",
            "guidance_scale": 4.0,
        }
        output = pipe(**PIXELS, **arguments, guidance_scale_2=2.0)
        assert largest_difference(output.frames, expected["pipeline.experts"]) <= TIGHT
        same_scale = pipe(**PIXELS, **arguments)
        assert largest_difference(same_scale.frames, expected["pipeline.experts"]) > 1e-3
