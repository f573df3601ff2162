"""Every token passes every layer at most once: what is rejected is lost, what is committed is never run again."""

from collections import Counter
from typing import Any

import pytest
from decode_fixtures import PROMPTS, FlakyHead, make_engine, random_heads, silenced, trunk
from torch import Tensor

from hispec import SamplingParams
from hispec.decode.level import Judged, Level
from hispec.decode.runner import Runner
from hispec.decode.stats import LevelStats
from hispec.heads import Head
from hispec.trunk import Trunk


class Numbered(list[int]):
    """Token ids that each get a number when they come in: a token drafted anew after a rejection is another one."""

    def __init__(self, ids: list[int], name: int) -> None:
        super().__init__(ids)
        self.numbers = [(name, at) for at in range(len(ids))]
        self._name, self._next = name, len(ids)

    def append(self, token: int) -> None:
        super().append(token)
        self.numbers.append((self._name, self._next))
        self._next += 1

    def __delitem__(self, index: Any) -> None:
        super().__delitem__(index)
        del self.numbers[index]


class Watched(Level):
    """A level that knows which tokens it passes."""

    now: list[tuple[int, int]] = []

    def step(self, tasks: Any, runner: Runner, stats: LevelStats, sureness: bool = False) -> list[Judged]:
        type(self).now = [n for t in tasks for n in t.sequence.ids.numbers[slice(t.start, t.stop)]]
        return super().step(tasks, runner, stats, sureness)


def passes(own: Trunk, heads: list[Head], windows: tuple[int, ...], n: int = 32) -> int:
    """Count, for every token and layer, how often it passed; returns how many were rejected."""
    seen: Counter[tuple[int, int, int]] = Counter()
    modules = [*own.layers, *(head.block for head in heads if head.kv is not None)]

    def count(layer: int, rows_1TD: Tensor) -> None:
        assert rows_1TD.shape[1] == len(Watched.now), "no row that is not a waiting token"
        seen.update((layer, *number) for number in Watched.now)

    hooks = [
        module.register_forward_hook(lambda _, args, __, layer=layer: count(layer, args[0]))
        for layer, module in enumerate(modules)
    ]
    engine = make_engine(own, heads, windows, PROMPTS, [SamplingParams(max_new_tokens=n - 2 * i) for i in range(5)])
    engine.levels = [Watched(x.index, x.trunk, x.start, x.stop, x.head) for x in engine.levels]
    sequences = list(engine.queue)
    for index, sequence in enumerate(sequences):
        sequence.ids = Numbered(sequence.ids, index)
    try:
        for _ in engine.run():
            pass
    finally:
        for hook in hooks:
            hook.remove()
    assert set(seen.values()) == {1}, "no token passes a layer twice"
    for sequence in sequences:
        assert isinstance(sequence.ids, Numbered)
        # The last token is decided by the full model, and nothing needs what comes after it.
        for number in sequence.ids.numbers[: sequence.n_committed - 1]:
            assert all(seen[layer, *number] == 1 for layer in range(len(modules)))
    for level, stats in zip(engine.levels, engine.stats.levels, strict=True):
        for layer in range(level.start, level.stop):
            assert stats.rows == sum(count for (at, _, _), count in seen.items() if at == layer)
    return sum(stats.rejected for stats in engine.stats.levels)


@pytest.mark.parametrize("exits", [(), (2,), (2, 4), (1, 2, 4)])
@pytest.mark.parametrize("name", ["llama_gqa", "opt_post_proj", "gemma2"])
def test_work_each_token_passes_each_layer_once(name: str, exits: tuple[int, ...]) -> None:
    for kind in ("mlp", "block"):
        own = trunk(name)
        assert bool(passes(own, random_heads(own, exits, kind), (2, 3, 4), 20)) == bool(exits)


@pytest.mark.parametrize("wrong", [1, 3, 5])
def test_work_whatever_was_rejected(wrong: int) -> None:
    own = Trunk(silenced("llama_gqa", 2))
    heads: list[Head] = [FlakyHead(own, exit_, lambda call: call % 6 == wrong) for exit_ in (2, 4)]
    assert passes(own, heads, (2, 4)) > 0


def test_p04_rows_of_a_round_do_not_grow_with_the_position() -> None:
    own = Trunk(silenced("llama_gqa", 2))
    engine = make_engine(own, [FlakyHead(own, 2)], (4,), [[5]], [SamplingParams(max_new_tokens=100)])
    rows = [0]
    for _ in engine.run():
        rows.append(engine.stats.levels[0].rows)
    assert max(b - a for a, b in zip(rows, rows[1:], strict=False)) <= 4 + 2
