"""What measured costs allow: against the engine's own passes, against chance played out, and by hand."""

import random

import pytest
from decode_fixtures import FlakyHead, make_engine, perfect_heads, trunk

from hispec.decode.ceiling import DRAFTS, ROUNDS, ceiling, rate
from hispec.decode.costs import Costs, name_of
from hispec.decode.hierarchy import make_levels
from hispec.decode.level import Level
from hispec.decode.request import SamplingParams

ROWS = (1, 2, 4, 8, 16)


def levels_of(*exits: int) -> list[Level]:
    own = trunk("llama_gqa")
    return make_levels(own, [FlakyHead(own, e, slot=slot) for slot, e in enumerate(exits)])


def costs(per_layer: float, per_row: float, per_head: float) -> Costs:
    """A machine on which a pass costs its layers, its rows and its head, for any level of a model of six layers."""
    seconds = {
        f"{start}-{stop}{'+' * read}": [(stop - start) * per_layer + n * per_row + read * per_head for n in ROWS]
        for start in range(7)
        for stop in range(start, 7)
        for read in (False, True)
    }
    return Costs(seconds, ROWS)


@pytest.mark.parametrize(("windows", "n_drafts", "n_rounds"), [((3,), 3, 1), ((2, 1), 2, 1), ((1, 4), 1, 2)])
def test_where_every_draft_stands_it_is_what_the_engine_does(
    windows: tuple[int, ...], n_drafts: int, n_rounds: int
) -> None:
    own = trunk("llama_gqa")
    engine = make_engine(own, perfect_heads(own, len(windows)), windows, [[5, 9]], [SamplingParams(max_new_tokens=61)])
    list(engine.run())
    stats, levels = engine.stats, engine.levels
    # The prompt's pass of each level, which brings the first token, left out.
    passes = [level.passes - 1 for level in stats.levels]
    assert stats.verified == 60
    unread = passes[0] // (n_drafts + 1)  # of the drafts' passes, those of the last ones
    paid = costs(0.0, 0.0, 1.0)
    seconds = (
        sum(n * paid.of(level, 1, read=True) for n, level in zip(passes, levels, strict=True)) - unread
    )  # a pass costs a second if its head is read, and nothing else
    assert rate(paid, levels, n_drafts, n_rounds, 1.0) == pytest.approx(stats.verified / seconds)


@pytest.mark.parametrize("chance", [0.0, 0.35, 0.8])
@pytest.mark.parametrize(("exits", "n_drafts", "n_rounds"), [((2,), 4, 1), ((1, 3), 2, 1), ((1, 3), 1, 3)])
def test_it_is_what_chance_brings(exits: tuple[int, ...], n_drafts: int, n_rounds: int, chance: float) -> None:
    dice, levels, paid = random.Random(3), levels_of(*exits), costs(1.0, 0.25, 0.5)

    def judge(rows: int) -> int:
        return next((n + 1 for n in range(rows - 1) if dice.random() >= chance), rows)

    seconds, tokens = 0.0, 0
    for _ in range(20_000):
        waiting = 0
        for _ in range(n_rounds):
            seconds += n_drafts * paid.of(levels[0], 1, True) + paid.of(levels[0], 1, False)
            stands = n_drafts + 1
            for level in levels[1:-1]:
                seconds += paid.of(level, stands, True)
                stands = judge(stands)
            waiting += stands
        seconds += paid.of(levels[-1], waiting, True)
        tokens += judge(waiting)
    assert rate(paid, levels, n_drafts, n_rounds, chance) == pytest.approx(tokens / seconds, rel=0.01)


def test_the_ceiling_is_the_best_that_was_measured() -> None:
    # Six layers of a second each, rows and heads for nothing: exit 1, drafts of n: n + 1 + 5 seconds for n + 1 tokens.
    paid, (plain,) = costs(1.0, 0.0, 0.0), levels_of()
    one = ceiling(paid, levels_of(1), plain)
    assert one["at_full_acceptance"] == pytest.approx([6 * (n + 1) / (n + 6) for n in DRAFTS])
    # Exits 1 and 3: a round takes n + 1 + 2 seconds, the full pass three; as many rounds as 16 rows hold.
    two = ceiling(paid, levels_of(1, 3), plain)
    rounds = [max(r for r in ROUNDS if r == 1 or r * (n + 1) <= 16) for n in DRAFTS]
    assert rounds == [4, 4, 2, 1]
    expected = [6 * r * (n + 1) / (r * (n + 3) + 3) for n, r in zip(DRAFTS, rounds, strict=True)]
    assert two["at_full_acceptance"] == pytest.approx(expected)


def test_acceptance_needed_is_the_least_that_gets_there() -> None:
    paid, (plain,), levels = costs(1.0, 0.1, 0.5), levels_of(), levels_of(2)
    for it in ceiling(paid, levels, plain)["needed"]:
        speed = it["ratio"] / paid.of(plain, 1, read=True)
        assert rate(paid, levels, it["drafts"], 1, it["acceptance"]) >= speed
        assert all(rate(paid, levels, n, 1, it["acceptance"] - 0.01) < speed for n in DRAFTS)


def test_what_no_acceptance_brings_is_none() -> None:
    paid, (plain,) = costs(0.0, 0.0, 1.0), levels_of()  # heads are all that costs: a draft is as dear as a full pass
    assert name_of(plain, True) == "0-6+"
    found = ceiling(paid, levels_of(2), plain)
    assert [it["acceptance"] for it in found["needed"]] == [1.0, None]
    assert found["needed"][1] == {"ratio": 1.5, "acceptance": None, "drafts": None}
