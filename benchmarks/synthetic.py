"""Forced acceptance: what the speed would be if heads were accepted so often. For sizing only.

The levels run all their layers and heads, then a die decides how many drafts stand, whatever the logits say: what comes
out is no model's text. Only benchmarks/gpu.py uses this; nothing in the package knows of it.
"""

import random
from collections.abc import Sequence

from torch import Tensor

from hispec.decode.level import Judged, Level, Read
from hispec.decode.stats import LevelStats


class SyntheticLevel(Level):
    """A level that lets each draft stand with a given probability, and replaces the first that does not."""

    acceptance = 1.0
    dice = random.Random(0)

    def _judge(self, reads: list[Read], logits_RV: Tensor, stats: LevelStats, sureness: bool) -> list[Judged]:
        picks = self.argmax(logits_RV)[1].tolist()  # the cost of a real verdict
        judged = []
        at = 0
        for sequence, first, n in reads:
            own = picks[at : at + n]
            proposed = sequence.ids[first + 1 : first + 1 + n]
            forced = [
                token if self.dice.random() < self.acceptance else (token + 1) % logits_RV.shape[-1]
                for token in proposed
            ] + own[len(proposed) :]
            place = sequence.levels.index(self)
            verdict = sequence.judge(place, first, forced, logits_RV[at : at + n], None)
            stats.count(verdict.accepted, verdict.rejected)
            judged.append(Judged(sequence, place, first, verdict))
            at += n
        return judged


def force(levels: Sequence[Level], acceptance: Sequence[float]) -> list[Level]:
    """The same levels, those above the first accepting with these probabilities."""
    forced: list[Level] = [levels[0]]
    for level, share in zip(levels[1:], acceptance, strict=True):
        own = SyntheticLevel(level.index, level.trunk, level.start, level.stop, level.head)
        own.acceptance, own.dice = share, random.Random(level.index)
        forced.append(own)
    return forced


def parse(text: str) -> list[float]:
    """`synthetic:0.8,0.9`: acceptance of level 1 and of level 2."""
    kind, _, numbers = text.partition(":")
    shares = [float(number) for number in numbers.split(",") if number]
    if kind != "synthetic" or len(shares) != 2 or not all(0.0 <= share <= 1.0 for share in shares):
        raise ValueError(
            f"acceptance={text!r}: write synthetic:A,B, the shares that levels 1 and 2 let stand, each 0..1"
        )
    return shares
