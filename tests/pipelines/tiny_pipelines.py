"""Pipelines of a few thousand random weights, one for each family, and calls of them.

No text encoder: embeddings of the prompt are drawn. The result is latents.
"""

# diffusers exports its names lazily, which pyright does not follow.
# pyright: reportPrivateImportUsage=false

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLLTXVideo,
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoImageToVideoPipeline,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    LTXConditionPipeline,
    LTXImageToVideoPipeline,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from PIL import Image

import cinetile as ct

FRAMES, HEIGHT, WIDTH = 17, 64, 80
STEPS = 3
# The signatures of diffusers ask for text encoders, its code does not.
NONE: Any = None
# Nor do its annotations fit all of its defaults.
CHANNELS: Any = (8, 8, 8, 8)
COGVIDEOX_DOWN: Any = ("CogVideoXDownBlock3D",) * 4
COGVIDEOX_UP: Any = ("CogVideoXUpBlock3D",) * 4


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline and a call of it.

    Attributes:
        name: the id of its tests.
        family: name of its family.
        build: makes the pipeline; the same weights each time.
        arguments: makes the arguments of a call.
        grid: the tokens that self-attention sees in that call.
        num_layers: self-attention layers of a transformer.
        passes: calls of a transformer in each step.
        rows: rows of the batch in each of them.
    """

    name: str
    family: str
    build: Callable[[], Any]
    arguments: Callable[[], dict[str, Any]]
    grid: ct.TokenGrid
    num_layers: int
    passes: int
    rows: int

    def __str__(self) -> str:
        return self.name

    def run(self, pipe: Any, **changes: Any) -> torch.Tensor:
        """The latents that a call gives."""
        settings: dict[str, Any] = {
            "height": HEIGHT,
            "width": WIDTH,
            "num_frames": FRAMES,
            "num_inference_steps": STEPS,
            "output_type": "latent",
            "generator": torch.Generator().manual_seed(0),
        }
        result = pipe(**{**settings, **self.arguments(), **changes})
        return result.frames


def _drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _livened(model: Any) -> Any:
    """Lets attention matter: the weights of fresh layers are too small for sharp scores."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and ("to_q" in name or "to_k" in name or "to_v" in name):
                scale = 2.0 * parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def _quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _wan_transformer(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 256,
        "ffn_dim": 32,
        "num_layers": 3,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 32,
    }
    return _livened(WanTransformer3DModel(**{**settings, **changes}))


def _wan_vae() -> Any:
    torch.manual_seed(2)
    return AutoencoderKLWan(
        base_dim=3,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()


def _wan_scheduler() -> Any:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def _wan() -> Any:
    return _quiet(
        WanPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=_wan_vae(),
            scheduler=_wan_scheduler(),
            transformer=_wan_transformer(),
        )
    )


def _wan_experts() -> Any:
    return _quiet(
        WanPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=_wan_vae(),
            scheduler=_wan_scheduler(),
            transformer=_wan_transformer(),
            transformer_2=_wan_transformer(seed=5),
            boundary_ratio=0.8,
        )
    )


def _wan_token_timesteps() -> Any:
    """Like the 5B model of Wan 2.2, whose timesteps are given token by token."""
    return _quiet(
        WanPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=_wan_vae(),
            scheduler=_wan_scheduler(),
            transformer=_wan_transformer(),
            expand_timesteps=True,
        )
    )


def _wan_image() -> Any:
    """Wan 2.1's image-to-video: more channels, and an image beside the text."""
    pipe: Any = WanImageToVideoPipeline(
        tokenizer=NONE,
        text_encoder=NONE,
        vae=_wan_vae(),
        scheduler=_wan_scheduler(),
        transformer=_wan_transformer(in_channels=36, image_dim=4, added_kv_proj_dim=24),
    )
    pipe.encode_image = lambda *_: _drawn(1, 257, 4, seed=3)
    return _quiet(pipe)


def _wan_image_experts() -> Any:
    """Wan 2.2's image-to-video: more channels, two experts."""
    return _quiet(
        WanImageToVideoPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=_wan_vae(),
            scheduler=_wan_scheduler(),
            transformer=_wan_transformer(in_channels=36),
            transformer_2=_wan_transformer(seed=5, in_channels=36),
            boundary_ratio=0.8,
        )
    )


def _wan_image_token_timesteps() -> Any:
    """Image-to-video of Wan 2.2's 5B model: the tokens of the first frame have timestep 0."""
    return _quiet(
        WanImageToVideoPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=_wan_vae(),
            scheduler=_wan_scheduler(),
            transformer=_wan_transformer(),
            expand_timesteps=True,
        )
    )


def _wan_arguments() -> dict[str, Any]:
    return {
        "prompt_embeds": _drawn(1, 8, 32),
        "negative_prompt_embeds": _drawn(1, 8, 32, seed=1),
        "guidance_scale": 3.0,
    }


