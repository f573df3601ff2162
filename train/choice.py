"""Which exits promise most, by how often candidates agree and what passes cost: arithmetic, without a model."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hispec.config import Config
from hispec.decode.auto import expected_rate

log = logging.getLogger("hispec")
DRAFTS, ROUNDS = (1, 2, 3, 4, 6), (1, 2, 3)
# Two exits are what is asked for: one alone must promise so much more.
MARGIN = 1.05
SHOWN = 5

# How often the token of an exit is that of a deeper one, or of the full model (None).
Agreement = Callable[[int, int | None], float]
# What a pass costs: its first and its last layer, its rows, and whether its logits are read.
Cost = Callable[[int, int, int, bool], float]


class Choice(Config):
    """What calibration came to; kept in the run folder, and in the checkpoints of the run."""

    exits: list[int]
    """From shallow to deep."""
    reason: str
    """One sentence."""
    candidates: list[dict[str, Any]]
    """Of each: exit, agreement with the full model, cost of a draft as a share of a plain step."""

    def summary(self) -> dict[str, Any]:
        """For the heads folder."""
        return {"chosen": "auto", "reason": self.reason, "candidates": self.candidates}


class Promise(NamedTuple):
    """Tokens per unit of cost of a sequence alone, with drafts of the best length and so many rounds of the levels
    below the full model for each pass of it."""

    rate: float
    exits: tuple[int, ...]
    drafts: int
    rounds: int


def choose(
    candidates: Sequence[int], n_layers: int, n_exits: int | None, agreement: Agreement, cost: Cost, seconds: bool
) -> Choice:
    """The exits that promise most, and a table of why in the log.

    `n_exits` None: two, or one where that is better by MARGIN. `seconds`: whether costs are these, or of no known unit.
    """
    plain = cost(0, n_layers, 1, True)
    numbers = [n for n in ((1, 2) if n_exits is None else (n_exits,)) if n <= len(candidates)]
    ranked = [promises(candidates, n_layers, n, agreement, cost) for n in numbers]
    among = ranked[0] if ranked[0][0].rate > MARGIN * ranked[-1][0].rate else ranked[-1]
    best = among[0]
    rows = [
        {"exit": exit_, "agreement": round(agreement(exit_, None), 4), "cost": round(draft / plain, 4)}
        | ({"milliseconds": round(1000 * draft, 3)} if seconds else {})
        for exit_ in candidates
        for draft in [cost(0, exit_, 1, True)]
    ]
    reason = (
        f"decoding with {_names(best.exits)} is expected at {best.rate * plain:.2f} times the plain speed"
        + (f" ({best.rate:.1f} against {1 / plain:.1f} tokens/s)" if seconds else "")
        + f", the most of {len(among)} choices of {len(best.exits)} among {len(candidates)} candidates, going by quick"
        " heads on the run's own data"
    )
    shown = sorted(itertools.chain(*ranked), reverse=True)[:SHOWN]
    log.info("%s", "\n".join([*_candidates(rows), *_promised(shown, plain, seconds)]))
    if best.rate * plain < 1.0:
        log.warning("exits=auto: plain decoding looks faster than every choice; these are the best there are")
    return Choice(exits=list(best.exits), reason=reason, candidates=rows)


def promises(candidates: Sequence[int], n_layers: int, n_exits: int, agreement: Agreement, cost: Cost) -> list[Promise]:
    """What every choice of so many exits promises, the best first."""
    every = itertools.combinations(candidates, n_exits)
    return sorted((_promise(exits, n_layers, agreement, cost) for exits in every), reverse=True)


def _promise(exits: tuple[int, ...], n_layers: int, agreement: Agreement, cost: Cost) -> Promise:
    spans = list(itertools.pairwise((0, *exits, n_layers)))
    chances = [agreement(low, high) for low, high in itertools.pairwise((*exits, None)) if low is not None]

    def of_level(level: int, rows: int, read: bool) -> float:
        return cost(*spans[level], rows, read)

    tries = itertools.product(DRAFTS, ROUNDS if len(exits) > 1 else (1,))
    return max(Promise(expected_rate(of_level, chances, *these), exits, *these) for these in tries)


def _names(exits: Sequence[int]) -> str:
    *others, last = map(str, exits)
    return f"exits {', '.join(others)} and {last}" if others else f"exit {last}"


def _candidates(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["exit  says what the full model says  a draft costs"]
    for row in rows:
        time = f", {row['milliseconds']:.2f} ms" if "milliseconds" in row else ""
        lines.append(f"{row['exit']:4}  {row['agreement']:29.1%}  {row['cost']:.1%} of a plain step{time}")
    return lines


def _promised(shown: Sequence[Promise], plain: float, seconds: bool) -> list[str]:
    lines = ["exits         drafts  rounds  against plain"]
    for rate, exits, drafts, rounds in shown:
        speed = f", {rate:.1f} tokens/s" if seconds else ""
        lines.append(f"{list(exits)!s:12}  {drafts:6}  {rounds:6}  {rate * plain:.2f}x{speed}")
    return lines
