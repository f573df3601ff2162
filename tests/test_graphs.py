"""Passes of fixed shape and the draft loop, run on a CPU as they are recorded on a GPU, equal passes as they come."""

import shutil
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_fixtures import (
    N_NEW,
    PROMPTS,
    FlakyHead,
    Run,
    assert_close,
    decode,
    decoding,
    drain,
    make_engine,
    random_heads,
    silenced,
    trunk,
    wanted,
    with_heads,
)
from tiny_models import VOCAB, build
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from hispec import SamplingParams
from hispec.decode.compiled import compile_layers, uncompile
from hispec.decode.feed import Part, bucket_of_blocks, make_feed
from hispec.decode.graphs import Graphs, StaticDraft, bucket, why_not
from hispec.decode.hierarchy import make_cache, make_levels
from hispec.decode.runner import Graphed
from hispec.errors import ConfigError
from hispec.heads import Head
from hispec.trunk import Trunk


def static(
    own: Trunk, heads: Sequence[Head], windows: Sequence[int], each: Sequence[SamplingParams], n: int = 5
) -> tuple[Run, Graphed]:
    """A run whose passes are of fixed shape wherever they can be, and the runner that knows which there were."""
    engine = make_engine(own, heads, windows, PROMPTS[:n], each[:n])
    engine.runner = runner = Graphed(engine.cache, record=False)
    return drain(engine, n), runner


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("name", ["llama_gqa", "opt_post_proj", "gemma2", "mistral_sw8"])
def test_g24_static_passes_give_the_same_tokens(name: str, batch: int) -> None:
    own, each = trunk(name), [SamplingParams(max_new_tokens=N_NEW)] * 5
    for heads, windows in (([], (1,)), (random_heads(own, (2, 4), "block"), (2, 4))):
        run, runner = static(own, heads, windows, each, batch)
        assert run.ids == wanted(name, PROMPTS[:batch])
        assert runner.graphs._steps, "passes of fixed shape were run"


@pytest.mark.parametrize("windows", [(1, 1), (2, 4), (5, 3)])
def test_g24_draft_loops_do_what_single_steps_do(windows: tuple[int, int]) -> None:
    own = Trunk(silenced("llama_gqa", 2))
    # One of them stops early, one draws: the first cuts a draft short, the second keeps its batch from the loop.
    each = [SamplingParams(max_new_tokens=n, stop_ids=[n + 90]) for n in (30, 11, 24, 7, 19)]

    def heads() -> list[Head]:
        return [FlakyHead(own, exit_, lambda call: call % 7 == 3) for exit_ in (2, 4)]

    run, runner = static(own, heads(), windows, each)
    loops = [step for step in runner.graphs._steps.values() if isinstance(step, StaticDraft)]
    assert max(step.n_drafts for step in loops) == windows[0]
    plain = decode(own, [], (1,), each=each)
    assert run.ids == plain.ids
    # The head errs at other calls here, so verdicts differ; without errors the very same passes are made.
    right = [FlakyHead(own, exit_) for exit_ in (2, 4)]
    looped = static(own, right, windows, each)[0]
    stepped = decode(own, right, windows, each=each)
    assert looped.rounds == stepped.rounds
    for loop, single in zip(looped.stats.levels, stepped.stats.levels, strict=True):
        # Where all texts end inside a loop, its last passes serve nobody.
        assert (loop.rows, loop.accepted, loop.rejected) == (single.rows, single.accepted, single.rejected)
        assert 0 <= loop.passes - single.passes <= 5


def test_g24_sequences_that_draw_are_not_in_the_draft_loop() -> None:
    own = trunk("llama_gqa")
    each = [SamplingParams(max_new_tokens=20, temperature=t, seed=3) for t in (0.0, 0.9, 0.0, 1.0, 0.7)]
    heads = random_heads(own, (2, 4), "mlp")
    run, runner = static(own, heads, (2, 4), each)
    assert run.ids == decode(own, heads, (2, 4), each=each).ids
    assert any(step.level.index > 0 for step in runner.graphs._steps.values())


def test_g24_reduced_vocabulary_and_missing_numbers_in_the_draft_loop() -> None:
    own, vocab_ids = trunk("llama_gqa"), torch.tensor([3, 5, 17, 40, 101, 150, 180, 203])
    each = [SamplingParams(max_new_tokens=24)] * 5
    run, _ = static(own, random_heads(own, (2,), "mlp", vocab_ids), (3,), each)
    assert run.ids == wanted("llama_gqa", n=24)
    [head] = random_heads(own, (2,), "mlp")
    with torch.no_grad():
        head.mlp.down.weight.fill_(float("nan"))
    engine = make_engine(own, [head], (3,), PROMPTS[:2], each[:2])
    engine.runner = Graphed(engine.cache, record=False)
    left = []
    while engine.busy:
        left += engine.step()
    assert {s.finish_reason for s in left} == {"error"} and "after layer 2 are not finite" in (left[0].error or "")
    assert engine.pool.n_free == engine.pool.n_blocks


