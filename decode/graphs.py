"""Passes of fixed shape: the same tensors every time, so that a CUDA graph can play them back without the host.

A decoding step of a small model is over before Python has launched its kernels. A graph is recorded once for every
level, number of sequences (a power of two), rows per sequence and width of the block table, and from then on a pass is
one copy of its inputs and one launch. The steps themselves are plain functions of their buffers and run anywhere:

    3 sequences of 2, 1 and 3 tokens in a step of 4 x 3      t t . | t . . | t t t | . . .      . padding, position -1

Padding writes its keys and values to the pool's trash slot and sees nothing.

Letters: B sequences, R rows per sequence, T = B * R, D hidden size, V vocabulary, N blocks of a table.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hispec.decode.cache import KVCache
from hispec.decode.feed import Index, Part, attention_over, bucket_of_blocks, layout, restage
from hispec.errors import first_line

if TYPE_CHECKING:
    from hispec.decode.level import Level

log = logging.getLogger("hispec")

# More rows than this per sequence is a prompt, and prompts run as they come: they are long enough to hide the host.
MAX_ROWS = 16
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts"}


class StaticPass:
    """One level's pass over `batch` sequences of `rows` tokens each, in buffers that stay where they are.

    Attributes:
        hidden_TD, features_TD: what the last `run` gave, padding included.
    """

    hidden_TD: Tensor
    features_TD: Tensor

    def __init__(self, level: "Level", cache: KVCache, batch: int, rows: int, n_blocks: int) -> None:
        """`n_blocks`: width of the block tables; no sequence may be longer."""
        self.level, self.cache, self.batch, self.rows, self.n_blocks = level, cache, batch, rows, n_blocks
        device, n_tokens = cache.device, batch * rows
        self._buffer, (self.ids_T, self.positions_T, tables, self._real_T) = layout(
            [n_tokens, n_tokens, batch * n_blocks, n_tokens], device
        )
        every_B1 = torch.arange(batch + 1, dtype=torch.int32, device=device)
        self._index = Index(
            self.positions_T,
            every_B1[:batch].repeat_interleave(rows),
            every_B1 * rows,
            tables.view(batch, n_blocks),
            ((every_B1[:batch].clone(), rows),),
        )
        self.entry_TD: Tensor | None = None
        if level.start > 0:
            hidden_size, dtype = level.trunk.hidden_size, level.trunk.dtype
            self.entry_TD = torch.zeros(n_tokens, hidden_size, dtype=dtype, device=device)
            self._pad_TD = torch.zeros_like(self.entry_TD)
        self.replay: Callable[[], None] = self.run

    def fill(self, parts: Sequence[Part]) -> None:
        """Put a pass into the buffers: at most `batch` parts of at most `rows` tokens."""
        ids: list[int] = []
        positions: list[int] = []
        tables: list[int] = []
        real: list[int] = []
        entries: list[Tensor] = []
        for number in range(self.batch):
            part = parts[number] if number < len(parts) else Part([], 0, [])
            n = len(part.ids)
            real += range(len(ids), len(ids) + n)
            ids += part.ids + [0] * (self.rows - n)
            positions += [*range(part.start, part.start + n), *[-1] * (self.rows - n)]
            tables += part.table[: self.n_blocks] + [0] * (self.n_blocks - len(part.table))
            if self.entry_TD is not None:
                if part.hidden_nD is not None:
                    entries.append(part.hidden_nD)
                entries.append(self._pad_TD[: self.rows - n])
        self._n_real = len(real)
        restage(self._buffer, [ids, positions, tables, real + [0] * (len(ids) - len(real))])
        if self.entry_TD is not None:
            torch.cat(entries, out=self.entry_TD)

    def run(self) -> None:
        """The pass itself: a function of the buffers alone, without a look from the host (on a GPU)."""
        self.hidden_TD, self.features_TD = self._forward(self.ids_T, self._index)

    def result(self) -> tuple[Tensor, Tensor]:
        """Hidden states and features [n, D] of the real tokens, copied out of the buffers."""
        real_n = self._real_T[: self._n_real]
        return self.hidden_TD.index_select(0, real_n), self.features_TD.index_select(0, real_n)

    def _forward(self, ids_T: Tensor, index: Index) -> tuple[Tensor, Tensor]:
        positions_T = index.positions_T.clamp_min(0).long()
        return self.level.forward(ids_T.long(), positions_T, attention_over(self.cache, index), self.entry_TD)


class StaticDraft(StaticPass):
    """The draft loop: level 0 proposes `n_drafts` tokens per sequence, each fed back where it is, without the host.

    The last draft is passed through the level too, so that the level above can add a token of its own.

    Attributes:
        hidden_LBD: states after each of the n_drafts + 1 passes.
        picks_LB: the drafts; -1 where no logit was a number.
    """

    hidden_LBD: Tensor
    picks_LB: Tensor

    def __init__(self, level: "Level", cache: KVCache, batch: int, n_drafts: int, n_blocks: int) -> None:
        super().__init__(level, cache, batch, 1, n_blocks)
        self.n_drafts = n_drafts

    def run(self) -> None:
        """See `StaticPass.run`."""
        ids_B, index = self.ids_T, self._index
        hidden: list[Tensor] = []
        picks: list[Tensor] = []
        for number in range(self.n_drafts + 1):
            hidden_BD, features_BD = self._forward(ids_B, index)
            hidden.append(hidden_BD)
            if number == self.n_drafts:
                break
            ids_B, checked_B = self.level.argmax(self.level.head.logits(features_BD))
            picks.append(checked_B)
            positions_B = index.positions_T
            index = index._replace(positions_T=torch.where(positions_B >= 0, positions_B + 1, positions_B))
        self.hidden_LBD, self.picks_LB = torch.stack(hidden), torch.stack(picks)


class Graphs:
    """Static passes made as they are needed, recorded where that is possible."""

    def __init__(self, cache: KVCache, record: bool) -> None:
        """`record`: play them back as CUDA graphs; else they run as written, which is what tests do on a CPU."""
        self.cache, self.record = cache, record
        self._steps: dict[tuple[int, ...], Any] = {}
        self._pool: Any = None

    def pass_of(self, level: "Level", parts: Sequence[Part], batch: int | None = None) -> StaticPass:
        """Run `parts` through the level; `batch` fixes the number of sequences, which else is the next power of two."""
        rows = max(len(part.ids) for part in parts)
        key = (level.number, batch or bucket(len(parts)), rows, bucket_of_blocks(parts), 0)
        step: StaticPass = self._play(key, parts, lambda: StaticPass(level, self.cache, *key[1:4]))
        return step

    def draft_of(self, level: "Level", parts: Sequence[Part], n_drafts: int) -> StaticDraft:
        """Draft `n_drafts` tokens behind each of `parts`, which have one token each."""
        ends = [part._replace(start=part.start + n_drafts) for part in parts]
        key = (level.number, bucket(len(parts)), n_drafts, bucket_of_blocks(ends), 1)
        step: StaticDraft = self._play(key, parts, lambda: StaticDraft(level, self.cache, *key[1:4]))
        return step

    def _play(self, key: tuple[int, ...], parts: Sequence[Part], make: Callable[[], StaticPass]) -> Any:
        step = self._steps.get(key)
        new = step is None
        if step is None:
            step = self._steps[key] = make()
        step.fill(parts)
        if new and self.record:
            try:
                step.replay = self._recorded(step)
            except RuntimeError as error:
                say_once(f"no CUDA graphs: a pass of this model cannot be recorded ({first_line(error)})")
                self.record = False
        step.replay()
        return step

    def _recorded(self, step: StaticPass) -> Callable[[], None]:
        """Record `step`, whose buffers hold a real pass: running it more than once writes the same keys again."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        # First runs compile kernels, size workspaces and pick algorithms: none of that may happen in a recording.
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                step.run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            step.run()
        return graph.replay


def bucket(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


@lru_cache
def say_once(message: str) -> None:
    """Warn, but not again with the same words."""
    log.warning(message)


def why_not(config: dict[str, Any]) -> str | None:
    """Why passes of this model cannot be recorded, or None."""
    if moving := {"dynamic", "longrope"} & {str(v) for key, v in _flattened(config) if key in ("rope_type", "type")}:
        return f"rope of type {moving.pop()!r} changes with the length of the text"
    return "which experts run is decided on the host" if has_experts(config) else None


def has_experts(config: dict[str, Any]) -> bool:
    """Whether a router sends tokens to different weights."""
    return any(value for key, value in _flattened(config) if key in EXPERTS)


def _flattened(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield from _flattened(value) if isinstance(value, dict) else [(key, value)]
