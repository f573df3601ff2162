"""One level of the hierarchy: its span of layers, its head, and one step over a ragged batch.

Letters: T packed tokens of all sequences, D hidden size, R rows whose logits are read, V vocabulary.
"""

from collections.abc import Sequence as Batch
from typing import NamedTuple

import torch
from torch import Tensor

from hispec.attention import Attend
from hispec.decode.blocks import blocks_for
from hispec.decode.feed import Part, select
from hispec.decode.runner import Runner
from hispec.decode.sequence import Sequence
from hispec.decode.stats import LevelStats
from hispec.decode.verify import Verdict
from hispec.heads import FullHead, Head
from hispec.trunk import Trunk


class Task(NamedTuple):
    """The tokens [start, stop) of a sequence, taking part in a step; and whether the level's logits are read.

    `drafts`: how many tokens the policy wants drafted behind them, if they are level 0's.
    """

    sequence: Sequence
    start: int
    stop: int
    read: bool
    drafts: int = 0

    def can_draft(self, n: int) -> bool:
        """Whether `n` drafts can follow in one go: greedily, within the text's limit and the blocks that are held."""
        s = self.sequence
        return (
            self.drafts == n
            and self.stop - self.start == 1
            and s.sampler.is_argmax
            and len(s.ids) - s.n_prompt + n <= s.params.max_new_tokens
            and blocks_for(self.stop + n) <= len(s.table)
        )


class Read(NamedTuple):
    """`n` rows of logits of a sequence, from position `first` on."""

    sequence: Sequence
    first: int
    n: int


class Judged(NamedTuple):
    """What a level, which is number `place` of the sequence's hierarchy, decided about the tokens after `first`."""

    sequence: Sequence
    place: int
    first: int
    verdict: Verdict


class Level:
    """Runs its span on every token that waits for it, then lets its head judge."""

    def __init__(self, index: int, trunk: Trunk, start: int, stop: int, head: Head | FullHead) -> None:
        self.index, self.trunk, self.head = index, trunk, head
        self.start, self.stop = start, stop
        # Rises with depth, and differs between all levels that one engine knows.
        self.number = (start << 24) + (stop << 8) + index
        self._span = trunk.span(start, stop)
        self.placed = self._span + head.placed

    @torch.inference_mode()
    def step(self, tasks: Batch[Task], runner: Runner, stats: LevelStats, sureness: bool = False) -> list[Judged]:
        """Pass these tokens through the level, each once, and judge what it reads.

        `sureness`: note what the head gives to the tokens it drafts.
        """
        hidden_TD, features_TD = runner.run(self, self._parts(tasks))
        # Rows to read: those that predict a token after the prompt.
        picked: list[int] = []
        reads: list[Read] = []
        offset = 0
        for sequence, start, stop, read, _ in tasks:
            sequence.passed(sequence.levels.index(self), stop, hidden_TD[offset : offset + stop - start])
            first = max(start, sequence.n_prompt - 1)
            if read and first < stop:
                reads.append(Read(sequence, first, stop - first))
                picked += range(offset + first - start, offset + stop - start)
            offset += stop - start
        stats.passes += 1
        stats.rows += offset
        if not reads:
            return []
        logits_RV = runner.logits(self, features_TD if len(picked) == offset else select(features_TD, picked))
        return self._judge(reads, logits_RV, stats, sureness)

    @torch.inference_mode()
    def draft(self, tasks: Batch[Task], n: int, runner: Runner, stats: LevelStats) -> bool:
        """What `n` greedy steps of level 0 and the pass of the last draft do, in one go; False: the runner cannot."""
        drafted = runner.draft(self, self._parts(tasks), n)
        if drafted is None:
            return False
        # The next graph to be played writes over these.
        hidden_BLD = drafted.hidden_LBD.transpose(0, 1).clone()
        picks = drafted.picks_LB.t().tolist()
        for (sequence, *_), own_LD, tokens in zip(tasks, hidden_BLD, picks, strict=False):
            n_passed = sequence.propose(tokens)
            sequence.passed(0, sequence.counts[0] + n_passed, own_LD[:n_passed])
            stats.rows += n_passed
            if -1 in tokens:
                self._fail(sequence, len(sequence.ids) - 1)
        stats.passes += n + 1
        return True

    def _parts(self, tasks: Batch[Task]) -> list[Part]:
        return [
            Part(s.ids[start:stop], start, s.table, s.waiting(at, stop - start) if at else None)
            for s, start, stop, *_ in tasks
            for at in [s.levels.index(self)]
        ]

    def forward(
        self, ids_T: Tensor, positions_T: Tensor, attend: Attend, hidden_TD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Hidden states [T, D] after the span, and the head's features [T, D]; a function of its tensors alone."""
        if not self.placed:
            assert hidden_TD is not None
            return hidden_TD, self.head.finish(hidden_TD, None)
        n = len(self._span)
        if n == len(self.placed):
            (hidden_TD,) = self.trunk.run_placed(ids_T, positions_T, self.placed, attend, hidden_TD)
            return hidden_TD, self.head.finish(hidden_TD, None)
        hidden_TD, block_TD = self.trunk.run_placed(ids_T, positions_T, self.placed, attend, hidden_TD, keep=(n - 1, n))
        return hidden_TD, self.head.finish(hidden_TD, block_TD)

    def argmax(self, logits_RV: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest tokens [R]; and the same, or -1 where the best logit is not a number."""
        best_R, picks_R = logits_RV.max(-1)
        if self.head.vocab_ids is not None:
            picks_R = self.head.vocab_ids[picks_R]
        return picks_R, torch.where(torch.isfinite(best_R), picks_R, -1)

    def _judge(self, reads: list[Read], logits_RV: Tensor, stats: LevelStats, sureness: bool) -> list[Judged]:
        vocab_ids = self.head.vocab_ids
        picks_R = logits_RV.argmax(-1)
        at = 0
        for sequence, first, n in reads:
            if sequence.sampler.picks_tokens and not sequence.sampler.is_argmax:
                picks_R[at : at + n] = sequence.sampler.picks(first, sequence.ids, logits_RV[at : at + n], vocab_ids)
            at += n
        columns_R = picks_R
        if vocab_ids is not None:
            picks_R = vocab_ids[picks_R]
        # The one wait for the device in a step: the picks, or -1 where the best logit is not a number.
        checked_R = torch.where(torch.isfinite(logits_RV.amax(-1)), picks_R, -1)
        picks, sure = checked_R.tolist(), []
        if sureness:
            sure = logits_RV.softmax(-1).gather(1, columns_R[:, None])[:, 0].tolist()
        judged: list[Judged] = []
        at = 0
        for sequence, first, n in reads:
            own, rows_RV = picks[at : at + n], logits_RV[at : at + n]
            at += n
            if -1 in own:
                self._fail(sequence, first + own.index(-1))
                continue
            place = sequence.levels.index(self)
            verdict = sequence.judge(place, first, own, rows_RV, vocab_ids)
            if not sequence.looked_up.tokens:
                stats.count(verdict.accepted, verdict.rejected)
            judged.append(Judged(sequence, place, first, verdict))
            if sureness and place == 0 and verdict.token is not None:
                sequence.sure[len(sequence.ids) - 1] = sure[at - 1]
        return judged

    def _fail(self, sequence: Sequence, position: int) -> None:
        sequence.finish_reason = "error"
        sequence.error = (
            f"logits after layer {self.stop} are not finite (request {sequence.index}, position {position});"
            " the model or its precision is at fault: try dtype=float32"
        )
