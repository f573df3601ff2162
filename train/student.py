"""All heads as one module, so that one engine holds them.

Letters: T tokens of a micro batch, S supervised positions, D hidden size.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from hispec.attention import PackedAttention
from hispec.heads import Head


class Student(nn.Module):
    """The heads, and their forward pass over a micro batch."""

    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self, hidden: dict[int, Tensor], ids_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths: Sequence[int]
    ) -> list[Tensor]:
        """Features [S, D] of each head at the positions `rows_S`, from the hidden states [T, D] at the exits."""
        attend = PackedAttention(lengths)
        features = []
        for head in self.heads:
            assert isinstance(head, Head)
            hidden_TD = hidden[head.exit]
            if head.placed:
                features.append(head.features(hidden_TD, ids_T, positions_T, attend)[rows_S])
            else:
                features.append(head.features(hidden_TD[rows_S], ids_T, positions_T, attend))
        return features
