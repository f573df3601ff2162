"""Hierarchical greedy decoding is plain greedy decoding, token for token, whatever drafts and whoever errs."""

import math

import pytest
import torch
from decode_fixtures import (
    N_NEW,
    PROMPTS,
    FlakyHead,
    assert_close,
    byte_tokenizer,
    decode,
    decoding,
    greedy,
    make_engine,
    perfect_heads,
    random_heads,
    scripted,
    silenced,
    trunk,
    wanted,
    with_heads,
)
from tiny_models import F1, VOCAB, build, reference
from torch import Tensor

from hispec import SamplingParams
from hispec.attention import PackedAttention
from hispec.decode.blocks import slots
from hispec.decode.engine import Engine
from hispec.decode.sequence import Sequence as Live
from hispec.errors import RequestError
from hispec.heads import Head
from hispec.trunk import Trunk

EXITS = [(2,), (2, 4), (1, 5), (1, 2, 4)]


def heads_of(name: str, variety: int, work: int) -> list[Head]:
    """Heads of some kind at some exits; with `variety` all kinds and numbers of levels come.

    `work`: drafts per full pass. Where nothing drafted stands, all of them are lost for one token: then fewer levels.
    """
    own = trunk(name)
    exits = EXITS[variety % (4 if work <= 4 else 3 if work <= 16 else 1)]
    match variety % 5:
        case 0:
            return perfect_heads(own, len(exits))
        case 1:
            return [FlakyHead(own, own.n_layers, lambda call: call % 3 == 1) for _ in exits]
        case 2 | 3 if own.final_norm is not None:
            return random_heads(own, exits, "block" if variety % 5 == 2 else "norm")
        case _:
            return random_heads(own, exits, "mlp")


def check(name: str, draft: int, verify: int, variety: int) -> None:
    prompts = PROMPTS[: 1 + variety % 5] if variety % 2 else PROMPTS
    run = decode(trunk(name), heads_of(name, variety, draft * verify), (draft, verify), prompts)
    assert run.ids == wanted(name, prompts), f"{name} draft {draft} verify {verify} variety {variety}"


@pytest.mark.parametrize("draft", range(1, 9))
@pytest.mark.parametrize("name", F1)
def test_g01_every_model_and_draft_length(name: str, draft: int) -> None:
    number = list(F1).index(name)
    # All ten models together go through every pair of draft length and window, 1..8 each.
    check(name, draft, 1 + (draft + number) % 8, draft + 3 * number)


@pytest.mark.slow
@pytest.mark.parametrize("verify", range(1, 9))
@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "opt_post_proj"])
def test_g01_every_pair_of_windows(name: str, verify: int) -> None:
    for draft in range(1, 9):
        check(name, draft, verify, draft + verify)


@pytest.mark.parametrize("name", F1)
def test_g01_plain_decoding(name: str) -> None:
    assert decode(trunk(name), [], (1,)).ids == wanted(name)


@pytest.mark.parametrize("kind", ["norm", "mlp", "block"])
def test_g01_reduced_vocabularies(kind: str) -> None:
    own, vocab_ids = trunk("llama_gqa"), torch.tensor([3, 5, 17, 40, 101, 150, 180, 203])
    run = decode(own, random_heads(own, (2, 4), kind, vocab_ids), (3, 4))  # type: ignore[arg-type]
    assert run.ids == wanted("llama_gqa")


@pytest.mark.parametrize("draft", [1, 4, 7])
@pytest.mark.parametrize("name", ["mistral_sw8", "gemma2"])
def test_m11_sliding_windows_are_crossed(name: str, draft: int) -> None:
    prompts = [list(range(20, 20 + n)) for n in (1, 6, 7, 8, 9, 20)]
    run = decode(trunk(name), random_heads(trunk(name), (2, 4), "mlp"), (draft, 4), prompts, 40)
    assert run.ids == wanted(name, prompts, 40)


