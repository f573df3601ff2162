"""Rows of training data, read from files: chats, prompts and plain text."""

import glob
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hispec.errors import DataError, FileError
from hispec.train.masks import Message

ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant"}
TEXT = (".txt", ".md", ".rst", ".py")
JSON = (".jsonl", ".ndjson", ".json")


@dataclass(frozen=True)
class Row:
    """A chat or a text, and where it stands (file:line), for messages to the user."""

    where: str
    messages: tuple[Message, ...] = ()
    text: str = ""


def read_files(patterns: Sequence[str]) -> list[Row]:
    """All rows of files or globs, in order.

    Raises:
        FileError: nothing there, or not readable. DataError: a malformed row, with file and line, or no row at all.
    """
    rows: list[Row] = []
    for pattern in patterns:
        paths = sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise FileError(f"data.files: {pattern!r} matches no file")
        for path in paths:
            found = list(_read(Path(path)))
            if not found:
                raise DataError(f"{path} holds no rows; give one JSON object per line, or text")
            rows += found
    return rows


def _read(path: Path) -> Iterator[Row]:
    if path.suffix not in JSON + TEXT:
        raise DataError(
            f"{path}: files of type {path.suffix or 'none'!r} are not read; legal: {', '.join(JSON + TEXT)}"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if path.suffix in TEXT:
        if text.strip():
            yield Row(where=str(path), text=text)
    elif path.suffix == ".json":
        data = _parse(text, str(path))
        if not isinstance(data, list):
            raise DataError(f"{path}: a JSON file must hold a list of rows; for one object per line name it .jsonl")
        for number, item in enumerate(data, 1):
            yield parse_row(item, f"{path}: row {number}")
    else:
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield parse_row(_parse(line, f"{path}:{number}"), f"{path}:{number}")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg}, column {error.colno})") from None


def parse_row(item: Any, where: str) -> Row:
    """One row from its JSON object: `messages` or ShareGPT `conversations` (keys may be mixed), `prompt` or `text`.

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
        return Row(where, ({"role": "user", "content": _content(item["prompt"], where)},))
    if item.get("text") is not None:
        return Row(where, text=_content(item["text"], where))
    raise DataError(
        f"{where}: a row needs messages, conversations, prompt or text; this one has {', '.join(item) or 'nothing'}"
    )


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