def _wan_image_arguments() -> dict[str, Any]:
    return {
        "prompt_embeds": _drawn(1, 512, 32),
        "negative_prompt_embeds": _drawn(1, 512, 32, seed=1),
        "guidance_scale": 3.0,
        "image": _drawn(1, 3, HEIGHT, WIDTH, seed=2).sigmoid(),
    }


def _hunyuan(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 10,
        "num_layers": 1,
        "num_single_layers": 2,
        "num_refiner_layers": 1,
        "patch_size": 1,
        "patch_size_t": 1,
        "guidance_embeds": True,
        "text_embed_dim": 16,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4),
    }
    transformer = HunyuanVideoTransformer3DModel(**{**settings, **changes})
    vae = AutoencoderKLHunyuanVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=CHANNELS,
        layers_per_block=1,
        act_fn="silu",
        norm_num_groups=4,
        scaling_factor=0.476986,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        mid_block_add_attention=True,
    ).eval()
    return _quiet(
        HunyuanVideoPipeline(
            text_encoder=NONE,
            tokenizer=NONE,
            transformer=_livened(transformer),
            vae=vae,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            text_encoder_2=NONE,
            tokenizer_2=NONE,
        )
    )


def _hunyuan_arguments() -> dict[str, Any]:
    mask = torch.zeros(1, 12, dtype=torch.long)
    mask[:, :7] = 1
    return {
        "prompt_embeds": _drawn(1, 12, 16),
        "pooled_prompt_embeds": _drawn(1, 8, seed=1),
        "prompt_attention_mask": mask,
    }


def _cogvideox(**changes: Any) -> Any:
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 2,
        "text_embed_dim": 32,
        "num_layers": 3,
        "sample_width": WIDTH // 8,
        "sample_height": HEIGHT // 8,
        "sample_frames": FRAMES,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 16,
        "use_rotary_positional_embeddings": True,
    }
    transformer = CogVideoXTransformer3DModel(**{**settings, **changes})
    vae = AutoencoderKLCogVideoX(
        in_channels=3,
        out_channels=3,
        down_block_types=COGVIDEOX_DOWN,
        up_block_types=COGVIDEOX_UP,
        block_out_channels=CHANNELS,
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    ).eval()
    return _quiet(
        CogVideoXPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=vae,
            transformer=_livened(transformer),
            scheduler=CogVideoXDDIMScheduler(),
        )
    )


def _cogvideox_frame_patches() -> Any:
    """Like CogVideoX 1.5, whose patches hold two frames; an odd number of frames is padded."""
    return _cogvideox(patch_size_t=2, patch_bias=False)


def _cogvideox_frame_patches_arguments() -> dict[str, Any]:
    return {**_cogvideox_arguments(), "num_frames": 33}  # 9 of latents


def _cogvideox_arguments() -> dict[str, Any]:
    return {
        "prompt_embeds": _drawn(1, 16, 32),
        "negative_prompt_embeds": _drawn(1, 16, 32, seed=1),
        "guidance_scale": 3.0,
        "max_sequence_length": 16,
    }


def _ltx() -> Any:
    torch.manual_seed(0)
    transformer = LTXVideoTransformer3DModel(
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=2,
        attention_head_dim=12,
        cross_attention_dim=24,
        num_layers=3,
        caption_channels=32,
    )
    vae = AutoencoderKLLTXVideo(
        in_channels=3,
        out_channels=3,
        latent_channels=8,
        block_out_channels=CHANNELS,
        decoder_block_out_channels=CHANNELS,
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5,
        upsample_residual=(False,) * 4,
        upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False,
        patch_size=1,
        patch_size_t=1,
        encoder_causal=True,
        decoder_causal=False,
    ).eval()
    vae.use_framewise_encoding = False
    vae.use_framewise_decoding = False
    return _quiet(
        LTXPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae,
            text_encoder=NONE,
            tokenizer=NONE,
            transformer=_livened(transformer),
        )
    )


def _ltx_arguments() -> dict[str, Any]:
    mask = torch.ones(1, 8, dtype=torch.long)
    mask[:, 5:] = 0
    return {
        "prompt_embeds": _drawn(1, 8, 32),
        "prompt_attention_mask": mask,
        "negative_prompt_embeds": _drawn(1, 8, 32, seed=1),
        "negative_prompt_attention_mask": mask,
        "guidance_scale": 3.0,
        "width": 32,
        "height": 32,
        "num_frames": 9,
    }


def _ltx_image() -> Any:
    """Timesteps token by token: those of the image's tokens are 0."""
    text = _ltx()
    return _quiet(
        LTXImageToVideoPipeline(
            scheduler=text.scheduler,
            vae=text.vae,
            text_encoder=NONE,
            tokenizer=NONE,
            transformer=text.transformer,
        )
    )