def test_the_engine_agrees_teacher_forced_where_a_model_says_little() -> None:
    own = trunk("opt_post_proj")
    [ids] = decode(own, random_heads(own, (2, 4), "mlp"), (2, 4), [PROMPTS[3]]).ids
    logits_TV = own.logits(torch.tensor(PROMPTS[3] + ids))
    assert logits_TV.argmax(-1)[len(PROMPTS[3]) - 1 : -1].tolist() == ids


# G02, G03: what stays behind after a rejection.


def fresh_cache(own: Trunk, ids: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
    """Keys and values [T, H, D] of every layer after one pass over `ids`."""
    kept = {}
    packed = PackedAttention([len(ids)])

    def attend(
        layer: int, q_HTD: Tensor, k_HTD: Tensor, v_HTD: Tensor, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        kept[layer] = k_HTD.transpose(0, 1), v_HTD.transpose(0, 1)
        return packed(layer, q_HTD, k_HTD, v_HTD, scale, window, cap)

    own.run(torch.tensor(ids), torch.arange(len(ids)), 0, own.n_layers, attend)
    return kept


def check_cache(engine: Engine, sequence: Live) -> None:
    """What each level has stored is what a fresh pass stores, and the counters stand where the ids say."""
    counts = sequence.counts
    assert counts == sorted(counts, reverse=True) and counts[0] <= len(sequence.ids)
    assert counts[-1] >= sequence.n_committed - 1
    fresh = fresh_cache(engine.levels[0].trunk, sequence.ids)
    for level, count in zip(engine.levels, counts, strict=True):
        at = torch.tensor(slots(sequence.table, 0, count))
        for layer in range(level.start, level.stop):
            for stored, expected in zip((engine.cache.keys, engine.cache.values), fresh[layer], strict=True):
                assert_close(stored[layer][at], expected[:count])


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "qwen3"])
@pytest.mark.parametrize("exits", [(2,), (2, 4), (1, 2, 4)])
def test_g02_the_cache_holds_nothing_of_rejected_drafts(name: str, exits: tuple[int, ...]) -> None:
    # Layers from 2 on are silent, so the logit lens at 2 is right but where it is told not to be.
    own = Trunk(silenced(name, 2))
    heads: list[Head] = [FlakyHead(own, exit_, lambda call: call % 4 == 2) for exit_ in exits]
    params = [SamplingParams(max_new_tokens=24)] * 3
    engine = make_engine(own, heads, (3, 4), PROMPTS[1:4], params)
    for sequence, _ in engine.run():
        if sequence.finish_reason is None:  # else its blocks are the pool's again
            check_cache(engine, sequence)
    assert engine.stats.levels[1].rejected > 0


@pytest.mark.parametrize("draft", range(1, 7))
def test_g03_wrong_at_every_place_of_the_draft(draft: int) -> None:
    own = Trunk(silenced("llama_gqa", 2))
    expected = reference(silenced("llama_gqa", 2), PROMPTS[2], 30)[0]
    for wrong in range(draft):
        head = FlakyHead(own, 2, lambda call, wrong=wrong: call % draft == wrong)  # type: ignore[misc]
        engine = make_engine(own, [head], (draft,), [PROMPTS[2]], [SamplingParams(max_new_tokens=30)])
        got: list[int] = []
        for sequence, tokens in engine.run():
            if got and len(got) + draft < 30:  # the limit cuts drafts short
                # Everything before the wrong draft stands, and the full model's own token replaces it.
                assert len(tokens) == wrong + 1
                assert sequence.counts == [len(sequence.ids) - 1] * 2
            got += tokens
        assert got == expected


@pytest.mark.parametrize("wrong", range(4))
def test_g03_wrong_intermediate_verifier(wrong: int) -> None:
    own = Trunk(silenced("llama_gqa", 2))
    heads: list[Head] = [FlakyHead(own, 2), FlakyHead(own, 4, lambda call: call % 4 == wrong)]
    run = decode(own, heads, (2, 4), n=30)
    assert run.ids == [reference(silenced("llama_gqa", 2), prompt, 30)[0] for prompt in PROMPTS]
    assert run.stats.levels[1].rejected > 0 and run.stats.levels[2].rejected > 0


