"""How a few rows look to training: what is learned, and what is only read."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from hispec.train.data import Document

GREEN, GREY, OFF = "\033[32m", "\033[90m", "\033[0m"


def show(document: Document, tokenizer: PreTrainedTokenizerBase, colour: bool) -> str:
    """The text of a document in one line: learned tokens green, others grey; without colour, learned ones [[so]].

    A token is learned when the position before it is supervised.
    """
    marks = [False, *document.supervised[:-1]]
    pieces = []
    for learned, ids in _runs(document.ids, marks):
        text = str(tokenizer.decode(ids, skip_special_tokens=False)).replace("\n", "\\n")
        if colour:
            pieces.append(f"{GREEN if learned else GREY}{text}{OFF}")
        else:
            pieces.append(f"[[{text}]]" if learned else text)
    return "".join(pieces)


def _runs(ids: Iterable[int], marks: Iterable[bool]) -> Iterator[tuple[bool, list[int]]]:
    pairs = zip(marks, ids, strict=True)
    for learned, run in groupby(pairs, key=lambda pair: bool(pair[0])):
        yield learned, [int(token) for _, token in run]