def parts_of(ids: Sequence[Sequence[int]], tables: Sequence[list[int]], start: int = 0) -> list[Part]:
    return [Part(list(own), start, table) for own, table in zip(ids, tables, strict=True)]


@pytest.mark.parametrize("name", ["llama_gqa", "opt_pre", "gemma2"])
@torch.inference_mode()
def test_static_pass_with_padding_equals_the_packed_pass(name: str) -> None:
    """Three sequences in a step for four, of 3, 1 and 2 tokens in three rows, twice in the same buffers."""
    levels = make_levels(trunk(name), random_heads(trunk(name), (2,), "block"))
    tables = [[5, 2], [0, 3], [4, 1]]
    packed, padded = make_cache(levels, 6), make_cache(levels, 6)
    graphs = Graphs(padded, record=False)
    for start, ids in ((0, [[5, 17, 101], [9], [33, 150]]), (3, [[7], [8, 6], [11, 12, 13]])):
        hidden: Any = None
        for level in levels:
            parts = parts_of(ids, tables, start)
            if hidden is not None:
                pieces = torch.split(hidden, [len(own) for own in ids])
                parts = [p._replace(hidden_nD=own) for p, own in zip(parts, pieces, strict=True)]
            step = graphs.pass_of(level, parts)
            assert (step.batch, step.rows) == (4, 3)
            got_hidden, got_features = step.result()
            hidden, features = level.forward(*make_feed(packed, parts))
            assert_close(got_hidden, hidden)
            assert_close(got_features, features)
    for layer in packed.keys:
        own_slots = slice(0, packed.trash_slot)
        assert_close(padded.keys[layer][own_slots], packed.keys[layer][own_slots])
    assert padded.keys[0][padded.trash_slot].any() and not packed.keys[0][packed.trash_slot].any()


def test_buckets() -> None:
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]
    widths = [bucket_of_blocks([Part([1] * n, start, [])]) for n, start in ((1, 0), (1, 1023), (2, 1023), (1, 3000))]
    assert widths == [64, 64, 128, 256]


def test_models_that_cannot_be_recorded_say_why() -> None:
    def llama(**rope: Any) -> dict[str, Any]:
        return LlamaConfig(rope_parameters={"rope_theta": 1e4, "rope_type": "default"} | rope).to_dict()

    assert why_not(llama()) is None
    assert "dynamic" in (why_not(llama(rope_type="dynamic", factor=2.0)) or "")
    assert "longrope" in (why_not({"full": {"rope_type": "longrope"}}) or "")
    assert "experts" in (why_not({"num_experts": 8}) or "")


WAITS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}


class Watching(TorchFunctionMode):
    """Counts what makes the host wait for the device, and soft-maxes over the vocabulary."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.waits, self.soft_maxes = vocab_size, Counter[str](), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.waits[name] += name in WAITS
        self.soft_maxes += "softmax" in name and args[0].shape[-1] == self.vocab_size
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_p09_one_wait_per_reading_step_and_no_soft_max_when_greedy(temperature: float) -> None:
    own = trunk("llama_gqa")
    params = SamplingParams(max_new_tokens=20, temperature=temperature, seed=1, top_p=0.9)
    engine = make_engine(own, random_heads(own, (2, 4), "mlp"), (2, 4), PROMPTS[:3], [params] * 3)
    steps = 0
    while engine.busy:
        before = [level.passes for level in engine.stats.levels]
        with Watching(VOCAB) as seen:
            engine.step()
        steps += sum(level.passes for level in engine.stats.levels) - sum(before)
        assert seen.waits.total() <= 1, seen.waits
        if temperature == 0.0:
            assert seen.soft_maxes == 0
    assert steps > 20
    with Watching(VOCAB) as seen:
        torch.randn(2, VOCAB).softmax(-1).tolist()
    assert seen.waits.total() == 1 and seen.soft_maxes == 1, "the watch sees"


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("g++") is None or not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    reason="torch.compile needs a C++ compiler and Python's headers",
)
@pytest.mark.filterwarnings("default")  # importing the compiler warns
def test_g24_compiled_layers_give_the_same_tokens() -> None:
    own = Trunk(build("llama_gqa"))
    heads = random_heads(own, (2, 4), "mlp")
    layers = compile_layers(own.layers)
    try:
        graphs = counters["stats"]["unique_graphs"]
        assert decode(own, heads, (2, 4), PROMPTS[:3], 12).ids == wanted("llama_gqa", PROMPTS[:3], 12)
        # Before the attention, after it, and the layer around both; for one row, and for any number of them.
        assert 0 < counters["stats"]["unique_graphs"] - graphs <= 8, "layers do not share their graphs"
    finally:
        uncompile(layers)
    graphs = counters["stats"]["unique_graphs"]
    assert decode(own, [], (1,), PROMPTS[:1], 4).ids == wanted("llama_gqa", PROMPTS[:1], 4)
    assert counters["stats"]["unique_graphs"] == graphs


def test_compile_is_refused_on_a_cpu() -> None:
    with (
        pytest.raises(ConfigError, match="compile: the model is on a CPU.*leave it out"),
        decoding(with_heads(trunk("llama_gqa")), compile=True),
    ):
        pass