# G06: perfect heads.


@pytest.mark.parametrize("draft", range(1, 9))
def test_g06_a_perfect_head_is_accepted_whole_and_the_passes_are_the_formulas(draft: int) -> None:
    own = trunk("llama_gqa")
    run = decode(own, perfect_heads(own, 1), (draft,), [PROMPTS[2]])
    assert run.stats.levels[1].rejected == 0
    assert run.stats.full_passes == math.ceil((N_NEW - 1) / (draft + 1))
    # After the prompt's own token, every round gives the drafts and the bonus.
    assert {len(tokens) for tokens in run.rounds[0][1:-1]} <= {draft + 1}


@pytest.mark.parametrize("verify", range(1, 9))
@pytest.mark.parametrize("draft", [1, 2, 3, 5])
def test_g06_two_perfect_levels(draft: int, verify: int) -> None:
    own = trunk("llama_gqa")
    run = decode(own, perfect_heads(own, 2), (draft, verify), [PROMPTS[2]])
    assert run.ids == [greedy("llama_gqa", tuple(PROMPTS[2]))]
    assert run.stats.levels[1].acceptance == run.stats.levels[2].acceptance == 1.0
    # Level 1 passes draft + 1 tokens on at a time; when at least `verify` wait, the full model takes them all.
    round_ = (draft + 1) * math.ceil(verify / (draft + 1))
    assert run.stats.full_passes == math.ceil((N_NEW - 1) / round_)


def test_g06_sampled_and_in_bf16() -> None:
    own = trunk("llama_gqa")
    run = decode(own, perfect_heads(own, 2), (2, 4), temperature=1.0, seed=3)
    assert run.stats.levels[1].rejected == run.stats.levels[2].rejected == 0
    low = Trunk(build("llama_gqa").bfloat16())
    run = decode(low, perfect_heads(low, 1), (4,))
    acceptance = run.stats.levels[1].acceptance
    assert acceptance is not None and acceptance >= 0.97


# Ends: limits, stop tokens, odd prompts.


@pytest.mark.parametrize("draft", range(1, 9))
def test_g08_exactly_as_many_tokens_as_asked_for(draft: int) -> None:
    own = trunk("llama_gqa")
    for n in range(1, 13):
        for heads in (perfect_heads(own, 1), perfect_heads(own, 2)):
            assert decode(own, heads, (draft, 4), PROMPTS[1:3], n).ids == wanted("llama_gqa", PROMPTS[1:3], n)


@pytest.mark.parametrize("n_levels", [0, 1, 2])
@pytest.mark.parametrize("step", range(1, 13))
def test_g10_nothing_follows_a_stop_token_inside_a_block(n_levels: int, step: int) -> None:
    # One script, read from different places: rows stop at different steps, one at its limit.
    script = [2] * 40
    script[2 + step] = 7
    own = Trunk(scripted(script, 10))
    prompts = [[3] * 4, [3] * 3, [3] * 9, [3] * 20]
    run = decode(own, [FlakyHead(own, 1 + level) for level in range(n_levels)], (5, 6), prompts, 14, stop_ids=[7])
    for prompt, ids in zip(prompts, run.ids, strict=True):
        said = [script[(len(prompt) - 1 + at) % 40] for at in range(14)]
        assert ids == said[: said.index(7) + 1 if 7 in said else 14]
    assert run.stats.finish_reasons.get("stop") == sum(7 in ids for ids in run.ids)