def _ltx_image_arguments() -> dict[str, Any]:
    return {**_ltx_arguments(), "image": _drawn(1, 3, 32, 32, seed=2).sigmoid()}


def _ltx_condition() -> Any:
    """Tells its transformer the place of each token instead of the size of the grid."""
    text = _ltx()
    return _quiet(
        LTXConditionPipeline(
            scheduler=text.scheduler,
            vae=text.vae,
            text_encoder=NONE,
            tokenizer=NONE,
            transformer=text.transformer,
        )
    )


def _ltx_condition_arguments() -> dict[str, Any]:
    image = _drawn(3, 32, 32, seed=2).sigmoid().movedim(0, -1).mul(255).byte()
    return {**_ltx_arguments(), "image": Image.fromarray(image.numpy())}


def _cogvideox_image() -> Any:
    text = _cogvideox(in_channels=8)
    return _quiet(
        CogVideoXImageToVideoPipeline(
            tokenizer=NONE,
            text_encoder=NONE,
            vae=text.vae,
            transformer=text.transformer,
            scheduler=text.scheduler,
        )
    )


def _cogvideox_image_arguments() -> dict[str, Any]:
    return {**_cogvideox_arguments(), "image": _drawn(1, 3, HEIGHT, WIDTH, seed=2).sigmoid()}


def _hunyuan_image() -> Any:
    """The image's latents replace those of the first frame."""
    text = _hunyuan(image_condition_type="token_replace", guidance_embeds=False)
    return _quiet(
        HunyuanVideoImageToVideoPipeline(
            text_encoder=NONE,
            tokenizer=NONE,
            transformer=text.transformer,
            vae=text.vae,
            scheduler=text.scheduler,
            text_encoder_2=NONE,
            tokenizer_2=NONE,
            image_processor=NONE,
        )
    )


def _hunyuan_image_arguments() -> dict[str, Any]:
    image = _drawn(1, 3, HEIGHT, WIDTH, seed=2).sigmoid()
    return {**_hunyuan_arguments(), "image": image, "guidance_scale": 1.0}


_WAN = "Wan 2.1 and 2.2"
_WAN_GRID = ct.TokenGrid(5, 4, 5)
_HUNYUAN = "HunyuanVideo"
_HUNYUAN_GRID = ct.TokenGrid(5, 8, 10, text_tokens=12)
_COG = "CogVideoX"
_COG_GRID = ct.TokenGrid(5, 4, 5, text_tokens=16, text_first=True)
_LTX_GRID = ct.TokenGrid(3, 8, 8)

PIPELINES: tuple[TinyPipeline, ...] = (
    TinyPipeline("wan", _WAN, _wan, _wan_arguments, _WAN_GRID, 3, 2, 1),
    TinyPipeline("wan-experts", _WAN, _wan_experts, _wan_arguments, _WAN_GRID, 3, 2, 1),
    TinyPipeline(
        "wan-token-timesteps", _WAN, _wan_token_timesteps, _wan_arguments, _WAN_GRID, 3, 2, 1
    ),
    TinyPipeline("wan-image", _WAN, _wan_image, _wan_image_arguments, _WAN_GRID, 3, 2, 1),
    TinyPipeline(
        "wan-image-experts", _WAN, _wan_image_experts, _wan_image_arguments, _WAN_GRID, 3, 2, 1
    ),
    TinyPipeline(
        "wan-image-token-timesteps",
        _WAN,
        _wan_image_token_timesteps,
        _wan_image_arguments,
        _WAN_GRID,
        3,
        2,
        1,
    ),
    TinyPipeline("hunyuan", _HUNYUAN, _hunyuan, _hunyuan_arguments, _HUNYUAN_GRID, 3, 1, 1),
    TinyPipeline(
        "hunyuan-image", _HUNYUAN, _hunyuan_image, _hunyuan_image_arguments, _HUNYUAN_GRID, 3, 1, 1
    ),
    TinyPipeline("cogvideox", _COG, _cogvideox, _cogvideox_arguments, _COG_GRID, 3, 1, 2),
    TinyPipeline(
        "cogvideox-image", _COG, _cogvideox_image, _cogvideox_image_arguments, _COG_GRID, 3, 1, 2
    ),
    TinyPipeline(
        "cogvideox-frame-patches",
        _COG,
        _cogvideox_frame_patches,
        _cogvideox_frame_patches_arguments,
        _COG_GRID,
        3,
        1,
        2,
    ),
    TinyPipeline("ltx", "LTX-Video", _ltx, _ltx_arguments, _LTX_GRID, 3, 1, 2),
    TinyPipeline("ltx-image", "LTX-Video", _ltx_image, _ltx_image_arguments, _LTX_GRID, 3, 1, 2),
    TinyPipeline(
        "ltx-condition", "LTX-Video", _ltx_condition, _ltx_condition_arguments, _LTX_GRID, 3, 1, 2
    ),
)
