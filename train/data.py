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
    """Token ids of one text or chat, and the positions a head is trained at (as many)."""

    ids: list[int]
    supervised: list[bool]


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
        return torch.tensor([token for document in self.documents for token in document.ids])

    @cached_property
    def positions_T(self) -> Tensor:
        """Places in their documents."""
        return torch.cat([torch.arange(length) for length in self.lengths])

    @cached_property
    def rows_S(self) -> Tensor:
        """The supervised positions."""
        return torch.tensor([mark for document in self.documents for mark in document.supervised]).nonzero()[:, 0]

    @cached_property
    def targets_S(self) -> Tensor:
        """The data's own next token at the supervised positions; -1 at the end of a document."""
        following = [token for document in self.documents for token in [*document.ids[1:], -1]]
        return torch.tensor(following)[self.rows_S]


def documents_of(
    rows: Iterable[Row], tokenizer: PreTrainedTokenizerBase, max_len: int, strict: bool = False
) -> tuple[list[Document], Counter[str]]:
    """Encode rows; also returns, by reason, how many could not be used.

    Raises:
        DataError: answers cannot be told from prompts; a row cannot be used and `strict`; or no row is left.
    """
    documents: list[Document] = []
    skipped: Counter[str] = Counter()
    for row in rows:
        try:
            new = list(_documents(row, tokenizer, max_len))
        except TemplateError as error:
            new, reason = [], f"refused by the chat template ({error})"
        else:
            reason = f"no supervised token within max_len={max_len}"
        if not new:
            if strict:
                raise DataError(f"{row.where}: {reason}; repair the row or give data.strict=false")
            skipped[reason] += 1
        documents += new
    for reason, count in skipped.items():
        log.warning("%d rows skipped: %s", count, reason)
    if not documents:
        why = "; ".join(f"{count} x {reason}" for reason, count in skipped.items()) or "there are none"
        raise DataError(f"no row can be trained on: {why}; raise data.max_len (now {max_len}) or give other rows")
    return documents, skipped


def _documents(row: Row, tokenizer: PreTrainedTokenizerBase, max_len: int) -> Iterator[Document]:
    if row.messages:
        ids, answer = encode_chat(tokenizer, row.messages)
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
    counts: Counter[int] = Counter()
    for document in documents:
        pairs = zip(document.supervised, document.ids[1:], strict=False)
        counts.update(token for marked, token in pairs if marked)
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]), dtype=torch.int64)
