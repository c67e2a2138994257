"""Flow matching with the small model: the losses, and sampling with guidance."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training.tiny_wan import codec, model, scenes, text

Params = dict[str, Tensor]
CONFIG = model.ModelConfig(num_attention_heads=4, attention_head_dim=48, num_layers=6, ffn_dim=768)
PLACE_WAVES = 24
TOKENS_A_SIDE = scenes.SIZE // codec.PATCH // 2


@dataclass(frozen=True)
class System:
    """Everything but the weights.

    Attributes:
        block: runs one block; compiled in training.
    """

    config: model.ModelConfig
    text: text.TextConfig
    words: Tokenizer
    codec: codec.LinearVideoCodec
    block: Callable[..., Tensor] = model.transformer_block

    def init(self, generator: torch.Generator) -> Params:
        """Fresh weights: the transformer's, `text.` the encoder's, `place.` for training alone."""
        encoder = text.init(self.text, generator)
        places = {
            "place.weight": torch.zeros(PLACE_WAVES, self.config.dim),
            "place.bias": torch.zeros(PLACE_WAVES),
        }
        words = {f"text.{name}": value for name, value in encoder.items()}
        return model.init(self.config, generator) | words | places

    def velocity(self, params: Params, latents: Tensor, moment: Tensor, ids: Tensor) -> Tensor:
        """The predicted velocity of latents [batch, frames, 16, 16, 16], in bfloat16 inside."""
        low = {name: value.to(torch.bfloat16) for name, value in params.items()}
        encoder = {k.removeprefix("text."): v for k, v in low.items() if k.startswith("text.")}
        places = torch.linspace(0, scenes.FRAMES - 1, latents.shape[1])
        tables = model.rope_tables(self.config, places, TOKENS_A_SIDE, TOKENS_A_SIDE)
        words = text.embed(encoder, self.text, ids)
        return model.velocity(low, self.config, latents, moment, words, tables, self.block)


def make_system(*, compiled: bool = False) -> System:
    """The system that the recipe trains."""
    words = text.tokenizer()
    block: Callable[..., Tensor] = model.transformer_block
    if compiled:
        block = torch.compile(block, dynamic=False)
    sizes = text.TextConfig(words.get_vocab_size())
    return System(CONFIG, sizes, words, codec.fit(), block)


def shifted(moment: Tensor, shift: float) -> Tensor:
    """Moves times in [0, 1] towards 1, pure noise."""
    return shift * moment / (1 + (shift - 1) * moment)


def moments(count: int, shift: float, generator: torch.Generator) -> Tensor:
    """Random times, one from each of `count` slices, so that a batch covers all noise levels."""
    slices = torch.randperm(count, generator=generator) + torch.rand(count, generator=generator)
    return shifted(slices / count, shift)


def training_loss(
    system: System,
    params: Params,
    latents: Tensor,
    captions: list[str],
    moment: Tensor,
    generator: torch.Generator,
) -> Tensor:
    """The loss of the velocity, and of telling places.

    The architecture knows distances only: a token finds out where it lies from how attention ends
    at the borders. Layout and motion are decided at high noise and rest on that, so the middle
    layer is asked for it outright; without this help motion took many times as long to appear.
    """
    noise = torch.randn(latents.shape, generator=generator)
    mix = moment.view(-1, 1, 1, 1, 1)
    ids = text.tokenize(captions, system.words)
    hidden = []

    def watched(*inputs: Any) -> Tensor:
        hidden.append(system.block(*inputs))
        return hidden[-1]

    noisy = (1 - mix) * latents + mix * noise
    found = replace(system, block=watched).velocity(params, noisy, moment, ids)
    # Whitening made fine detail as large as colour; this gives some of the weight back.
    weights = 1 / (1 + torch.arange(latents.shape[-1]))
    weights = weights / weights.mean()
    video_loss = ((found - (noise - latents)).square() * weights).mean()

    middle = hidden[len(hidden) // 2 - 1].float()
    middle = functional.layer_norm(middle, middle.shape[-1:])
    told = functional.linear(middle, params["place.weight"], params["place.bias"])
    return video_loss + (told - _places(latents.shape[1])).square().mean()


@functools.cache
def _places(frames: int) -> Tensor:
    """Waves over the place of every token, [tokens, 24]: 4 lengths for each of 3 axes."""
    axes = torch.meshgrid(
        torch.linspace(0, 1, frames),
        torch.linspace(0, 1, TOKENS_A_SIDE),
        torch.linspace(0, 1, TOKENS_A_SIDE),
        indexing="ij",
    )
    waves = [
        2**0.5 * wave(torch.pi * turns * axis)
        for wave in (torch.cos, torch.sin)
        for turns in (1, 2, 3, 4)
        for axis in axes
    ]
    return torch.stack(waves, dim=-1).reshape(-1, PLACE_WAVES)


@torch.no_grad()
def sample(
    system: System,
    params: Params,
    captions: list[str],
    *,
    frames: int = scenes.FRAMES,
    steps: int = 20,
    guidance: float = 4.0,
    shift: float = 8.0,
    seed: int = 0,
    batch: int = 8,
) -> np.ndarray:
    """Videos in [0, 1] for captions, by Euler steps: float32 [captions, frames, 64, 64, 3]."""
    generator = torch.Generator().manual_seed(seed)
    times = shifted(torch.linspace(1, 0, steps + 1), shift)
    side = 2 * TOKENS_A_SIDE
    videos = []
    for first in range(0, len(captions), batch):
        part = captions[first : first + batch]
        ids = text.tokenize(part + [""] * len(part), system.words)
        shape = (len(part), frames, side, side, codec.CHANNELS)
        latents = torch.randn(shape, generator=generator)
        for now, then in itertools.pairwise(times):
            both = system.velocity(
                params, torch.cat([latents, latents]), now.expand(2 * len(part)), ids
            )
            told, free = both.chunk(2)
            latents = latents + (then - now) * (free + guidance * (told - free))
        videos.append(system.codec.decode(latents.numpy()))
    return np.concatenate(videos)
