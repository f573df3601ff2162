"""The running mean of what heads were: less noisy than what they are, and exported in their place when it is kept."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


class Ema:
    """Means of some tensors, each of which is updated in place elsewhere; under ZeRO-3 of this rank's parts."""

    def __init__(self, tensors: Mapping[str, Tensor], decay: float, steps: int = 0) -> None:
        """`steps`: how many updates are behind."""
        self.tensors, self.decay, self.steps = tensors, decay, steps
        self.means = {name: tensor.detach().float().clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take in what the tensors are now."""
        self.steps += 1
        # Young means forget fast, or a short run would export little but its beginning.
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, mean in self.means.items():
            mean.lerp_(self.tensors[name].float(), 1.0 - decay)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """While entered, the tensors hold their means."""
        kept = {name: tensor.detach().clone() for name, tensor in self.tensors.items()}
        self._put(self.means)
        try:
            yield
        finally:
            self._put(kept)

    @torch.no_grad()
    def _put(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(values[name])
