"""All heads as one module, so that one engine holds them.

Letters: T tokens of a micro batch, S supervised positions, D hidden size.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from hispec.attention import PackedAttention
from hispec.heads import Head, Reading


class Student(nn.Module):
    """The heads, and their forward pass over a micro batch."""

    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self, hidden: dict[int, Tensor], ids_T: Tensor, positions_T: Tensor, rows_S: Tensor, lengths: Sequence[int]
    ) -> list[Reading]:
        """What each head's logits at the positions `rows_S` are made of, from the hidden states [T, D] at the exits."""
        attend = PackedAttention(lengths)
        heads = [head for head in self.heads if isinstance(head, Head)]
        return [head(hidden[head.exit], ids_T, positions_T, rows_S, attend) for head in heads]
