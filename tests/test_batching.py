"""Rows of a batch do not see each other, and every block of the pool comes back."""

import random

import pytest
import torch
from decode_fixtures import (
    N_BLOCKS,
    PROMPTS,
    FlakyHead,
    byte_tokenizer,
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

from hispec import SamplingParams
from hispec.decode.blocks import BLOCK_SIZE, BlockPool, blocks_for, is_contiguous, slots
from hispec.decode.cache import PagedAttention, Rows
from hispec.decode.engine import Engine
from hispec.decode.hierarchy import make_cache, make_levels
from hispec.errors import CapacityError, RequestError
from hispec.heads import Head
from hispec.trunk import Trunk

LENGTHS = (1, 3, 8, 17, 40)
LIMITS = (3, 10, 48, 5, 20)


@pytest.mark.parametrize("name", ["llama_gqa", "opt_pre", "mistral_sw8"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b01_rows_accept_different_numbers_of_tokens(name: str, temperature: float) -> None:
    own = Trunk(silenced(name, 2))
    prompts = [[(7 * i + n) % 200 + 5 for i in range(n)] for n in LENGTHS]
    each = [SamplingParams(max_new_tokens=n, temperature=temperature, seed=n) for n in LIMITS]

    def heads() -> list[Head]:
        return [FlakyHead(own, exit_, lambda call: call % 5 in (1, 3)) for exit_ in (2, 4)]

    run = decode(own, heads(), (3, 4), prompts, each=each)
    assert [len(ids) for ids in run.ids] == list(LIMITS)
    for prompt, params, ids in zip(prompts, each, run.ids, strict=True):
        assert decode(own, heads(), (3, 4), [prompt], each=[params]).ids == [ids]
        assert decode(own, [], (1,), [prompt], each=[params]).ids == [ids]


@pytest.mark.parametrize("name", ["llama_gqa", "opt_pre"])
def test_b02_padding_has_no_influence(name: str) -> None:
    prompts = [list(range(20, 20 + n)) for n in (3, 9, 17)]
    with decoding(with_heads(trunk(name), (2, 4))) as decoder:
        for side in ("left", "right"):
            byte_tokenizer().padding_side = side
            got = decoder.generate(prompts, SamplingParams(max_new_tokens=16, ignore_eos=True))
            assert [completion.ids for completion in got] == wanted(name, prompts, 16)


def test_b03_a_neighbours_ids_do_not_reach_a_row() -> None:
    own, levels = trunk("llama_gqa"), make_levels(trunk("llama_gqa"), [])
    tables = [[0, 5], [1, 2], [4, 3]]

    @torch.inference_mode()
    def logits(others: int) -> torch.Tensor:
        attend = PagedAttention(make_cache(levels, 6), [Rows(table, 0, 20) for table in tables])
        ids_T = torch.cat([torch.arange(20) + 5, torch.arange(40) * others % 200 + 5])
        return own.unembed(own.features(own.run(ids_T, torch.arange(20).repeat(3), 0, own.n_layers, attend)))

    one, two = logits(1), logits(7)
    assert torch.equal(one[:20], two[:20]) and not torch.equal(one[20:], two[20:])
    torch.testing.assert_close(one[:20], own.logits(torch.arange(20) + 5), rtol=0, atol=1e-4)


def test_b03_alone_or_among_eight_is_the_same() -> None:
    own, heads = trunk("qwen3"), random_heads(trunk("qwen3"), (2, 4), "block")
    prompts = [*PROMPTS, [60] * 15, [61] * 16, [62] * 17]
    run = decode(own, heads, (2, 4), prompts, 16)
    assert run.ids == [decode(own, heads, (2, 4), [prompt], 16).ids[0] for prompt in prompts]


def test_b06_blocks_are_reused_in_any_order() -> None:
    own, shuffle = trunk("llama_gqa"), random.Random(0)
    heads = random_heads(own, (2, 4), "block")
    prompts = [PROMPTS[3], [5], PROMPTS[2], list(range(60, 100)), [5, 17], list(range(9, 30))]
    each = [SamplingParams(max_new_tokens=n) for n in (4, 30, 3, 20, 12, 8)]
    expected = [ids[: p.max_new_tokens] for ids, p in zip(wanted("llama_gqa", prompts, 30), each, strict=True)]
    for _ in range(5):
        pool = BlockPool(9)  # room for about two of them at a time, in holes that others left
        taken = pool.allocate(9)
        shuffle.shuffle(taken)
        pool._blank = taken  # the pool itself keeps neighbours together; here it may not
        engine = make_engine(own, heads, (2, 3), prompts, each, pool=pool)
        assert drain(engine, len(prompts)).ids == expected


def test_waiting_requests_join_as_others_leave() -> None:
    own = trunk("llama_gqa")
    each = [SamplingParams(max_new_tokens=n) for n in (12, 3, 9, 5, 7)]
    for max_batch in (1, 2, 4):
        engine = make_engine(own, random_heads(own, (2,), "mlp"), (2,), PROMPTS, each, max_batch=max_batch)
        widest = 0
        got: list[list[int]] = [[] for _ in PROMPTS]
        for sequence, tokens in engine.run():
            widest = max(widest, len(engine.live))
            got[sequence.index] += tokens
        assert widest <= max_batch
        assert got == [ids[: p.max_new_tokens] for ids, p in zip(wanted("llama_gqa"), each, strict=True)]


# B09: every block comes back.


def free(engine: Engine) -> int:
    return engine.pool.n_free


def test_b09_an_abandoned_run_gives_its_blocks_back() -> None:
    own = trunk("llama_gqa")
    for after in (1, 2, 7):
        engine = make_engine(
            own, random_heads(own, (2,), "mlp"), (2,), PROMPTS, [SamplingParams(max_new_tokens=20)] * 5
        )
        running = engine.run()
        for _, _ in zip(range(after), running, strict=False):
            assert free(engine) < N_BLOCKS
        running.close()  # type: ignore[attr-defined]
        assert free(engine) == N_BLOCKS and not (engine.live or engine.queue)


class NanHead(FlakyHead):
    def logits(self, features_TD: torch.Tensor) -> torch.Tensor:
        logits_TV = super().logits(features_TD)
        return logits_TV * float("nan") if self.calls > 5 else logits_TV


def test_b09_a_failure_gives_its_blocks_back() -> None:
    own = trunk("llama_gqa")
    engine = make_engine(own, [NanHead(own, 6)], (2,), PROMPTS, [SamplingParams(max_new_tokens=20)] * 5)
    drain(engine, 5)
    assert engine.stats.finish_reasons == {"error": 5} and free(engine) == N_BLOCKS


class FullHead(FlakyHead):
    def logits(self, features_TD: torch.Tensor) -> torch.Tensor:
        super().logits(features_TD)
        raise torch.OutOfMemoryError("Tried to allocate 2 GiB")


def test_b09_out_of_memory_names_what_to_lower_and_gives_its_blocks_back() -> None:
    own = trunk("llama_gqa")
    engine = make_engine(own, [FullHead(own, 2)], (2,), PROMPTS, [SamplingParams(max_new_tokens=20)] * 5)
    with pytest.raises(CapacityError, match="out of memory .* lower max_batch=8, prefill_chunk=512 or kv_blocks=64"):
        drain(engine, 5)
    assert free(engine) == N_BLOCKS and not engine.busy


def test_b09_a_decoder_goes_on_after_calls_that_were_given_up() -> None:
    with decoding(with_heads(trunk("llama_gqa"), (2, 4))) as decoder:
        params = SamplingParams(max_new_tokens=16, ignore_eos=True)
        assert len(decoder.generate(PROMPTS, params)) == 5
        total = decoder._engine.pool.n_blocks
        for n in range(4):
            tokens = decoder.stream_ids(PROMPTS[2], params)
            assert [next(tokens) for _ in range(n)] == wanted("llama_gqa")[2][:n]
            tokens.close()  # type: ignore[attr-defined]
            assert decoder._engine.pool.n_free == decoder._engine.pool.n_blocks == total
        with pytest.raises(RequestError):
            decoder.generate([[5], []], params)
        assert [c.ids for c in decoder.generate(PROMPTS, params)] == wanted("llama_gqa", PROMPTS, 16)
        assert decoder._engine.pool.n_free == total


def test_a_request_that_the_pool_never_holds_is_refused() -> None:
    with decoding(with_heads(trunk("llama_gqa")), kv_blocks=2) as decoder:
        with pytest.raises(CapacityError, match="request 1 needs 3 KV blocks, the pool has 2; raise kv_blocks"):
            decoder.generate([[5], PROMPTS[3]], SamplingParams(max_new_tokens=9))
        assert len(decoder.generate([[5], [6], [7]], SamplingParams(max_new_tokens=20, ignore_eos=True))) == 3


# The pool itself.


def test_blocks_and_slots() -> None:
    assert [blocks_for(n) for n in (1, 16, 17, 32, 33)] == [1, 1, 2, 2, 3]
    assert slots([4, 1], 14, 18) == [4 * BLOCK_SIZE + 14, 4 * BLOCK_SIZE + 15, BLOCK_SIZE, BLOCK_SIZE + 1]
    assert (
        is_contiguous([3]) and is_contiguous([3, 4, 5]) and not is_contiguous([3, 5, 4]) and not is_contiguous([4, 3])
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_pool_never_gives_a_block_twice_and_loses_none(seed: int) -> None:
    chance = random.Random(seed)
    pool, held = BlockPool(24), list[list[int]]()
    for _ in range(200):
        if held and chance.random() < 0.5:
            pool.free(held.pop(chance.randrange(len(held))))
        else:
            n = chance.randint(1, 6)
            if n <= pool.n_free:
                held.append(pool.allocate(n))
                assert len(held[-1]) == n
            else:
                with pytest.raises(CapacityError, match=f"{n} blocks wanted, {pool.n_free} of 24 are free"):
                    pool.allocate(n)
        blocks = [block for own in held for block in own]
        assert len(blocks) == len(set(blocks)) == 24 - pool.n_free and set(blocks) <= set(range(24))
    for own in held:
        pool.free(own)
    assert pool.n_free == 24 and is_contiguous(pool.allocate(24))


def test_the_pool_prefers_neighbours_and_refuses_a_block_given_back_twice() -> None:
    pool = BlockPool(6)
    one, two, three = pool.allocate(1), pool.allocate(2), pool.allocate(1)
    pool.free(one)
    assert is_contiguous(pool.allocate(2)), "not blocks 0 and 4"
    pool.free(three)
    with pytest.raises(AssertionError, match="was free already"):
        pool.free(three)
    pool.free(two)
