"""Drafts that cost no layer: what followed the last few tokens where they stood before (prompt lookup).

ids    a b c d e ... x b c          the last two tokens, b c, stood before: d e ... x b c is what followed them there
"""

from collections.abc import Sequence
from typing import NamedTuple

# Lengths of the last few tokens that are searched for; the longest that is found wins.
SIZES = (4, 3, 2)
MOST = 8


class Found(NamedTuple):
    """Tokens that may come next, and how many of the last tokens stood before them there."""

    matched: int
    tokens: list[int]


NOTHING = Found(0, [])


class Lookup:
    """The places of one text behind every few tokens in a row, the newest of equals; it grows with the text.

    A text that it has seen may grow, but not change: it is for committed tokens.
    """

    def __init__(self) -> None:
        self._behind: dict[tuple[int, ...], int] = {}
        self._next = min(SIZES)

    def find(self, ids: Sequence[int], most: int = MOST) -> Found:
        """At most `most` tokens that may follow `ids`, which are longer than at the last call, or the same."""
        # The last tokens of all have nothing behind them yet, so they do not find themselves.
        for place in range(self._next, len(ids)):
            for size in SIZES:
                if size <= place:
                    self._behind[tuple(ids[place - size : place])] = place
        self._next = max(self._next, len(ids))
        for size in SIZES:
            behind = self._behind.get(tuple(ids[-size:]))
            if behind is not None:
                tokens = list(ids[behind : behind + most])
                # A copy that reaches the end goes on with itself: what repeats may go on repeating.
                while len(tokens) < most:
                    tokens.append(tokens[behind - len(ids)])
                return Found(size, tokens)
        return NOTHING
