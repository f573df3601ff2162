"""bf16: near-ties may flip when passes have other row counts (G22), and never with exact=true."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from decode_fixtures import PROMPTS, Run, decoding, drain, make_engine, random_heads, trunk, wanted, with_heads
from tiny_models import build

from hispec import SamplingParams
from hispec.decode.cache import block_bytes, blocks_that_fit
from hispec.decode.hierarchy import make_cache, make_levels, stored
from hispec.decode.runner import Exact
from hispec.errors import CapacityError, ConfigError
from hispec.heads import Head
from hispec.trunk import Trunk

# A word 48 times over, and others.
TEXTS = [[77] * 48, *PROMPTS[1:4]]
N = 24
MODELS = ["llama_gqa", "qwen3", "gemma2", "opt_pre", "mistral_sw8"]
# A logit of these models is about 10 in size and bf16 keeps 8 bits; several layers of rounding are behind it.
TOLERANCE = 0.3


@lru_cache
def short(name: str) -> Trunk:
    model: Any = build(name)
    return Trunk(model.to(torch.bfloat16))


def run(own: Trunk, heads: Sequence[Head], windows: Sequence[int], texts: Sequence[list[int]], exact: bool) -> Run:
    engine = make_engine(own, heads, windows, texts, [SamplingParams(max_new_tokens=N)] * len(texts))
    if exact:
        engine.runner = Exact(engine.cache)
    return drain(engine, len(texts))


@pytest.mark.parametrize("name", MODELS)
def test_g22_exact_is_bitwise_the_same_whatever_batch_and_drafts(name: str) -> None:
    own = short(name)
    plain = run(own, [], (1,), TEXTS, exact=True).ids
    for number, text in enumerate(TEXTS):
        assert run(own, [], (1,), [text], exact=True).ids == [plain[number]]
    for exits, windows, kind in (((2,), (3,), "mlp"), ((2, 4), (2, 4), "block"), ((1, 2, 4), (1, 2, 3), "mlp")):
        heads = random_heads(own, exits, kind)  # type: ignore[arg-type]
        assert run(own, heads, windows, TEXTS, exact=True).ids == plain
        assert run(own, heads, windows, TEXTS[:2], exact=True).ids == plain[:2]


def test_g22_without_exact_bf16_differs_at_near_ties_only() -> None:
    flips = 0
    for name in MODELS:
        own = short(name)
        plain = run(own, [], (1,), TEXTS, exact=True).ids
        for heads, windows in (([], (1,)), (random_heads(own, (2, 4), "mlp"), (2, 4))):
            for text, ids, expected in zip(TEXTS, run(own, heads, windows, TEXTS, exact=False).ids, plain, strict=True):
                at = next((i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b), None)
                if at is not None:
                    flips += 1
                    logits_V = own.logits(torch.tensor(text + expected[:at]))[-1].float()
                    best = logits_V.max()
                    assert best - logits_V[ids[at]] < TOLERANCE and best - logits_V[expected[at]] < TOLERANCE
    assert flips, "if nothing ever flips, exact=true is not tested"


@pytest.mark.parametrize("name", ["llama_gqa", "opt_post_proj"])
def test_g22_fp32_needs_no_exactness(name: str) -> None:
    own = trunk(name)
    expected = wanted(name, TEXTS, N)
    assert run(own, [], (1,), TEXTS, exact=False).ids == expected
    assert run(own, random_heads(own, (2, 4), "block"), (2, 4), TEXTS, exact=True).ids == expected


def test_g22_exact_sampling_through_the_decoder() -> None:
    own = short("llama_gqa")
    params = [SamplingParams(max_new_tokens=16, temperature=0.9, seed=seed, ignore_eos=True) for seed in range(4)]
    texts = [[token % own.vocab_size for token in text] for text in TEXTS]
    with decoding(with_heads(own, (2, 4), "mlp"), exact=True) as decoder:
        together = [completion.ids for completion in decoder.generate(texts, params)]
    with decoding(with_heads(own), exits=(), exact=True) as plain:
        assert [plain.generate(t, p)[0].ids for t, p in zip(texts, params, strict=True)] == together


def test_exact_is_refused_where_the_batch_decides_on_rows() -> None:
    model = build("llama_gqa")
    model.config.num_experts = 4
    with pytest.raises(ConfigError, match=r"exact: not possible for 'llama'.*exact=false"):
        with decoding(with_heads(model), exact=True):
            pass


def test_share_of_gpu_memory_is_checked() -> None:
    for share in (0.0, 1.5, -1.0):
        with (
            pytest.raises(ConfigError, match="gpu_memory_utilization"),
            decoding(with_heads(trunk("llama_gqa")), gpu_memory_utilization=share),
        ):
            pass


def test_the_pool_takes_what_is_free_of_its_share() -> None:
    assert blocks_that_fit(free=70, total=100, utilization=0.9, block=6) == 9  # 60 bytes, one block of them for trash
    with pytest.raises(CapacityError, match=r"gpu_memory_utilization=0\.3"):
        blocks_that_fit(free=70, total=100, utilization=0.3, block=6)
    levels = make_levels(trunk("llama_gqa"), random_heads(trunk("llama_gqa"), (2,), "block"))
    cache = make_cache(levels, 3)
    held = sum(x.nbytes for x in (*cache.keys.values(), *cache.values.values()))
    assert held == 4 * block_bytes(stored(levels), torch.float32)
