"""Sampling: `coupled` is plain sampling for the seed, `rejection` follows the full model's law."""

from collections import Counter
from typing import Any, Literal

import pytest
import sfix
import torch
from decode_fixtures import PROMPTS, FlakyHead, Run, decode, drain, make_engine, perfect_heads, random_heads, trunk
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from hispec import SamplingParams
from hispec.decode.blocks import BlockPool
from hispec.decode.sampling import gumbel, processed
from hispec.decode.verify import Verdict, agree, draw, reject
from hispec.errors import ConfigError

CPU = torch.device("cpu")
Rule = Literal["coupled", "rejection"]

# Seeds are fixed, so these tests always see the same draws: a p-value this small means a biased rule, not bad luck.
P_VALUE = 1e-3


def fits(tokens: list[int], law_V: Tensor) -> float:
    """p-value of a chi-square test of `tokens` against a law; tokens expected less than 5 times are counted as one."""
    expected_V = law_V * len(tokens)
    counts_V = torch.bincount(torch.tensor(tokens), minlength=len(law_V)).double()
    assert float(counts_V[expected_V == 0].sum()) == 0, "a token that the law excludes"
    rare_V = expected_V < 5
    seen = [*counts_V[~rare_V].tolist(), float(counts_V[rare_V].sum())]
    wanted = [*expected_V[~rare_V].tolist(), float(expected_V[rare_V].sum())]
    seen, wanted = (seen, wanted) if wanted[-1] > 0 else (seen[:-1], wanted[:-1])
    return float(stats.chisquare(seen, wanted).pvalue)


def distance(tokens: list[int], law_V: Tensor) -> float:
    counts_V = torch.bincount(torch.tensor(tokens), minlength=len(law_V)).double()
    return 0.5 * float((counts_V / len(tokens) - law_V).abs().sum())


def total_variation(a: Tensor, b: Tensor) -> float:
    return 0.5 * float((a.exp() - b.exp()).abs().sum())


# The noise.


def test_gumbel_is_a_frozen_function_of_seed_position_and_token() -> None:
    noise_V = gumbel(42, 7, 211, CPU)
    # Computed apart from this code, with Python's integers.
    frozen = [-0.923859263573656, 3.4113056288821957, -0.6095381337897555, 0.008721051768865506]
    torch.testing.assert_close(noise_V[:4], torch.tensor(frozen, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert torch.equal(gumbel(42, 7, 50, CPU), noise_V[:50]), "noise belongs to the token id, not to the vocabulary"
    others = [gumbel(43, 7, 211, CPU), gumbel(42, 8, 211, CPU), gumbel(7, 42, 211, CPU)]
    assert not any(torch.equal(noise_V, other) for other in others)


@pytest.mark.parametrize("along", ["tokens", "positions", "seeds"])
def test_gumbel_noise_is_uniform_underneath_and_uncorrelated(along: str) -> None:
    match along:
        case "tokens":
            noise = gumbel(1, 2, 50_000, CPU)
        case "positions":
            noise = torch.stack([gumbel(1, position, 9, CPU)[8] for position in range(20_000)])
        case _:
            noise = torch.stack([gumbel(seed, 5, 9, CPU)[8] for seed in range(20_000)])
    uniform = torch.exp(-torch.exp(-noise)).numpy()
    assert stats.kstest(uniform, "uniform").pvalue > P_VALUE
    assert abs(stats.pearsonr(uniform[1:], uniform[:-1]).statistic) < 0.03
    assert bool(torch.isfinite(noise).all())


# From logits to the law that is asked for.


def test_processed_applies_temperature_then_top_k_then_top_p() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 1.0]])

    def law(**options: Any) -> list[float]:
        scores = processed(logits, SamplingParams(temperature=options.pop("temperature", 1.0), **options))
        return [round(p, 4) for p in scores.softmax(-1)[0].tolist()]

    e = torch.e
    assert law() == [round(float(p), 4) for p in logits.double().softmax(-1)[0]]
    assert law(temperature=0.5) == [round(float(p), 4) for p in (2 * logits.double()).softmax(-1)[0]]
    assert law(top_k=1) == [1, 0, 0, 0, 0]
    # Both of two equal ones stay: which is likelier is not for the filter to decide.
    assert law(top_k=2) == [round(e / (e + 2), 4), round(1 / (e + 2), 4), 0, 0, round(1 / (e + 2), 4)]
    assert law(top_k=10**6) == law() == law(top_p=1.0)
    assert law(top_p=1e-9) == law(top_p=0.5) == [1, 0, 0, 0, 0]
    assert law(top_p=0.55)[1:] == [round(1 / (1 + e), 4), 0, 0, 0]


