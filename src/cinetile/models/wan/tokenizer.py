"""Prompts as token ids."""

import html
import os
import re
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from cinetile import _extras

PAD_ID = 0
_UNKNOWN = "<unk>"


def clean_prompt(prompt: str) -> str:
    """Resolves HTML entities (twice, as web captions need) and makes runs of spaces single."""
    return re.sub(r"\s+", " ", html.unescape(html.unescape(prompt))).strip()


class PromptTokenizer:
    """The tokenizer of a pipeline's `tokenizer` folder.

    Args:
        folder: holds `tokenizer.json`.

    Raises:
        FileNotFoundError: there is none.
        ImportError: the package tokenizers is not installed.
        ValueError: the file holds no tokenizer.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            hint = ""
            if (path.parent / "spiece.model").is_file():
                hint = (
                    "; spiece.model alone is not read, but "
                    "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder) "
                    "turns it into one"
                )
            raise FileNotFoundError(f"{path} is missing{hint}")
        tokenizers = _extras.require("tokenizers", extra="wan", feature="reading a prompt")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing narrower
            raise ValueError(f"{path} holds no tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def __call__(
        self, prompts: list[str], max_length: int, name: str = "prompt"
    ) -> tuple[Int[np.ndarray, "batch tokens"], Bool[np.ndarray, "batch tokens"]]:
        """Cleans and encodes prompts.

        Args:
            prompts: any text.
            max_length: tokens to pad to, the end mark included.
            name: of the argument, for errors.

        Returns:
            Token ids, and where they are not padding.

        Raises:
            ValueError: a prompt has more tokens.
        """
        ids = np.full((len(prompts), max_length), PAD_ID, np.int32)
        mask = np.zeros((len(prompts), max_length), np.bool_)
        for row, prompt in enumerate(prompts):
            tokens = self._tokenizer.encode(clean_prompt(prompt)).ids
            if len(tokens) > max_length:
                raise ValueError(
                    f"{name} must have at most {max_length} tokens (max_sequence_length), the end "
                    f"mark included, got {len(tokens)}: {prompt[:40]!r}..."
                )
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        return ids, mask

    def unknown_words(self, prompts: list[str]) -> tuple[str, ...]:
        """What in the prompts the vocabulary does not have, each once."""
        unknown = self._tokenizer.token_to_id(_UNKNOWN)
        words: dict[str, None] = {}
        for prompt in map(clean_prompt, prompts):
            encoded = self._tokenizer.encode(prompt)
            for token, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
                if token == unknown:
                    words[prompt[start:stop]] = None
        return tuple(words)
