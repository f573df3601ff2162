"""Requests join, wait, give up their blocks, share prefixes and leave: none of it shows in what they say."""

import random
from functools import cache
from typing import Any

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
from tiny_models import build
from torch import nn

from hispec import Completion, Decoder, HiSpecModel, SamplingParams
from hispec.decode.blocks import BLOCK_SIZE, BlockPool
from hispec.decode.stats import Stats
from hispec.heads import Head
from hispec.trunk import Trunk

LONG = [[(7 * i + k) % 200 + 5 for k in range(n)] for i, n in enumerate((40, 33, 20, 60, 5, 48))]


# B07: a pool that is too small.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama_gqa", "opt_pre"])
def test_b07_preempted_requests_lose_nothing(name: str, temperature: float) -> None:
    own = Trunk(silenced(name, 2))
    prompts = LONG[:3] + LONG[4:5] + [[9, 8], [17]]
    each = [SamplingParams(max_new_tokens=64, temperature=temperature, seed=n) for n in range(6)]

    def heads() -> list[Head]:
        return [FlakyHead(own, exit_, lambda call: call % 5 == 2) for exit_ in (2, 4)]

    calm = decode(own, heads(), (2, 3), prompts, each=each)
    engine = make_engine(own, heads(), (2, 3), prompts, each, pool=BlockPool(16))
    run = drain(engine, 6)
    assert run.ids == calm.ids and [len(ids) for ids in run.ids] == [64] * 6
    assert engine.stats.preemptions > 0 and calm.stats.preemptions == 0
    assert run.stats.tokens == calm.stats.tokens == 6 * 64


def test_b07_rejection_sampling_keeps_the_tokens_it_has_drawn() -> None:
    own = trunk("llama_gqa")
    each = [SamplingParams(max_new_tokens=40, temperature=1.0, seed=n, rule="rejection") for n in range(4)]
    engine = make_engine(own, random_heads(own, (2, 4), "block"), (2, 3), LONG[:4], each, pool=BlockPool(12))
    known: dict[int, list[int]] = {}
    preempt = engine._preempt

    def watched(sequence: object) -> None:
        known[id(sequence)] = list(sequence.ids)  # type: ignore[attr-defined]
        preempt(sequence)  # type: ignore[arg-type]
        assert sequence.ids == known[id(sequence)]  # type: ignore[attr-defined]

    engine._preempt = watched  # type: ignore[method-assign]
    drain(engine, 4)
    assert known


def test_admission_takes_back_what_others_hold_for_later() -> None:
    own = trunk("llama_gqa")
    params = SamplingParams(max_new_tokens=60)
    engine = make_engine(own, [], (1,), [[5], [6], [7]], [params] * 3, pool=BlockPool(5))
    engine.step()
    assert len(engine.live) == 3, "each needs four blocks one day, and one now"
    drain(engine, 3)


# Prompts in pieces.


@pytest.mark.parametrize("chunk", [1, 7, 16, 50])
@pytest.mark.parametrize("exits", [(), (2,), (2, 4)])
def test_a_prompt_in_pieces_is_the_same_prompt(exits: tuple[int, ...], chunk: int) -> None:
    own = trunk("llama_gqa")
    for kind in ("mlp", "block"):
        engine = make_engine(
            own, random_heads(own, exits, kind), (2, 3), PROMPTS, [SamplingParams(max_new_tokens=9)] * 5
        )
        engine.prefill_chunk = chunk
        assert drain(engine, 5).ids == wanted("llama_gqa", PROMPTS, 9)


def test_a_long_prompt_does_not_stall_the_others() -> None:
    own = trunk("llama_gqa")
    engine = make_engine(own, [], (1,), [[5], LONG[3]], [SamplingParams(max_new_tokens=30)] * 2)
    engine.prefill_chunk = 5
    short, long = list(engine.queue)
    while long.prefilling:
        before = short.n_committed
        engine.step()
        assert short.n_committed == before + 1 and len(engine.live) == 2
    assert short.n_committed >= 60 // 5
    drain(engine, 2)


