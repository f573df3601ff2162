"""Muon for matrices, AdamW for everything else, as one optimizer."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# What each of the two keeps of a parameter.
ADAMW, MUON = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)


def takes(name: str, parameter: Tensor) -> bool:
    """Whether Muon is for this parameter: a matrix between hidden states, not one that stands for tokens."""
    return parameter.dim() == 2 and not name.endswith((".matrix", ".up.weight"))


class Muon(torch.optim.Optimizer):
    """torch's Muon and AdamW over disjoint parameters, with the learning rate of AdamW for both."""

    def __init__(
        self, parameters: Mapping[str, Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        matrices = [p for name, p in parameters.items() if takes(name, p)]
        rest = [p for name, p in parameters.items() if not takes(name, p)]
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            # Updates as large as AdamW's, so that one learning rate serves both.
            same = "match_rms_adamw"
            self._parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn=same))
        if rest:
            self._parts.append(torch.optim.AdamW(rest, lr=lr, betas=betas, weight_decay=weight_decay))
        super().__init__([{"params": list(parameters.values())}], {"lr": lr})
        self.param_groups = [group for part in self._parts for group in part.param_groups]
        for part in self._parts:
            part.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters."""
        assert closure is None
        for part in self._parts:
            part.step()
