"""One level of the hierarchy: its span of layers, its head, and one step over a ragged batch.

Letters: T packed tokens of all sequences, D hidden size, R rows whose logits are read, V vocabulary.
"""

from collections.abc import Sequence as Batch
from dataclasses import dataclass

import torch
from torch import Tensor

from hispec.decode.cache import KVCache, PagedAttention, Rows
from hispec.decode.sequence import Sequence
from hispec.decode.stats import LevelStats
from hispec.errors import DivergedError
from hispec.heads import FullHead, Head
from hispec.trunk import Trunk


@dataclass(frozen=True)
class Task:
    """A sequence taking part in a step, and whether the level's logits are read for it."""

    sequence: Sequence
    read: bool


class Level:
    """Runs its span on every token that waits for it, then lets its head judge."""

    def __init__(self, index: int, trunk: Trunk, start: int, stop: int, head: Head | FullHead) -> None:
        self.index, self.trunk, self.head = index, trunk, head
        self.start, self.stop = start, stop
        self._span = trunk.span(start, stop)
        self._placed = self._span + head.placed

    @torch.inference_mode()
    def step(self, tasks: Batch[Task], cache: KVCache, stats: LevelStats) -> None:
        """Pass all pending tokens of these sequences through the level, each once, and judge what it reads."""
        bounds = [task.sequence.pending(self.index) for task in tasks]
        hidden_TD, features_TD = self._run(tasks, bounds, cache)
        # Rows to read: those that predict a token after the prompt.
        picked: list[int] = []
        firsts: list[tuple[Sequence, int, int]] = []
        offset = 0
        for task, (start, stop) in zip(tasks, bounds, strict=True):
            sequence = task.sequence
            sequence.passed(self.index, stop, hidden_TD[offset : offset + stop - start])
            first = max(start, sequence.n_prompt - 1)
            if task.read and first < stop:
                firsts.append((sequence, first, stop - first))
                picked += range(offset + first - start, offset + stop - start)
            offset += stop - start
        stats.passes += 1
        stats.rows += offset
        if not firsts:
            return
        logits_RV = self.head.logits(features_TD if len(picked) == offset else features_TD[picked])
        self._judge(firsts, logits_RV, stats)

    def _run(self, tasks: Batch[Task], bounds: list[tuple[int, int]], cache: KVCache) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D] after the span, and the head's features [T, D]."""
        device = self.trunk.device
        ids_T = torch.tensor(
            [token for t, (a, b) in zip(tasks, bounds, strict=True) for token in t.sequence.ids[a:b]], device=device
        )
        positions_T = torch.tensor([p for a, b in bounds for p in range(a, b)], device=device)
        hidden_TD = None
        if self.index > 0:
            waiting = [task.sequence.waiting(self.index) for task in tasks]
            hidden_TD = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        if not self._placed:
            assert hidden_TD is not None
            return hidden_TD, self.head.finish(hidden_TD, None)
        rows = [Rows(task.sequence.table, a, b) for task, (a, b) in zip(tasks, bounds, strict=True)]
        attend = PagedAttention(cache, rows)
        n = len(self._span)
        if n == len(self._placed):
            (hidden_TD,) = self.trunk.run_placed(ids_T, positions_T, self._placed, attend, hidden_TD)
            return hidden_TD, self.head.finish(hidden_TD, None)
        hidden_TD, block_TD = self.trunk.run_placed(
            ids_T, positions_T, self._placed, attend, hidden_TD, keep=(n - 1, n)
        )
        return hidden_TD, self.head.finish(hidden_TD, block_TD)

    def _judge(self, firsts: list[tuple[Sequence, int, int]], logits_RV: Tensor, stats: LevelStats) -> None:
        picks_R = logits_RV.argmax(-1)
        if self.head.vocab_ids is not None:
            picks_R = self.head.vocab_ids[picks_R]
        # The one wait for the device in a step: the picks, and whether every row's best logit is a number.
        best_R = logits_RV.amax(-1)
        picks = picks_R.tolist()
        finite = torch.isfinite(best_R).tolist()
        at = 0
        for sequence, first, n in firsts:
            if not all(finite[at : at + n]):
                raise DivergedError(
                    f"logits after layer {self.stop} are not finite (request {sequence.index}, position {first});"
                    " the model or its precision is at fault: try dtype=float32"
                )
            logits = None if sequence.params.greedy else logits_RV[at : at + n]
            verdict = sequence.judge(self.index, first, picks[at : at + n], logits, self.head.vocab_ids)
            stats.accepted += verdict.accepted
            stats.rejected += verdict.rejected
            at += n
