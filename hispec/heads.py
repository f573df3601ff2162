"""Heads: what is trained at an exit. `logits = unembed(norm(h + f(h)))`, and before training f is zero, so that every
head starts as the logit lens (the trunk cut off at its exit).

Letters: T packed tokens, D hidden size, V vocabulary (or its reduced part).
"""

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hispec.adapted import Handed, low_rank
from hispec.attention import Attend
from hispec.config import HeadConfig
from hispec.errors import ConfigError
from hispec.linear import prepack, unpack
from hispec.ranks import whole
from hispec.trunk import KVShape, Placed, Trunk
from hispec.unembedding import Unembedding


class Reading(NamedTuple):
    """What a head in training hands over to its logits; everything with a gradient is in it.

    low_SR, matrix: of a lora head, the features in its low rank, and the matrix [R, V] that takes them back; of a
    copied unembedding, the matrix [V, D].
    """

    features_SD: Tensor
    low_SR: Tensor | None = None
    matrix: Tensor | None = None

    def rows(self, start: int, stop: int) -> "Reading":
        """Some of the positions."""
        low_SR = None if self.low_SR is None else self.low_SR[start:stop]
        return Reading(self.features_SD[start:stop], low_SR, self.matrix)


class Head(nn.Module):
    """Reads logits from the hidden state at one exit.

    Its unembedding is the trunk's own: shared, frozen, never stored. What a head adds to it (kind lora), or a copy that
    it trains (unembedding=copied), is its own.

    Attributes:
        exit: number of trunk layers run before it.
        vocab_ids: [v] the token ids its logits stand for, or None for the whole vocabulary.
        kv: the (layer number, shape) of its own attention, for kinds that have one; numbered behind the trunk's layers.
    """

    vocab_ids: Tensor | None
    place: int

    def __init__(
        self, trunk: Trunk, exit_: int, config: HeadConfig, slot: int, vocab_ids: Tensor | None = None
    ) -> None:
        """`slot`: place of the head among its siblings, by which its KV is numbered."""
        super().__init__()
        self.exit, self.config = exit_, config
        self.norm = copy.deepcopy(trunk.final_norm)
        self.kv: tuple[int, KVShape] | None = None
        self._trunk = [trunk]  # in a list, so that the trunk's parameters do not become the head's
        if (config.vocab_size is not None) != (vocab_ids is not None):
            raise ConfigError("head.vocab_size: a reduced vocabulary needs the list of its token ids, and only then")
        self.register_buffer("vocab_ids", vocab_ids)
        shared = trunk.unembed if vocab_ids is None else Unembedding(trunk.model, vocab_ids)
        self._shared = self._unembed = [shared]
        handed = Handed(shared.matrix)
        self._in_training = (handed, shared.replaced(handed))  # in a tuple, so that neither becomes a part of the head
        if config.kind == "mlp":
            self.mlp = ResidualMLP(trunk.hidden_size, round(config.width * trunk.hidden_size))
        elif config.kind == "block":
            self._add_block(trunk, exit_, slot)
        elif config.kind == "lora":
            layer = low_rank(shared.matrix, config.rank)
            self.down, self.up = layer.lora_A["default"], layer.lora_B["default"]
            self._unembed = [shared.replaced(layer)]
        if config.unembedding == "copied":
            # A parameter of the head itself: under ZeRO-3 it is whole while `forward` runs, and only then.
            self.matrix = nn.Parameter(whole(shared.matrix.weight.detach()).clone())
        self.to(device=trunk.device, dtype=trunk.dtype)
        if config.unembedding == "copied":
            copied = copy.copy(shared.matrix)
            copied._parameters = copied._parameters | {"weight": self.matrix}
            unpack([copied])
            prepack([copied])
            self._unembed = [shared.replaced(copied)]
        if self.norm is not None:
            self.norm.requires_grad_(True)
        self.eval()

    def _add_block(self, trunk: Trunk, exit_: int, slot: int) -> None:
        self.place = min(exit_, trunk.n_layers - 1)
        block, shape = trunk.copy_layer(self.place)
        self.block = block.requires_grad_(True)
        unpack(self.block.modules())  # these weights are to change
        attention: Any = next(m for m in self.block.modules() if hasattr(m, "layer_idx"))
        attention.layer_idx = trunk.n_layers + slot
        self.kv = (trunk.n_layers + slot, shape)
        # Reads the block's whole output, not what it adds: so it can also take back the exit's own state, which at a
        # shallow exit is mostly a few large constant directions that mean nothing to the unembedding.
        self.out = nn.Linear(trunk.hidden_size, trunk.hidden_size)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    @property
    def trunk(self) -> Trunk:
        return self._trunk[0]

    @property
    def unembed(self) -> Unembedding:
        """What the head's logits come from."""
        return self._unembed[0]

    @property
    def shared(self) -> Unembedding:
        """The trunk's own unembedding, over the head's vocabulary: by it the full model is compared."""
        return self._shared[0]

    def forward(self, hidden_TD: Tensor, ids_T: Tensor, positions_T: Tensor, rows_S: Tensor, attend: Attend) -> Reading:
        """For training: what the logits at the positions `rows_S` are made of."""
        if self.placed:
            features_SD = self.features(hidden_TD, ids_T, positions_T, attend)[rows_S]
        else:
            features_SD = self.features(hidden_TD[rows_S], ids_T, positions_T, attend)
        if self.config.kind == "lora":
            # The matrix is the module's answer to the identity: so it is called, as ZeRO-3 wants it, and just once.
            return Reading(features_SD, self.down(features_SD), self.up(torch.eye(self.config.rank).to(features_SD)))
        return Reading(features_SD, None, self.matrix.clone() if self.config.unembedding == "copied" else None)

    def read(self, reading: Reading) -> Tensor:
        """For training: logits [S, V] of what `forward` handed over, without touching the head's own modules."""
        handed, unembed = self._in_training
        handed.low_SR, handed.matrix = reading.low_SR, reading.matrix
        logits_SV = unembed(reading.features_SD.to(self.trunk.dtype))
        handed.low_SR = handed.matrix = None
        return logits_SV

    def train(self, mode: bool = True) -> Self:
        """Stay in eval mode: a copied block may carry dropout, and decoding has none."""
        return super().train(False)

    @property
    def placed(self) -> tuple[Placed, ...]:
        """The head's own block, standing at the trunk layer it was copied from; empty for kinds without one."""
        return ((self.place, self.block),) if self.kv is not None else ()

    def features(self, hidden_TD: Tensor, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """What the logits are read from, [T, D]. Kinds with attention write their keys and values through `attend`."""
        if not self.placed:
            return self.finish(hidden_TD, None)
        return self.finish(hidden_TD, self.trunk.run_placed(ids_T, positions_T, self.placed, attend, hidden_TD)[0])

    def finish(self, hidden_TD: Tensor, block_TD: Tensor | None) -> Tensor:
        """`features` for callers that have already run the head's block."""
        if block_TD is not None:
            hidden_TD = hidden_TD + self.out(block_TD)
        elif self.config.kind == "mlp":
            hidden_TD = hidden_TD + self.mlp(hidden_TD)
        return self.trunk.project(hidden_TD if self.norm is None else self.norm(hidden_TD))

    def logits(self, features_TD: Tensor) -> Tensor:
        """Logits [T, V], over `vocab_ids` where the vocabulary is reduced."""
        return self.unembed(features_TD)


class FullHead:
    """The trunk's own end, spoken to as a head: what the last level reads its logits from."""

    vocab_ids: Tensor | None = None
    kv: tuple[int, KVShape] | None = None
    placed: tuple[Placed, ...] = ()

    def __init__(self, trunk: Trunk) -> None:
        self.trunk, self.exit = trunk, trunk.n_layers

    @property
    def unembed(self) -> Unembedding:
        return self.trunk.unembed

    def finish(self, hidden_TD: Tensor, block_TD: Tensor | None) -> Tensor:
        """Features [T, D] of hidden states after the last layer."""
        return self.trunk.features(hidden_TD)

    def features(self, hidden_TD: Tensor, ids_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """As `Head.features`."""
        return self.finish(hidden_TD, None)

    def logits(self, features_TD: Tensor) -> Tensor:
        """Logits [T, V]."""
        return self.unembed(features_TD)


class ResidualMLP(nn.Module):
    """Gated MLP on a normalised hidden state, D -> width -> D; its last matrix starts at zero."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(hidden_size)
        self.gate_up = nn.Linear(hidden_size, 2 * width, bias=False)
        self.down = nn.Linear(width, hidden_size, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(self, hidden_TD: Tensor) -> Tensor:
        """What is added to the hidden state, [T, D]."""
        gate, up = self.gate_up(self.norm(hidden_TD)).chunk(2, dim=-1)
        out: Tensor = self.down(F.silu(gate) * up)
        return out


def make_heads(
    trunk: Trunk, exits: Sequence[int], configs: Sequence[HeadConfig], vocab_ids: Sequence[Tensor | None] | None = None
) -> nn.ModuleList:
    """One head per exit, each starting as the logit lens."""
    ids = vocab_ids or [None] * len(exits)
    return nn.ModuleList(
        Head(trunk, exit_, config, slot, own)
        for slot, (exit_, config, own) in enumerate(zip(exits, configs, ids, strict=True))
    )
