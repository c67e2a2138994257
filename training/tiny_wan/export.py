"""Writes a folder in diffusers' layout: `python -m training.tiny_wan.export STATE FOLDER`."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file
from torch import Tensor

from training.tiny_wan.codec import CHANNELS, PATCH
from training.tiny_wan.flow import System, make_system
from training.tiny_wan.model import ModelConfig
from training.tiny_wan.scenes import FRAMES, SIZE
from training.tiny_wan.text import END, MAX_TOKENS, PAD, UNKNOWN

STEPS = 20
GUIDANCE = 3.0
FLOW_SHIFT = 8.0


def export(folder: Path, params: dict[str, Tensor], system: System) -> None:
    """Writes the transformer, text encoder, tokenizer, codec and scheduler.

    Args:
        folder: is made if missing; files of the same names are replaced.
        params: the transformer's weights, and the text encoder's with the prefix `text.`.
        system: everything but the weights.
    """
    model = system.config
    transformer = {}
    encoder = {}
    for name, value in params.items():
        if name.startswith("place."):
            continue
        stored = value.detach().to(torch.bfloat16).contiguous()
        if name.startswith("text."):
            encoder[name.removeprefix("text.")] = stored
        elif name == "patch_embedding.weight":
            transformer[name] = stored.view(model.dim, model.in_channels, 1, 2, 2)
        else:
            transformer[name] = stored

    def write(path: str, content: dict) -> None:
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content, indent=2) + "\n")

    write("model_index.json", _MODEL_INDEX)
    write("generation.json", _GENERATION)
    write("scheduler/scheduler_config.json", _SCHEDULER)
    write("transformer/config.json", _transformer_config(model))
    write("text_encoder/config.json", system.text.to_json())
    write("tokenizer/tokenizer_config.json", _TOKENIZER)
    write("vae/config.json", _CODEC)
    system.words.save(str(folder / "tokenizer/tokenizer.json"))
    metadata = {"format": "pt"}
    weights = "diffusion_pytorch_model.safetensors"
    save_file(transformer, folder / "transformer" / weights, metadata)
    save_file(encoder, folder / "text_encoder/model.safetensors", metadata)
    arrays = {
        "mean": system.codec.mean,
        "encoder.weight": system.codec.encoder,
        "decoder.weight": system.codec.decoder,
    }
    arrays = {name: np.ascontiguousarray(value, np.float32) for name, value in arrays.items()}
    save_arrays(arrays, folder / "vae" / weights, metadata)


def _transformer_config(model: ModelConfig) -> dict:
    config = {
        "_class_name": "WanTransformer3DModel",
        "_diffusers_version": "0.35.1",
        "added_kv_proj_dim": None,
        "attention_head_dim": model.attention_head_dim,
        "cross_attn_norm": True,
        "eps": 1e-06,
        "ffn_dim": model.ffn_dim,
        "freq_dim": model.freq_dim,
        "image_dim": None,
        "in_channels": model.in_channels,
        "num_attention_heads": model.num_attention_heads,
        "num_layers": model.num_layers,
        "out_channels": model.in_channels,
        "patch_size": [1, 2, 2],
        "pos_embed_seq_len": None,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 1024,
        "text_dim": model.text_dim,
    }
    # Diffusers fixes theta at 10,000; another one is a key of our own.
    return config if model.rope_theta == 10000.0 else config | {"rope_theta": model.rope_theta}


_MODEL_INDEX = {
    "_class_name": "WanPipeline",
    "_diffusers_version": "0.35.1",
    "boundary_ratio": None,
    "expand_timesteps": False,
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "PreTrainedTokenizerFast"],
    "transformer": ["diffusers", "WanTransformer3DModel"],
    "transformer_2": [None, None],
    "vae": ["cinetile", "LinearVideoCodec"],
}
_GENERATION = {
    "height": SIZE,
    "width": SIZE,
    "num_frames": FRAMES,
    "num_inference_steps": STEPS,
    "guidance_scale": GUIDANCE,
    "max_sequence_length": MAX_TOKENS,
    "trained_sizes": [[FRAMES, SIZE, SIZE]],
}
_SCHEDULER = {
    "_class_name": "UniPCMultistepScheduler",
    "_diffusers_version": "0.35.1",
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "beta_start": 0.0001,
    "disable_corrector": [],
    "dynamic_thresholding_ratio": 0.995,
    "final_sigmas_type": "zero",
    "flow_shift": FLOW_SHIFT,
    "lower_order_final": True,
    "num_train_timesteps": 1000,
    "predict_x0": True,
    "prediction_type": "flow_prediction",
    "rescale_betas_zero_snr": False,
    "sample_max_value": 1.0,
    "solver_order": 2,
    "solver_p": None,
    "solver_type": "bh2",
    "steps_offset": 0,
    "thresholding": False,
    "timestep_spacing": "linspace",
    "trained_betas": None,
    "use_beta_sigmas": False,
    "use_exponential_sigmas": False,
    "use_flow_sigmas": True,
    "use_karras_sigmas": False,
}
_TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "model_max_length": MAX_TOKENS,
    "padding_side": "right",
    "pad_token": PAD,
    "eos_token": END,
    "unk_token": UNKNOWN,
}
_CODEC = {
    "_class_name": "LinearVideoCodec",
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": [1, PATCH, PATCH],
    "z_dim": CHANNELS,
    "latents_mean": [0.0] * CHANNELS,
    "latents_std": [1.0] * CHANNELS,
}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state", type=Path, help="state.pt of a training run")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    arguments = parser.parse_args()
    average = torch.load(arguments.state)["average"]
    export(arguments.folder, average, make_system())


if __name__ == "__main__":
    main()
