"""Checks of test_kernels that need Triton's interpreter: a tiny llama decoded through the kernels; a line for each."""

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from decode_fixtures import Run, drain, make_engine, random_heads
from tiny_models import VOCAB
from transformers import LlamaConfig, LlamaForCausalLM

from hispec import SamplingParams
from hispec.decode.blocks import BlockPool
from hispec.decode.graphs import StaticDraft
from hispec.decode.runner import Eager, Graphed
from hispec.heads import Head
from hispec.trunk import Trunk

torch.set_num_threads(1)
# The second is longer than one split of the keys.
PROMPTS = [[5, 17, 101], [(7 * i) % 200 + 5 for i in range(265)], list(range(40, 60))]
PARAMS = [SamplingParams(max_new_tokens=5), SamplingParams(max_new_tokens=4), SamplingParams(max_new_tokens=6)]


def tiny() -> Trunk:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=False,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    return Trunk(model.eval())


OWN = tiny()
HEADS = random_heads(OWN, (1, 2), "block")


def run(heads: Sequence[Head], windows: Sequence[int], kernels: bool, static: bool) -> tuple[Run, Eager]:
    """All prompts, in pieces of 100 tokens, from a pool that makes one of them wait."""
    engine = make_engine(OWN, heads, windows, PROMPTS, PARAMS, pool=BlockPool(19))
    engine.prefill_chunk = 100
    engine.cache.kernels = kernels
    runner = Graphed(engine.cache, record=False) if static else Eager(engine.cache)
    engine.runner = runner
    return drain(engine, len(PROMPTS)), runner


def compare(heads: Sequence[Head], windows: Sequence[int], static: bool) -> Eager:
    expected = run(heads, windows, kernels=False, static=False)[0]
    got, runner = run(heads, windows, kernels=True, static=static)
    assert got.ids == expected.ids, (got.ids, expected.ids)
    assert got.rounds == expected.rounds
    return runner


def engine() -> None:
    compare(HEADS, (2, 3), static=False)


def graphs() -> None:
    runner = compare([], (1,), static=True)
    assert isinstance(runner, Graphed) and runner.graphs._steps


def drafts() -> None:
    runner = compare(HEADS, (2, 3), static=True)
    assert isinstance(runner, Graphed)
    assert any(isinstance(step, StaticDraft) for step in runner.graphs._steps.values())


if __name__ == "__main__":
    for check in (engine, graphs, drafts):
        try:
            check()
            print(f"{check.__name__}: as wanted")
        except Exception:  # the others are still worth knowing
            traceback.print_exc()
