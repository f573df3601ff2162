"""What may stand where a trunk's unembedding matrix was, for a head that changes it.

Letters: S positions, R low rank, D hidden size, V vocabulary (or its reduced part).
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from hispec.errors import ConfigError


def low_rank(matrix: nn.Module, rank: int) -> Any:
    """peft's LoRA layer over `matrix`, which stays as it is and starts unchanged.

    Raises:
        ConfigError: peft is not installed.
    """
    try:
        from peft import LoraConfig
        from peft.tuners.lora.layer import Linear
    except ImportError:
        raise ConfigError("a head of kind lora needs peft; run: pip install 'hispec[lora]'") from None
    # alpha = rank: what the two matrices make is added as it is.
    return Linear(matrix, "default", LoraConfig(), r=rank, lora_alpha=rank)


class Handed(nn.Module):
    """Stands there in training, when the head's own tensors are handed in with each call.

    Attributes:
        low_SR, matrix: as in `heads.Reading`.
    """

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self._shared = [shared]  # in a list, so that the trunk's parameters do not become the head's
        self.low_SR: Tensor | None = None
        self.matrix: Tensor | None = None

    def forward(self, features_1SD: Tensor) -> Tensor:
        """Logits [1, S, V] before any scale or cap of the model."""
        shared: Any = self._shared[0]
        if self.matrix is None:
            logits_1SV: Tensor = shared(features_1SD)
        elif self.low_SR is None:
            logits_1SV = F.linear(features_1SD, self.matrix.to(features_1SD.dtype), shared.bias)
        else:
            added_SV = self.low_SR @ self.matrix
            logits_1SV = shared(features_1SD) + added_SV.to(features_1SD.dtype)
        return logits_1SV
