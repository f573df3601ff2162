"""What the text itself offers is found, taken where it pays, verified like any draft, and changes no token."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from decode_fixtures import (
    PROMPTS,
    FlakyHead,
    Run,
    byte_tokenizer,
    decode,
    decoding,
    drain,
    make_engine,
    random_heads,
    scripted,
    trunk,
    wanted,
    with_heads,
)
from test_auto import costs, policy

from hispec import HiSpecModel, SamplingParams
from hispec.decode.auto import TRY_EVERY, AutoPolicy
from hispec.decode.bench_options import BenchOptions
from hispec.decode.blocks import BlockPool
from hispec.decode.contestants import wanted as contestants
from hispec.decode.hierarchy import Exits
from hispec.decode.lookup import MOST, NOTHING, SIZES, Found, Lookup
from hispec.decode.policy import Action, FixedPolicy, Policy, Sight
from hispec.decode.request import LOOKED_UP
from hispec.decode.runner import Graphed
from hispec.heads import Head
from hispec.trunk import Trunk

# Says a verse over and over, a little differently every time.
VERSE = [3, 9, 4, 9, 5, 12, 6, 3, 9, 7]
SCRIPT = [token for at in range(13) for token in (*VERSE[: 4 + at % 7], 20 + at)][:128]
EXITS = [(), (2,), (1, 3), (1, 2, 3)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))


# The index.


def dull(ids: Sequence[int], most: int) -> Found:
    """The same search, from the end of the text backwards, token by token."""
    for size in SIZES:
        for place in range(len(ids) - 1, size - 1, -1):
            if list(ids[place - size : place]) == list(ids[-size:]):
                text = list(ids)
                while len(text) < len(ids) + most:
                    text.append(text[place + len(text) - len(ids)])
                return Found(size, text[len(ids) :])
    return NOTHING


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(5))
def test_the_index_finds_what_a_search_finds(seed: int, n_tokens: int) -> None:
    chance = random.Random(seed)
    lookup, ids, matched = Lookup(), list[int](), set[int]()
    for _ in range(120):
        most = chance.randint(1, MOST)
        got = lookup.find(ids, most)
        assert got == dull(ids, most)
        matched.add(got.matched)
        ids += [chance.randrange(n_tokens) for _ in range(chance.randint(0, 3))]
    assert len(matched) >= 3


def test_the_longest_match_wins_then_the_newest() -> None:
    assert Lookup().find([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], 2) == Found(3, [9, 7])
    assert Lookup().find([2, 3, 9, 2, 3, 8, 2, 3], 2) == Found(2, [8, 2])
    assert Lookup().find([5, 5, 5, 5, 5], 3) == Found(4, [5, 5, 5])
    assert Lookup().find([1, 2, 3, 4]) == Lookup().find([1]) == Lookup().find([]) == NOTHING


# What policies do with an offer.


@pytest.mark.parametrize("n_levels", [1, 2, 3, 4])
def test_looked_up_tokens_go_up_unread_and_the_last_level_judges(n_levels: int) -> None:
    policies: list[Policy] = [FixedPolicy(n_levels)]
    if n_levels == 3:
        policies.append(uncertain(0.9, per_row=0.0))
    for own in policies:
        counts, offer = [10] * n_levels, Sight((1, 3), matched=4, offered=5)
        action = own.next(counts, 11, False, offer)
        assert action == Action(0, read=n_levels == 1, looked_up=5)
        for level in range(n_levels):
            carried = own.next(counts, 16, level % 2 == 0, Sight((1, 3), looked_up=5))
            assert carried == Action(level, read=level == n_levels - 1)
            counts[level] = 16


def uncertain(chance: float, per_row: float) -> AutoPolicy:
    """The policy of test_auto, on a machine where a row costs `per_row` of what one row costs, and bad heads."""
    own = policy({1: 0.02, 3: 0.02})
    for name, seconds in own.costs.seconds.items():
        own.costs.seconds[name] = [s * (1 + per_row * (n - 1)) for s, n in zip(seconds, own.costs.rows, strict=True)]
    for _ in range(100):
        good = round(20 * chance)
        own.looked_up((), Found(4, [0] * 8), good, False)
        for _ in range(20 - good):
            own.looked_up((), Found(4, [0] * 8), 0, True)
    return own


@pytest.mark.parametrize("exits", [(), (1, 3)])
@pytest.mark.parametrize(
    ("chance", "per_row", "taken"), [(0.9, 0.0, 6), (0.9, 0.2, 6), (0.5, 0.2, 2), (0.5, 0.3, 1), (0.2, 0.3, 0)]
)
def test_as_many_are_taken_as_are_worth_their_rows(
    exits: tuple[int, ...], chance: float, per_row: float, taken: int
) -> None:
    own = uncertain(chance, per_row)
    action = own.next([10] * (len(exits) + 1), 11, False, Sight(exits, matched=4, offered=6))
    if exits:
        assert action.looked_up >= taken, "worth more where going on with bad heads brings less"
    else:
        assert action == Action(0, read=True, looked_up=taken)


def test_how_often_a_match_of_some_length_stands_is_learnt_by_itself_and_tried_again() -> None:
    own = uncertain(0.0, per_row=0.3)

    def taken(matched: int) -> int:
        return own.next([10], 11, False, Sight((), matched=matched, offered=8)).looked_up

    assert taken(2) == 1, "of which nothing is known"
    assert [taken(4) for _ in range(2 * TRY_EVERY)] == ([0] * (TRY_EVERY - 1) + [1]) * 2
    for _ in range(60):
        own.looked_up((), Found(4, [0] * 8), 8, False)
    assert taken(4) == 8


def test_a_hierarchy_answers_for_carrying_tokens_up_in_pieces() -> None:
    own = policy({1: 0.02, 3: 0.02})
    for name, seconds in own.costs.seconds.items():
        own.costs.seconds[name] = [0.5 + s for s in seconds]  # every pass costs something of its own
    for exits in own.hierarchies:
        own.looked_up(exits, Found(4, [0] * 3), 3, False)
        more = sum(own.costs.of(level, 4, level is own.hierarchies[exits][-1]) for level in own.hierarchies[exits])
        assert own.accounts[exits].seconds == pytest.approx(more - own.costs.of(own.hierarchies[()][0], 4, True))
    assert own.accounts[()].seconds == 0 < own.accounts[1, 3].seconds


def test_good_heads_are_not_given_up_for_a_poor_offer() -> None:
    own, good = uncertain(0.3, per_row=0.1), (1, 3)
    offer = Sight((), matched=4, offered=4)
    assert own.next([10], 11, False, offer).looked_up > 0
    own.accounts[good].verdicts, own.accounts[good].tokens, own.accounts[good].seconds = 100, 50.0, 100.0
    assert own.next([10] * 3, 11, False, offer._replace(exits=good)).looked_up == 0


# Decoding with it.


def heads_of(own: Trunk, exits: Sequence[int], wrong_every: int = 4) -> list[Head]:
    return [FlakyHead(own, exit_, lambda call: call % wrong_every == 1, slot) for slot, exit_ in enumerate(exits)]


def check_counts(run: Run, chosen_by: Sequence[Sequence[int]]) -> None:
    stats = run.stats
    assert 0 < stats.looked_up_accepted < stats.looked_up
    assert sum(own.count(LOOKED_UP) for own in chosen_by) == stats.looked_up_accepted
    assert f"looked up: {stats.looked_up} tokens, " in stats.report()


@pytest.mark.parametrize("options", [{}, {"temperature": 0.4, "seed": 3}, {"presence_penalty": 0.1, "logprobs": 1}])
@pytest.mark.parametrize("exits", EXITS)
def test_a_text_that_repeats_itself_is_what_plain_decoding_says(
    exits: tuple[int, ...], options: dict[str, Any]
) -> None:
    own = Trunk(scripted(SCRIPT, 40))
    prompts = [SCRIPT[:n] for n in (1, 17, 30, 44, 9)]
    params = [SamplingParams.build({"max_new_tokens": n} | options) for n in (60, 70, 33, 50, 8)]
    expected = decode(own, [], (1,), prompts, each=params)
    engine = make_engine(own, heads_of(own, exits), (2, 4), prompts, params, lookup=True)
    sequences = list(engine.queue)
    run = drain(engine, len(prompts))
    assert run.ids == expected.ids
    check_counts(run, [s.chosen_by[: s.n_committed - s.n_prompt] for s in sequences])
    for sequence in sequences:
        assert "logprobs" not in options or len(sequence.sampler.logprobs) >= sequence.n_committed - sequence.n_prompt


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "opt_pre"])
@pytest.mark.parametrize("exits", [(), (2, 4)])
def test_what_does_not_stand_leaves_nothing_behind(name: str, exits: tuple[int, ...]) -> None:
    """Prompts that repeat themselves, of models that do not: nearly all that is taken has to be taken back."""
    prompts = [[5, 17] * 6, PROMPTS[2] * 3, [9] * 20, [40, 41, 42] * 7, PROMPTS[2] + [8, 7]]
    run = decode(trunk(name), random_heads(trunk(name), exits, "block"), (2, 4), prompts, 24, lookup=True)
    assert run.ids == wanted(name, prompts, 24)
    assert run.stats.looked_up > run.stats.looked_up_accepted


@pytest.mark.parametrize("exits", EXITS)
def test_what_stands_saves_passes_and_a_heads_acceptance_stays_its_own(exits: tuple[int, ...]) -> None:
    own = Trunk(scripted([3, 4, 5, 6, 7] * 26, 40))
    run = decode(own, [FlakyHead(own, exit_) for exit_ in exits], (2, 3), [[3] * 16], 91, lookup=True)
    assert run.stats.looked_up_accepted == run.stats.looked_up - MOST, "the threes of the prompt do not go on"
    n_lookups = [len(tokens) for tokens in run.rounds[0]].count(MOST + 1)
    assert n_lookups >= 8 and run.stats.looked_up_accepted >= MOST * n_lookups
    for level in run.stats.levels[1:]:
        assert level.rejected == 0 and level.accepted < 12, "of what was drafted before the text repeated itself"


@pytest.mark.parametrize("exits", [(), (1, 3)])
def test_it_ends_where_it_has_to_inside_what_was_looked_up(exits: tuple[int, ...]) -> None:
    own = Trunk(scripted([3, 4, 5, 6, 7] * 26, 40))
    said = [3, 4, 5, 6, 7] * 9
    for n in range(1, 40):
        prompt, params = [7, *said[:10]], SamplingParams(max_new_tokens=n)
        engine = make_engine(own, heads_of(own, exits, 99), (2, 3), [prompt], [params], lookup=True)
        [sequence] = engine.queue
        assert drain(engine, 1).ids == [said[:n]] and sequence.finish_reason == "length"
        assert engine.stats.looked_up <= max(0, n - 2), "nothing beyond the limit"
    script = said[:40]
    script[31] = 11
    own = Trunk(scripted(script, 40))
    for stop_id in (6, 11):
        run = decode(own, heads_of(own, exits, 99), (2, 3), [[7, *said[:10]]], 60, stop_ids=[stop_id], lookup=True)
        assert run.ids == [script[10 : script.index(stop_id, 10) + 1]] and run.stats.finish_reasons == {"stop": 1}
        if stop_id == 6:
            assert run.stats.looked_up == run.stats.looked_up_accepted == 3, "nothing behind the stop token"


@pytest.mark.parametrize("n_exits", [0, 2])
def test_a_stop_string_ends_what_was_looked_up(n_exits: int) -> None:
    ids = byte_tokenizer()("Ab, cd! Ab, cd! Ab, cd? ").input_ids
    model = with_heads(scripted([*ids, *ids, *ids], 260), range(1, 1 + n_exits))
    for stop, text in (("?", "Ab, cd! Ab, cd! Ab, cd"), ("cd? A", "Ab, cd! Ab, cd! Ab, ")):
        params = SamplingParams(max_new_tokens=60, stop=[stop])
        with decoding(model, lookup=True) as decoder:
            [done] = decoder.generate([[3, *ids]], params)
            assert (done.text, done.finish_reason) == (text[: len(text)], "stop")
            assert decoder.stats.looked_up_accepted > 8


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("exits", [(), (2,), (1, 3)])
def test_a_sequence_gives_up_its_blocks_with_tokens_looked_up(exits: tuple[int, ...], rule: str) -> None:
    own = Trunk(scripted(SCRIPT, 40))
    prompts = [SCRIPT[: 12 + n] for n in range(6)]
    temperature = 0.0 if rule == "coupled" else 0.3
    params = [
        SamplingParams.build({"max_new_tokens": 60, "temperature": temperature, "rule": rule, "seed": n})
        for n in range(6)
    ]
    engine = make_engine(own, heads_of(own, exits), (2, 4), prompts, params, pool=BlockPool(12), lookup=True)
    preempt, pending = engine._preempt, list[int]()

    def watched(sequence: Any) -> None:
        known = list(sequence.ids)
        preempt(sequence)
        assert sequence.ids == known
        pending.append(len(sequence.looked_up.tokens))

    engine._preempt = watched  # type: ignore[method-assign]
    run = drain(engine, 6)
    assert max(pending) > 0, "some of them on their way to the last level"
    if rule == "coupled":
        assert run.ids == decode(own, [], (1,), prompts, each=params).ids


def test_passes_of_fixed_shape_carry_them_too() -> None:
    own = Trunk(scripted(SCRIPT, 40))
    prompts, params = [SCRIPT[:n] for n in (1, 17, 30)], [SamplingParams(max_new_tokens=50)] * 3
    engine = make_engine(own, heads_of(own, (1, 3)), (2, 4), prompts, params, lookup=True)
    engine.runner = Graphed(engine.cache, record=False)
    assert drain(engine, 3).ids == decode(own, [], (1,), prompts, each=params).ids
    assert engine.stats.looked_up_accepted > 0


# The option.


def model_of(n_exits: int) -> HiSpecModel:
    model = with_heads(scripted(SCRIPT, 260), ())
    model.heads.extend(heads_of(model.trunk, [1, 3][:n_exits]))
    return model


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "seed": 2}])
@pytest.mark.parametrize("n_exits", [0, 1, 2])
def test_auto_looks_up_and_its_accounts_are_of_heads(n_exits: int, options: dict[str, Any]) -> None:
    class Counting(AutoPolicy):
        n_looked_up = 0

        def looked_up(self, exits: Exits, found: Found, accepted: int, rejected: bool) -> None:
            self.n_looked_up += 1
            super().looked_up(exits, found, accepted, rejected)

    model, prompts = model_of(n_exits), [SCRIPT[:n] for n in (30, 17, 44, 25)]
    params = SamplingParams.build({"max_new_tokens": 60, "ignore_eos": True, **options})
    with decoding(model, exits=()) as plain, decoding(model, policy="auto", max_batch=1) as auto:
        own: Any = auto.policy
        own.costs = costs(own.hierarchies)  # a machine on which rows cost nothing
        own.__class__ = Counting
        expected = [completion.ids for completion in plain.generate(prompts, params)]
        verdicts = 0
        for _ in range(3):
            assert [completion.ids for completion in auto.generate(prompts, params)] == expected
            assert 0 < auto.stats.looked_up_accepted <= auto.stats.looked_up
            verdicts += auto.stats.verdicts
        assert 0 < own.n_looked_up == verdicts - sum(account.verdicts for account in own.accounts.values())
        for exits, account in own.accounts.items():
            if account.verdicts and not exits:
                assert account.tokens / account.seconds == pytest.approx(own.rate(()))


@pytest.mark.parametrize(
    ("policy", "lookup", "looks_up"),
    [("auto", None, True), ("auto", False, False), ("fixed:2", None, False), ("fixed:2", True, True)],
)
def test_the_option_decides_whether_anything_is_looked_up(policy: str, lookup: bool | None, looks_up: bool) -> None:
    with decoding(model_of(1), policy=policy, lookup=lookup) as decoder:
        decoder.generate([SCRIPT[:40]], SamplingParams(max_new_tokens=40, ignore_eos=True))
        assert (decoder.stats.looked_up > 0) == looks_up


def test_contestants_that_look_up() -> None:
    names = ["plain", "plain_lookup", "two_exits_lookup", "auto"]
    options = BenchOptions.build({"model": "m", "contestants": names})
    taking_part, left_out = contestants(options, (1, 3))
    assert {name: (own.exits, own.policy, own.lookup) for name, own in taking_part.items()} == {
        "plain": ([], "fixed:1", None),
        "plain_lookup": ([], "fixed:1", True),
        "two_exits_lookup": ([1, 3], "fixed:1,1", True),
        "auto": ([1, 3], "auto", None),
    }
    assert not left_out
    taking_part, left_out = contestants(options, ())
    assert list(taking_part) == ["plain", "plain_lookup", "auto"] and "two_exits_lookup is left out" in left_out[0]
