"""The policy that measures itself: what passes cost is known from the start, what drafts bring is learned on the way.

A hierarchy is a choice of exits, () being plain decoding. For every one that has been used, seconds (by the table of
costs) and tokens are kept; for the others, what both would be follows from how often drafts are accepted. A sequence
starts in the best one, and may leave exits aside later, when they turn out not to pay; sequences that start later try
again now and then. Drafting goes on while the next draft is likely enough to stand:

    chance that all drafts so far stand x chance that one more does x seconds a token is worth  >  seconds of one more

What the text itself offers, looked up, costs no layer before it is judged. It is taken where that is expected to bring
more tokens a second than the hierarchy does; how often such a token stands is followed for all hierarchies at once.

Nothing of this looks at what a token is, so the output stays the full model's.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hispec.decode.costs import Costs
from hispec.decode.hierarchy import Exits
from hispec.decode.level import Level
from hispec.decode.lookup import MOST, Found
from hispec.decode.policy import NOTHING_SEEN, Action, Sight, bring_up

MAX_DRAFT, MAX_WAITING = 8, 16
# Verdicts after which a hierarchy's own figures count, and those after which the past is worth half.
ENOUGH, HALF_LIFE = 6, 64
DECAY = 0.5 ** (1 / HALF_LIFE)
# Another hierarchy must be better by this much, or noise would move sequences to and fro.
BETTER, FAR_BETTER = 1.02, 1.2
# One of so many new sequences tries a hierarchy that did not look best; of one of so many offers of the text that did
# not look worth it, a token is taken.
TRY_EVERY = 16
N_BINS = 10


@dataclass
class Chance:
    """How often something comes out well; recent times count more."""

    good: float
    all: float

    def see(self, good: int, all_: int) -> None:
        decay: float = DECAY**all_
        self.good, self.all = self.good * decay + good, self.all * decay + all_

    @property
    def mean(self) -> float:
        return self.good / self.all


@dataclass
class Account:
    """What one hierarchy has brought and cost."""

    accepted: list[Chance]
    """Per level above the draft: whether a token from below stands there."""
    sure: list[Chance] = field(default_factory=lambda: [Chance(2 * (n + 0.5) / N_BINS, 2.0) for n in range(N_BINS)])
    """By what the draft head gave its own token: whether it stood."""
    seconds: float = 0.0
    tokens: float = 0.0
    verdicts: int = 0
    starts: int = 0

    def chance(self, sure: float) -> float:
        """That a draft of this probability stands."""
        return self.sure[min(int(sure * N_BINS), N_BINS - 1)].mean


class AutoPolicy:
    """Chooses exits, draft lengths and verifications by what they cost and bring."""

    def __init__(self, hierarchies: Mapping[Exits, list[Level]], costs: Costs, prior: Mapping[int, float]) -> None:
        """`prior`: per exit, how often its head agreed with the full model when it was last measured."""
        self.hierarchies, self.costs = hierarchies, costs
        self.choose: Callable[[Iterable[int]], int] = min
        self.accounts = {exits: Account(_prior(exits, prior)) for exits in hierarchies}
        # By how many tokens in a row stood before: whether a looked-up token stands.
        self.found: defaultdict[int, Chance] = defaultdict(lambda: Chance(1.0, 2.0))
        self._declined: Counter[int] = Counter()
        self._carried: dict[tuple[Exits, int], list[float]] = {}
        self._started, self.batch = 0, 1

    # What runs.

    def start(self, batch: int, company: Sequence[Exits] = ()) -> Exits:
        """The hierarchy of a new sequence, one of `batch`; `company`: the hierarchies of those that are there.

        Sequences of one hierarchy share their passes, so a new one joins the others unless another hierarchy is far
        better, and at larger batches others are tried less often.
        """
        self._started, self.batch = self._started + 1, batch
        exits = self._best(self.hierarchies)
        if company:
            ((common, _),) = Counter(company).most_common(1)
            if self.rate(exits) <= FAR_BETTER * self.rate(common):
                exits = common
        if self._started % (TRY_EVERY * batch) == 0:
            others = [other for other in self.hierarchies if other and other != exits]
            exits = min(others, key=lambda other: self.accounts[other].starts, default=exits)
        self.accounts[exits].starts += 1
        return exits

    def leave(self, exits: Exits) -> Exits:
        """The hierarchy that a sequence of `exits` goes on in; some of its exits, as the others' keys are not there."""
        if not exits or self.accounts[exits].verdicts < ENOUGH:
            return exits
        within = [other for other in self.hierarchies if set(other) < set(exits)]
        best = self._best(within)
        return best if self.rate(best) > BETTER * self.rate(exits) else exits

    def next(self, counts: Sequence[int], length: int, ended: bool, sight: Sight = NOTHING_SEEN) -> Action:
        """See `Policy.next`."""
        self.batch = sight.batch
        last = len(counts) - 1
        if sight.looked_up:
            return bring_up(counts, length)
        if sight.offered and (n := self._taken(sight)):
            return Action(0, read=last == 0, looked_up=n)
        if last == 0:
            return Action(0, read=True)
        if ended:
            return next(Action(k, read=True) for k in range(1, last + 1) if counts[k - 1] > counts[k])
        levels, account, worth = self.hierarchies[sight.exits], self.accounts[sight.exits], self._worth(sight.exits)
        drafted = length - counts[1] - 1
        if drafted == 0:
            return self._round(counts, levels, account, worth)
        stands = 1.0
        for sure in sight.sure[-drafted:]:
            stands *= account.chance(sure)
        if drafted < MAX_DRAFT and counts[0] < length:
            more = stands * account.accepted[0].mean * worth
            if more > self._share(levels[0], 1, read=True):
                return Action(0, read=True)
            if stands * worth > self._share(levels[0], 1, read=False):
                return Action(0, read=False)
        return Action(1, read=True)

    def _taken(self, sight: Sight) -> int:
        """How many of the tokens offered by the text are taken: as many as gain most over going on without them."""
        chance, worth = self.found[sight.matched].mean, 1.0 / self.rate(sight.exits)
        best, most = 0, 0.0
        tokens = stands = 1.0
        for n, seconds in enumerate(self._carrying(sight.exits)[: sight.offered], 1):
            stands *= chance
            tokens += stands
            if tokens * worth - seconds > most:
                best, most = n, tokens * worth - seconds
        if best == 0:
            self._declined[sight.matched] += 1
            return int(self._declined[sight.matched] % TRY_EVERY == 0)
        return best

    def _round(self, counts: Sequence[int], levels: Sequence[Level], account: Account, worth: float) -> Action:
        """Nothing is drafted: verify what waits below a level, or draft on."""
        for k in range(len(counts) - 1, 1, -1):
            waiting = counts[k - 1] - counts[k]
            if waiting == 0:
                continue
            all_stand = account.accepted[k - 1].mean ** waiting
            gain = 1.0 + account.accepted[0].mean
            cost = 2 * self._share(levels[0], 1, read=True) + self._share(levels[1], 2, read=True)
            if waiting >= MAX_WAITING or all_stand * gain * worth < cost:
                return Action(k, read=True)
        return Action(0, read=True)

    # What has been seen.

    def spent(self, level: Level, rows: int, read: bool, shares: Mapping[Exits, float]) -> None:
        """A pass over `rows` has run; `shares`: whose rows they were."""
        seconds = self.costs.of(level, rows, read)
        for exits, share in shares.items():
            self.accounts[exits].seconds += seconds * share

    def judged(self, exits: Exits, level: int, accepted: int, rejected: bool, sure: Sequence[float]) -> None:
        """A level has decided; `sure`: of the drafts that it accepted and, last, of the one it rejected."""
        account = self.accounts[exits]
        account.accepted[level - 1].see(accepted, accepted + rejected)
        for number, value in enumerate(sure):
            account.sure[min(int(value * N_BINS), N_BINS - 1)].see(number < accepted, 1)

    def looked_up(self, exits: Exits, found: Found, accepted: int, rejected: bool) -> None:
        """The last level has decided on tokens that the text offered.

        A hierarchy answers for what it takes longer than plain decoding to carry them up, if it does.
        """
        self.found[found.matched].see(accepted, accepted + rejected)
        n = len(found.tokens)
        self.accounts[exits].seconds += max(0.0, self._carrying(exits)[n - 1] - self._carrying(())[n - 1])

    def earned(self, exits: Exits, tokens: int) -> None:
        """The last level has committed tokens."""
        account = self.accounts[exits]
        account.verdicts += 1
        account.tokens, account.seconds = (account.tokens + tokens) * DECAY, account.seconds * DECAY

    # What things are worth.

    def rate(self, exits: Exits) -> float:
        """Tokens per second of one sequence: measured where there is enough of it, else expected."""
        account = self.accounts[exits]
        if exits and account.verdicts >= ENOUGH:
            return account.tokens / account.seconds
        return self._expected(exits)

    def _expected(self, exits: Exits) -> float:
        levels, chances = self.hierarchies[exits], [chance.mean for chance in self.accounts[exits].accepted]
        if not exits:
            return 1.0 / self._share(levels[0], 1, read=True)

        def seconds(level: int, rows: int, read: bool) -> float:
            return self._share(levels[level], rows, read)

        return max(expected_rate(seconds, chances, n_drafts) for n_drafts in (1, 2, 4))

    def _worth(self, exits: Exits) -> float:
        return 1.0 / max(self.rate(exits), self.rate(()))

    def _best(self, among: Iterable[Exits]) -> Exits:
        return max(among, key=self.rate)

    def _carrying(self, exits: Exits) -> list[float]:
        """Seconds that 1, 2, ... looked-up tokens, and the newest one before them, take up to the last level's verdict.

        Kept, as every sequence asks at every round.
        """
        key = exits, self.batch
        if key not in self._carried:
            levels, rows = self.hierarchies[exits], range(2, MOST + 2)
            self._carried[key] = [sum(self._share(x, n, read=x is levels[-1]) for x in levels) for n in rows]
        return self._carried[key]

    def _share(self, level: Level, rows: int, read: bool) -> float:
        """One sequence's share of a pass that all of the batch take part in, with `rows` each."""
        return self.costs.of(level, rows * self.batch, read) / self.batch


