"""hispec-bench: the same prompts through Hugging Face's generate, plain decoding, one exit and two, side by side."""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field
from tqdm import tqdm

from hispec.config import Config, field_help, parse_assignments
from hispec.errors import DataError, FileError, command

if TYPE_CHECKING:
    from hispec.decode.decoder import Decoder
    from hispec.model import HiSpecModel

HELP = """\
hispec-bench: how fast a model's heads make it, measured against plain decoding and Hugging Face's generate.

  hispec-bench model=runs/quickstart/heads output=result.json

Every prompt goes through all contestants before the next one does, in one process, so that their ratios mean something
on a machine that is not quiet. Decoding is greedy; outputs are compared token by token with those of plain decoding.

options (key=value):
"""


class BenchOptions(Config):
    """What hispec-bench understands."""

    model: str
    """Heads folder or Hub id."""
    prompts: str | None = None
    """JSONL file with "prompt" lines; null: held-out prompts that come with hispec."""
    max_prompts: int = Field(default=16, ge=1)
    """Prompts used, from the start of the file."""
    max_new_tokens: int = Field(default=128, ge=1)
    """Tokens generated per prompt, less where the model stops by itself."""
    template: bool = True
    """Wrap each prompt as a user's message in the model's chat template, if it has one."""
    one_exit: str = "fixed:1"
    """Policy of single-layer speculation, which drafts at the shallowest exit; short drafts suit weak exits."""
    two_exits: str = "fixed:1,1"
    """Policy of hierarchical decoding with all exits; the paper's is fixed:2,4."""
    hf: bool = True
    """Measure Hugging Face's generate too."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; null: torch's default."""
    output: str | None = None
    """JSON file for the table."""


@dataclass
class Contestant:
    """One way to decode, and what it has done so far."""

    name: str
    run: Callable[[list[int]], list[int]]
    decoder: "Decoder | None" = None
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[int]] = field(default_factory=list)
    judged: list[list[int]] = field(default_factory=list)
    """Per level above the first: accepted, rejected."""
    full: list[int] = field(default_factory=lambda: [0, 0])
    """Tokens after the first of each prompt, and verdicts of the last level."""

    def measure(self, prompt: list[int], keep: bool = True) -> None:
        """Decode one prompt and add it up."""
        start = time.perf_counter()
        ids = self.run(prompt)
        seconds = time.perf_counter() - start
        if not keep:
            return
        self.seconds.append(seconds)
        self.outputs.append(ids)
        if self.decoder is not None:
            stats = self.decoder.stats
            counts = [[level.accepted, level.rejected] for level in stats.levels[1:]]
            before = self.judged or [[0, 0]] * len(counts)
            self.judged = [[a + c, r + d] for (a, r), (c, d) in zip(before, counts, strict=True)]
            self.full = [self.full[0] + stats.verified, self.full[1] + stats.verdicts]

    def row(self, plain: "Contestant") -> dict[str, Any]:
        """The contestant's line of the table."""
        tokens = sum(map(len, self.outputs))
        return {
            "contestant": self.name,
            "tokens_per_s": tokens / sum(self.seconds),
            "ratio_to_plain": sum(plain.seconds) / sum(self.seconds),
            "ratio_per_prompt": [p / s for p, s in zip(plain.seconds, self.seconds, strict=True)],
            "identical": self.outputs == plain.outputs,
            "acceptance": [accepted / max(1, accepted + rejected) for accepted, rejected in self.judged],
            "tokens_per_full_pass": self.full[0] / self.full[1] if self.full[1] else None,
        }


@command
def main(arguments: list[str]) -> None:
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        print(HELP + field_help(BenchOptions), end="")
        return
    options = BenchOptions.build(parse_assignments(arguments, BenchOptions))
    result = run(options)
    print(table(result))
    if options.output is not None:
        write_json(Path(options.output), result)