@pytest.mark.parametrize("n_exits", [0, 1, 2])
def test_m17_all_stop_ids_of_the_generation_config_count(n_exits: int) -> None:
    model = with_heads(scripted([4, 5, 6, 8, 9, 4, 4, 2, 5, 5], 260), range(1, 1 + n_exits))
    model.generation.eos_token_id = [2, 9]
    with decoding(model, policy="fixed:4,4") as decoder:
        [five, three] = decoder.generate([[3], [3] * 6], SamplingParams(max_new_tokens=20))
        assert (five.ids, five.finish_reason) == ([4, 5, 6, 8, 9], "stop")
        assert (three.ids, three.finish_reason) == ([4, 4, 2], "stop")
        [on] = decoder.generate([[3]], SamplingParams(max_new_tokens=7, ignore_eos=True))
        assert (on.ids, on.finish_reason) == ([4, 5, 6, 8, 9, 4, 4], "length")


@pytest.mark.parametrize("n_exits", [0, 2])
def test_g07_the_first_token_counts(n_exits: int) -> None:
    [a] = byte_tokenizer()("A").input_ids
    with decoding(with_heads(scripted([1, a, a], 260), range(1, 1 + n_exits))) as decoder:
        [stopped, one, cut] = decoder.generate(
            [[3], [3, 3], [3, 3]],
            [SamplingParams.build({"max_new_tokens": 9} | own) for own in ({}, {"max_new_tokens": 1}, {"stop": ["A"]})],
        )
    assert (stopped.ids, stopped.text, stopped.finish_reason) == ([1], "", "stop")  # the tokenizer's own stop token
    assert (one.ids, one.finish_reason) == ([a], "length")
    assert (cut.ids, cut.text, cut.finish_reason) == ([a], "", "stop")


def test_g17_short_prompts_and_an_empty_one() -> None:
    with decoding(with_heads(trunk("llama_gqa"), (2, 4))) as decoder:
        params = SamplingParams(max_new_tokens=10, ignore_eos=True)
        prompts: list[list[int]] = [[1], [5], PROMPTS[3], [1]]
        assert [c.ids for c in decoder.generate(prompts, params)] == wanted("llama_gqa", prompts, 10)
        with pytest.raises(RequestError, match="prompt 1 is empty"):
            decoder.generate([[5], []], params)
        with pytest.raises(RequestError, match="prompt 0 is empty"):
            decoder.generate("", params)
        with pytest.raises(RequestError, match="token id 211 is not in the vocabulary, 0..210"):
            decoder.generate([[211]], params)
        assert decoder.generate([], params) == []


@pytest.mark.parametrize("name", F1)
def test_g22_in_bf16_every_token_is_the_best_within_its_rounding(name: str) -> None:
    own = Trunk(build(name).bfloat16())
    prompt = [33] * 48
    [ids] = decode(own, random_heads(own, (2, 4), "mlp"), (3, 4), [prompt]).ids
    logits_TV = own.logits(torch.tensor(prompt + ids)).float()[len(prompt) - 1 : -1]
    gap_T = logits_TV.amax(-1) - logits_TV[torch.arange(len(ids)), torch.tensor(ids)]
    scale = float(logits_TV.abs().max())
    assert float(gap_T.max()) <= 0.03 * scale, "bf16 has 8 bits: only near-ties may fall the other way"


def test_g25_nothing_is_left_over_from_one_call_to_the_next() -> None:
    with decoding(with_heads(trunk("qwen3"), (2, 4)), policy="fixed:3,4", prefix_cache=False) as decoder:
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)

        def call(prompt: list[int]) -> tuple[list[int], list[tuple[int, int, int]]]:
            [completion] = decoder.generate([prompt], params)
            return completion.ids, [(level.passes, level.rows, level.accepted) for level in decoder.stats.levels]

        first, second = call(PROMPTS[2]), call(PROMPTS[3])
        assert first[0] == greedy("qwen3", tuple(PROMPTS[2]))[:20]
        with pytest.raises(RequestError):
            decoder.generate([[VOCAB]], params)
        assert [call(PROMPTS[3]), call(PROMPTS[2])] == [second, first]
        assert list(decoder.stream_ids(PROMPTS[2], params)) == first[0]
