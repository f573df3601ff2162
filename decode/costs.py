"""What a pass costs on this machine: measured once per model, machine and settings, and kept.

Letters: R rows of a pass.
"""

import bisect
import hashlib
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import torch
from tqdm import tqdm

from hispec import ranks
from hispec.base import cache_folder
from hispec.decode.blocks import blocks_for
from hispec.decode.cache import KVCache
from hispec.decode.feed import Part
from hispec.decode.level import Level
from hispec.decode.machine import processor
from hispec.decode.runner import Eager

# Raised when passes are measured in another way, so that what was kept before is not used.
METHOD = 2
ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
# Rows of one sequence in a pass, at most: more than the longest draft and the token before it.
PER_SEQUENCE = 16
CONTEXT = 64
ROUNDS = 5


class Costs:
    """Seconds of a level's pass by rows, with its logits read or not; between measured row counts, in proportion."""

    def __init__(self, seconds: dict[str, list[float]], rows: Sequence[int]) -> None:
        """`seconds`: per `name_of` a pass, one number for each of `rows`, which rise."""
        self.seconds, self.rows = seconds, list(rows)

    def of(self, level: Level, n_rows: int, read: bool) -> float:
        """Seconds of one pass over `n_rows`."""
        measured = self.seconds[name_of(level, read)]
        at = bisect.bisect_left(self.rows, n_rows)
        if at == len(self.rows):
            return measured[-1] * n_rows / self.rows[-1]
        if at == 0 or self.rows[at] == n_rows:
            return measured[at]
        share = (n_rows - self.rows[at - 1]) / (self.rows[at] - self.rows[at - 1])
        return measured[at - 1] + share * (measured[at] - measured[at - 1])


def name_of(level: Level, read: bool) -> str:
    """Which pass it is: a span of layers, and whether its head is read."""
    return f"{level.start}-{level.stop}{'+' if read else ''}"


def costs_of(levels: Sequence[Level], make_cache: Callable[[int], KVCache], max_batch: int, model_key: str) -> Costs:
    """The costs of these levels, from the file of an earlier measurement on this machine if there is one.

    `model_key` tells models and heads apart, by what their passes cost. `make_cache`: from a number of blocks, for the
    time of measuring.
    """
    rows = [n for n in ROWS if n <= PER_SEQUENCE * max_batch]
    if ranks.joined():
        # They measure together, and decide alike: by what the first one measured.
        return Costs(ranks.share(measure(levels, make_cache(_blocks(max_batch)), max_batch, rows).seconds), rows)
    path = cache_folder() / "costs" / f"{_key(levels, max_batch, model_key)}.json"
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        return Costs(kept["seconds"], kept["rows"])
    except (OSError, ValueError, KeyError):
        costs = measure(levels, make_cache(_blocks(max_batch)), max_batch, rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps({"rows": rows, "seconds": costs.seconds}))
        temporary.replace(path)
    except OSError:
        pass  # where nothing can be kept, the next start measures again
    return costs


@torch.inference_mode()
def measure(levels: Sequence[Level], cache: KVCache, max_batch: int, rows: Sequence[int]) -> Costs:
    """Run every level on every row count, spread over as many sequences as decode at a time; the best of some rounds.

    All passes have their turn before the next round: a moment in which the machine is busy spoils one round only.
    """
    runner = Eager(cache)
    seconds = {name_of(level, read): [math.inf] * len(rows) for level in levels for read in (False, True)}
    rounds = tqdm(range(1 + ROUNDS), desc="measuring passes", unit="round", leave=False, disable=None)
    for _ in rounds:  # the first compiles and allocates, and is hardly ever the best
        # Level after level, as in decoding: what one reads drives the other's weights out of the caches.
        for (at, n_rows), level in itertools.product(enumerate(rows), levels):
            parts = _parts(level, n_rows, max_batch)
            start = time.perf_counter()
            _, features_TD = runner.run(level, parts)
            _wait(features_TD)
            unread = time.perf_counter() - start
            runner.logits(level, features_TD).argmax(-1).tolist()
            read = time.perf_counter() - start
            for name, value in ((name_of(level, False), unread), (name_of(level, True), read)):
                seconds[name][at] = min(seconds[name][at], value)
    return Costs(seconds, rows)


def _parts(level: Level, n_rows: int, max_batch: int) -> list[Part]:
    n_sequences = min(max_batch, n_rows)
    n_blocks = blocks_for(CONTEXT + n_rows)
    parts = []
    for number in range(n_sequences):
        own = n_rows // n_sequences + (number < n_rows % n_sequences)
        hidden_nD = None
        if level.start:
            hidden_nD = torch.randn(own, level.trunk.hidden_size, dtype=level.trunk.dtype, device=level.trunk.device)
        table = list(range(number * n_blocks, (number + 1) * n_blocks))
        parts.append(Part([1] * own, CONTEXT, table, hidden_nD))
    return parts


def _blocks(max_batch: int) -> int:
    """Blocks of the cache that `measure` wants."""
    return max(min(max_batch, n) * blocks_for(CONTEXT + n) for n in ROWS if n <= PER_SEQUENCE * max_batch)


def _wait(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _key(levels: Sequence[Level], max_batch: int, model_key: str) -> str:
    at = levels[0].trunk.device
    device = torch.cuda.get_device_name(at) if at.type == "cuda" else f"{processor()} x {os.cpu_count()}"
    parts = [
        METHOD, model_key, device, str(levels[0].trunk.dtype), torch.get_num_threads(), max_batch, PER_SEQUENCE,
        [name_of(level, True) for level in levels], *(metadata.version(name) for name in ("torch", "transformers")),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:24]