def run(options: BenchOptions) -> dict[str, Any]:
    """Measure, and return the table as data."""
    import torch

    from hispec.decode.prompts import chat_ids
    from hispec.model import HiSpecModel

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    model = HiSpecModel.from_pretrained(options.model)
    tokenizer = model.tokenizer
    texts = read_texts(options)
    wrap = options.template and tokenizer.chat_template is not None
    prompts = [
        chat_ids(tokenizer, [{"role": "user", "content": t}]) if wrap else list(tokenizer(t).input_ids) for t in texts
    ]
    contestants = _contestants(model, options)
    for contestant in contestants:
        contestant.measure(prompts[0], keep=False)
    for number, prompt in enumerate(tqdm(prompts, desc="bench", unit="prompt", disable=None)):
        # Who goes first changes, so that no one always runs on the others' warm caches.
        turn = number % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            contestant.measure(prompt)
    plain = next(c for c in contestants if c.name == "plain")
    return {
        "results": [contestant.row(plain) for contestant in contestants],
        "model": options.model,
        "base": model.base,
        "exits": list(model.exits),
        "policies": {"one_exit": options.one_exit, "two_exits": options.two_exits},
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "batch": 1,
        "dtype": str(model.trunk.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "machine": {"processor": _processor(), "cores": os.cpu_count(), "system": platform.platform()},
        "versions": {name: metadata.version(name) for name in ("hispec", "torch", "transformers")},
    }


def _contestants(model: "HiSpecModel", options: BenchOptions) -> list[Contestant]:
    from hispec.decode.decoder import Decoder
    from hispec.decode.request import SamplingParams

    params = SamplingParams(max_new_tokens=options.max_new_tokens)
    ways: list[tuple[str, tuple[int, ...], str]] = [("plain", (), "fixed:1")]
    if model.exits:
        ways.append(("one_exit", model.exits[:1], options.one_exit))
    if len(model.exits) > 1:
        ways.append(("two_exits", model.exits, options.two_exits))
    contestants = [_hf(model, options)] if options.hf else []
    for name, exits, policy in ways:
        # Nobody is to profit from prompts that begin alike.
        decoder = Decoder(model, exits=exits, policy=policy, max_batch=1, prefix_cache=False)
        contestants.append(Contestant(name, lambda p, d=decoder: d.generate([p], params)[0].ids, decoder))  # type: ignore[misc]
    return contestants


def _hf(model: "HiSpecModel", options: BenchOptions) -> Contestant:
    """Hugging Face's generate on its own copy of the model, as a user would call it."""
    import torch

    from hispec.base import load_base

    own: Any = load_base(model.base, model.revision, model.trunk.dtype, model.trunk.device)[0]

    def run(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=own.device)
        out = own.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=options.max_new_tokens, do_sample=False
        )
        return list(out[0, len(prompt) :].tolist())

    return Contestant("hf", run)


def read_texts(options: BenchOptions) -> list[str]:
    """The prompts to measure on.

    Raises:
        FileError, DataError: the file cannot be used.
    """
    if options.prompts is None:
        from hispec.recipes import read_recipe_file

        texts = yaml.safe_load(read_recipe_file("prompts/everyday.yaml"))["held_out"]
    else:
        from hispec.decode.prompts import read_prompts

        rows = read_prompts(Path(options.prompts), {})
        if bad := [row.line for row in rows if row.source != "prompt"]:
            raise DataError(f'{options.prompts}:{bad[0]}: hispec-bench takes lines with "prompt"')
        texts = [row.content for row in rows]
    return list(texts[: options.max_prompts])


def table(result: dict[str, Any]) -> str:
    """The result for a person."""
    lines = [
        f"{result['base']}, exits {result['exits']}, {result['prompts']} prompts, up to {result['max_new_tokens']}"
        f" tokens, batch 1, {result['dtype']}, {result['threads']} threads, {result['machine']['processor']}",
        "",
        f"{'':10} {'tokens/s':>9} {'vs plain':>9} {'spread':>13} {'accepted per level':>20}"
        f" {'tokens/full pass':>17} {'identical':>10}",
    ]
    for row in result["results"]:
        ratios = sorted(row["ratio_per_prompt"])
        quarter = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        accepted = " ".join(f"{share:.0%}" for share in row["acceptance"]) or "-"
        per_pass = "-" if row["tokens_per_full_pass"] is None else f"{row['tokens_per_full_pass']:.2f}"
        spread = f"{quarter[0]:.2f}..{quarter[2]:.2f}"
        lines.append(
            f"{row['contestant']:10} {row['tokens_per_s']:9.1f} {row['ratio_to_plain']:8.2f}x {spread:>13}"
            f" {accepted:>20} {per_pass:>17} {'yes' if row['identical'] else 'NO':>10}"
        )
    return "\n".join(lines)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write under a temporary name, then rename."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        raise FileError(f"output: cannot write {path}: {error.strerror}; choose another place") from None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
