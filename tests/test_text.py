"""Text as it arrives: whole characters, nothing past a stop string, nothing that may yet become one."""

from functools import cache
from typing import Any

import pytest
from decode_fixtures import byte_tokenizer, decoding, scripted, with_heads

from hispec import Completion, Decoder, SamplingParams
from hispec.decode.policy import parse_policy
from hispec.decode.text import REPLACEMENT, TextStream

HARD = "ď 世界 👩‍👩‍👧 é the CD C D"


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_tokenizer()(text).input_ids
    return ids


def saying(text: str, n_exits: int = 2, start: int = 1) -> Any:
    """A model that says `text` to a prompt of `start` ids, then ends; all its exits know."""
    ids = ids_of(text)
    return with_heads(scripted([2] * (start - 1) + ids + [1], len(byte_tokenizer()), 4), range(1, 1 + n_exits), "norm")


@cache
def speaker(text: str, n_exits: int) -> Decoder:
    return Decoder(saying(text, n_exits))


def say(text: str, n_exits: int, policy: str = "fixed:3,5", **options: Any) -> tuple[Completion, list[str]]:
    """The completion and the streamed pieces."""
    decoder = speaker(text, n_exits)
    decoder.policy = parse_policy(policy, n_exits + 1)
    params = SamplingParams(**{"max_new_tokens": 100} | options)
    return decoder.generate([[5]], params)[0], list(decoder.stream([5], params))


@pytest.mark.parametrize("draft", range(1, 7))
def test_u04_characters_are_never_split(draft: int) -> None:
    completion, pieces = say(HARD, 2, f"fixed:{draft},{draft + 1}")
    assert completion.text == "".join(pieces) == HARD
    assert completion.ids == [*ids_of(HARD), 1] and completion.finish_reason == "stop"
    assert len(pieces) > 3 and not any(REPLACEMENT in piece for piece in pieces)


@pytest.mark.parametrize("n", range(1, len(ids_of("a世界👩"))))
def test_u04_a_cut_character_shows_once_at_the_very_end(n: int) -> None:
    completion, pieces = say("a世界👩", 1, max_new_tokens=n)
    expected = byte_tokenizer().decode(ids_of("a世界👩")[:n])
    assert completion.text == "".join(pieces) == expected
    assert REPLACEMENT not in "".join(pieces)[:-1] and completion.finish_reason == "length"


def reference_cut(text: str, stop: str) -> tuple[str, int]:
    """The text before the stop string, and how many tokens it takes until the string is complete."""
    ids = ids_of(text)
    for n in range(1, len(ids) + 1):
        if stop in (said := str(byte_tokenizer().decode(ids[:n]))):
            return said[: said.index(stop)], n
    return text, len(ids) + 1


STOPS = ["C D", "CD", "D", "the", " t", "e C", "界 ", "👩‍👧", "never", "ď"]


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("policy", ["fixed:1", "fixed:2,3", "fixed:8,8"])
def test_g11_g13_text_ids_and_usage_end_at_the_stop_string(stop: str, policy: str) -> None:
    text, n = reference_cut(HARD, stop)
    for n_exits in (0, 2):
        completion, pieces = say(HARD, n_exits, policy, stop=[stop, "not this one"])
        assert (completion.text, len(completion.ids)) == (text, n)
        assert "".join(pieces) == text
        # The ids are those that completed the stop string; their text is the text, the stop string, and no more tokens.
        full = str(byte_tokenizer().decode(completion.ids, skip_special_tokens=True))
        assert full == HARD if stop == "never" else full.startswith(text + stop)


@pytest.mark.parametrize("offset", range(7))
def test_g11_wherever_the_block_ends(offset: int) -> None:
    text = "." * offset + "C D and on and on"
    completion, pieces = say(text, 1, "fixed:5", stop=["C D"])
    assert completion.text == "".join(pieces) == "." * offset
    assert completion.finish_reason == "stop" and len(completion.ids) == offset + 2  # "C " and "D"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(byte_tokenizer(), ["abcd", "bX"], eager=True)
    shown = []
    for token in ids_of("aabcabX"):
        if stream.push(token):
            break
        shown.append(stream.take())
    assert shown == ["", "a", "", "", "abc", ""]  # "a", "ab", "abc" wait; then it was another text
    assert stream.finish() == "aabca" and stream.take(final=True) == "a" and stream.stopped


def test_what_was_held_back_comes_at_the_end() -> None:
    completion, pieces = say("xab", 1, stop=["abc"])
    assert completion.text == "".join(pieces) == "xab"


def test_without_stop_strings_nothing_is_decoded_before_the_end() -> None:
    stream = TextStream(byte_tokenizer())
    assert not any(stream.push(token) for token in ids_of(HARD))
    assert stream.take() == "" and stream.finish() == HARD


def test_u11_special_tokens_are_not_text() -> None:
    tokenizer, tokens = byte_tokenizer(), [*ids_of("ab"), 0, *ids_of("c"), 1]
    stream = TextStream(tokenizer, eager=True)
    pieces = []
    for token in tokens:
        stream.push(token)
        pieces.append(stream.take())
    assert "".join(pieces) == stream.finish() == "abc"


def test_m19_a_tokenizer_without_a_pad_token_is_left_alone() -> None:
    model = saying("one two", start=3)
    assert model.tokenizer.pad_token is None
    before = len(model.tokenizer)
    decoder = Decoder(model)
    texts = [c.text for c in decoder.generate([[5, 5, 5], [5, 5, 5, 5], [5] * 6], SamplingParams(max_new_tokens=20))]
    decoder.close()
    assert texts == ["one two", "ne two", " two"]
    assert model.tokenizer.pad_token is None and len(model.tokenizer) == before


def test_u08_finish_reasons_and_usage() -> None:
    with decoding(saying("one two")) as decoder:
        each = [
            SamplingParams(max_new_tokens=30),
            SamplingParams(max_new_tokens=3),
            SamplingParams(max_new_tokens=9, stop=["e"]),
        ]
        completions = decoder.generate([[5]] * 3, each)
        assert [c.finish_reason for c in completions] == ["stop", "length", "stop"]
        assert decoder.stats.finish_reasons == {"stop": 2, "length": 1}
        assert decoder.stats.tokens == sum(len(c.ids) for c in completions) and decoder.stats.prompts == 3
        assert [c.text for c in completions] == ["one two", "one", "on"]
