"""Request options, each against a dull loop over the library's own forward, or against what it says by definition."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from decode_fixtures import (
    PROMPTS,
    FlakyHead,
    byte_tokenizer,
    decode,
    decoding,
    perfect_heads,
    random_heads,
    scripted,
    silenced,
    trunk,
    wanted,
    with_heads,
)
from tiny_models import build
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from hispec import HiSpecModel, SamplingParams
from hispec.decode.request import BANNED
from hispec.decode.sampling import adjusted, processed
from hispec.errors import ConfigError, RequestError
from hispec.trunk import Trunk

Change = Callable[[Tensor, list[int], int], Tensor]


def dull(name: str, prompt: Sequence[int], n: int, change: Change) -> list[int]:
    """Greedy decoding without a cache: `change(logits [V], all tokens, prompt length)` before each arg-max."""
    model: Any = build(name)
    ids = list(prompt)
    for _ in range(n):
        with torch.no_grad():
            logits_V = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        ids.append(int(change(logits_V.clone(), ids, len(prompt)).argmax()))
    return ids[len(prompt) :]


def penalised(repetition: float, presence: float, frequency: float) -> Change:
    def change(logits_V: Tensor, ids: list[int], n_prompt: int) -> Tensor:
        library: Any = RepetitionPenaltyLogitsProcessor(repetition)
        logits_V = library(torch.tensor([ids]), logits_V[None])[0]
        for token, times in Counter(ids[n_prompt:]).items():
            logits_V[token] -= presence + frequency * times
        return logits_V

    return change


# Penalties.


@pytest.mark.parametrize("draft", [1, 2, 3, 6])
@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 1.7}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.1}, {"repetition_penalty": 0.7}],
    ids=lambda options: next(iter(options)),
)
def test_g18_penalties_see_every_token_of_a_draft(options: dict[str, Any], draft: int) -> None:
    change = penalised(
        *(options.get(f"{key}_penalty", d) for key, d in [("repetition", 1.0), ("presence", 0.0), ("frequency", 0.0)])
    )
    prompts = [[9, 9, 9, 9], PROMPTS[2]]
    expected = [dull("opt_pre", prompt, 24, change) for prompt in prompts]
    assert expected != [dull("opt_pre", prompt, 24, lambda x, *_: x) for prompt in prompts]
    own = trunk("opt_pre")
    for heads in (perfect_heads(own, 2), random_heads(own, (2, 4), "block"), []):
        assert decode(own, heads, (draft, 2), prompts, 24, **options).ids == expected
    assert decode(own, perfect_heads(own, 1), (draft,), prompts, 24, **options).stats.levels[-1].rejected == 0


def test_g18_penalties_of_a_reduced_vocabulary_are_those_of_its_tokens() -> None:
    torch.manual_seed(0)
    logits_RV, vocab_ids = 3 * torch.randn(2, 9), torch.tensor([7, 0, 3, 8])
    params = SamplingParams(
        repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={3: 1.5, 8: BANNED, 5: 2.0},
        min_new_tokens=4,
    )  # fmt: skip
    histories, stop_ids = [[7, 3, 3, 1], [7, 3, 3, 1, 0]], [0, 2]
    whole = adjusted(logits_RV, params, histories, 1, stop_ids)
    part = adjusted(logits_RV[:, vocab_ids], params, histories, 1, stop_ids, vocab_ids)
    assert torch.equal(whole[:, vocab_ids], part)
    # By hand: token 3 is there twice behind the prompt; its bias comes first.
    biased = float(logits_RV[0, 3]) + 1.5
    assert float(whole[0, 3]) == pytest.approx((biased / 1.3 if biased > 0 else biased * 1.3) - 0.4 - 2 * 0.2)
    assert whole[:, 8].tolist() == [float("-inf")] * 2
    assert whole[0, 0] == float("-inf") and whole[1, 0] != float("-inf"), "four tokens are enough"


def test_min_p_is_the_librarys() -> None:
    torch.manual_seed(0)
    logits_RV = 3 * torch.randn(5, 40)
    for min_p in (0.01, 0.2, 1.0):
        library: Any = MinPLogitsWarper(min_p)
        assert torch.equal(
            processed(logits_RV, SamplingParams(temperature=1.0, min_p=min_p)).isfinite(),
            library(None, logits_RV).isfinite(),
        )


# Bias and bans.


@pytest.mark.parametrize("n_exits", [0, 1, 2])
def test_g20_a_forbidden_token_is_never_said(n_exits: int) -> None:
    own = trunk("llama_gqa")
    banned = wanted("llama_gqa", [PROMPTS[2]])[0][3]

    def change(logits_V: Tensor, *_: Any) -> Tensor:
        logits_V[banned] = float("-inf")
        return logits_V

    expected = dull("llama_gqa", PROMPTS[2], 24, change)
    assert banned not in expected
    for heads in (perfect_heads(own, n_exits), random_heads(own, (2, 4)[:n_exits], "mlp")):
        assert decode(own, heads, (3, 4), [PROMPTS[2]], 24, logit_bias={banned: BANNED}).ids == [expected]
    sampled = decode(own, [], (1,), [PROMPTS[2]], 40, logit_bias={banned: BANNED}, temperature=5.0, seed=1).ids[0]
    assert banned not in sampled


def test_a_bias_of_a_token_that_does_not_exist_is_refused() -> None:
    with decoding(with_heads(trunk("llama_gqa"))) as decoder:
        with pytest.raises(RequestError, match=r"prompt 0: logit_bias names token 211, the vocabulary is 0\.\.210"):
            decoder.generate([[5]], SamplingParams(max_new_tokens=4, logit_bias={211: 1.0}))


# The shortest text.


@pytest.mark.parametrize("n_exits", [0, 1, 2])
def test_g14_no_end_before_the_shortest_text(n_exits: int) -> None:
    """A model that wants to stop at every second step: it may at the eighth token, and not before."""
    own = Trunk(scripted([60, 1], len(byte_tokenizer())))
    model = HiSpecModel(own, byte_tokenizer(), with_heads(own, ()).heads, "scripted")
    model.heads.extend(perfect_heads(own, 0) if n_exits == 0 else [FlakyHead(own, e) for e in (2, 3)[:n_exits]])
    ends: dict[str, Any] = {"stop_ids": [1]}
    with decoding(model, policy="fixed:3,4") as decoder:
        [free] = decoder.generate([[5]], SamplingParams(max_new_tokens=20, ignore_eos=True, **ends))
        [held] = decoder.generate([[5]], SamplingParams(max_new_tokens=20, ignore_eos=True, min_new_tokens=7, **ends))
    assert len(free.ids) <= 2 and free.ids[-1] == 1
    assert 1 not in held.ids[:7] and held.ids[-1] == 1 and len(held.ids) == 8 and held.finish_reason == "stop"


@pytest.mark.parametrize("n_exits", [0, 2])
def test_g14_stop_strings_wait_too(n_exits: int) -> None:
    own = trunk("llama_gqa")
    with decoding(with_heads(own, (2, 4)[:n_exits])) as decoder:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        [whole] = decoder.generate([PROMPTS[2]], params)
        characters = [str(byte_tokenizer().decode([token])) for token in whole.ids]
        stop = next(c for at, c in enumerate(characters) if at >= 2 and len(c) == 1 and c in characters[at + 6 :])
        first = characters.index(stop)
        again = next(at for at, c in enumerate(characters) if stop in c and at >= first + 5)
        [early] = decoder.generate([PROMPTS[2]], params.model_copy(update={"stop": [stop]}))
        [late] = decoder.generate([PROMPTS[2]], params.model_copy(update={"stop": [stop], "min_new_tokens": first + 5}))
    assert len(early.ids) == first + 1 and len(late.ids) == again + 1
    assert late.text == "".join(characters[:again]) and late.finish_reason == "stop"


# Log-probabilities.


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("exits", [(), (2,), (2, 4)])
def test_logprobs_are_the_full_models(exits: tuple[int, ...], temperature: float) -> None:
    own = Trunk(silenced("llama_gqa", 3))
    params = SamplingParams(
        max_new_tokens=20, ignore_eos=True, logprobs=3, temperature=temperature, seed=3, frequency_penalty=0.5
    )
    with decoding(with_heads(own, exits)) as decoder:
        [got] = decoder.generate([PROMPTS[2]], params)
    assert got.logprobs is not None and len(got.logprobs) == len(got.ids) == 20
    law_TV = own.logits(torch.tensor([*PROMPTS[2], *got.ids])).log_softmax(-1)[len(PROMPTS[2]) - 1 : -1]
    for token, said, law_V in zip(got.ids, got.logprobs, law_TV, strict=True):
        assert next(iter(said)) == token, "its own comes first"
        assert set(said) == {token, *law_V.topk(3).indices.tolist()}
        assert list(said.values()) == pytest.approx(law_V[list(said)].tolist(), abs=1e-4)


def test_g13_logprobs_end_where_the_ids_end() -> None:
    stop = wanted("llama_gqa", [PROMPTS[2]])[0][4]
    with decoding(with_heads(silenced("llama_gqa", 2), (2, 4)), policy="fixed:4,8") as decoder:
        params = SamplingParams(max_new_tokens=30, stop_ids=[stop], logprobs=0)
        for completion in decoder.generate(PROMPTS, params):
            assert completion.logprobs is not None
            assert [next(iter(said)) for said in completion.logprobs] == completion.ids
            assert all(len(said) == 1 for said in completion.logprobs)


# Several continuations.


def test_n_continuations_are_those_of_the_seeds_that_follow() -> None:
    with decoding(with_heads(trunk("llama_gqa"), (2, 4))) as decoder:
        params = SamplingParams(max_new_tokens=12, temperature=1.2, seed=40, n=3)
        got = decoder.generate(PROMPTS[2:4], params)
        assert [(c.index, c.choice) for c in got] == [(i, c) for i in range(2) for c in range(3)]
        for completion in got:
            one = params.model_copy(update={"n": 1, "seed": 40 + completion.choice})
            [alone] = decoder.generate([PROMPTS[2 + completion.index]], one)
            assert alone.ids == completion.ids
        assert decoder.generate(PROMPTS[3], params)[0].ids == got[3].ids and decoder.stats.shared_tokens > 0
        with pytest.raises(RequestError, match="n=3 continuations cannot be streamed"):
            next(decoder.stream([5], params))


def test_the_same_greedy_text_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="n=2 with temperature=0 is the same text 2 times"):
        SamplingParams.build({"n": 2})


# What is not offered.


@pytest.mark.parametrize("name", sorted(SamplingParams.refused))
def test_what_is_not_offered_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*(not offered|is called)"):
        SamplingParams.build({name: 2})
