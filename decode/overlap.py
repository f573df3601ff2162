"""Whether what is measured on was trained on."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hispec.decode.prompt_sets import packaged_texts, read_rows
from hispec.errors import DataError


def find(training: Sequence[str], prompts: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Per prompt set, the prompts whose words occur one after the other in a training text, whatever lies between
    the words: case, punctuation and line breaks do not count.

    `training`: JSON or JSONL files, of which every string is looked at, a run's folder of answers (or own prompts),
    or names of packaged lists.

    Raises:
        FileError, DataError: a file cannot be read, holds answers without what they answer, or nothing to look at.
    """
    texts = [f" {normalised(text)} " for source in training for text in _texts(source)]
    return {
        name: [prompt for prompt in own if any(f" {normalised(prompt)} " in text for text in texts)]
        for name, own in prompts.items()
    }


def normalised(text: str) -> str:
    """Words and numbers alone, in lower case, one space between them."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _texts(source: str) -> Iterator[str]:
    if "/" not in source and "." not in source and not Path(source).is_dir():
        try:
            yield from packaged_texts(source)[1]
        except FileNotFoundError:
            raise DataError(f"training: {source!r} is neither a file nor a packaged list such as everyday") from None
        return
    path = Path(source)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"training: the folder {source} holds no .jsonl file; give files, or a run's answers/")
    for file in files:
        rows = read_rows(file)
        if rows and rows[0].keys() == {"provenance"}:
            rows = _written(rows, file)
        elif path.is_dir():
            raise DataError(f"training: {file} was not written by a trunk; give its name, or a run's answers/")
        for row in rows:
            yield from _strings(row)


def _written(rows: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """The rows of a file that a trunk has written, without the first, which tells how."""
    if any("prompt" in row and "prompt_text" not in row for row in rows):
        raise DataError(
            f"training: {file} holds answers, not the prompts they answer; give the files or packaged lists that the"
            " recipe names under data"
        )
    return rows[1:]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def said(found: Mapping[str, Sequence[str]], training: Sequence[str], n: Mapping[str, int]) -> list[str]:
    """The outcome, a line per prompt set."""
    where = ", ".join(training)
    lines = []
    for name, own in found.items():
        line = f"training text: {len(own)} of {n[name]} prompts of {name} occur in {where}"
        lines.append(f"WARNING: {line}; the first is {json.dumps(own[0][:60], ensure_ascii=False)}" if own else line)
    return lines
