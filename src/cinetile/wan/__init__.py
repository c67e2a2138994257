"""Wan text-to-video: the models, their schedulers and the pipeline, loaded from diffusers' files.

Needs the extra `wan`: `pip install "cinetile[wan]"`.
"""

try:
    import equinox  # noqa: F401
except ImportError as error:
    raise ImportError('cinetile.wan needs equinox: pip install "cinetile[wan]"') from error

from cinetile.wan.attention import DenseAttention, SelfAttention
from cinetile.wan.checkpoint import small_checkpoint
from cinetile.wan.folder import GenerationDefaults
from cinetile.wan.linear_codec import LinearVideoCodec, LinearVideoCodecConfig
from cinetile.wan.pipeline import CallPlan, VideoSize, WanPipeline, WanPipelineOutput
from cinetile.wan.schedulers import (
    FlowMatchEulerDiscreteScheduler,
    Schedule,
    Scheduler,
    UniPCMultistepScheduler,
)
from cinetile.wan.text_encoder import UMT5Config, UMT5EncoderModel
from cinetile.wan.tiling import Tiling
from cinetile.wan.tokenizer import PromptTokenizer
from cinetile.wan.transformer import WanTransformer3DModel, WanTransformerConfig
from cinetile.wan.vae import AutoencoderKLWan, AutoencoderKLWanConfig

__all__ = [
    "AutoencoderKLWan",
    "AutoencoderKLWanConfig",
    "CallPlan",
    "DenseAttention",
    "FlowMatchEulerDiscreteScheduler",
    "GenerationDefaults",
    "LinearVideoCodec",
    "LinearVideoCodecConfig",
    "PromptTokenizer",
    "Schedule",
    "Scheduler",
    "SelfAttention",
    "Tiling",
    "UMT5Config",
    "UMT5EncoderModel",
    "UniPCMultistepScheduler",
    "VideoSize",
    "WanPipeline",
    "WanPipelineOutput",
    "WanTransformer3DModel",
    "WanTransformerConfig",
    "small_checkpoint",
]
