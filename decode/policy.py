"""Which level runs next. A policy sees counters only, never a token's value beyond "this sequence has ended", so
whatever it decides, the output stays the full model's."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hispec.errors import ConfigError


class Action(NamedTuple):
    """Run `level` on all tokens waiting for it; `read` its logits, or only pass the tokens through its layers."""

    level: int
    read: bool


class Policy(Protocol):
    """Decides for one sequence."""

    def next(self, counts: Sequence[int], length: int, ended: bool) -> Action:
        """The next action.

        `counts[k]`: tokens that have been through level k; `length`: tokens known, committed or not;
        `ended`: the last token known is a stop token or the limit, so nothing can follow it.
        """
        ...


class FixedPolicy:
    """The paper's policy (arXiv 2510.01336): level 0 drafts `windows[0]` tokens, level 1 judges them and
    adds one; level k > 1 runs once `windows[k - 1]` tokens have survived the level below.

    The last draft is passed through level 0 before level 1 judges, so that level 1 adds a token of its own (the bonus).
    """

    def __init__(self, n_levels: int, windows: Sequence[int] = (2, 4)) -> None:
        """`windows`: one per level above the first; missing ones double, further ones are not used."""
        if any(window < 1 for window in windows) or not windows:
            raise ConfigError(
                f"policy: {list(windows)} needs at least one window, each 1 or more; the paper's is fixed:2,4"
            )
        wanted = list(windows)
        while len(wanted) < n_levels - 1:
            wanted.append(2 * wanted[-1])
        self.windows = wanted[: n_levels - 1]
        self.last = n_levels - 1

    def next(self, counts: Sequence[int], length: int, ended: bool) -> Action:
        """See `Policy.next`."""
        for level in range(self.last, 1, -1):
            if counts[level - 1] - counts[level] >= self.windows[level - 1]:
                return Action(level, read=True)
        if ended:
            # Nothing to draft: bring up what waits, lowest level first.
            return next(Action(k, read=True) for k in range(1, self.last + 1) if counts[k - 1] > counts[k])
        if self.last == 0:
            return Action(0, read=True)
        drafted = length - counts[1] - 1
        if drafted < self.windows[0]:
            return Action(0, read=True)
        if counts[0] < length:
            return Action(0, read=False)
        return Action(1, read=True)


def parse_policy(text: str, n_levels: int) -> FixedPolicy:
    """`fixed:2,4` as typed by a user.

    Raises:
        ConfigError: unknown name or windows that are not numbers.
    """
    name, _, numbers = text.partition(":")
    if name != "fixed":
        raise ConfigError(f"policy: {text!r} is unknown; legal: fixed:DRAFT,VERIFY such as fixed:2,4")
    try:
        windows = [int(number) for number in numbers.split(",")] if numbers else [2, 4]
    except ValueError:
        raise ConfigError(f"policy: {text!r} has windows that are not whole numbers; write fixed:2,4") from None
    return FixedPolicy(n_levels, windows)