def test_b11_no_step_takes_more_prompt_tokens_than_it_may() -> None:
    own = trunk("llama_gqa")
    for chunk in (1, 2, 3, 8):
        engine = make_engine(
            own, random_heads(own, (2,), "block"), (2,), PROMPTS, [SamplingParams(max_new_tokens=6)] * 5
        )
        engine.prefill_chunk = chunk
        rows = 0
        while engine.busy:
            engine.step()
            assert engine.stats.levels[0].rows - rows <= chunk + len(PROMPTS)
            rows = engine.stats.levels[0].rows


# Prefixes.


def decode_one(decoder: Decoder, prompt: list[int]) -> list[int]:
    [completion] = decoder.generate([prompt], SamplingParams(max_new_tokens=12, ignore_eos=True))
    return completion.ids


@pytest.mark.parametrize("neighbours", [True, False])
def test_b10_a_known_prefix_is_not_run_again(neighbours: bool) -> None:
    prompt = LONG[0]
    with decoding(with_heads(trunk("llama_gqa")), kv_blocks=32) as decoder:
        decoder._engine = decoder._new_engine(32)
        decoder._engine.cache.likes_neighbours = neighbours
        for asked, shared in [
            (prompt, 0), (prompt, 32), (prompt, 32), ([*prompt, 7], 32), ([*prompt[:20], 3, 4], 16), ([3, *prompt], 0),
        ]:  # fmt: skip
            assert decode_one(decoder, asked) == wanted("llama_gqa", [asked], 12)[0]
            assert decoder.stats.shared_tokens == shared
            assert decoder.stats.levels[0].rows == len(asked) - shared + 11
        assert decoder._engine.pool.n_free == 32


def test_what_a_request_said_is_a_prefix_of_the_next_one() -> None:
    with decoding(with_heads(trunk("llama_gqa"), (2,)), kv_blocks=32) as decoder:
        said = [*LONG[0], *decode_one(decoder, LONG[0])]
        assert decode_one(decoder, [*said, 9, 9]) == wanted("llama_gqa", [[*said, 9, 9]], 12)[0]
        assert decoder.stats.shared_tokens == 48
        said = [*said, 9, 9, *wanted("llama_gqa", [[*said, 9, 9]], 12)[0]]
        assert decode_one(decoder, said) == wanted("llama_gqa", [said], 12)[0]
        assert decoder.stats.shared_tokens == 64, "what was copied is known too"


def test_of_requests_that_begin_alike_one_computes_the_beginning() -> None:
    own = trunk("llama_gqa")
    prompts = [[*LONG[0], n] for n in range(6)]
    run = drain(make_engine(own, [], (1,), prompts, [SamplingParams(max_new_tokens=5)] * 6), 6)
    assert run.ids == wanted("llama_gqa", prompts, 5)
    assert run.stats.shared_tokens == 5 * 32


