"""Chats to token ids, and which positions a head is trained at.

    token        <s> <|user|> hi <|end|> <|assistant|>  ok  yes <|end|>
    answer        .     .      .    .         .          x   x     x
    supervised    .     .      .    .         x          x   x     .

A position is supervised when the token after it belongs to an answer: the last token of the prompt is, because that is
where decoding starts; the end marker is not, because nothing is asked of a model there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from hispec.errors import DataError

Message = dict[str, str]
# Stands for a user's words; no template has it, or changes it.
WORDS = "uSeRsWoRdS"


def supervised(answer: Sequence[bool]) -> list[bool]:
    """The positions to train at, [T], from the tokens that belong to answers, [T]."""
    return [*answer[1:], False]


def everywhere(n: int) -> npt.NDArray[np.bool_]:
    """As `supervised`, if all of `n` tokens belonged to an answer; an array, as there may be very many."""
    return np.arange(n) < n - 1


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of plain text, with the start token if the tokenizer adds one, but never two."""
    ids: list[int] = tokenizer(text)["input_ids"]
    bos = tokenizer.bos_token_id
    return ids[1:] if len(ids) > 1 and ids[0] == ids[1] == bos else ids


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Token ids of a chat that waits for an answer; without a chat template, of the contents alone."""
    if not tokenizer.chat_template:
        return encode_text(tokenizer, "\n\n".join(message["content"] for message in messages))
    return _ids(tokenizer, _render(tokenizer, messages, prompt=True))


def encode_opening(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], str]:
    """Token ids of a chat up to where the user's first words would stand, and the text that comes after these.

    Raises:
        DataError: the template refuses such a chat, or does not show its words.
    """
    try:
        before, words, after = _render(tokenizer, [{"role": "user", "content": WORDS}], prompt=True).partition(WORDS)
    except TemplateError as error:
        raise DataError(f"the chat template refuses a single question ({error}); give chat_template=FILE") from None
    if not words:
        raise DataError("the chat template does not show what the user says; give chat_template=FILE")
    # A space belongs to the word after it, for most tokenizers; alone, no model has seen it there.
    return _ids(tokenizer, before.rstrip(" ")), after.strip()


def encode_chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> tuple[list[int], list[bool]]:
    """Token ids [T] of a chat, and which of them belong to answers, end marker included.

    Answers are found by the template's own generation markers, else by rendering the chat turn by turn.

    Raises:
        DataError: no chat template, or one by which answers cannot be found.
    """
    template = tokenizer.chat_template
    if not template:
        raise DataError("the model's tokenizer has no chat template; give chat_template=FILE, or rows with text")
    if not tokenizer.is_fast:
        raise DataError(
            f"tokenizer {type(tokenizer).__name__} does not tell which text a token stands for; use a fast one"
        )
    if isinstance(template, str) and "generation %}" in template.replace("-%}", "%}").replace("endgeneration", ""):
        found: Any = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
    text = _render(tokenizer, messages)
    spans = _answer_spans(tokenizer, messages, text)
    encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    answer = [
        any(start < stop_ and end > start_ for start_, stop_ in spans) for start, end in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), answer


def _answer_spans(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str) -> list[tuple[int, int]]:
    """Character spans of the answers in the rendered chat; the whole is tokenised once, so no token can drift."""
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], prompt=True)
        after = _render(tokenizer, messages[: index + 1])
        if not (text.startswith(before) and text.startswith(after) and len(after) > len(before)):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise DataError(
                f"the chat template of {name!r} renders the start of a chat differently once it goes on, so answers"
                " cannot be told from prompts; give chat_template=FILE with {% generation %} markers around the answers"
            )
        # White space after the end marker belongs to the template, not to what the model says.
        spans.append((len(before), len(after.rstrip())))
    return spans


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], prompt: bool = False) -> str:
    text: Any = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
    return str(text)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template prints the start token itself.
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids
