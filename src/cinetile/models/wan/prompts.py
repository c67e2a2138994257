"""Prompts of a call: checked strings, their token ids, and their embeddings."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from cinetile.models.wan.text_encoder import UMT5EncoderModel
from cinetile.models.wan.tokenizer import PromptTokenizer, clean_prompt

AnyArray = Array | np.ndarray


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """Prompts as token ids, padded to one length.

    Attributes:
        ids: token ids.
        mask: False where a token is padding.
        repeats: videos of each prompt.
    """

    ids: Int[np.ndarray, "prompts text"]
    mask: Bool[np.ndarray, "prompts text"]
    repeats: int = 1

    def __len__(self) -> int:
        """The number of videos."""
        return len(self.ids) * self.repeats


Prompts = PromptTokens | AnyArray
"""Prompts as a call takes them: tokens, or embeddings `[batch, text, dim]`."""


def read_prompts(
    tokenizer: PromptTokenizer, prompt: str | list[str], max_length: int, repeats: int
) -> tuple[PromptTokens, tuple[str, ...]]:
    """Checks prompts and encodes them.

    Returns:
        The tokens, and the words that the vocabulary does not have.

    Raises:
        TypeError: a prompt is not a string.
        ValueError: a prompt is empty or has more than `max_length` tokens.
    """
    prompts = as_strings("prompt", prompt)
    if not all(map(clean_prompt, prompts)):
        raise ValueError("prompt must not be empty")
    tokens = PromptTokens(*tokenizer(prompts, max_length, "prompt"), repeats)
    return tokens, tokenizer.unknown_words(prompts)


def read_negative_prompts(
    tokenizer: PromptTokenizer,
    negative_prompt: str | list[str],
    prompts: int,
    max_length: int,
    repeats: int,
) -> PromptTokens:
    """Checks negative prompts and encodes them: a string for all prompts, or a list of strings.

    Raises:
        TypeError: a negative prompt is not a string.
        ValueError: their number differs from the number of prompts, or one is too long.
    """
    negatives = as_strings("negative_prompt", negative_prompt)
    if isinstance(negative_prompt, str):
        negatives = negatives * prompts
    if len(negatives) != prompts:
        raise ValueError(
            f"negative_prompt must have one string for each of the {prompts} prompts, "
            f"got {len(negatives)}"
        )
    return PromptTokens(*tokenizer(negatives, max_length, "negative_prompt"), repeats)


def embed_prompts(text_encoder: UMT5EncoderModel, tokens: PromptTokens) -> Float[Array, "b t d"]:
    """Embeds prompts `[batch, text, dim]`, with zeros at padding and repeats next to each other."""
    embeddings = _embed(text_encoder, jnp.asarray(tokens.ids), jnp.asarray(tokens.mask))
    return jnp.repeat(embeddings, tokens.repeats, axis=0)


@jax.jit
def _embed(
    text_encoder: UMT5EncoderModel,
    ids: Int[Array, "batch text"],
    mask: Bool[Array, "batch text"],
) -> Array:
    embeddings = text_encoder(ids, mask)
    return jnp.where(mask[..., jnp.newaxis], embeddings, 0)


def check_embeddings(name: str, array: Any, batch: int, dim: int) -> None:
    """Raises ValueError unless `array` holds prompt embeddings `[batch, tokens, dim]`."""
    if array.ndim != 3 or array.shape[0] != batch or array.shape[2] != dim:
        raise ValueError(f"{name} must be [{batch}, tokens, {dim}], got {array.shape}")


def as_strings(name: str, value: str | list[str]) -> list[str]:
    """Returns a string or a list of strings as a list.

    Raises:
        TypeError: `value` is neither.
        ValueError: the list is empty.
    """
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(text, str) for text in strings):
        raise TypeError(f"{name} must be a string or a list of strings, got {value!r}")
    if not strings:
        raise ValueError(f"{name} must not be an empty list")
    return strings
