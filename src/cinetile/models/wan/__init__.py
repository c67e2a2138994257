"""Wan text-to-video: the models, their schedulers and the pipeline, loaded from diffusers' files.

Needs the extra `wan`: `pip install --constraint constraints.txt ".[wan]"` in a clone.
"""

from cinetile import _extras

_extras.require("equinox", extra="wan", feature="cinetile.models.wan")

from cinetile.models.wan.attention import DenseAttention, SelfAttention
from cinetile.models.wan.checkpoint import small_checkpoint
from cinetile.models.wan.folder import GenerationDefaults
from cinetile.models.wan.linear_codec import LinearVideoCodec, LinearVideoCodecConfig
from cinetile.models.wan.output import WanPipelineOutput
from cinetile.models.wan.pipeline import WanPipeline
from cinetile.models.wan.request import CallPlan
from cinetile.models.wan.schedulers import (
    FlowMatchEulerDiscreteScheduler,
    Schedule,
    Scheduler,
    UniPCMultistepScheduler,
)
from cinetile.models.wan.size import VideoSize
from cinetile.models.wan.text_encoder import UMT5Config, UMT5EncoderModel
from cinetile.models.wan.tiling import Tiling
from cinetile.models.wan.tokenizer import PromptTokenizer
from cinetile.models.wan.transformer import WanTransformer3DModel
from cinetile.models.wan.transformer_config import WanTransformerConfig
from cinetile.models.wan.vae import AutoencoderKLWan, AutoencoderKLWanConfig

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
