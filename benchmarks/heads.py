"""What makes heads good: every lever alone, against the same baseline.

    hispec-train recipe=smollm2-135m                                  writes the text that all of them learn from
    python benchmarks/heads.py runs/quickstart [--only "kind mlp" ...] [--tokens 40000] [--output levers.json]

A lever is a change of one setting of that run. Each gets the same text and as many tokens, then is measured twice: how
often its heads agree with the full model on text held apart, and what real decoding makes of them (float32, batch 1,
packaged prompts, against plain decoding in the same turns; auto without lookup, which needs no heads). What the trunk
computes is kept, so that a lever costs what its heads cost. Prints a table as in recipes/README.md.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from hispec.attention import PackedAttention
from hispec.decode.bench_options import read_options
from hispec.decode.bench_run import Bench
from hispec.decode.results import write_json
from hispec.errors import FileError, HiSpecError
from hispec.train.cli import load
from hispec.train.data import Document, MicroBatch
from hispec.train.evaluate import agreement
from hispec.train.features import FeatureCache
from hispec.train.loop import Training, n_steps
from hispec.train.masks import everywhere

# Settings that differ from the baseline, by the name they have in the table.
LEVERS: dict[str, list[str]] = {
    "baseline": [],
    "kind norm": ["heads=[{kind: norm, vocab_size: 4096}, {kind: norm, vocab_size: 4096}]"],
    "kind mlp": ["heads=[{kind: mlp, vocab_size: 4096}, {kind: mlp, vocab_size: 4096}]"],
    "vocabulary 2,048": ["heads=[{kind: block, vocab_size: 2048}, {kind: block, vocab_size: 2048}]"],
    "vocabulary 16,384": ["heads=[{kind: block, vocab_size: 16384}, {kind: block, vocab_size: 16384}]"],
    "loss tv": ["train.loss={kl: 0.0, tv: 1.0}"],
    "loss acceptance": ["train.loss={kl: 0.0, acceptance: 1.0}"],
    "loss kl, annealed to acceptance": ["train.loss={kl: 1.0, final: {acceptance: 1.0}}"],
    "loss ce on the text": ["train.loss={kl: 0.0, ce: 1.0}"],
    "teacher: the next level": ["train.loss={kl: 1.0, teacher: next}"],
    "teacher: half of each": ["train.loss={kl: 1.0, teacher: 0.5}"],
    "learn from answers only": ["data.learn_from=answers"],
    "half the tokens, twice the epochs": ["train.epochs=4", "tokens=0.5"],
    "twice the tokens, half the epochs": ["train.epochs=1", "tokens=2"],
    "twice the epochs": ["train.epochs=4"],
    "learning rate 1e-3": ["train.lr=1e-3"],
    "no weight decay": ["train.weight_decay=0.0"],
    "muon": ["train.optimizer=muon", "train.lr=1e-3"],
    "exits 4, 20": ["exits=[4,20]"],
    "exits 2, 8": ["exits=[2,8]"],
    "exits 2, 16": ["exits=[2,16]"],
    "exits 8, 16": ["exits=[8,16]"],
}
ALL_EXITS = [2, 4, 8, 16, 20]
# Micro batches at the end of the text that no lever learns from.
HELD_APART = 8


def train(run_dir: Path, folder: Path, words: list[str], tokens: int) -> tuple[Training, float]:
    """Train a lever; also returns the minutes that its heads took."""
    share = [word for word in words if word.startswith("tokens=")]
    changes = [word for word in words if word not in share]
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("answers", "own_prompts", "tokens"):
        if (run_dir / name).exists() and not (folder / name).exists():
            (folder / name).symlink_to((run_dir / name).resolve())
    run = Training(load(["recipe=smollm2-135m", "train.epochs=2", *changes, f"run_dir={folder}", "resume=never"]))
    run.cache = FeatureCache(folder.parent / "features", run.model.trunk, ALL_EXITS)
    learned, held_apart = run.batches[:-HELD_APART], [at_every_position(batch) for batch in run.batches[-HELD_APART:]]
    wanted = tokens * float(share[0].partition("=")[2]) if share else tokens
    n = 0
    while n < len(learned) and sum(sum(batch.lengths) for batch in learned[:n]) < wanted:
        n += 1
    run.batches = learned[:n]
    for batch in [*run.batches, *held_apart]:
        run.cache.get(batch)
    run.order = lambda place: place % n
    run.steps = n_steps(run.config.train, n, run.per_step)
    start = time.perf_counter()
    while run.step < run.steps:
        run.train_step()
    minutes = (time.perf_counter() - start) / 60
    run.batches = held_apart
    return run, minutes


def at_every_position(batch: MicroBatch) -> MicroBatch:
    """The same documents, measured at every position, wherever heads learn."""
    return MicroBatch(tuple(Document(own.ids, everywhere(len(own.ids))) for own in batch.documents))


@torch.no_grad()
def agreements(run: Training) -> list[float]:
    """Per exit, how often its head says what the full model says, on the text held apart."""
    run._load_heads()
    found = []
    for head in run.model.heads_list:
        good = seen = 0
        for batch in run.batches:
            features = run.cache.get(batch)
            attend = PackedAttention(batch.lengths)
            state_TD = head.features(features.hidden[head.exit], batch.ids_T, batch.positions_T, attend)
            good += agreement(head, state_TD[batch.rows_S], features.truth)[0]
            seen += len(batch.rows_S)
        found.append(good / seen)
    return found


def decode(heads: Path, prompts: int, new_tokens: int, threads: int) -> list[dict[str, Any]]:
    """Rows of hispec-bench."""
    words = f"""model={heads} prompts=[held_out] max_prompts={prompts} max_new_tokens={new_tokens} repeats=1
        contestants=[plain,one_exit,two_exits,auto] contestants.auto.lookup=false dtype=float32 threads={threads}
        costs=false"""
    bench = Bench(read_options(words.split()))
    bench.run()
    rows: list[dict[str, Any]] = bench.result()["rows"]
    return rows


def measure(name: str, words: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    folder = arguments.folder / name.replace(" ", "-").replace(",", "").replace(":", "")
    run, minutes = train(arguments.run_dir, folder, words, arguments.tokens)
    found = agreements(run)
    run.model.save_pretrained(folder / "heads")
    exits = list(run.model.exits)
    del run
    rows = decode(folder / "heads", arguments.prompts, arguments.new_tokens, arguments.threads)
    by = {row["contestant"]: row for row in rows}
    return {
        "lever": name,
        "settings": words,
        "exits": exits,
        "agreement": found,
        "minutes": minutes,
        "acceptance": {who: by[who]["acceptance"] for who in ("one_exit", "two_exits")},
        "ratio_to_plain": {who: by[who]["ratio_to_plain"] for who in ("one_exit", "two_exits", "auto")},
        "identical": all(row["identical"] for row in rows),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = "lever, exits, agreement, accepted (one exit), accepted (two exits), one exit, two exits, auto, minutes"
    columns = names.split(", ")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        percents = " / ".join(f"{value:.0%}" for value in row["agreement"])
        one, two = (
            " / ".join("-" if value is None else f"{value:.0%}" for value in row["acceptance"][who])
            for who in ("one_exit", "two_exits")
        )
        speeds = " | ".join(f"{row['ratio_to_plain'][who]:.2f}x" for who in ("one_exit", "two_exits", "auto"))
        exits = ", ".join(map(str, row["exits"]))
        lines.append(f"| {row['lever']} | {exits} | {percents} | {one} | {two} | {speeds} | {row['minutes']:.1f} |")
    return "\n".join(lines)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every lever that is asked for, kept as soon as it is measured."""
    rows = []
    for name in arguments.only or LEVERS:
        rows.append(measure(name, LEVERS[name], arguments))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        if arguments.output is not None:
            write_json(arguments.output, {"levers": rows})
    return rows


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, help="finished run of hispec-train, whose text is used")
    parser.add_argument("--folder", type=Path, default=Path("runs/levers"), help="of the levers' own runs")
    parser.add_argument("--only", nargs="+", choices=LEVERS, metavar="LEVER", help="some of: " + "; ".join(LEVERS))
    parser.add_argument("--tokens", type=int, default=40_000, help="of text, each seen twice")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        if not (arguments.run_dir / "answers").is_dir():
            raise FileError(f"{arguments.run_dir} holds no answers; give the run_dir of a run of recipe=smollm2-135m")
        print(table(run(arguments)))
    except HiSpecError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
