"""What a hierarchy would do on a known text: the decoder's counters, driven without a model.

    text       t0 t1 t2 t3 t4 t5 ...        what the full model answers
    picks[k]    . p1 p2 p3 p4 p5 ...        what level k would say in each place, given the text before it

From these alone follows how many full passes the text costs under a policy, which is compared with a real decode.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hispec.decode.policy import Policy

# What any level says after a wrong token. The full model throws it away at the latest, so its value does not matter.
GARBAGE = -1


class Simulated(NamedTuple):
    """Tokens after the first (which the prompt's own pass gives), and the full passes they took."""

    tokens: int
    full_passes: int

    @property
    def tokens_per_full_pass(self) -> float:
        return self.tokens / self.full_passes if self.full_passes else 0.0


def simulate(picks: Sequence[Sequence[int]], policy: Policy) -> Simulated:
    """Drive `policy` over a text.

    `picks`: per level, from the draft up, its token in each place; the last level's is the text itself.
    """
    text = picks[-1]
    last = len(picks) - 1
    ids = [text[0]]
    counts = [0] * len(picks)
    full_passes = 0
    while counts[last] + 1 < len(text):
        level, read, *_ = policy.next(counts, len(ids), len(ids) >= len(text))
        full_passes += level == last
        first = counts[level]
        counts[level] = len(ids) if level == 0 else counts[level - 1]
        if level == 0 and last > 0:
            if read:
                ids.append(_pick(picks[0], ids, text, counts[0] - 1))
            continue
        for row in range(first, counts[level]):
            pick = _pick(picks[level], ids, text, row)
            if row + 1 == len(ids):
                ids.append(pick)
            elif ids[row + 1] != pick:
                ids[row + 1 :] = [pick]
                counts[: level + 1] = [min(count, row + 1) for count in counts[: level + 1]]
                break
    return Simulated(len(text) - 1, full_passes)


def _pick(picks: Sequence[int], ids: Sequence[int], text: Sequence[int], row: int) -> int:
    """What a level says after the tokens up to `row`."""
    known = row + 1 < len(text) and all(ids[at] == text[at] for at in range(row + 1))
    return picks[row + 1] if known else GARBAGE
