"""The loop: sequences join, levels run, verdicts commit tokens, sequences leave.

A hierarchy is a list of levels. One level is plain decoding, two are single-layer speculation, three are HiSpec.
"""

import sys
import time
from collections import Counter, deque
from collections.abc import Iterator

import torch

from hispec.decode.auto import AutoPolicy
from hispec.decode.blocks import BLOCK_SIZE, BlockPool, blocks_for
from hispec.decode.cache import KVCache
from hispec.decode.hierarchy import Exits, exits_of
from hispec.decode.level import Judged, Level, Task
from hispec.decode.lookup import NOTHING
from hispec.decode.policy import Action, Policy, Sight
from hispec.decode.request import FinishReason
from hispec.decode.runner import Eager, Runner
from hispec.decode.sequence import Sequence
from hispec.decode.stats import LevelStats, Stats
from hispec.errors import CapacityError


class Engine:
    """Decodes a batch that sequences join and leave at any step.

    Attributes:
        queue: sequences that wait for room, in order of arrival.
        live: sequences that hold blocks, in order of arrival: whoever is preempted is the youngest.
    """

    def __init__(
        self,
        levels: list[Level],
        policy: Policy,
        cache: KVCache,
        pool: BlockPool,
        max_batch: int,
        prefill_chunk: int = 512,
        runner: Runner | None = None,
        lookup: bool = False,
    ) -> None:
        """`prefill_chunk`: most prompt tokens that are on their way through the levels at a time.

        `runner`: how passes over `cache` are carried out; as they come, by default. `lookup`: whether the policy is
        offered what a sequence's own text proposes.
        """
        # A policy that chooses hierarchies, and wants to know what comes of it.
        self.auto = policy if isinstance(policy, AutoPolicy) else None
        self.levels, self.policy, self.cache, self.pool = levels, policy, cache, pool
        self.max_batch, self.prefill_chunk = max_batch, prefill_chunk
        self.runner: Runner = runner or Eager(cache)
        self.lookup = lookup
        self.queue: deque[Sequence] = deque()
        self.live: list[Sequence] = []
        # Per hierarchy, the step in which it last had its turn.
        self._turns: dict[Exits, int] = {}
        self.count_anew()

    @property
    def busy(self) -> bool:
        """Whether any sequence is there."""
        return bool(self.live or self.queue)

    def count_anew(self) -> None:
        """Start new statistics."""
        self.stats = Stats([LevelStats(level.stop) for level in self.levels])

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it joins when there is room.

        Raises:
            CapacityError: the pool could never hold it.
        """
        need = blocks_for(sequence.n_prompt + sequence.params.max_new_tokens)
        if need > self.pool.n_blocks:
            raise CapacityError(
                f"request {sequence.index} needs {need} KV blocks, the pool has {self.pool.n_blocks}; raise kv_blocks"
            )
        self.queue.append(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """Let a sequence leave as it is, unless it has finished."""
        if sequence in self.live:
            self._leave(sequence, "abort")
        elif sequence in self.queue:
            self.queue.remove(sequence)
            sequence.finish_reason = "abort"

    def run(self) -> Iterator[tuple[Sequence, list[int]]]:
        """Decode until nothing is left; yields each sequence with the tokens it has just committed."""
        try:
            while self.busy:
                for sequence in self.step():
                    fresh, sequence.fresh = sequence.fresh, []
                    if fresh:
                        yield sequence, fresh
        finally:
            for sequence in [*self.live, *self.queue]:
                self.cancel(sequence)

    def step(self) -> list[Sequence]:
        """Run one level on all sequences that want it next; returns those that have committed tokens or left.

        Raises:
            CapacityError: the memory is not there. Whatever is raised, all sequences have left.
        """
        if not self.busy:
            return []
        start = time.perf_counter()
        try:
            self._admit()
            level, tasks = self._next()
            tasks = self._make_room(tasks)
            return self._run(level, tasks) if tasks else []
        except BaseException as error:
            for sequence in [*self.live, *self.queue]:
                self.cancel(sequence)
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                raise CapacityError(
                    f"out of memory in a step of {self.max_batch} sequences; lower max_batch={self.max_batch},"
                    f" prefill_chunk={self.prefill_chunk} or kv_blocks={self.pool.n_blocks}"
                ) from None
            raise
        finally:
            self.stats.seconds += time.perf_counter() - start

    def _admit(self) -> None:
        """Let queued sequences join, first come first served, as long as the pool has room for what they know."""
        while self.queue and len(self.live) < self.max_batch and self._join(self.queue[0]):
            self.live.append(self.queue.popleft())

    def _join(self, sequence: Sequence) -> bool:
        """Give a sequence its blocks, and start it behind the prefix that is remembered; False: not now."""
        if not sequence.levels:
            self._choose_levels(sequence)
        assert sequence.goal is not None
        limit = sequence.goal[-1] - 1  # one token at least has to run: there must be logits
        root = self._root(sequence)
        known = self.pool.find(sequence.ids[:limit], root)
        next_block = (len(known) + 1) * BLOCK_SIZE
        if next_block <= limit and any(
            other.prefilling and other.ids[:next_block] == sequence.ids[:next_block] for other in self.live
        ):
            return False  # somebody is just computing what both begin with
        self.pool.share(known)
        own = blocks_for(len(sequence.ids)) - len(known)
        whole = blocks_for(sequence.n_prompt + sequence.params.max_new_tokens)
        # One block each, so that those who are there do not push the new one out at once.
        if not self._reclaim(own + len(self.live)):
            self.pool.free(known)
            return False
        if self.cache.likes_neighbours and known and whole <= self.pool.n_free:
            # To copy once costs less than to gather at every step.
            sequence.table = self.pool.allocate(whole)
            self.cache.copy(known, sequence.table[: len(known)])
            self.pool.free(known)
        else:
            more = whole - len(known) if whole - len(known) <= self.pool.n_free else own
            sequence.table = known + self.pool.allocate(more, self._neighbour(known))
        sequence.counts = [len(known) * BLOCK_SIZE] * len(sequence.levels)
        sequence.n_remembered, sequence.serial = len(known), self.pool.serial_of(known, root)
        self.stats.shared_tokens += len(known) * BLOCK_SIZE
        return True

    def _next(self) -> tuple[Level, list[Task]]:
        """The level that the policy picks among those that sequences want next, and all that want it.

        Hierarchies take turns: sequences of one never wait until those of another are as far.
        """
        budget = self.prefill_chunk - sum(s.counts[0] - s.counts[-1] for s in self.live if s.goal is not None)
        wanted = [(sequence, self._action(sequence, budget)) for sequence in self.live]
        by_exits: dict[Exits, dict[int, Level]] = {}
        for sequence, action in wanted:
            if action is not None:
                level = sequence.levels[action.level]
                by_exits.setdefault(exits_of(sequence.levels), {})[level.number] = level
        exits = min(by_exits, key=lambda own: self._turns.get(own, 0))
        self._turns[exits] = 1 + max(self._turns.values(), default=0)
        level = by_exits[exits][self.policy.choose(by_exits[exits])]
        tasks = []
        for sequence, action in wanted:
            if action is None or sequence.levels[action.level] is not level:
                continue
            if action.looked_up:
                sequence.look_up(action.looked_up)
            start, stop = sequence.pending(action.level)
            if action.level == 0 and sequence.goal is not None:
                stop = min(stop, start + budget)
                budget -= stop - start
            if stop > start:
                tasks.append(Task(sequence, start, stop, action.read, action.drafts))
        return level, tasks

    def _action(self, sequence: Sequence, budget: int) -> Action | None:
        if sequence.goal is None:
            return self._policys_action(sequence)
        # A prompt goes up chunk by chunk, each through all levels before the next one starts.
        last = len(sequence.levels) - 1
        for level in range(last, 0, -1):
            start, stop = sequence.pending(level)
            if stop > start:
                return Action(level, read=level == last and sequence.prefilling)
        return Action(0, read=last == 0 and sequence.prefilling) if budget > 0 else None

    def _make_room(self, tasks: list[Task]) -> list[Task]:
        """Blocks for every token of these tasks; where there are none, the youngest sequence gives up its own."""
        for sequence, _, stop, *_ in tasks:
            while sequence in self.live and (lack := blocks_for(stop) - len(sequence.table)) > 0:
                if self._reclaim(lack):
                    sequence.table += self.pool.allocate(lack, self._neighbour(sequence.table))
                else:
                    self._preempt(self.live[-1])
        return [task for task in tasks if task.sequence.table]

    def _reclaim(self, n: int) -> bool:
        """Whether `n` blocks are free, after taking back, if need be, what sequences hold for tokens to come."""
        for sequence in reversed(self.live):
            if self.pool.n_free >= n:
                break
            keep = blocks_for(len(sequence.ids))
            self.pool.free(sequence.table[keep:])
            del sequence.table[keep:]
        return self.pool.n_free >= n

    def _preempt(self, sequence: Sequence) -> None:
        self.live.remove(sequence)
        self.pool.free(sequence.table)
        sequence.preempt()
        self.queue.appendleft(sequence)
        self.stats.preemptions += 1

    def _run(self, level: Level, tasks: list[Task]) -> list[Sequence]:
        catching_up = {id(task.sequence) for task in tasks if task.sequence.goal is not None}
        n, stats = tasks[0].drafts, self.stats.levels[level.index]
        at_once = n > 0 and all(task.can_draft(n) for task in tasks)
        start = time.perf_counter()
        if not (at_once and level.draft(tasks, n, self.runner, stats)):
            judged = level.step(tasks, self.runner, stats, self.auto is not None and level.index < len(self.levels) - 1)
            self._learn(level, tasks, judged, catching_up)
        self.stats.add_time(level.index, time.perf_counter() - start, len(catching_up) == len(tasks))
        news = [task.sequence for task in tasks if task.sequence.finish_reason is not None]
        if level.index == len(self.levels) - 1:
            self.stats.prefills += len(catching_up) == len(tasks)
            for sequence, *_ in tasks:
                if sequence.finish_reason is None:
                    news += self._commit(sequence, id(sequence) not in catching_up)
        for sequence in news:
            if sequence.finish_reason is not None:
                self._leave(sequence, sequence.finish_reason)
        return news

    def _commit(self, sequence: Sequence, is_verdict: bool) -> list[Sequence]:
        before = sequence.n_committed
        sequence.commit()
        n = sequence.n_committed - before
        self.stats.tokens += n
        if is_verdict:
            if self.auto is not None and not sequence.looked_up.tokens:
                self.auto.earned(exits_of(sequence.levels), n)
            sequence.looked_up = NOTHING
            self.stats.verdicts += 1
            self.stats.verified += n
        # Blocks that no rejection can touch any more.
        for at in range(sequence.n_remembered, sequence.counts[-1] // BLOCK_SIZE):
            tokens = sequence.ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]
            sequence.serial = self.pool.remember(sequence.table[at], sequence.serial, tokens)
            sequence.n_remembered = at + 1
        return [sequence] if n else []

    # What the policy sees, and learns. Without `auto` there is one hierarchy.

    def _choose_levels(self, sequence: Sequence) -> None:
        levels = self.levels
        if self.auto is not None:
            company = [exits_of(other.levels) for other in self.live if other.levels and other is not sequence]
            batch = min(self.max_batch, len(self.live) + len(self.queue))
            levels = self.auto.hierarchies[self.auto.start(batch, company)]
        sequence.levels = list(levels)
        sequence.start_over(len(levels))

    def _policys_action(self, sequence: Sequence) -> Action:
        if self.auto is None and not self.lookup:
            return self.policy.next(sequence.counts, len(sequence.ids), sequence.ended)
        exits = exits_of(sequence.levels)
        at_rest = sequence.counts[0] == sequence.counts[-1] == len(sequence.ids) - 1
        if self.auto is not None and at_rest and (better := self.auto.leave(exits)) != exits:
            sequence.levels, exits = list(self.auto.hierarchies[better]), better
            sequence.change_levels(len(sequence.levels))
            sequence.n_remembered = sys.maxsize  # its blocks are of two kinds now
        sure = [sequence.sure.get(at, 0.0) for at in range(sequence.n_committed, len(sequence.ids))]
        matched, offered = sequence.find() if self.lookup and at_rest else NOTHING
        sight = Sight(exits, sure, len(self.live), matched, len(offered), len(sequence.looked_up.tokens))
        return self.policy.next(sequence.counts, len(sequence.ids), sequence.ended, sight)

    def _learn(self, level: Level, tasks: list[Task], judged: list[Judged], catching_up: set[int]) -> None:
        """Count what was looked up, and let the policy learn what a step has cost and brought.

        Hierarchies answer for what they draft. A sequence that has looked up is reckoned as one row that is nobody's.
        """
        for sequence, *_, verdict in judged:
            if sequence.looked_up.tokens:
                self.stats.looked_up += len(sequence.looked_up.tokens)
                self.stats.looked_up_accepted += verdict.accepted
        if self.auto is None:
            return
        drafting = [task for task in tasks if not task.sequence.looked_up.tokens]
        own = [task.sequence.levels for task in drafting if id(task.sequence) not in catching_up]
        shares = Counter(map(exits_of, own))
        rows = sum(task.stop - task.start for task in drafting) + len(tasks) - len(drafting)
        self.auto.spent(level, rows, bool(judged), {exits: n / len(tasks) for exits, n in shares.items()})
        for sequence, place, first, verdict in judged:
            if sequence.looked_up.tokens:
                exits = exits_of(sequence.levels)
                self.auto.looked_up(exits, sequence.looked_up, verdict.accepted, verdict.rejected)
            elif place > 0 and verdict.accepted + verdict.rejected:
                places = range(first + 1, first + 1 + verdict.accepted + verdict.rejected)
                sure = [sequence.sure[at] for at in places if at in sequence.sure] if place == 1 else []
                self.auto.judged(exits_of(sequence.levels), place, verdict.accepted, verdict.rejected, sure)

    def _root(self, sequence: Sequence) -> int:
        """Where remembered prefixes of the sequence's hierarchy begin: keys of heads it leaves aside are not there."""
        return -sum(1 << level.index for level in sequence.levels if level.index < len(self.levels) - 1)

    def _leave(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.live.remove(sequence)
        self.pool.free(sequence.table)
        sequence.table = []
        self.stats.prompts += 1
        self.stats.finish_reasons[reason] = self.stats.finish_reasons.get(reason, 0) + 1

    def _neighbour(self, table: list[int]) -> int | None:
        return table[-1] if table and self.cache.likes_neighbours else None
