"""The lossless rules by which a level accepts or replaces what lies before it. Pure.

Letters: R rows judged, V vocabulary.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Verdict(NamedTuple):
    """How many proposed tokens stand, the level's own token after them (None: none to add), whether it replaces one."""

    accepted: int
    token: int | None
    rejected: bool


def agree(picks: Sequence[int], proposed: Sequence[int]) -> Verdict:
    """Accept as long as the level's own picks are the proposed tokens; greedy and coupled sampling.

    `picks`: one per row. `proposed`: the known tokens after those rows, as many, or one less (the last pick is a bonus)
    or none.
    """
    for at, (pick, token) in enumerate(zip(picks, proposed, strict=False)):
        if pick != token:
            return Verdict(at, pick, rejected=True)
    return Verdict(len(proposed), picks[len(proposed)] if len(picks) > len(proposed) else None, rejected=False)


def reject(
    law_RV: Tensor, drawn_from: Sequence[Tensor], proposed: Sequence[int], generator: torch.Generator
) -> Verdict:
    """Speculative sampling (arXiv 2211.17192, algorithm 1), for one level of a hierarchy.

    `law_RV`: this level's distribution after each row. `drawn_from`: per proposed token, the distribution [V] it comes
    from, that of the level that handed it up. Token x stands with probability min(1, p(x) / q(x)); the first that does
    not is drawn anew from max(0, p - q), normalised. What stands afterwards is distributed exactly as this level's own
    samples, so the level above may verify it against this level's distribution.
    """
    for at, (token, q_V) in enumerate(zip(proposed, drawn_from, strict=True)):
        p_V = law_RV[at]
        if float(torch.rand((), generator=generator, dtype=torch.float64)) * float(q_V[token]) < float(p_V[token]):
            continue
        residual_V = (p_V - q_V).clamp_min(0.0)
        # p == q up to rounding leaves nothing to draw from, and then p itself is right.
        return Verdict(at, draw(residual_V if float(residual_V.sum()) > 0 else p_V, generator), rejected=True)
    more = len(law_RV) > len(proposed)
    return Verdict(len(proposed), draw(law_RV[len(proposed)], generator) if more else None, rejected=False)


def draw(weights_V: Tensor, generator: torch.Generator) -> int:
    """One token id, with probability in proportion to its weight."""
    return int(torch.multinomial(weights_V.cpu(), 1, generator=generator))
