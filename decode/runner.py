"""How a level's pass is carried out: as it comes, in graphs, or with one fixed number of rows.

Letters: T packed tokens, R rows whose logits are read, D hidden size, V vocabulary.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from hispec import ranks
from hispec.decode.cache import KVCache
from hispec.decode.feed import Part, make_feed
from hispec.decode.graphs import MAX_ROWS, Graphs, StaticDraft, has_experts, say_once, why_not
from hispec.errors import ConfigError
from hispec.trunk import Trunk

if TYPE_CHECKING:
    from hispec.decode.level import Level

# Rows of every product in exact mode. On a large GPU that many cost hardly more than one: the weights are what is read.
EXACT_ROWS = {"cuda": 64, "cpu": 8}


class Runner(Protocol):
    """Carries out passes; every runner computes the same, up to rounding."""

    def run(self, level: "Level", parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D] after the level's span, and its head's features [T, D]; parts one after another."""
        ...

    def logits(self, level: "Level", features_RD: Tensor) -> Tensor:
        """The head's logits [R, V]."""
        ...

    def draft(self, level: "Level", parts: Sequence[Part], n: int) -> StaticDraft | None:
        """`n` greedy drafts of level 0 in one go; None: it has no such thing, draft them one by one."""
        ...


class Eager:
    """Runs what comes, as it comes."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    def run(self, level: "Level", parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """See `Runner`."""
        return level.forward(*make_feed(self.cache, parts))

    def logits(self, level: "Level", features_RD: Tensor) -> Tensor:
        """See `Runner`."""
        return level.head.logits(features_RD)

    def draft(self, level: "Level", parts: Sequence[Part], n: int) -> StaticDraft | None:
        """See `Runner`."""
        return None


class Graphed(Eager):
    """Plays short passes back as CUDA graphs; prompts run as they come."""

    def __init__(self, cache: KVCache, record: bool = True) -> None:
        super().__init__(cache)
        self.graphs = Graphs(cache, record)

    def run(self, level: "Level", parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """See `Runner`."""
        if max(len(part.ids) for part in parts) > MAX_ROWS:
            return super().run(level, parts)
        return self.graphs.pass_of(level, parts).result()

    def draft(self, level: "Level", parts: Sequence[Part], n: int) -> StaticDraft | None:
        """See `Runner`."""
        return self.graphs.draft_of(level, parts, n)


class Exact(Eager):
    """Gives every product the same number of rows, whatever is asked, and attends for every token by itself: then a
    token's numbers depend on the tokens before it alone, bit by bit, not on batch, drafts or policy."""

    def __init__(self, cache: KVCache, record: bool = False) -> None:
        super().__init__(cache)
        self.graphs = Graphs(cache, record)
        self.rows = EXACT_ROWS[cache.device.type]

    def run(self, level: "Level", parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """See `Runner`."""
        single = [
            Part([token], part.start + at, part.table, None if part.hidden_nD is None else part.hidden_nD[at : at + 1])
            for part in parts
            for at, token in enumerate(part.ids)
        ]
        results = [
            self.graphs.pass_of(level, single[at : at + self.rows], self.rows).result()
            for at in range(0, len(single), self.rows)
        ]
        hidden, features = zip(*results, strict=True)
        return torch.cat(hidden), torch.cat(features)

    def logits(self, level: "Level", features_RD: Tensor) -> Tensor:
        """See `Runner`."""
        pieces = []
        for piece_RD in torch.split(features_RD, self.rows):
            padded_RD = piece_RD.new_zeros(self.rows, piece_RD.shape[1])
            padded_RD[: len(piece_RD)] = piece_RD
            pieces.append(level.head.logits(padded_RD)[: len(piece_RD)])
        return torch.cat(pieces)


def make_runner(cache: KVCache, trunk: Trunk, *, graphs: bool = True, exact: bool = False) -> Runner:
    """The runner for a device and a model: graphs where they are wanted, on a GPU, and possible.

    Raises:
        ConfigError: exact, for a model whose products have as many rows as a router sends them.
    """
    config = trunk.model.config.to_dict()
    if exact and has_experts(config):
        raise ConfigError(
            f"exact: not possible for {trunk.name!r}, the batch decides how many rows an expert gets; use exact=false"
        )
    record = graphs and cache.device.type == "cuda"
    if cache.device.type == "cuda":
        torch.cuda.set_device(cache.device)  # Triton launches on the current one
        if not cache.kernels:
            say_once("triton is not installed: attention runs sequence by sequence, without CUDA graphs, and is slow")
            record = False
    if record and ranks.joined():
        say_once("no CUDA graphs where several ranks share the layers: not tried yet")
        record = False
    if record and (reason := why_not(config)) is not None:
        say_once(f"no CUDA graphs for {trunk.name!r}: {reason}; passes are launched one kernel at a time")
        record = False
    if exact:
        return Exact(cache, record)
    return Graphed(cache) if record else Eager(cache)
