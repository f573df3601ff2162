"""Whether policy=auto holds what it promises: never much slower than plain decoding, nor than the best fixed policy.

    python benchmarks/auto.py HEADS [gsm8k=test.jsonl humaneval ...] [--prompts 8] [--output auto.json]

A setting is a prompt set (NAME, or NAME=FILE), the heads as trained or the same ones with random weights, and a batch
size. In each, plain decoding, auto and fixed policies take turns in one process, as in hispec-bench. A setting fails if
auto needs more than it may: auto's tokens per second must be 0.97 of plain's, and 0.95 of the best other's, plain
decoding included. Both are of the whole time, so what auto spends on learning counts; beside them, in brackets, the
median over turns. As many threads as OMP_NUM_THREADS says. auto starts anew in every set, and knows of random heads
only what it sees.
"""

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hispec import HiSpecModel
from hispec.decode import machine
from hispec.decode.bench_options import BenchOptions
from hispec.decode.bench_run import Bench
from hispec.decode.results import Row, write_json
from hispec.errors import HiSpecError

SETS = ["gsm8k", "humaneval", "spec_bench"]
BATCHES = [1, 8]
ONE_EXIT, TWO_EXITS = ("fixed:1", "fixed:2", "fixed:4"), ("fixed:1,1", "fixed:2,2", "fixed:2,4")
TO_PLAIN, TO_BEST = 0.97, 0.95


def contestants(exits: Sequence[int]) -> dict[str, Any]:
    """Plain decoding with and without lookup, auto, and the fixed policies that so many exits allow, by their names."""
    fixed = {policy: {"exits": list(exits[:1]), "policy": policy} for policy in ONE_EXIT}
    if len(exits) > 1:
        fixed |= {policy: {"exits": list(exits[:2]), "policy": policy} for policy in TWO_EXITS}
    return {"plain": {}, "plain_lookup": {}, "auto": {}, **fixed}


def write_random(model: HiSpecModel, folder: Path) -> None:
    """The same kinds of heads over the same vocabularies, with nothing learnt in them and nothing known of them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.heads.parameters():
            parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.metrics = {}
    model.save_pretrained(folder)


def judge(rows: Sequence[Row]) -> dict[str, Any]:
    """What a setting came to, by the rows of its contestants."""
    by = {row["contestant"]: row for row in rows}
    speeds = {name: row["tokens"] / row["seconds"] for name, row in by.items()}
    best = max((name for name in by if name != "auto"), key=speeds.__getitem__)
    pairs = zip(by["auto"]["ratio_per_turn"], by[best]["ratio_per_turn"], strict=True)
    found = {
        "prompt_set": rows[0]["prompt_set"],
        "batch": rows[0]["batch"],
        "tokens_per_s": speeds,
        "best": best,
        "auto_to_plain": speeds["auto"] / speeds["plain"],
        "auto_to_best": speeds["auto"] / speeds[best],
        "auto_to_plain_by_turn": by["auto"]["ratio_to_plain"],
        "auto_to_best_by_turn": statistics.median(auto / other for auto, other in pairs),
        "identical": all(row["identical"] for row in rows),
    }
    return found | {"passed": found["auto_to_plain"] >= TO_PLAIN and found["auto_to_best"] >= TO_BEST}


def measure(options: argparse.Namespace, heads: str, exits: Sequence[int]) -> Iterator[list[Row]]:
    """The rows of every prompt set and batch size."""
    for text in options.sets:
        name, _, place = text.partition("=")
        asked = {
            "model": heads, "prompts": {name: place or None}, "max_prompts": options.prompts, "batches": BATCHES,
            "max_new_tokens": options.max_new_tokens, "repeats": options.repeats, "contestants": contestants(exits),
            "dtype": "float32", "costs": False,
        }  # fmt: skip
        bench = Bench(BenchOptions.build(asked))
        bench.run()
        rows = bench.result()["rows"]
        yield from ([row for row in rows if row["batch"] == batch] for batch in BATCHES)


def line(found: dict[str, Any]) -> str:
    """A setting for a person."""
    speeds, best = found["tokens_per_s"], found["best"]
    return (
        f"{found['heads']:8} {found['prompt_set']:12} batch {found['batch']}  "
        f"plain {speeds['plain']:6.1f}  auto {speeds['auto']:6.1f}  best {best:9} {speeds[best]:6.1f} tokens/s  "
        f"auto/plain {found['auto_to_plain']:.3f} ({found['auto_to_plain_by_turn']:.3f})  "
        f"auto/best {found['auto_to_best']:.3f} ({found['auto_to_best_by_turn']:.3f})  "
        + ("passed" if found["passed"] else "FAILED")
        + ("" if found["identical"] else ", and its outputs differ")
    )


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every setting, printed and kept as soon as it is measured."""
    settings: list[dict[str, Any]] = []
    kept: list[Row] = []
    model = HiSpecModel.from_pretrained(options.heads, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        write_random(model, Path(folder) / "heads")
        exits, about = model.exits, machine.describe(model.trunk.device)
        del model
        for kind, heads in (("trained", options.heads), ("random", f"{folder}/heads")):
            for rows in measure(options, heads, exits):
                settings.append({"heads": kind, **judge(rows)})
                kept += [{"heads": kind, **row} for row in rows]
                print(line(settings[-1]), flush=True)
                if options.output is not None:
                    limits = {"auto_to_plain": TO_PLAIN, "auto_to_best": TO_BEST}
                    own = {"prompts": options.prompts, "max_new_tokens": options.max_new_tokens}
                    write_json(options.output, {"limits": limits, "settings": settings, "rows": kept, **own, **about})
    return settings


def summary(settings: Sequence[dict[str, Any]]) -> str:
    """Which settings failed, and by what."""
    lines = [
        f"FAILED: {s['heads']} heads, {s['prompt_set']}, batch {s['batch']}: {name} is {s[key]:.3f}, below {least}"
        for s in settings
        for key, name, least in (
            ("auto_to_plain", "auto/plain", TO_PLAIN),
            ("auto_to_best", f"auto/best ({s['best']})", TO_BEST),
        )
        if s[key] < least
    ]
    failed = sum(not s["passed"] for s in settings)
    return "\n".join([f"{len(settings)} settings, {len(settings) - failed} passed, {failed} failed", *lines])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", help="heads folder or Hub id")
    parser.add_argument("sets", nargs="*", default=SETS, help=f"prompt sets; default: {' '.join(SETS)}")
    parser.add_argument("--prompts", type=int, default=32, help="of each set")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args()
    try:
        settings = run(options)
    except HiSpecError as error:
        parser.error(str(error))
    print(summary(settings))


if __name__ == "__main__":
    main()