def test_rejected_tokens_are_never_part_of_a_known_prefix() -> None:
    own = Trunk(silenced("llama_gqa", 2))
    engine = make_engine(
        own, [FlakyHead(own, 2, lambda call: call % 3 == 1)], (4,), LONG[:2], [SamplingParams(max_new_tokens=40)] * 2
    )
    sequences = list(engine.queue)
    drain(engine, 2)
    for sequence in sequences:
        committed = sequence.ids[: sequence.n_committed]
        assert len(engine.pool.find(committed, engine._root(sequence))) == (len(committed) - 1) // BLOCK_SIZE
    known = {tokens for _, tokens in engine.pool._block_of}
    said = [s.ids[: s.n_committed] for s in sequences]
    assert known == {tuple(ids[at : at + 16]) for ids in said for at in range(0, (len(ids) - 1) // 16 * 16, 16)}


# A request that fails.


def test_numbers_that_are_not_finite_end_their_own_request_only() -> None:
    model = build("llama_gqa")
    with torch.no_grad():
        embedding: Any = model.get_input_embeddings()
        embedding.weight[200] = float("nan")
    own = Trunk(model)
    bad = [[5, 200, 9], LONG[0]]
    engine = make_engine(
        own,
        random_heads(own, (2,), "mlp"),
        (2,),
        [PROMPTS[0], bad[0], PROMPTS[2]],
        [SamplingParams(max_new_tokens=9)] * 3,
    )
    sequences = list(engine.queue)
    run = drain(engine, 3)
    assert [run.ids[0], run.ids[2]] == wanted("llama_gqa", [PROMPTS[0], PROMPTS[2]], 9) and run.ids[1] == []
    assert sequences[1].finish_reason == "error"
    assert sequences[1].error and sequences[1].error.startswith(
        "logits after layer 6 are not finite (request 1, position 2)"
    )


# Requests that come and go.


def test_requests_can_be_added_at_any_step_and_cancelled() -> None:
    with decoding(with_heads(trunk("llama_gqa"), (2, 4)), kv_blocks=N_BLOCKS) as decoder:
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        numbers = [decoder.add(PROMPTS[2], params)]
        got: dict[int, list[int]] = {}
        text: dict[int, str] = {}
        done: dict[int, Completion] = {}
        for step in range(400):
            if step in (3, 7, 15):
                numbers.append(decoder.add(PROMPTS[len(numbers)], params))
            if step == 20:
                decoder.cancel(numbers[3])
            for update in decoder.step():
                got.setdefault(update.index, []).extend(update.ids)
                text[update.index] = text.get(update.index, "") + update.text
                if update.completion is not None:
                    done[update.index] = update.completion
            if step > 20 and not decoder.requests:
                break
        assert done[numbers[3]].finish_reason == "abort" and done[numbers[3]].ids == got.get(numbers[3], [])
        for number, prompt in zip(numbers[:3], (PROMPTS[2], PROMPTS[1], PROMPTS[2]), strict=True):
            assert done[number].ids == got[number] == wanted("llama_gqa", [prompt], 20)[0]
            assert done[number].text == text[number]
        assert decoder._engine.pool.n_free == N_BLOCKS


def test_calls_inside_a_stream_do_not_disturb_it() -> None:
    with decoding(with_heads(trunk("llama_gqa"), (2,)), kv_blocks=N_BLOCKS) as decoder:
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        said = []
        for token in decoder.stream_ids(PROMPTS[2], params):
            said.append(token)
            if len(said) in (3, 9):
                assert [c.ids for c in decoder.generate(PROMPTS[:2], params)] == wanted("llama_gqa", PROMPTS[:2], 20)
        assert said == wanted("llama_gqa", [PROMPTS[2]], 20)[0]


@pytest.mark.parametrize("windows", [(2, 4), (3, 3)])
def test_a_batch_that_does_not_wait_says_the_same(windows: tuple[int, ...]) -> None:
    with decoding(with_heads(trunk("llama_gqa"), (2, 4)), policy=f"fixed:{windows[0]},{windows[1]}:now") as decoder:
        got = decoder.generate(PROMPTS, SamplingParams(max_new_tokens=30, ignore_eos=True))
        assert [completion.ids for completion in got] == wanted("llama_gqa", PROMPTS, 30)


# All of it at once.


def random_params(chance: random.Random, seed: int) -> SamplingParams:
    options: dict[str, Any] = {"max_new_tokens": chance.randint(1, 24), "seed": seed}
    if chance.random() < 0.6:
        options["temperature"] = chance.choice([0.3, 0.8, 1.0, 1.5])
        filters: dict[str, list[Any]] = {"top_k": [1, 3, 50], "top_p": [0.3, 0.9], "min_p": [0.05, 0.3]}
        for key, values in filters.items():
            if chance.random() < 0.3:
                options[key] = chance.choice(values)
    others: dict[str, list[Any]] = {
        "repetition_penalty": [1.2, 0.9], "presence_penalty": [0.7, -0.4], "frequency_penalty": [0.5],
        "logit_bias": [{7: -100.0, 11: 4.0}], "min_new_tokens": [1], "stop_ids": [[9, 60], [33]],
        "stop": [["e"], ["ab", "q "]], "ignore_eos": [True], "logprobs": [0, 3],
    }  # fmt: skip
    for key, values in others.items():
        if chance.random() < 0.2:
            options[key] = chance.choice(values)
    return SamplingParams.build(options)


@cache
def roomy() -> HiSpecModel:
    own = Trunk(silenced("llama_gqa", 3))
    own.max_positions = 512
    heads = [FlakyHead(own, 3, lambda call: call % 4 == 1), *random_heads(own, (4,), "block")]
    return HiSpecModel(own, byte_tokenizer(), nn.ModuleList(heads), "tiny")


def traffic(seed: int, n: int, lookup: bool = False) -> Stats:
    """`n` requests with 30% of the blocks that twelve of them want, some cancelled: each equals its solo plain run."""
    chance = random.Random(seed)
    prompts = [[chance.randrange(211) for _ in range(chance.randint(1, 200))] for _ in range(n)]
    for at in range(0, n, 5):
        prompts[at] = prompts[0][: len(prompts[at])] + [chance.randrange(211)]  # some begin alike
    for at in range(3, n if lookup else 0, 5):
        prompts[at] = (prompts[at][: 1 + at % 7] * 200)[: len(prompts[at])]  # some repeat themselves
    params = [random_params(chance, number) for number in range(n)]
    demand = sum(-(-(len(p) + own.max_new_tokens) // BLOCK_SIZE) for p, own in zip(prompts, params, strict=True)) / n
    kv_blocks = max(16, int(0.3 * 12 * demand))
    with decoding(
        roomy(), max_batch=12, kv_blocks=kv_blocks, prefill_chunk=64, policy="fixed:3,4", lookup=lookup
    ) as decoder:
        numbers: dict[int, int] = {}
        done: dict[int, Completion] = {}
        cancelled: set[int] = set()
        waiting = list(range(n))
        while waiting or decoder.requests:
            while waiting and (not decoder.requests or chance.random() < 0.4):
                at = waiting.pop()
                numbers[decoder.add(prompts[at], params[at])] = at
            if decoder.requests and chance.random() < 0.01:
                number = chance.choice(decoder.requests)
                cancelled.add(number)
                decoder.cancel(number)
            done |= {u.index: u.completion for u in decoder.step() if u.completion is not None}
        stats = decoder.stats
        assert len(done) == n and decoder._engine.pool.n_free == kv_blocks
    with decoding(roomy(), exits=(), max_batch=1, kv_blocks=16) as plain:
        for number, at in numbers.items():
            [alone] = plain.generate([prompts[at]], params[at])
            got = done[number]
            if number in cancelled and got.finish_reason == "abort":
                assert got.ids == alone.ids[: len(got.ids)]
                continue
            assert (got.ids, got.text, got.finish_reason) == (alone.ids, alone.text, alone.finish_reason), (seed, at)
            for one, other in zip(got.logprobs or (), alone.logprobs or (), strict=True):
                assert one == pytest.approx(other, abs=1e-3)
    return stats


@pytest.mark.parametrize("lookup", [False, True])
def test_traffic_of_random_requests_equals_each_alone(lookup: bool) -> None:
    stats = traffic(100, 40, lookup)
    assert (stats.looked_up_accepted > 0) == lookup


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_300_random_requests_equal_each_alone(seed: int) -> None:
    lookup = seed % 2 == 1
    stats = traffic(seed, 300, lookup)
    assert stats.preemptions > 0 or lookup, "of those that repeat themselves, fewer are there at a time"
    assert stats.looked_up_accepted > 0 or not lookup
    assert stats.shared_tokens > 0 and stats.finish_reasons["abort"] > 0


def test_b09_any_end_at_any_moment_gives_all_blocks_back() -> None:
    own = trunk("llama_gqa")
    chance = random.Random(3)
    heads = random_heads(own, (2, 4), "block")
    engine = make_engine(own, heads, (2, 3), [], [], pool=BlockPool(20), max_batch=4)
    for _ in range(60):
        more = make_engine(own, [], (1,), [chance.choice(LONG)], [SamplingParams(max_new_tokens=chance.randint(1, 30))])
        sequence = more.queue.popleft()
        sequence.counts, sequence.goal, sequence.hidden = [0] * 3, [sequence.n_prompt] * 3, [None] * 3
        engine.add(sequence)
        for _ in range(chance.randint(0, 12)):
            engine.step()
        if chance.random() < 0.5:
            engine.cancel(chance.choice([*engine.live, *engine.queue, sequence]))
    for sequence in [*engine.live, *engine.queue]:
        engine.cancel(sequence)
    assert engine.pool.n_free == 20 and not engine.busy