BAD: dict[str, Any] = {
    "temperature": -1, "top_p": 0, "top_k": -1, "max_new_tokens": 0, "min_new_tokens": 129, "repetition_penalty": 0,
    "rule": "lossy", "seed": -1, "logit_bias": {3: -101.0}, "min_p": 1.5, "n": 0, "logprobs": 21,
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), BAD.items())
def test_g19_what_has_no_meaning_is_refused_not_ignored(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        SamplingParams.build({key: value})


# The rules, bare.


def test_agree() -> None:
    assert agree([1, 2, 3], [1, 2]) == Verdict(2, 3, rejected=False)
    assert agree([1, 2], [1, 2]) == Verdict(2, None, rejected=False)
    assert agree([1, 9, 3], [1, 2]) == Verdict(1, 9, rejected=True)
    assert agree([4], []) == Verdict(0, 4, rejected=False)


def test_reject_gives_the_law_of_the_judge() -> None:
    generator = torch.Generator().manual_seed(0)
    p_V, q_V = sfix.FULL.exp(), sfix.DRAFT.exp()
    first, bonus, accepted = [], [], 0
    for _ in range(20_000):
        proposed = draw(q_V, generator)
        verdict = reject(torch.stack([p_V, p_V]), [q_V], [proposed], generator)
        assert verdict.token is not None
        accepted += verdict.accepted
        first.append(proposed if verdict.accepted else verdict.token)
        if verdict.accepted:
            bonus.append(verdict.token)
    assert fits(first, p_V) > P_VALUE and fits(bonus, p_V) > P_VALUE
    assert accepted / 20_000 == pytest.approx(1 - total_variation(sfix.FULL, sfix.DRAFT), abs=0.01)


def test_reject_of_a_token_that_nobody_drew_gives_the_law_of_the_judge() -> None:
    generator = torch.Generator().manual_seed(1)
    p_V, point_V = sfix.FULL.exp(), torch.nn.functional.one_hot(torch.tensor(4), sfix.VOCAB).double()
    verdicts = [reject(p_V[None], [point_V], [4], generator) for _ in range(20_000)]
    assert all((verdict.token is None) == (verdict.accepted == 1) and verdict.token != 4 for verdict in verdicts)
    assert fits([4 if verdict.token is None else verdict.token for verdict in verdicts], p_V) > P_VALUE


def test_reject_of_equal_laws_accepts_everything() -> None:
    generator = torch.Generator().manual_seed(0)
    law_V = torch.softmax(torch.randn(5, generator=generator, dtype=torch.float64), -1)
    for token in range(5):
        assert reject(law_V[None], [law_V], [token], generator) == Verdict(1, None, rejected=False)
    # What the judge excludes never stands, and p == q leaves no residual to draw from.
    point_V = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert reject(point_V[None], [point_V], [0], generator) == Verdict(0, 1, rejected=True)


# Coupled: equality with plain sampling.

SAMPLED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "seed": 42},
    "hot": {"temperature": 1.7, "seed": 1},
    "top_k": {"temperature": 0.9, "top_k": 20, "seed": 2},
    "top_p": {"temperature": 1.2, "top_p": 0.8, "seed": 3},
    "both": {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "seed": 4},
}
SCHEDULES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((2,), (1,)),
    ((2,), (5,)),
    ((2, 4), (2, 4)),
    ((1, 2, 4), (1, 2, 2)),
]


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2"])
@pytest.mark.parametrize("options", SAMPLED.values(), ids=SAMPLED)
def test_coupled_equals_plain_sampling_in_every_schedule(name: str, options: dict[str, Any]) -> None:
    own = trunk(name)
    expected = decode(own, [], (1,), n=16, **options).ids
    assert len(set(map(tuple, expected))) == len(expected)
    for exits, windows in SCHEDULES:
        assert decode(own, random_heads(own, exits, "mlp"), windows, n=16, **options).ids == expected
    assert decode(own, [FlakyHead(own, 6, lambda call: call % 3 == 0)] * 2, (3, 5), n=16, **options).ids == expected
    vocab_ids = torch.arange(0, 211, 3)
    assert decode(own, random_heads(own, (2, 4), "block", vocab_ids), (2, 4), n=16, **options).ids == expected
    for prompt, ids in zip(PROMPTS, expected, strict=True):
        assert decode(own, random_heads(own, (2,), "norm"), (3,), [prompt], 16, **options).ids == [ids]


