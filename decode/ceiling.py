"""What a hierarchy can bring at best: its speed by what passes cost here, if each token stands with one chance.

One round, with drafts of n tokens (as in `FixedPolicy`):

    level 0    n passes over one row, and one that is not read, for the last draft
    level 1    one pass over n + 1 rows: up to n drafts stand, and it adds a token of its own
    level 2    one pass over all that stood in so many rounds; what it adds is level 1's token, or takes its place

What the engine does between passes is left out, so a run stays a little below.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hispec.decode.costs import Costs
from hispec.decode.level import Level
from hispec.decode.results import level_names

if TYPE_CHECKING:
    from hispec.model import HiSpecModel

ROWS = (1, 2, 4, 8)
DRAFTS = (1, 2, 4, 8)
# Rounds between two full passes, as far as they were measured with so many rows.
ROUNDS = (1, 2, 4)
TARGETS = (1.0, 1.5)


def rate(costs: Costs, levels: Sequence[Level], n_drafts: int, n_rounds: int, chance: float) -> float:
    """Tokens per second, expected, where every level lets each token of the level below stand with this chance.

    `n_rounds`: those of the lower levels before the last one runs; with a single exit there is one.
    """
    first, last = levels[0], levels[-1]
    seconds = n_drafts * costs.of(first, 1, read=True) + costs.of(first, 1, read=False)
    waiting = {n_drafts + 1: 1.0}
    for level in levels[1:]:
        if level is last and len(levels) > 2:
            seconds, waiting = n_rounds * seconds, _gathered(waiting, n_rounds)
        seconds += sum(share * costs.of(level, rows, read=True) for rows, share in waiting.items())
        waiting = _judged(waiting, chance)
    return sum(tokens * share for tokens, share in waiting.items()) / seconds


def ceiling(costs: Costs, levels: Sequence[Level], plain: Level) -> dict[str, Any]:
    """The best ratios to plain decoding by draft length, and the acceptance at every level that others take.

    Returns `at_full_acceptance`, one ratio for each of DRAFTS, and `needed`: for each of TARGETS the least acceptance
    (in steps of 0.01) with which a draft length gets there, and that length; None where none does.
    """
    one = costs.of(plain, 1, read=True)

    def best(n_drafts: int, chance: float) -> float:
        legal = [n for n in ROUNDS if n == 1 or (len(levels) > 2 and n * (n_drafts + 1) <= costs.rows[-1])]
        return one * max(rate(costs, levels, n_drafts, n_rounds, chance) for n_rounds in legal)

    needed = []
    for target in TARGETS:
        reached = ((step / 100, n) for step in range(101) for n in DRAFTS if best(n, step / 100) >= target)
        acceptance, drafts = next(reached, (None, None))
        needed.append({"ratio": target, "acceptance": acceptance, "drafts": drafts})
    return {"at_full_acceptance": [best(n, 1.0) for n in DRAFTS], "needed": needed}


def ceilings(model: "HiSpecModel", exits: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """What the passes of these contestants cost at batch 1, in ms by ROWS, and what that allows.

    `exits`: of each contestant. Costs are those that policy=auto goes by, measured or remembered.
    """
    from hispec.decode.auto import AutoPolicy
    from hispec.decode.decoder import Decoder

    decoder = Decoder(model, exits=sorted({e for own in exits.values() for e in own}), policy="auto", max_batch=1)
    policy = decoder.policy
    assert isinstance(policy, AutoPolicy)
    costs, (plain,) = policy.costs, policy.hierarchies[()]
    decoder.close()

    def milliseconds(level: Level) -> list[float]:
        return [1000 * costs.of(level, rows, read=True) for rows in ROWS]

    rows = []
    for name, own in exits.items():
        levels = policy.hierarchies[tuple(own)]
        parts = [
            {"level": what, "layers": [level.start, level.stop], "ms": milliseconds(level)}
            for what, level in zip(level_names(len(levels)), levels, strict=True)
        ]
        rows.append({"contestant": name, "exits": list(own), "levels": parts, **ceiling(costs, levels, plain)})
    return {"batch": 1, "rows": ROWS, "drafts": DRAFTS, "plain_ms": milliseconds(plain), "contestants": rows}


def _gathered(waiting: Mapping[int, float], n_rounds: int) -> dict[int, float]:
    """How many tokens several rounds bring, by the shares of what one brings."""
    total = {0: 1.0}
    for _ in range(n_rounds):
        after: dict[int, float] = defaultdict(float)
        for before, share in total.items():
            for n, own in waiting.items():
                after[before + n] += share * own
        total = after
    return total


def _judged(waiting: Mapping[int, float], chance: float) -> dict[int, float]:
    """What is left when a level has judged: all before the first token that falls, and one of the level's own."""
    after: dict[int, float] = defaultdict(float)
    for n, share in waiting.items():
        for kept in range(1, n):
            after[kept] += share * chance ** (kept - 1) * (1.0 - chance)
        after[n] += share * chance ** (n - 1)
    return after
