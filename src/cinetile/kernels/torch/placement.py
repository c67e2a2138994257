"""Heads of a group in an engine's order of tokens, and their rows back in frame-major order."""

import numpy as np
import torch
from jaxtyping import Int


def place(
    tensor: torch.Tensor,
    order: Int[np.ndarray, " tokens"],
    rows: Int[np.ndarray, " group"],
    heads: Int[np.ndarray, " group"],
) -> torch.Tensor:
    """Takes the heads of a group and puts their tokens in order, `[tokens, group, head_dim]`.

    One gather, or a view where the tokens stay and the heads lie side by side in one batch row.

    Args:
        tensor: `[batch, tokens, heads, head_dim]`.
        order: frame-major position of the token at each place.
        rows: batch row of each head.
        heads: index of each head.
    """
    if is_in_place(order) and _side_by_side(rows, heads):
        return tensor[rows[0], :, heads[0] : heads[-1] + 1]
    at = torch.tensor(order.astype(np.int64)).to(tensor.device)
    row, head = (torch.tensor(index).to(tensor.device) for index in (rows, heads))
    return tensor[row[None, :], at[:, None], head[None, :]]


def is_in_place(order: Int[np.ndarray, " tokens"]) -> bool:
    """Whether an order leaves every token where it is."""
    return bool((order == np.arange(len(order))).all())


def _side_by_side(rows: Int[np.ndarray, " group"], heads: Int[np.ndarray, " group"]) -> bool:
    return bool((rows == rows[0]).all() and (np.diff(heads) == 1).all())


class Scatter:
    """Writes placed rows of a group to where they belong.

    Attributes:
        order: frame-major position of the token at each place, on the device.
    """

    def __init__(
        self,
        order: Int[np.ndarray, " tokens"],
        rows: Int[np.ndarray, " group"],
        heads: Int[np.ndarray, " group"],
        device: torch.device,
    ) -> None:
        self._direct = (rows[0], heads[0], heads[-1] + 1) if _side_by_side(rows, heads) else None
        self._in_place = is_in_place(order)
        self.order = torch.tensor(order.astype(np.int64)).to(device)
        self._row, self._head = (torch.tensor(index).to(device) for index in (rows, heads))

    def __call__(self, target: torch.Tensor, start: int, placed: torch.Tensor) -> None:
        """Writes rows from `start` on.

        Args:
            target: `[batch, tokens, heads, ...]`.
            start: place of the first row.
            placed: `[places, group, ...]` of any floating dtype.
        """
        stop = start + placed.shape[0]
        if self._direct and self._in_place:
            row, first, end = self._direct
            target[row, start:stop, first:end] = placed
        else:
            at = self.order[start:stop, None]
            target[self._row[None, :], at, self._head[None, :]] = placed.to(target.dtype)
