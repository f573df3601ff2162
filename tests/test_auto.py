"""The policy that measures itself decides for what pays; and whatever it decides, the output is the full model's."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from decode_fixtures import PROMPTS, FlakyHead, decoding, trunk, wanted, with_heads
from decode_fixtures import silenced as with_silent_layers

from hispec import HiSpecModel, SamplingParams
from hispec.decode.auto import ENOUGH, TRY_EVERY, AutoPolicy, expected_rate
from hispec.decode.costs import ROWS, Costs, name_of
from hispec.decode.hierarchy import Exits, exits_of, make_hierarchies, make_levels
from hispec.decode.level import Level
from hispec.decode.policy import Action, Sight
from hispec.trunk import Trunk


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HISPEC_CACHE", str(tmp_path))


def hierarchies() -> dict[tuple[int, ...], list[Level]]:
    own = trunk("llama_gqa")
    return make_hierarchies(make_levels(own, [FlakyHead(own, 1, slot=0), FlakyHead(own, 3, slot=1)]))


def costs(known: dict[tuple[int, ...], list[Level]], per_layer: float = 1.0, per_head: float = 0.5) -> Costs:
    """A machine on which rows cost nothing: a pass costs its layers, and its head if it is read."""
    levels = {level.number: level for hierarchy in known.values() for level in hierarchy}.values()
    spans = {
        name_of(x, read): (x.stop - x.start) * per_layer + read * per_head for x in levels for read in (False, True)
    }
    return Costs({name: [seconds] * len(ROWS) for name, seconds in spans.items()}, ROWS)


def policy(prior: dict[int, float], per_head: float = 0.5) -> AutoPolicy:
    known = hierarchies()
    return AutoPolicy(known, costs(known, per_head=per_head), prior)


# Hierarchies.


def test_every_choice_of_exits_is_a_hierarchy_and_shares_levels() -> None:
    known = hierarchies()
    assert list(known) == [(), (1,), (3,), (1, 3)]
    spans = {exits: [(level.start, level.stop) for level in levels] for exits, levels in known.items()}
    assert spans == {(): [(0, 6)], (1,): [(0, 1), (1, 6)], (3,): [(0, 3), (3, 6)], (1, 3): [(0, 1), (1, 3), (3, 6)]}
    assert known[(1, 3)][0] is known[(1,)][0] and known[(1, 3)][2] is known[(3,)][1]
    assert all(exits_of(levels) == exits for exits, levels in known.items())


def test_of_many_exits_only_pairs_and_all_are_hierarchies() -> None:
    own = trunk("llama_gqa")
    known = make_hierarchies(make_levels(own, [FlakyHead(own, at, slot=at) for at in range(1, 6)]))
    assert [len(exits) for exits in known] == [0] + [1] * 5 + [2] * 10 + [5]


def test_costs_lie_on_lines_between_what_was_measured() -> None:
    level = hierarchies()[()][0]
    own = Costs({"0-6": [1.0, 1.2, 2.0], "0-6+": [3.0, 3.0, 3.0]}, [1, 2, 4])
    assert [own.of(level, n, read=False) for n in (1, 2, 3, 4, 8)] == pytest.approx([1.0, 1.2, 1.6, 2.0, 4.0])
    assert own.of(level, 3, read=True) == 3.0


# Choices.


def test_a_good_head_is_used_and_a_useless_one_is_not() -> None:
    assert policy({1: 0.9, 3: 0.9}).start(1) in [(1,), (1, 3)]
    assert policy({1: 0.02, 3: 0.02}).start(1) == ()
    assert policy({1: 0.05, 3: 0.95}, per_head=0.1).start(1) == (3,)


def test_a_new_sequence_shares_the_passes_of_the_others_unless_it_does_far_better() -> None:
    own = policy({1: 0.02, 3: 0.02})
    assert own.start(4) == ()
    seconds = 1.0 / own.rate(())
    for exits, tokens in (((1,), 0.5), ((3,), 0.9)):
        account = own.accounts[exits]
        account.verdicts, account.tokens, account.seconds = 99, tokens, seconds
    assert own.start(4, [(1,), (3,), (3,)]) == (3,) and own.start(4, [(1,), (1,), (3,)]) == ()
    own.accounts[1,].tokens = 2.0
    assert own.start(4, [(3,), (3,)]) == (1,)
    started = [own.start(4, [(1,)]) for _ in range(2 * 4 * TRY_EVERY)]
    assert len(started) - started.count((1,)) == 2


def test_the_expected_rate_is_tokens_over_the_passes_they_take() -> None:
    def seconds(level: int, rows: int, read: bool) -> float:
        return {0: 1.0 + read, 1: 3.0, 2: 10.0 + rows}[level]

    # Three drafts, each read, and the last passed through; all stand, and the level above adds one.
    assert expected_rate(seconds, [1.0], 3) == pytest.approx(4 / (3 * 2.0 + 1.0 + 3.0))
    assert expected_rate(seconds, [0.0], 3) == pytest.approx(1 / (3 * 2.0 + 1.0 + 3.0))
    assert expected_rate(seconds, [0.5], 2) == pytest.approx(1.75 / (2 * 2.0 + 1.0 + 3.0))
    # Two rounds of the levels below, three tokens each, before the full model sees all six.
    assert expected_rate(seconds, [1.0, 1.0], 2, rounds=2) == pytest.approx(6 / (2 * (5.0 + 3.0) + 16.0))
    assert expected_rate(seconds, [1.0], 2, rounds=2) == expected_rate(seconds, [1.0], 2), "nobody judges below"


def test_what_does_not_pay_is_left_and_tried_again() -> None:
    own = policy({1: 0.9, 3: 0.9})
    starts = []
    for _ in range(100):
        exits = own.start(1)
        starts.append(exits)
        for _ in range(ENOUGH if exits else 0):
            for level in own.hierarchies[exits]:
                own.spent(level, 1, True, {exits: 1.0})
            own.judged(exits, 1, 0, True, [0.5])
            own.earned(exits, 1)
        if exits:
            assert own.leave(exits) != exits
    assert starts[0] != () and set(starts[:4]) == set(own.hierarchies), "what promises most comes first"
    assert starts[4:].count(()) >= 85 and any(starts[4:]), "plain, but now and then another is given a chance"


def test_a_sequence_never_takes_up_an_exit_that_it_left() -> None:
    own = policy({1: 0.99, 3: 0.99})
    assert own.leave(()) == ()
    own.accounts[(1,)].verdicts, own.accounts[(1,)].tokens, own.accounts[(1,)].seconds = ENOUGH, 1.0, 100.0
    assert own.leave((1,)) == ()


def test_drafting_stops_where_the_draft_is_unsure() -> None:
    own = policy({1: 0.6, 3: 0.6}, per_head=0.2)
    for _ in range(60):
        own.judged((1,), 1, 1, False, [0.95])
        own.judged((1,), 1, 0, True, [0.05])

    def after(sure: Sequence[float]) -> Action:
        return own.next([10, 10], 11 + len(sure), False, Sight((1,), sure, 1))

    assert after([]) == Action(0, read=True), "one draft at least: the pass below it has to run in any case"
    assert after([0.95]) == Action(0, read=True)
    assert after([0.05]) == Action(1, read=True), "not worth another pass"
    assert after([0.95] * 8) == Action(1, read=True), "enough"
    assert own.next([12, 10], 12, True, Sight((1,), [0.9], 1)) == Action(1, read=True), "ended: only verify"


# Whatever it decides.


def model_of(name: str, wrong_every: int) -> HiSpecModel:
    own = Trunk(with_silent_layers(name, 2))
    model = with_heads(own, ())
    model.heads.extend(FlakyHead(own, e, lambda call: call % wrong_every == 1, slot) for slot, e in enumerate((2, 4)))
    return model


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}])
@pytest.mark.parametrize("wrong_every", [2, 9])
@pytest.mark.parametrize("max_batch", [1, 8])
def test_auto_says_what_plain_decoding_says(max_batch: int, wrong_every: int, options: dict[str, float]) -> None:
    model = model_of("llama_gqa", wrong_every)
    params = SamplingParams.build({"max_new_tokens": 30, "ignore_eos": True, **options})
    with decoding(model, exits=()) as plain, decoding(model, policy="auto", max_batch=max_batch) as auto:
        expected = [completion.ids for completion in plain.generate(PROMPTS, params)]
        for _ in range(4):  # it learns, and may decide otherwise every time
            assert [completion.ids for completion in auto.generate(PROMPTS, params)] == expected


@pytest.mark.parametrize("seed", range(6))
def test_auto_may_change_its_mind_at_any_moment(seed: int) -> None:
    """Choices by chance: exits at the start, exits left on the way, drafts of any length."""
    chance = torch.Generator().manual_seed(seed)

    def pick(among: list[tuple[int, ...]]) -> tuple[int, ...]:
        return among[int(torch.randint(len(among), (), generator=chance))]

    class Fickle(AutoPolicy):
        def start(self, batch: int, company: Sequence[Exits] = ()) -> Exits:
            return pick(list(self.hierarchies))

        def leave(self, exits: tuple[int, ...]) -> tuple[int, ...]:
            stays = float(torch.rand((), generator=chance)) < 0.9
            return exits if stays else pick([other for other in self.hierarchies if set(other) <= set(exits)])

    model, params = model_of("llama_gqa", 4), SamplingParams(max_new_tokens=40, ignore_eos=True)
    with decoding(model, exits=()) as plain, decoding(model, policy="auto", kv_blocks=16) as decoder:
        expected = [completion.ids for completion in plain.generate(PROMPTS * 2, params)]
        decoder.policy.__class__ = Fickle
        for _ in range(2):
            assert [completion.ids for completion in decoder.generate(PROMPTS * 2, params)] == expected
            assert decoder._engine.pool.n_free == 16


def test_hierarchies_take_turns() -> None:
    class Mixed(AutoPolicy):
        def start(self, batch: int, company: Sequence[Exits] = ()) -> Exits:
            return max(self.hierarchies, key=len) if company else ()

        def leave(self, exits: Exits) -> Exits:
            return exits

    with decoding(model_of("llama_gqa", 9), policy="auto", lookup=False) as decoder:
        decoder.policy.__class__ = Mixed
        params = SamplingParams(max_new_tokens=60, ignore_eos=True)
        first, second = (decoder.add(prompt, params) for prompt in PROMPTS[:2])
        n = dict.fromkeys((first, second), 0)
        while n[first] < 30:
            for update in decoder.step():
                n[update.index] += len(update.ids)
        assert n[second] > 3, "the deeper levels of the second are not to wait for the first to end"


def test_a_sequence_that_waits_for_room_chooses_once() -> None:
    with decoding(model_of("llama_gqa", 9), policy="auto", kv_blocks=6, max_batch=4) as decoder:
        assert isinstance(decoder.policy, AutoPolicy)
        decoder.generate(PROMPTS, SamplingParams(max_new_tokens=40, ignore_eos=True))
        assert sum(account.starts for account in decoder.policy.accounts.values()) == len(PROMPTS)


def test_costs_are_kept_for_the_next_start(tmp_path: Path) -> None:
    model = with_heads(trunk("llama_gqa"), (2, 4), "block")
    with decoding(model, policy="auto") as first, decoding(model, policy="auto") as second:
        assert isinstance(first.policy, AutoPolicy) and isinstance(second.policy, AutoPolicy)
        assert first.policy.costs.seconds == second.policy.costs.seconds
        assert all(seconds > 0 for row in first.policy.costs.seconds.values() for seconds in row)
    assert len(list((tmp_path / "costs").glob("*.json"))) == 1


def test_auto_without_heads_is_plain_decoding() -> None:
    with decoding(with_heads(trunk("llama_gqa")), policy="auto") as decoder:
        got = decoder.generate(PROMPTS, SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert [completion.ids for completion in got] == wanted("llama_gqa", PROMPTS, 9)
