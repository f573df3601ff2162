"""One level of the hierarchy: its span of layers, its head, and one step over a ragged batch.

Letters: T packed tokens of all sequences, D hidden size, R rows whose logits are read, V vocabulary.
"""

from collections.abc import Sequence as Batch
from typing import NamedTuple

import torch
from torch import Tensor

from hispec.decode.cache import KVCache, PagedAttention, Rows
from hispec.decode.sequence import Sequence
from hispec.decode.stats import LevelStats
from hispec.heads import FullHead, Head
from hispec.trunk import Trunk


class Task(NamedTuple):
    """The tokens [start, stop) of a sequence, taking part in a step; and whether the level's logits are read."""

    sequence: Sequence
    start: int
    stop: int
    read: bool


class Read(NamedTuple):
    """`n` rows of logits of a sequence, from position `first` on."""

    sequence: Sequence
    first: int
    n: int


class Level:
    """Runs its span on every token that waits for it, then lets its head judge."""

    def __init__(self, index: int, trunk: Trunk, start: int, stop: int, head: Head | FullHead) -> None:
        self.index, self.trunk, self.head = index, trunk, head
        self.start, self.stop = start, stop
        self._span = trunk.span(start, stop)
        self._placed = self._span + head.placed

    @torch.inference_mode()
    def step(self, tasks: Batch[Task], cache: KVCache, stats: LevelStats) -> None:
        """Pass these tokens through the level, each once, and judge what it reads."""
        hidden_TD, features_TD = self._run(tasks, cache)
        # Rows to read: those that predict a token after the prompt.
        picked: list[int] = []
        reads: list[Read] = []
        offset = 0
        for sequence, start, stop, read in tasks:
            sequence.passed(self.index, stop, hidden_TD[offset : offset + stop - start])
            first = max(start, sequence.n_prompt - 1)
            if read and first < stop:
                reads.append(Read(sequence, first, stop - first))
                picked += range(offset + first - start, offset + stop - start)
            offset += stop - start
        stats.passes += 1
        stats.rows += offset
        if not reads:
            return
        logits_RV = self.head.logits(features_TD if len(picked) == offset else features_TD[picked])
        self._judge(reads, logits_RV, stats)

    def _run(self, tasks: Batch[Task], cache: KVCache) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D] after the span, and the head's features [T, D]."""
        device = self.trunk.device
        ids_T = torch.tensor([token for s, a, b, _ in tasks for token in s.ids[a:b]], device=device)
        positions_T = torch.tensor([p for _, a, b, _ in tasks for p in range(a, b)], device=device)
        hidden_TD = None
        if self.index > 0:
            waiting = [s.waiting(self.index, b - a) for s, a, b, _ in tasks]
            hidden_TD = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        if not self._placed:
            assert hidden_TD is not None
            return hidden_TD, self.head.finish(hidden_TD, None)
        attend = PagedAttention(cache, [Rows(s.table, a, b) for s, a, b, _ in tasks])
        n = len(self._span)
        if n == len(self._placed):
            (hidden_TD,) = self.trunk.run_placed(ids_T, positions_T, self._placed, attend, hidden_TD)
            return hidden_TD, self.head.finish(hidden_TD, None)
        hidden_TD, block_TD = self.trunk.run_placed(
            ids_T, positions_T, self._placed, attend, hidden_TD, keep=(n - 1, n)
        )
        return hidden_TD, self.head.finish(hidden_TD, block_TD)

    def _judge(self, reads: list[Read], logits_RV: Tensor, stats: LevelStats) -> None:
        vocab_ids = self.head.vocab_ids
        picks_R = logits_RV.argmax(-1)
        at = 0
        for sequence, first, n in reads:
            if sequence.sampler.picks_tokens and not sequence.sampler.is_argmax:
                picks_R[at : at + n] = sequence.sampler.picks(first, sequence.ids, logits_RV[at : at + n], vocab_ids)
            at += n
        if vocab_ids is not None:
            picks_R = vocab_ids[picks_R]
        # The one wait for the device in a step: the picks, or -1 where the best logit is not a number.
        picks = torch.where(torch.isfinite(logits_RV.amax(-1)), picks_R, -1).tolist()
        at = 0
        for sequence, first, n in reads:
            own, rows_RV = picks[at : at + n], logits_RV[at : at + n]
            at += n
            if -1 in own:
                sequence.finish_reason = "error"
                sequence.error = (
                    f"logits after layer {self.stop} are not finite (request {sequence.index}, position"
                    f" {first + own.index(-1)}); the model or its precision is at fault: try dtype=float32"
                )
                continue
            verdict = sequence.judge(self.index, first, own, rows_RV, vocab_ids)
            stats.accepted += verdict.accepted
            stats.rejected += verdict.rejected
