"""What a training step costs on this machine, and what the feature cache saves.

    python benchmarks/training.py text.jsonl [recipe=smollm2-135m] [--batches 12] [key=value ...]

text.jsonl holds rows that hispec-train reads; other rows are taken as text, their fields joined. Prints tokens per
second, where the time goes, peak memory, and the first epoch against an epoch from the cache. One process, as many
threads as OMP_NUM_THREADS says.
"""

import argparse
import functools
import json
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hispec.train.cli import load
from hispec.train.loop import Training


class Clock:
    """Seconds by name, taken around calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed."""

        @functools.wraps(call)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start

        return timed


def as_rows(path: Path, folder: Path) -> Path:
    """A file that hispec-train reads; rows of unknown fields become text."""
    known = {"messages", "conversations", "prompt", "text", "input_ids"}
    target = folder / "rows.jsonl"
    with target.open("w") as file:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if not known & row.keys():
                row = {"text": "\n".join(value for value in row.values() if isinstance(value, str))}
            file.write(json.dumps(row) + "\n")
    return target


def epoch(run: Training, clock: Clock, n_batches: int) -> dict[str, float]:
    """Train on each batch once; seconds, in all and by part."""
    clock.seconds.clear()
    start = time.perf_counter()
    for _ in range(n_batches):
        run.train_step()
    return {"all": time.perf_counter() - start, **clock.seconds}


def measure(words: list[str], n_batches: int, folder: Path) -> dict[str, Any]:
    """Two epochs over the first `n_batches` batches."""
    config = load([*words, f"run_dir={folder / 'run'}"])
    run = Training(config)
    run.batches = run.batches[:n_batches]
    run.order = lambda place: place % n_batches
    tokens = sum(sum(batch.lengths) for batch in run.batches)
    run.train_step()  # DeepSpeed's first step, and the optimizer's, make buffers
    for path in (run.cache.folder or folder).glob("*.safetensors"):
        path.unlink()
    clock = Clock()
    run.cache.get = clock.around("trunk", run.cache.get)  # type: ignore[method-assign]
    run.engine.step = clock.around("optimizer", run.engine.step)  # type: ignore[method-assign]
    run._losses = clock.around("trunk and heads", run._losses)  # type: ignore[method-assign]
    run.engine.backward = clock.around("backward", run.engine.backward)  # type: ignore[method-assign]
    first, again = epoch(run, clock, n_batches), epoch(run, clock, n_batches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "tokens": tokens,
        "first": first,
        "again": again,
        "peak_memory_gib": peak,
        "threads": torch.get_num_threads(),
    }


def show(found: dict[str, Any]) -> None:
    """A table for a person."""
    print(
        f"{found['tokens']} tokens an epoch, {found['threads']} threads, peak memory {found['peak_memory_gib']:.2f} GiB"
    )
    print(f"{'':12}{'tokens/s':>10}{'trunk':>9}{'heads':>9}{'optimizer':>11}{'rest':>8}")
    for name, label in (("first", "first epoch"), ("again", "from cache")):
        part = found[name]
        trunk, optimizer = part["trunk"], part["optimizer"]
        heads = part["trunk and heads"] - trunk + part["backward"]
        shares = [trunk, heads, optimizer, part["all"] - trunk - heads - optimizer]
        columns = "".join(
            f"{share / part['all']:>{width}.0%}" for share, width in zip(shares, (9, 9, 11, 8), strict=True)
        )
        print(f"{label:12}{found['tokens'] / part['all']:>10.0f}{columns}")
    print(f"an epoch from the cache is {found['first']['all'] / found['again']['all']:.2f} times as fast as the first")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--json", type=Path)
    arguments, words = parser.parse_known_args()
    if not any(word.startswith("recipe=") for word in words):
        words.insert(0, "recipe=smollm2-135m")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = as_rows(arguments.text, folder)
        text = [f"data.source={rows}", "~data.prompts", "data.answers=given", "data.stdlib_tokens=0", "data.cache=true"]
        found = measure([*words, *text], arguments.batches, folder)
    show(found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    sys.exit(0)


if __name__ == "__main__":
    main()
