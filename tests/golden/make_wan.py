"""Makes small random Wan pipelines with diffusers, and records what they compute.

`python tests/golden/make_wan.py` rewrites the golden files beside it; it needs PyTorch, diffusers
and transformers (`pip install -c constraints.txt ".[parity]"`).
"""

import importlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from safetensors.numpy import save_file

# Their lazy modules tell type checkers nothing of use.
diffusers: Any = importlib.import_module("diffusers")
transformers: Any = importlib.import_module("transformers")

PROMPT, NEGATIVE = "a red  ball &amp;amp; rolls to the right", "dark"
_WORDS = ["<pad>", "</s>", "<unk>", "a", "red", "ball", "rolls", "to", "the", "right", "dark", "&"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a random pipeline; small enough for a repository."""

    heads: int = 2
    head_dim: int = 12
    layers: int = 2
    ffn_dim: int = 40
    z_dim: int = 4
    text_dim: int = 16
    vae_dim: int = 2
    latent_height: int = 4
    latent_width: int = 4
    steps: int = 5
    flow_shift: float = 3.0


def make(folder: Path, seed: int, sizes: Sizes) -> None:
    """Writes `wan21` (a pipeline), `wan22` (a second expert) and `expected.safetensors`."""
    torch.manual_seed(seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    transformer, transformer_2 = _transformer(sizes), _transformer(sizes)
    pipe = diffusers.WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=_text_encoder(sizes),
        transformer=transformer,
        vae=_vae(sizes),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction",
            use_flow_sigmas=True,
            flow_shift=sizes.flow_shift,
        ),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder / "wan21")
    transformer_2.save_pretrained(folder / "wan22" / "transformer_2")

    expected: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        _run_transformer(transformer, sizes, expected)
        _run_text_encoder(pipe.text_encoder, expected)
        _run_vae(pipe.vae, expected)
        _run_schedulers(sizes, expected)
        _run_pipelines(pipe, transformer_2, sizes, expected)
    save_file(
        {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in expected.items()},
        folder / "expected.safetensors",
    )
    for file in folder.rglob("*.json"):  # where a file was made is nobody's business
        document = json.loads(file.read_text())
        if document.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(document, indent=2) + "\n")


def _transformer(sizes: Sizes) -> Any:
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=sizes.heads,
        attention_head_dim=sizes.head_dim,
        in_channels=sizes.z_dim,
        out_channels=sizes.z_dim,
        text_dim=sizes.text_dim,
        freq_dim=16,
        ffn_dim=sizes.ffn_dim,
        num_layers=sizes.layers,
    )
    _perturb(model)
    return model


def _text_encoder(sizes: Sizes) -> Any:
    model = transformers.UMT5EncoderModel(
        transformers.UMT5Config(
            vocab_size=len(_WORDS),
            d_model=sizes.text_dim,
            d_kv=6,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            relative_attention_max_distance=10,
        )
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model.eval()


def _vae(sizes: Sizes) -> Any:
    model = diffusers.AutoencoderKLWan(
        base_dim=sizes.vae_dim,
        z_dim=sizes.z_dim,
        num_res_blocks=1,
        latents_mean=[0.1 * i for i in range(sizes.z_dim)],
        latents_std=[1 + 0.1 * i for i in range(sizes.z_dim)],
    )
    _perturb(model)
    with torch.no_grad():  # so that some pixels are clipped
        model.decoder.conv_out.weight *= 2.0
    return model


def _perturb(model: torch.nn.Module) -> None:
    """Moves norms and biases away from 1 and 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1 or parameter.numel() == parameter.shape[0]:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)