def expected_rate(
    seconds: Callable[[int, int, bool], float], chances: Sequence[float], n_drafts: int, rounds: int = 1
) -> float:
    """Tokens per second of a hierarchy with drafts of fixed length, one sequence.

    `seconds`: of a pass, by the level's place, its rows, and whether its logits are read. `chances`: per level above
    the draft, that a token from below stands there. `rounds`: so often the levels below the last run before it does,
    where one of them judges; then more tokens wait for its pass.
    """
    spent, waiting = seconds(0, 1, True) * n_drafts + seconds(0, 1, False), float(n_drafts + 1)
    for level, chance in enumerate(chances, 1):
        if 1 < level == len(chances):
            spent, waiting = spent * rounds, waiting * rounds
        rows = max(1, round(waiting))
        spent += seconds(level, rows, True)
        waiting = 1.0 + sum(chance ** (n + 1) for n in range(rows - 1))
    return waiting / spent


def _prior(exits: Exits, known: Mapping[int, float]) -> list[Chance]:
    """Acceptance to start from, worth a few verdicts.

    `known` is agreement with the full model. Two exits agree where both are right, and mostly where the deeper one is
    wrong: they err alike.
    """
    tops = [known.get(exit_, 0.5) for exit_ in exits]
    means = [low * high + 0.75 * (1.0 - high) for low, high in zip(tops, tops[1:], strict=False)] + tops[-1:]
    return [Chance(4 * mean, 4.0) for mean in means]