def test_coupled_is_the_argmax_of_scores_and_noise_of_a_bare_model() -> None:
    own, prompt = trunk("qwen3"), PROMPTS[2]
    [got] = decode(own, random_heads(own, (2, 4), "mlp"), (2, 4), [prompt], 12, temperature=0.8, seed=9).ids
    logits_TV = own.logits(torch.tensor(prompt + got)).double()
    for position in range(len(prompt), len(prompt) + 12):
        assert int((logits_TV[position - 1] / 0.8 + gumbel(9, position, 211, CPU)).argmax()) == (prompt + got)[position]


def test_coupled_follows_the_full_models_law() -> None:
    tokens = [t for ids in s_run(2, (2, 3), "coupled", n_requests=250).ids for t in ids]
    assert fits(tokens, sfix.FULL.exp()) > P_VALUE


# Rejection: the S fixture.


def s_run(
    n_levels: int, windows: tuple[int, ...], rule: Rule, n_requests: int = 1000, lookup: bool = False, **options: Any
) -> Run:
    """`n_requests` x 20 sampled tokens of the S fixture through `n_levels` exits."""
    own, heads = sfix.build()
    heads = heads[:n_levels]
    params = [
        SamplingParams(**{"temperature": 1.0, "max_new_tokens": 20, "rule": rule, "seed": seed} | options)
        for seed in range(n_requests)
    ]
    pool = BlockPool(500)
    engine = make_engine(own, heads, windows, [[3]] * n_requests, params, max_batch=250, pool=pool, lookup=lookup)
    return drain(engine, n_requests)


def check_law(run: Run, law_V: Tensor) -> None:
    """The law holds pooled, at every offset of a round (the bonus among them), and for neighbouring tokens."""
    pooled = [token for ids in run.ids for token in ids]
    assert distance(pooled, law_V) < 0.015 and fits(pooled, law_V) > P_VALUE
    offsets: dict[int, list[int]] = {}
    for rounds in run.rounds:
        for tokens in rounds:
            for offset, token in enumerate(tokens):
                offsets.setdefault(offset, []).append(token)
    for tokens in offsets.values():
        if len(tokens) >= 500:
            assert fits(tokens, law_V) > P_VALUE
    common = law_V.topk(4).indices.tolist()
    pairs = Counter(
        (a, b) for ids in run.ids for a, b in zip(ids, ids[1:], strict=False) if a in common and b in common
    )
    table = [[pairs[a, b] for b in common if law_V[b] > 0] for a in common if law_V[a] > 0]
    assert float(stats.chi2_contingency(table).pvalue) > P_VALUE


@pytest.mark.parametrize("draft", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_s01_one_level_follows_the_law_and_s04_accepts_what_theory_says(draft: int) -> None:
    run = s_run(1, (draft,), "rejection")
    check_law(run, sfix.FULL.exp())
    assert run.stats.levels[1].acceptance == pytest.approx(1 - total_variation(sfix.FULL, sfix.DRAFT), abs=0.02)


@pytest.mark.parametrize(
    "windows", [(2, 3), pytest.param((1, 1), marks=pytest.mark.slow), pytest.param((3, 6), marks=pytest.mark.slow)]
)
def test_s05_two_levels_follow_the_law(windows: tuple[int, int]) -> None:
    run = s_run(2, windows, "rejection")
    check_law(run, sfix.FULL.exp())
    middle, full = run.stats.levels[1].acceptance, run.stats.levels[2].acceptance
    assert middle == pytest.approx(1 - total_variation(sfix.DRAFT, sfix.MIDDLE), abs=0.02)
    # What the intermediate level hands up follows its own law, not the draft's.
    assert full == pytest.approx(1 - total_variation(sfix.MIDDLE, sfix.FULL), abs=0.02)


@pytest.mark.parametrize("n_levels", [0, 2])
def test_what_is_looked_up_follows_the_law_too(n_levels: int) -> None:
    run = s_run(n_levels, (2, 3), "rejection", lookup=True)
    check_law(run, sfix.FULL.exp())
    assert 0 < run.stats.looked_up_accepted < run.stats.looked_up
    if n_levels:  # what the heads drafted is judged as ever
        acceptance = run.stats.levels[2].acceptance
        assert acceptance == pytest.approx(1 - total_variation(sfix.MIDDLE, sfix.FULL), abs=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"temperature": 0.5}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.3, "top_k": 5}], ids=str
)
def test_s03_temperature_and_filters_reach_every_stage(options: dict[str, Any]) -> None:
    law_V = processed(sfix.FULL[None], SamplingParams(**options)).softmax(-1)[0]
    check_law(s_run(2, (2, 3), "rejection", **options), law_V)


