"""Prompts as token ids."""

import html
import os
import re
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from cinetile import _extras
from cinetile.files import reading

PAD_ID = 0
_EXPECTED = "a tokenizer of the package tokenizers"
# UMT5's, with 256,300 pieces, has 17 MB.
_MAX_BYTES = 128 << 20
_LARGEST_ID = (1 << 31) - 1
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
        self._path = path
        with reading(path, _EXPECTED):
            if path.stat().st_size > _MAX_BYTES:
                raise ValueError(f"it has more than {_MAX_BYTES:,} bytes")
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
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
            with reading(self._path, _EXPECTED):
                tokens = self._tokenizer.encode(clean_prompt(prompt)).ids
                if max(tokens, default=0) > _LARGEST_ID:
                    raise ValueError(f"it gives the token {max(tokens):,}")
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
