"""Muon for the matrices of the blocks, AdamW for everything else."""

import torch
from torch import Tensor

Params = dict[str, Tensor]

MUON_RATE = 0.02
ADAM_RATE = 2e-3
_MOMENTUM = 0.95
_DECAY = 0.01


class Optimizer:
    """Steps float32 weights from their `.grad`; its state can be saved and loaded."""

    def __init__(self, params: Params) -> None:
        """Takes the weights by name; those of blocks with two axes go to Muon."""
        self._matrices = {
            name: value
            for name, value in params.items()
            if name.startswith("blocks.") and value.ndim == 2
        }
        self._momenta = {name: torch.zeros_like(value) for name, value in self._matrices.items()}
        rest = [value for name, value in params.items() if name not in self._matrices]
        self._adam = torch.optim.AdamW(rest, betas=(0.9, 0.99), weight_decay=0.0)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step at `rate` times the full learning rates; clears the gradients."""
        for group in self._adam.param_groups:
            group["lr"] = ADAM_RATE * rate
        self._adam.step()
        self._adam.zero_grad()
        groups: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for name, value in self._matrices.items():
            gradient = value.grad
            if gradient is None:
                raise ValueError(f"{name} has no gradient")
            momentum = self._momenta[name].lerp_(gradient, 1 - _MOMENTUM)
            update = gradient.lerp(momentum, _MOMENTUM)
            wide = update if update.shape[0] <= update.shape[1] else update.T
            groups.setdefault(tuple(wide.shape), []).append((value, wide))
            value.grad = None
        for members in groups.values():
            updates = _orthogonal(torch.stack([wide for _, wide in members])).float()
            for (value, _), update in zip(members, updates, strict=True):
                upright = update if update.shape == value.shape else update.T
                scale = max(1.0, value.shape[0] / value.shape[1]) ** 0.5
                value.mul_(1 - _DECAY * MUON_RATE * rate)
                value.add_(upright, alpha=-MUON_RATE * rate * scale)

    def state_dict(self) -> dict:
        """What `load_state_dict` takes."""
        return {"momenta": self._momenta, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Continues from a saved state."""
        for name, value in state["momenta"].items():
            self._momenta[name].copy_(value)
        self._adam.load_state_dict(state["adam"])


def _orthogonal(matrices: Tensor) -> Tensor:
    """Pushes the singular values of [count, rows, columns] towards 1 (Newton-Schulz)."""
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x
