"""Which level runs next. A policy sees counters only, never a token's value beyond "this sequence has ended", so
whatever it decides, the output stays the full model's."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from hispec.errors import ConfigError


class Action(NamedTuple):
    """Run `level` on all tokens waiting for it; `read` its logits, or only pass the tokens through its layers.

    `drafts`, of level 0: so many steps will be wanted one after another, and then the last draft passed through.
    `looked_up`, of level 0: so many of the tokens that the text offers are put behind the newest token first.
    """

    level: int
    read: bool
    drafts: int = 0
    looked_up: int = 0


class Sight(NamedTuple):
    """What a policy that adapts looks at besides counters.

    `exits`: of the sequence's hierarchy. `sure`: per uncommitted token, what the draft head gave it. `batch`: sequences
    that are decoded together. `offered`: tokens that the text itself offers as drafts, behind `matched` tokens in a row
    that stood there before; only at the start of a round, and if tokens are looked up at all. `looked_up`: how many of
    them were taken and are on their way to the last level.
    """

    exits: tuple[int, ...] = ()
    sure: Sequence[float] = ()
    batch: int = 1
    matched: int = 0
    offered: int = 0
    looked_up: int = 0


NOTHING_SEEN = Sight()


class Policy(Protocol):
    """Decides for one sequence."""

    def next(self, counts: Sequence[int], length: int, ended: bool, sight: Sight = NOTHING_SEEN) -> Action:
        """The next action.

        `counts[k]`: tokens that have been through level k; `length`: tokens known, committed or not;
        `ended`: the last token known is a stop token or the limit, so nothing can follow it.
        """
        ...

    @property
    def choose(self) -> Callable[[Iterable[int]], int]:
        """The level that runs, of those that the sequences of a batch want next; the others wait."""
        ...


def bring_up(counts: Sequence[int], length: int) -> Action:
    """Pass looked-up tokens on, unread below the last level, which judges: a weak head would throw out good ones."""
    level = next(k for k, count in enumerate(counts) if count < (counts[k - 1] if k else length))
    return Action(level, read=level == len(counts) - 1)


class FixedPolicy:
    """The paper's policy (arXiv 2510.01336): level 0 drafts `windows[0]` tokens, level 1 judges them and
    adds one; level k > 1 runs once `windows[k - 1]` tokens have survived the level below.

    The last draft is passed through level 0 before level 1 judges, so that level 1 adds a token of its own (the bonus).
    Not the paper's: where the text offers tokens, all of them are taken before any are drafted.
    """

    def __init__(self, n_levels: int, windows: Sequence[int] = (2, 4), waits: bool = True) -> None:
        """`windows`: one per level above the first; missing ones double, further ones are not used.

        `waits`: a sequence whose window is full waits until the others of its batch are as far, so that one pass
        serves them all; else it triggers the pass.
        """
        if any(window < 1 for window in windows) or not windows:
            raise ConfigError(
                f"policy: {list(windows)} needs at least one window, each 1 or more; the paper's is fixed:2,4"
            )
        wanted = list(windows)
        while len(wanted) < n_levels - 1:
            wanted.append(2 * wanted[-1])
        self.windows = wanted[: n_levels - 1]
        self.last = n_levels - 1
        self.choose = min if waits else max

    def next(self, counts: Sequence[int], length: int, ended: bool, sight: Sight = NOTHING_SEEN) -> Action:
        """See `Policy.next`."""
        if sight.looked_up:
            return bring_up(counts, length)
        if sight.offered:
            return Action(0, read=self.last == 0, looked_up=sight.offered)
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
            return Action(0, read=True, drafts=self.windows[0] - drafted)
        if counts[0] < length:
            return Action(0, read=False)
        return Action(1, read=True)


def parse_policy(text: str, n_levels: int) -> FixedPolicy:
    """`fixed:2,4` or `fixed:2,4:now` as typed by a user.

    Raises:
        ConfigError: unknown name or windows that are not numbers.
    """
    name, numbers, when, *more = [*text.split(":"), "", ""][: max(3, text.count(":") + 1)]
    if name != "fixed" or when not in ("", "now") or more:
        raise ConfigError(
            f"policy: {text!r} is unknown; legal: auto, fixed:DRAFT,VERIFY such as fixed:2,4, or fixed:2,4:now"
        )
    try:
        windows = [int(number) for number in numbers.split(",")] if numbers else [2, 4]
    except ValueError:
        raise ConfigError(f"policy: {text!r} has windows that are not whole numbers; write fixed:2,4") from None
    return FixedPolicy(n_levels, windows, waits=when != "now")
