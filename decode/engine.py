"""The loop: sequences join, levels run, verdicts commit tokens, sequences leave.

A hierarchy is a list of levels. One level is plain decoding, two are single-layer speculation, three are HiSpec.
"""

from collections import deque
from collections.abc import Iterator

import torch

from hispec.decode.blocks import BlockPool, blocks_for
from hispec.decode.cache import KVCache
from hispec.decode.level import Level, Task
from hispec.decode.policy import Action, Policy
from hispec.decode.sequence import Sequence
from hispec.decode.stats import LevelStats, Stats
from hispec.errors import CapacityError
from hispec.heads import FullHead, Head
from hispec.trunk import Trunk


def make_levels(trunk: Trunk, heads: list[Head]) -> list[Level]:
    """One level per head, and the full model behind them: each owns the layers from the exit below to its own."""
    ends: list[Head | FullHead] = [*heads, FullHead(trunk)]
    starts = [0, *(head.exit for head in heads)]
    return [Level(k, trunk, start, end.exit, end) for k, (start, end) in enumerate(zip(starts, ends, strict=True))]


class Engine:
    """Decodes a batch that sequences join and leave at any step."""

    def __init__(self, levels: list[Level], policy: Policy, cache: KVCache, pool: BlockPool, max_batch: int) -> None:
        self.levels, self.policy, self.cache, self.pool, self.max_batch = levels, policy, cache, pool, max_batch
        self.stats = Stats([LevelStats(level.stop) for level in levels])
        self.queue: deque[Sequence] = deque()
        self.live: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; it joins when there is room.

        Raises:
            CapacityError: the pool could never hold it.
        """
        need = self._blocks(sequence)
        if need > self.pool.n_blocks:
            raise CapacityError(
                f"request {sequence.index} needs {need} KV blocks, the pool has {self.pool.n_blocks}; raise kv_blocks"
            )
        self.queue.append(sequence)

    def run(self) -> Iterator[tuple[Sequence, list[int]]]:
        """Decode until nothing is left; yields each sequence with the tokens it has just committed."""
        try:
            while self.queue or self.live:
                self._admit()
                level, tasks = self._next_step()
                fresh = {id(task.sequence) for task in tasks if task.sequence.prefilling}
                level.step(tasks, self.cache, self.stats.levels[level.index])
                if level is self.levels[-1]:
                    self.stats.prefills += len(fresh) == len(tasks)
                    self.stats.verdicts += len(tasks) - len(fresh)
                    yield from self._commit([task.sequence for task in tasks])
        finally:
            for sequence in self.live:
                self.pool.free(sequence.table)
            self.live.clear()
            self.queue.clear()

    def _admit(self) -> None:
        """Let queued sequences join, first come first served, each with all the blocks it may ever need."""
        while self.queue and len(self.live) < self.max_batch and self._blocks(self.queue[0]) <= self.pool.n_free:
            sequence = self.queue.popleft()
            sequence.table = self.pool.allocate(self._blocks(sequence))
            self.live.append(sequence)

    def _next_step(self) -> tuple[Level, list[Task]]:
        """The lowest level that any sequence wants next, and all that want it; the others wait to join them above."""
        wanted = [(sequence, self._action(sequence)) for sequence in self.live]
        lowest = min(action.level for _, action in wanted)
        return self.levels[lowest], [Task(s, action.read) for s, action in wanted if action.level == lowest]

    def _action(self, sequence: Sequence) -> Action:
        if not sequence.prefilling:
            return self.policy.next(sequence.counts, len(sequence.ids), sequence.ended)
        level = next(k for k, count in enumerate(sequence.counts) if count < sequence.n_prompt)
        return Action(level, read=level == len(self.levels) - 1)

    def _commit(self, sequences: list[Sequence]) -> Iterator[tuple[Sequence, list[int]]]:
        for sequence in sequences:
            tokens = sequence.commit()
            self.stats.tokens += len(tokens)
            if sequence.finish_reason is not None:
                self.live.remove(sequence)
                self.pool.free(sequence.table)
                self.stats.prompts += 1
                reasons = self.stats.finish_reasons
                reasons[sequence.finish_reason] = reasons.get(sequence.finish_reason, 0) + 1
            if tokens:
                yield sequence, tokens

    def _blocks(self, sequence: Sequence) -> int:
        return blocks_for(sequence.n_prompt + sequence.params.max_new_tokens)


def make_cache(levels: list[Level], n_blocks: int) -> KVCache:
    """A cache for every trunk layer and for the heads that have attention of their own."""
    trunk = levels[0].trunk
    shapes = dict(enumerate(trunk.kv_shapes)) | dict(level.head.kv for level in levels if level.head.kv is not None)
    with torch.inference_mode():
        return KVCache(shapes, n_blocks, trunk.dtype, trunk.device)