def _tokenizer() -> Any:
    vocabulary = {word: index for index, word in enumerate(_WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def _run_transformer(model: Any, sizes: Sizes, expected: dict[str, torch.Tensor]) -> None:
    hidden = torch.randn(2, sizes.z_dim, 3, 4, 6)
    timestep, text = torch.tensor([999, 421]), torch.randn(2, 7, sizes.text_dim)
    expected["transformer.hidden_states"] = hidden
    expected["transformer.timestep"] = timestep
    expected["transformer.encoder_hidden_states"] = text
    expected["transformer.output"] = model(hidden, timestep, text, return_dict=False)[0]


def _run_text_encoder(model: Any, expected: dict[str, torch.Tensor]) -> None:
    ids = torch.randint(1, len(_WORDS), (2, 30))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    ids = ids * mask
    expected["text.input_ids"], expected["text.attention_mask"] = ids, mask
    expected["text.output"] = model(ids, mask).last_hidden_state


def _run_vae(model: Any, expected: dict[str, torch.Tensor]) -> None:
    cases = [("1", 1, 32, 32), ("5", 5, 32, 32), ("9", 9, 32, 32), ("tiled", 1, 56, 40)]
    for name, frames, height, width in cases:
        if name == "tiled":  # the last tiles are cut short, in both directions
            model.enable_tiling(32, 32, 24, 24)
        video = torch.rand(1, 3, frames, height, width) * 2 - 1
        expected[f"vae.{name}.video"] = video
        latents = model.encode(video).latent_dist.mode()
        expected[f"vae.{name}.latents"] = latents
        expected[f"vae.{name}.decoded"] = model.decode(latents).sample
    model.use_tiling = False


def _run_schedulers(sizes: Sizes, expected: dict[str, torch.Tensor]) -> None:
    shift = sizes.flow_shift
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": shift}
    for name, scheduler in (
        ("euler", diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)),
        ("unipc", diffusers.UniPCMultistepScheduler(**flow)),
        ("unipc3", diffusers.UniPCMultistepScheduler(solver_order=3, **flow)),
        ("uncorrected", diffusers.UniPCMultistepScheduler(disable_corrector=[1], **flow)),
    ):
        scheduler.set_timesteps(sizes.steps)
        sample = torch.randn(2, 5)
        outputs, samples = torch.randn(sizes.steps, 2, 5), [sample]
        for timestep, output in zip(scheduler.timesteps, outputs, strict=True):
            sample = scheduler.step(output, timestep, sample, return_dict=False)[0]
            samples.append(sample)
        expected[f"scheduler.{name}.timesteps"] = scheduler.timesteps
        expected[f"scheduler.{name}.sigmas"] = scheduler.sigmas
        expected[f"scheduler.{name}.outputs"] = outputs
        expected[f"scheduler.{name}.samples"] = torch.stack(samples)


def _run_pipelines(
    pipe: Any, transformer_2: Any, sizes: Sizes, expected: dict[str, torch.Tensor]
) -> None:
    height, width = 8 * sizes.latent_height, 8 * sizes.latent_width
    latents = torch.randn(1, sizes.z_dim, 3, sizes.latent_height, sizes.latent_width)
    expected["pipeline.latents"] = latents

    def run(name: str, pipe: Any, output_type: str, **arguments) -> None:
        frames = pipe(
            height=height,
            width=width,
            num_frames=9,
            num_inference_steps=sizes.steps,
            latents=latents,
            output_type=output_type,
            max_sequence_length=12,
            **arguments,
        ).frames
        expected[f"pipeline.{name}"] = torch.as_tensor(frames)

    embeds, negative = torch.randn(2, 1, 9, sizes.text_dim)
    expected["pipeline.prompt_embeds"] = embeds
    expected["pipeline.negative_prompt_embeds"] = negative
    given = {"prompt_embeds": embeds, "negative_prompt_embeds": negative}
    run("unipc", pipe, "latent", guidance_scale=5.0, **given)
    run("frames", pipe, "np", guidance_scale=5.0, **given)
    run("unguided", pipe, "latent", guidance_scale=1.0, prompt_embeds=embeds)
    run("text", pipe, "np", guidance_scale=4.0, prompt=PROMPT, negative_prompt=NEGATIVE)

    parts = {name: getattr(pipe, name) for name in ("tokenizer", "text_encoder", "vae")}
    experts = diffusers.WanPipeline(
        **parts,
        transformer=pipe.transformer,
        transformer_2=transformer_2,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=sizes.flow_shift),
        boundary_ratio=0.8,
    )
    experts.set_progress_bar_config(disable=True)
    run("experts", experts, "latent", guidance_scale=4.0, guidance_scale_2=2.0, **given)


if __name__ == "__main__":
    make(Path(__file__).parent / "wan", seed=0, sizes=Sizes())