def test_s01_a_reduced_draft_vocabulary_follows_the_law_too() -> None:
    own, _ = sfix.build()
    heads = random_heads(own, (1, 2), "norm", torch.tensor([0, 2, 3, 7, 9]))
    params = [SamplingParams(temperature=1.0, max_new_tokens=20, rule="rejection", seed=seed) for seed in range(300)]
    run = drain(make_engine(own, heads, (2, 3), [[3]] * 300, params, max_batch=150, pool=BlockPool(400)), 300)
    assert fits([token for ids in run.ids for token in ids], sfix.FULL.exp()) > P_VALUE


# Seeds and edges.


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_s07_a_requests_seed_is_its_own(rule: Rule) -> None:
    own = trunk("llama_gqa")
    heads = random_heads(own, (2, 4), "mlp")

    def run(seed: int | None, prompts: list[list[int]] | None = None) -> list[list[int]]:
        return decode(own, heads, (2, 4), prompts or [PROMPTS[2]], 16, temperature=1.0, rule=rule, seed=seed).ids

    first = run(42)
    assert run(43) != first
    run(None, PROMPTS)
    assert run(42) == first
    assert run(42, PROMPTS)[2] == first[0]
    assert decode(own, heads, (2, 4), n=16, seed=1).ids == decode(own, heads, (2, 4), n=16, seed=2).ids, (
        "greedy has no use for it"
    )


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_s08_seeded_and_unseeded_requests_share_a_batch(rule: Rule) -> None:
    own, heads = sfix.build()
    seeds = [42, None, 7, None] * 75
    each = [SamplingParams(temperature=1.0, rule=rule, seed=seed, max_new_tokens=20) for seed in seeds]
    ids = drain(make_engine(own, heads, (2, 3), [[3]] * 300, each, max_batch=100, pool=BlockPool(200)), 300).ids
    for row in (0, 2):
        [alone] = drain(make_engine(own, heads, (2, 3), [[3]], [each[row]]), 1).ids
        assert all(got == alone for got in ids[row::4])
    unseeded = ids[1::2]
    assert len(set(map(tuple, unseeded))) == len(unseeded)
    # These draws differ from run to run, so the bound is one that chance does not reach (3,000 tokens: 0.025).
    assert distance([token for own_ids in unseeded for token in own_ids], sfix.FULL.exp()) < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_s10_the_limits_of_sampling_are_greedy(rule: Rule, dtype: torch.dtype) -> None:
    own, heads = trunk("llama_gqa"), random_heads(trunk("llama_gqa"), (2, 4), "mlp")
    if dtype != torch.float32:
        own, heads = sfix.build()
        own.model.to(dtype)
        heads = random_heads(own, (1, 2), "mlp")
    expected = decode(own, heads, (2, 4), PROMPTS[:1], 16).ids
    edges: list[dict[str, Any]] = [
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 1e-9},
    ]
    for options in edges:
        assert decode(own, heads, (2, 4), PROMPTS[:1], 16, rule=rule, seed=3, **options).ids == expected


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_s12_a_shorter_run_is_the_beginning_of_a_longer_one(rule: Rule) -> None:
    own = trunk("llama_gqa")
    options: dict[str, Any] = {"temperature": 1.0, "rule": rule, "seed": 5}
    for heads in ([], random_heads(own, (2, 4), "mlp")):
        long = decode(own, heads, (2, 4), n=20, **options).ids
        if rule == "rejection" and heads:
            continue  # its draws depend on the schedule, which the limit cuts short
        assert decode(own, heads, (2, 4), n=5, **options).ids == [ids[:5] for ids in long]
        stopped = decode(own, heads, (2, 4), n=20, stop_ids=[long[2][9]], **options).ids[2]
        assert stopped == long[2][: long[2].index(long[2][9]) + 1]


def test_g06_equal_laws_are_accepted_whole_by_rejection() -> None:
    own = trunk("llama_gqa")
    run = decode(own, perfect_heads(own, 2), (2, 4), temperature=1.0, rule="rejection", seed=3)
    assert run.stats.levels[1].acceptance == run.stats.levels[2].acceptance == 1.0
