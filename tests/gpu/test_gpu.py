"""What only a GPU can show: kernels, graphs, draft loop, compiled layers and the engine against fp32 on the CPU.

Needs torch, transformers, safetensors, triton, pytest, and pydantic; no network. Runs in a minute or two.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from decode_fixtures import PROMPTS, drain, make_engine, random_heads, wanted, with_heads
from tiny_models import F1, GQA, build
from transformers import LlamaConfig, LlamaForCausalLM

from hispec import Decoder, SamplingParams
from hispec.decode.blocks import BlockPool
from hispec.decode.compiled import compile_layers, uncompile
from hispec.decode.graphs import StaticDraft
from hispec.decode.runner import Eager, Exact, Graphed
from hispec.heads import Head
from hispec.trunk import Trunk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("default"),
]
Make = Callable[[Any], Eager]
RUNNERS: dict[str, Make] = {"eager": Eager, "graphs": Graphed, "exact": lambda cache: Exact(cache, record=True)}


def on_gpu(model: Any, dtype: torch.dtype = torch.float32) -> Trunk:
    return Trunk(model.to("cuda", dtype))


def run(
    own: Trunk, heads: Sequence[Head], windows: Sequence[int], make: Make, texts: Sequence[list[int]], n: int
) -> tuple[list[list[int]], Eager]:
    params = [SamplingParams(max_new_tokens=n)] * len(texts)
    engine = make_engine(own, heads, windows, texts, params, pool=BlockPool(256))
    engine.runner = runner = make(engine.cache)
    return drain(engine, len(texts)).ids, runner


def long_llama() -> Any:
    torch.manual_seed(0)
    config: Any = GQA | {"max_position_embeddings": 1024, "initializer_range": 0.3, "tie_word_embeddings": False}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    return model.eval()


@pytest.mark.parametrize("what", ["heads", "sizes", "edges", "windows", "splits", "padding", "offsets", "write"])
def test_kernels_equal_the_dense_reference(what: str) -> None:
    import kernel_checks

    next(check for check in kernel_checks.CHECKS if check.__name__ == what)()


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", F1)
def test_every_runner_gives_the_tokens_of_the_cpu_in_fp32(name: str, runner: str) -> None:
    own = on_gpu(build(name))
    for heads, windows in (([], (1,)), (random_heads(own, (2, 4), "block"), (2, 4))):
        ids, used = run(own, heads, windows, RUNNERS[runner], PROMPTS, 48)
        assert ids == wanted(name)
        if isinstance(used, Graphed):
            assert used.graphs.record, "a recording failed and passes fell back to single launches"
            assert not heads or any(isinstance(step, StaticDraft) for step in used.graphs._steps.values())


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_g24_graphs_and_compiled_layers_give_the_same_200_tokens(batch: int) -> None:
    own = on_gpu(long_llama())
    heads = random_heads(own, (2, 4), "mlp")
    texts = [[(7 * i + number) % 200 + 5 for i in range(3 + 40 * number)] for number in range(batch)]
    expected = run(own, [], (1,), Eager, texts, 200)[0]
    assert run(own, [], (1,), Graphed, texts, 200)[0] == expected
    assert run(own, heads, (2, 4), Graphed, texts, 200)[0] == expected
    if batch == 3:
        layers = compile_layers(own.layers)
        try:
            assert run(own, heads, (2, 4), Graphed, texts, 200)[0] == expected
        finally:
            uncompile(layers)


def test_g22_exact_is_bitwise_the_same_in_bf16() -> None:
    own = on_gpu(long_llama(), torch.bfloat16)
    texts = [[77] * 48, [5, 17, 101], list(range(40, 200))]
    plain = run(own, [], (1,), RUNNERS["exact"], texts, 64)[0]
    for text, ids in zip(texts, plain, strict=True):
        assert run(own, [], (1,), RUNNERS["exact"], [text], 64)[0] == [ids]
    for exits, windows in (((2,), (3,)), ((2, 4), (2, 4))):
        assert run(own, random_heads(own, exits, "block"), windows, RUNNERS["exact"], texts, 64)[0] == plain


def test_the_pool_takes_its_share_of_the_memory() -> None:
    model = with_heads(on_gpu(build("llama_gqa")), (2, 4))
    _, total = torch.cuda.mem_get_info()
    decoder = Decoder(model, policy="fixed:2,4", gpu_memory_utilization=0.5)
    try:
        [done] = decoder.generate([PROMPTS[2]], SamplingParams(max_new_tokens=48, ignore_eos=True))
        free, _ = torch.cuda.mem_get_info()
        assert done.ids == wanted("llama_gqa", [PROMPTS[2]])[0]
        assert 0.4 * total < total - free < 0.55 * total
    finally:
        decoder.close()


def test_dynamic_rope_is_decoded_without_graphs() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    torch.manual_seed(0)
    config: Any = GQA | {"initializer_range": 0.3, "rope_parameters": rope}
    model: Any = LlamaForCausalLM(LlamaConfig(**config))
    decoder = Decoder(with_heads(on_gpu(model.eval())), policy="fixed:2,4", kv_blocks=64)
    try:
        assert not isinstance(decoder._engine.runner, Graphed)
        assert len(decoder.generate([PROMPTS[2]], SamplingParams(max_new_tokens=8, ignore_eos=True))[0].ids) == 8
    finally:
        decoder.close()
