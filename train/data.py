"""From rows to packed micro batches.

    documents     aaaaaaaa  bbb  ccccc  dd            a document: token ids, and where a head is trained in it
    micro batch   [aaaaaaaa bbb ccccc]  [dd ...]      up to micro_batch_tokens; positions start at 0 in each document,
                                                      and none sees another

Letters: T tokens of a micro batch, S supervised positions among them.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hispec.errors import DataError
from hispec.train.masks import encode_chat, encode_text, supervised
from hispec.train.rows import Row

log = logging.getLogger("hispec")


@dataclass(frozen=True)
class Document:
    """Token ids of one text or chat, and the positions a head is trained at (as many); lists, or parts of an array."""

    ids: Sequence[int] | npt.NDArray[np.int32]
    supervised: Sequence[bool] | npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MicroBatch:
    """Documents packed for one forward pass."""

    documents: tuple[Document, ...]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [len(document.ids) for document in self.documents]

    @cached_property
    def ids_T(self) -> Tensor:
        """Token ids."""
        return _joined([document.ids for document in self.documents], np.int64)

    @cached_property
    def positions_T(self) -> Tensor:
        """Places in their documents."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @cached_property
    def rows_S(self) -> Tensor:
        """The supervised positions."""
        return _joined([document.supervised for document in self.documents], np.bool_).nonzero()[:, 0]

    @cached_property
    def targets_S(self) -> Tensor:
        """The data's own next token at the supervised positions; -1 at the end of a document."""
        following_T = self.ids_T.roll(-1)
        following_T[torch.tensor(self.lengths).cumsum(0) - 1] = -1
        return following_T[self.rows_S]


def _joined(parts: Sequence[Any], dtype: Any) -> Tensor:
    return torch.from_numpy(np.concatenate([np.asarray(part, dtype) for part in parts]))


def documents_of(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, max_len: int, strict: bool = False
) -> tuple[list[Document], Counter[str]]:
    """Encode rows; also returns, by reason, how many could not be used.

    Raises:
        DataError: answers cannot be told from prompts; a row cannot be used and `strict`; or no row is left.
    """
    documents: list[Document] = []
    skipped = Skipped(strict)
    for row in rows:
        documents += encode(row, tokenizer, max_len, skipped)
    skipped.tell(len(documents), max_len)
    return documents, skipped.counts


class Skipped:
    """Rows that cannot be used, counted by reason."""

    def __init__(self, strict: bool = False) -> None:
        """`strict` stops at the first one."""
        self.strict = strict
        self.counts: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, row: Row, reason: str) -> None:
        """Note a row.

        Raises:
            DataError: with `strict`.
        """
        if self.strict:
            raise DataError(f"{row.where}: {reason}; repair the row or give data.strict=false")
        self.counts[reason] += 1
        self.first.setdefault(reason, row.where)

    def tell(self, n_documents: int, max_len: int) -> None:
        """Log what was skipped.

        Raises:
            DataError: nothing is left.
        """
        for reason, count in self.counts.items():
            log.warning("%d rows skipped: %s (the first: %s)", count, reason, self.first[reason])
        if not n_documents:
            why = "; ".join(f"{count} x {reason}" for reason, count in self.counts.items()) or "there are none"
            raise DataError(f"no row can be trained on: {why}; raise data.max_len (now {max_len}) or give other rows")


def encode(row: Row, tokenizer: PreTrainedTokenizerBase, max_len: int, skipped: Skipped) -> list[Document]:
    """The documents of one row: one of a chat, any number of a text; none if it cannot be used.

    Raises:
        DataError: answers cannot be told from prompts, or the row cannot be used and `skipped` is strict.
    """
    fault = row.fault
    if not fault and any(token >= len(tokenizer) for token in row.ids):
        fault = f"a token id is not in the vocabulary, 0..{len(tokenizer) - 1}"
    documents: list[Document] = []
    if not fault:
        try:
            documents = list(_documents(row, tokenizer, max_len))
        except TemplateError as error:
            fault = f"refused by the chat template ({error})"
    if not documents:
        skipped.add(row, fault or f"no supervised token within max_len={max_len}")
    return documents


def _documents(row: Row, tokenizer: PreTrainedTokenizerBase, max_len: int) -> Iterator[Document]:
    if row.messages or row.ids:
        ids, answer = (list(row.ids), list(row.answer)) if row.ids else encode_chat(tokenizer, row.messages)
        # Cut first: a half answer keeps its half, and no end marker is invented.
        marks = supervised(answer[:max_len])
        if any(marks):
            yield Document(ids[:max_len], marks)
        return
    ids = encode_text(tokenizer, row.text)
    for start in range(0, len(ids), max_len):
        part = ids[start : start + max_len]
        if len(part) > 1:
            yield Document(part, [True] * len(part))


def text_documents(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, max_len: int, tokens: int, seed: int
) -> list[Document]:
    """One stretch of each text row, of up to `max_len` tokens at a random place, until there are `tokens` of them."""
    rng = random.Random(seed)
    documents: list[Document] = []
    missing = tokens
    for row in rows:
        if missing <= 1:
            break
        stretches = list(_documents(Row(row.where, text=row.text[:200_000]), tokenizer, max_len))
        if stretches:
            chosen = rng.choice(stretches)
            size = min(len(chosen.ids), missing)
            documents.append(Document(chosen.ids[:size], chosen.supervised[:size]))
            missing -= size
    return documents


def pack(documents: Sequence[Document], tokens: int, seed: int) -> list[MicroBatch]:
    """Shuffle documents and pack them, none split, each into the first batch of the last few that still has room."""
    order = list(documents)
    random.Random(seed).shuffle(order)
    bins: list[tuple[list[Document], int]] = []
    for document in order:
        size = len(document.ids)
        # A few open bins are enough to fill nearly all, and keep this linear.
        place = next((at for at in range(max(0, len(bins) - 16), len(bins)) if bins[at][1] + size <= tokens), None)
        if place is None:
            bins.append(([document], size))
        else:
            bins[place][0].append(document)
            bins[place] = (bins[place][0], bins[place][1] + size)
    return [MicroBatch(tuple(packed)) for packed, _ in bins]


def batch_order(n_batches: int, seed: int) -> Callable[[int], int]:
    """The endless stream of batches, as a function from place to batch: epoch after epoch, each shuffled anew.

    Steps take their batches from this stream one after another, so no window of accumulation is ever incomplete (one
    may reach into the next epoch), every rank has equally many, and a resumed run goes on at its place.
    """
    epochs: dict[int, list[int]] = {}

    def at(place: int) -> int:
        epoch, index = divmod(place, n_batches)
        if epoch not in epochs:
            epochs.clear()
            epochs[epoch] = random.Random(f"{seed} {epoch}").sample(range(n_batches), n_batches)
        return epochs[epoch][index]

    return at


def frequent_tokens(documents: Iterable[Document], size: int, vocab_size: int) -> Tensor:
    """The `size` most frequent targets, as rising token ids [size]; ties, and what is missing, go to lower ids.

    Raises:
        DataError: the vocabulary is not larger than `size`.
    """
    if size >= vocab_size:
        raise DataError(
            f"head.vocab_size={size} does not reduce a vocabulary of {vocab_size}; give a smaller one, or null"
        )
    counts_V = np.zeros(vocab_size, np.int64)
    for document in documents:
        marked = np.asarray(document.supervised[:-1], np.bool_)
        np.add.at(counts_V, np.asarray(document.ids[1:], np.int64)[marked], 1)
    ranked_V = np.argsort(-counts_V, kind="stable")
    return torch.from_numpy(np.sort(ranked_V[:size]))
