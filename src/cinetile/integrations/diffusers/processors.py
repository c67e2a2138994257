"""What stands in for a layer's own attention processor."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Int
from torch.overrides import TorchFunctionMode

from cinetile.grid import TokenGrid

Attend = Callable[..., torch.Tensor]
"""Takes query, key and value `[batch, heads, tokens, head_dim]` and what else the function
`torch.nn.functional.scaled_dot_product_attention` does; gives its output."""


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keeps torch.compile out: a graph ends before the call, and another begins behind it."""
    return torch.compiler.disable(
        function,
        reason="cinetile's sparse attention cannot be traced; compile with fullgraph=False",
    )


class BoundToModel:
    """What holds on to one model: neither copied nor pickled with it."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a model with sparse attention can be neither copied nor pickled; call restore() of "
            "its handle first (save_pretrained works at any time)"
        )


class Hook(BoundToModel):
    """A hook of a model that torch.compile does not look into."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    @untraced
    def __call__(self, *args: Any) -> None:
        self._function(*args)


class SparseProcessor(BoundToModel):
    """Runs a layer's own processor, all but its attention.

    Projections, norms, rotary embeddings and the output projection stay the model's own code;
    only its call of `scaled_dot_product_attention` goes elsewhere. Nothing is patched: the call
    is caught by a mode that holds in this thread while the processor runs.

    Made by `processor_for`, whose classes can be called.
    """

    def __init__(self, original: Any, attend: Attend) -> None:
        self.original = original
        self._attend = attend

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Does what the original would, with other attention."""
        with _Interception(self._attend) as interception:
            output = self.original(*args, **kwargs)
        if interception.calls != 1:
            raise RuntimeError(
                f"{type(self.original).__name__} called scaled_dot_product_attention "
                f"{interception.calls} times where one call was expected, so nothing can be made "
                "sparse; choose PyTorch's own attention with "
                "pipe.transformer.set_attention_backend('native')"
            )
        return output

    # The model's set_attention_backend looks for these on processors; they are the original's.
    @property
    def _attention_backend(self) -> Any:
        return self.original._attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: Any) -> None:
        self.original._attention_backend = backend

    @property
    def _parallel_config(self) -> Any:
        return self.original._parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.original._parallel_config = config


def processor_for(original: Any, attend: Attend) -> SparseProcessor:
    """What stands in for a processor, and is called with the arguments that it takes."""
    return _class_for(type(original))(original, attend)


@functools.cache
def _class_for(original: type) -> type[SparseProcessor]:
    """Layers drop what the signature of their processor's `__call__` does not name."""

    @functools.wraps(original.__call__)
    def call(self: SparseProcessor, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    return type(f"Sparse{original.__name__}", (SparseProcessor,), {"__call__": untraced(call)})


class _Interception(TorchFunctionMode):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self._attend = attend
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self._attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def prompt_length_of(mask: Any, batch: int, grid: TokenGrid) -> Int[np.ndarray, " batch"] | None:
    """Text tokens of each batch row that a mask leaves; None for all.

    Raises:
        ValueError: the mask hides anything but the end of the text.
    """
    if mask is None:
        return None
    start = 0 if grid.text_first else grid.num_video_tokens
    stop = start + grid.text_tokens
    fits = mask.dtype == torch.bool and mask.shape[-1] == grid.num_tokens
    keys = mask
    while fits and keys.ndim > 2:
        # Whoever widens a mask of keys does so without memory.
        fits = keys.shape[-2] == 1 or keys.stride(-2) == 0
        keys = keys.select(-2, 0)
    if fits:
        kept = keys.expand(batch, -1).cpu().numpy()
        lengths = kept[:, start:stop].sum(axis=1, dtype=np.int32)
        expected = np.ones_like(kept)
        expected[:, start:stop] = np.arange(grid.text_tokens) < lengths[:, None]
        if np.array_equal(kept, expected):
            return None if kept.all() else lengths
    raise ValueError(
        f"self-attention was given a mask {mask.dtype} {list(mask.shape)} that is none of the "
        f"end of its text, which is all that can be masked on a grid of {grid}"
    )
