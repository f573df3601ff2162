"""Hierarchies: lists of levels, from the draft up to the full model.

exits [4, 8] of 30     level 0 [0, 4) -> level 1 [4, 8) -> level 2 [8, 30)
exits [8]              level [0, 8) -> the same level 2
exits []               level [0, 30)
"""

import itertools
from collections.abc import Sequence

import torch

from hispec.decode.cache import KVCache
from hispec.decode.level import Level
from hispec.heads import FullHead, Head
from hispec.trunk import KVShape, Trunk

Exits = tuple[int, ...]


def make_levels(trunk: Trunk, heads: list[Head]) -> list[Level]:
    """One level per head, and the full model behind them: each owns the layers from the exit below to its own."""
    ends: list[Head | FullHead] = [*heads, FullHead(trunk)]
    starts = [0, *(head.exit for head in heads)]
    return [Level(k, trunk, start, end.exit, end) for k, (start, end) in enumerate(zip(starts, ends, strict=True))]


def exits_of(levels: Sequence[Level]) -> Exits:
    """The exits of a hierarchy."""
    return tuple(level.stop for level in levels[:-1])


def make_hierarchies(levels: list[Level]) -> dict[Exits, list[Level]]:
    """Every choice of up to two of a hierarchy's exits, and all, as a hierarchy of its own; levels over the same layers
    are the same. Choices of more would soon be too many to measure."""
    known = {(level.start, level.stop): level for level in levels}
    hierarchies: dict[Exits, list[Level]] = {}
    for n in sorted({*range(min(3, len(levels))), len(levels) - 1}):
        for chosen in itertools.combinations(levels[:-1], n):
            start, hierarchy = 0, []
            for level in (*chosen, levels[-1]):
                own = Level(level.index, level.trunk, start, level.stop, level.head)
                hierarchy.append(known.setdefault((start, level.stop), own))
                start = level.stop
            hierarchies[exits_of(hierarchy)] = hierarchy
    return hierarchies


def stored(levels: list[Level]) -> dict[int, KVShape]:
    """What every trunk layer, and every head that has attention of its own, stores per token."""
    shapes = dict(enumerate(levels[0].trunk.kv_shapes))
    return shapes | dict(level.head.kv for level in levels if level.head.kv is not None)


def make_cache(levels: list[Level], n_blocks: int) -> KVCache:
    """A cache for everything that these levels store."""
    trunk = levels[0].trunk
    with torch.inference_mode():
        return KVCache(stored(levels), n_blocks, trunk.dtype, trunk.device)
