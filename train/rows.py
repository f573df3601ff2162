"""Rows of training data, read from files: chats, prompts, plain text and token ids."""

import glob
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hispec.errors import DataError, FileError, first_line
from hispec.train.masks import Message

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
TEXT = (".txt", ".md", ".rst", ".py")
JSON = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
# What a label says where nothing is to be learned.
NO_LABEL = -100


@dataclass(frozen=True)
class Row:
    """A chat, a text or token ids, and where it stands (file:line), for messages to the user.

    `answer` marks the `ids` that belong to answers. `unfinished`: the text is a prompt, which the trunk goes on with.
    `fault` says why the row cannot be used; it is empty otherwise.
    """

    where: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    unfinished: bool = False
    ids: tuple[int, ...] = ()
    answer: tuple[bool, ...] = ()
    fault: str = ""

    @property
    def asks(self) -> bool:
        """Whether the trunk can answer it, or go on with it."""
        return bool(self.messages) or self.unfinished


def find_files(path: str) -> list[Path]:
    """The files that a path, a glob or a folder stands for, in order; none if there is nothing."""
    found = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
    return [file for place in found for file in ([place] if place.is_file() else _inside(place))]


def _inside(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in (*JSON, *TEXT, PARQUET) and path.is_file())


def read_file(path: Path) -> Iterator[Row]:
    """All rows of a file, in order; those of an unknown form carry a fault.

    Raises:
        FileError: not readable. DataError: not of its type, or no row at all.
    """
    n_rows = 0
    try:
        for item, where in _items(path):
            n_rows += 1
            yield item if isinstance(item, Row) else row_of(item, where)
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not n_rows:
        raise DataError(f"{path} holds no rows; give one JSON object per line, or text")


def _items(path: Path) -> Iterator[tuple[Any, str]]:
    """What stands in a file, each with its place; a text file is a row itself."""
    if path.suffix in TEXT:
        text = path.read_text(encoding="utf-8-sig")
        if text.strip():
            yield Row(where=str(path), text=text), str(path)
    elif path.suffix == ".json":
        data = _parse(path.read_text(encoding="utf-8-sig"), str(path))
        if not isinstance(data, list):
            raise DataError(f"{path}: a JSON file must hold a list of rows; for one object per line name it .jsonl")
        yield from ((item, f"{path}: row {number}") for number, item in enumerate(data, 1))
    elif path.suffix in JSON:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _parse(line, f"{path}:{number}"), f"{path}:{number}"
    elif path.suffix == PARQUET:
        yield from _parquet(path)
    else:
        legal = ", ".join((*JSON, PARQUET, *TEXT))
        raise DataError(f"{path}: files of type {path.suffix or 'none'!r} are not read; legal: {legal}")


def _parquet(path: Path) -> Iterator[tuple[Any, str]]:
    # By name: it has no types, and only those who read Parquet need it.
    parquet: Any = importlib.import_module("pyarrow.parquet")
    arrow: Any = importlib.import_module("pyarrow")
    try:
        number = 0
        for part in parquet.ParquetFile(path).iter_batches(batch_size=1024):
            for item in part.to_pylist():
                number += 1
                yield item, f"{path}: row {number}"
    except arrow.ArrowException as error:
        raise DataError(f"{path}: not valid Parquet ({first_line(error)})") from None


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None


def row_of(item: Any, where: str) -> Row:
    """As `parse_row`; a row of an unknown form carries what is wrong with it instead of raising."""
    try:
        return parse_row(item, where)
    except DataError as error:
        return Row(where, fault=str(error).removeprefix(f"{where}: "))


def parse_row(item: Any, where: str) -> Row:
    """One row from its JSON object.

    `messages` or ShareGPT `conversations` (keys may be mixed) with an optional `system`; `prompt`, with or without
    `completion`, each a text or messages; `text`; or `input_ids` with `loss_mask` (1: part of an answer) or `labels`.

    Raises:
        DataError: none of these fields, or a turn without a known role.
    """
    if not isinstance(item, dict):
        raise DataError(f"{where}: a row is a JSON object, this is {type(item).__name__}")
    turns = item.get("messages") or item.get("conversations")
    if isinstance(turns, list):
        messages = [_message(turn, where) for turn in turns]
        system = _content(item.get("system"), where)
        if system and not (messages and messages[0]["role"] == "system"):
            messages.insert(0, {"role": "system", "content": system})
        return Row(where, tuple(messages))
    if item.get("prompt") is not None:
        answer = item.get("completion")
        turns = [*_turns("user", item["prompt"], where), *_turns("assistant", answer, where)]
        return Row(where, tuple(turns))
    if item.get("input_ids") is not None:
        return _tokens(item, where)
    if item.get("text") is not None:
        return Row(where, text=_content(item["text"], where))
    raise DataError(
        f"{where}: a row needs messages, conversations, prompt, text or input_ids;"
        f" this one has {', '.join(item) or 'nothing'}"
    )


def _turns(role: str, content: Any, where: str) -> list[Message]:
    """A prompt or a completion: a text, or messages already."""
    if content is None:
        return []
    if isinstance(content, list) and content and all(isinstance(turn, dict) and "role" in turn for turn in content):
        return [_message(turn, where) for turn in content]
    return [{"role": role, "content": _content(content, where)}]


def _tokens(item: dict[str, Any], where: str) -> Row:
    ids, mask, labels = item["input_ids"], item.get("loss_mask"), item.get("labels")
    if not (isinstance(ids, list) and ids and all(isinstance(token, int) and token >= 0 for token in ids)):
        raise DataError(f"{where}: input_ids must be a list of token ids, 0 or more each")
    marks = mask if mask is not None else labels
    if marks is not None and not (isinstance(marks, list) and len(marks) == len(ids)):
        name = "labels" if mask is None else "loss_mask"
        raise DataError(f"{where}: {name} must be as long as input_ids, which has {len(ids)}")
    if mask is not None:
        answer = [mark in (1, True) for mark in mask]
    elif labels is not None:
        answer = [label != NO_LABEL for label in labels]
    else:
        answer = [True] * len(ids)
    return Row(where, ids=tuple(ids), answer=tuple(answer))


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, dict):
        raise DataError(f"{where}: a turn is a JSON object with role and content, this is {type(turn).__name__}")
    role = turn.get("role") or turn.get("from")
    role = ROLES.get(str(role).lower(), str(role).lower())
    if role not in ("system", "user", "assistant", "tool"):
        raise DataError(f"{where}: role {role!r} is unknown; legal: system, user (human), assistant (gpt), tool")
    content = turn["content"] if "content" in turn else turn.get("value")
    return {"role": role, "content": _content(content, where)}


def _content(content: Any, where: str) -> str:
    """Text of a content field: null is empty, a list is its text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    raise DataError(f"{where}: content must be text or a list of parts, this is {type(content).__name__}")
