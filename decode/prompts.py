"""Prompt files: lines of JSON in, lines of JSON out, resumable.

While a run lasts its lines lie in OUTPUT.part, as they are finished, behind one line that identifies the run. What a
killed run has left there is kept; at the end they are put in the order of the prompts, and the file takes its name.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hispec.config import Config
from hispec.decode.request import Completion, SamplingParams
from hispec.errors import ConfigError, DataError, FileError, RequestError

_SOURCES = ("prompt", "messages", "prompt_ids")
_WRITTEN = (
    "index", "choice", "text", "finish_reason", "prompt_tokens", "completion_tokens", "ids", "logprobs", "error",
)  # fmt: skip


@dataclass(frozen=True)
class PromptRow:
    """One line of a prompt file."""

    line: int
    source: str
    content: Any
    params: SamplingParams
    rest: dict[str, Any]
    """What else the line holds; copied to the output."""


def read_prompts(path: Path, defaults: Mapping[str, Any]) -> list[PromptRow]:
    """All rows of a JSONL file; blank lines are skipped.

    Raises:
        FileError: not readable. DataError: empty, or a line cannot be used (it is named).
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise FileError(f"prompts: cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"prompts: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    rows = [_row(path, n, line, defaults) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not rows:
        raise DataError(f"prompts: {path} has no lines; each line is JSON with {', '.join(_SOURCES)}")
    return rows


def _row(path: Path, number: int, line: str, defaults: Mapping[str, Any]) -> PromptRow:
    where = f"{path}:{number}"
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at column {error.colno}); mend the line") from None
    sources = [key for key in _SOURCES if isinstance(data, dict) and data.get(key) is not None]
    if len(sources) != 1:
        raise DataError(f"{where}: needs exactly one of {', '.join(_SOURCES)}, has {sources or 'none'}")
    kind = str if sources[0] == "prompt" else list
    if not isinstance(data[sources[0]], kind):
        raise DataError(f"{where}: {sources[0]} must be a {kind.__name__}, is {type(data[sources[0]]).__name__}")
    if refused := [key for key in SamplingParams.refused if key in data]:
        raise DataError(f"{where}: {refused[0]}: {SamplingParams.refused[refused[0]]}")
    own = {key: data[key] for key in SamplingParams.model_fields if key in data}
    try:
        params = SamplingParams.build({**defaults, **own})
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None
    rest = {key: value for key, value in data.items() if key not in sources and key not in own}
    if clash := [key for key in _WRITTEN if key in rest]:
        raise DataError(f"{where}: key {clash[0]!r} is one that the output has for itself; rename it")
    return PromptRow(number, sources[0], data[sources[0]], params, rest)


class OutputFile:
    """Completions, one JSON line each, in the order of the prompts when all are there.

    Attributes:
        missing: numbers of the rows that do not have all their completions yet.
    """

    def __init__(self, path: Path, identity: Config, rows: list[PromptRow], overwrite: bool) -> None:
        """Open for appending what is missing; `identity` is what makes a run the same run.

        Raises:
            FileError: the file exists, cannot be written, or belongs to another run.
        """
        self.path, self.rows = path, rows
        self.part = path.with_name(path.name + ".part")
        if path.exists() and not overwrite:
            raise FileError(f"output: {path} exists; choose another name, or give overwrite=true")
        digest = hashlib.sha256(repr((identity, [(r.content, r.params, r.rest) for r in rows])).encode()).hexdigest()
        header = json.dumps({"hispec_run": digest}) + "\n"
        self._done = self._left_by_killed_run(header)
        self.missing = [
            number
            for number, row in enumerate(rows)
            if not all((number, choice) in self._done for choice in range(row.params.n))
        ]
        try:
            self._file = self.part.open("a", encoding="utf-8")
            if self._file.tell() == 0:
                self._file.write(header)
        except OSError as error:
            raise FileError(f"output: cannot write {self.part}: {error.strerror}; choose another place") from None

    def write(self, number: int, completion: Completion) -> None:
        """Write row `number`'s completion.

        Raises:
            FileError: it cannot be written; what is there stays.
        """
        row = self.rows[number]
        if (number, completion.choice) in self._done:
            return  # there from a run that was killed between two continuations of a prompt
        line = {
            "index": number,
            **({"choice": completion.choice} if row.params.n > 1 else {}),
            **row.rest,
            row.source: row.content,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(completion.prompt_ids),
            "completion_tokens": len(completion.ids),
            "ids": completion.ids,
            **({} if completion.logprobs is None else {"logprobs": completion.logprobs}),
            **({} if completion.error is None else {"error": completion.error}),
        }
        try:
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise self._full(error) from None

    def finish(self) -> None:
        """Give the complete file its name.

        Raises:
            FileError: it cannot be written; what is there stays.
        """
        final = self.part.with_name(self.part.name + ".final")
        try:
            self._file.close()
            lines = self.part.read_bytes().splitlines(keepends=True)[1:]
            lines.sort(key=_place)
            final.write_bytes(b"".join(lines))
            os.replace(final, self.path)
            self.part.unlink()
        except OSError as error:
            final.unlink(missing_ok=True)
            raise self._full(error) from None

    def close(self) -> None:
        """Leave what is finished for the next run."""
        with contextlib.suppress(OSError):
            self._file.close()

    def _full(self, error: OSError) -> FileError:
        return FileError(
            f"output: cannot write beside {self.path}: {error.strerror}; free space and give the same command again,"
            f" finished lines are kept in {self.part}"
        )

    def _left_by_killed_run(self, header: str) -> set[tuple[int, int]]:
        if not self.part.exists():
            return set()
        lines = self.part.read_bytes().splitlines(keepends=True)
        if lines and lines[0] != header.encode():
            raise FileError(
                f"output: {self.part} is from a run with other prompts or settings; delete it to start anew"
            )
        whole = [line for line in lines if line.endswith(b"\n")]
        if len(whole) < len(lines):
            # The kill came in the middle of a line.
            with self.part.open("r+b") as file:
                file.truncate(sum(map(len, whole)))
        return {_place(line) for line in whole[1:]}


def _place(line: bytes) -> tuple[int, int]:
    data = json.loads(line)
    return data["index"], data.get("choice", 0)


def render(rows: list[PromptRow], tokenizer: Any, template: bool, system: str | None) -> Iterator[str | list[int]]:
    """The prompt of each row, as text or token ids.

    Raises:
        RequestError: messages are given but the model has no chat template, or it refuses them.
    """
    for row in rows:
        if row.source == "prompt_ids":
            yield row.content
        elif row.source == "messages" or template:
            messages = row.content if row.source == "messages" else [{"role": "user", "content": row.content}]
            try:
                yield chat_ids(tokenizer, messages, system)
            except RequestError as error:
                raise RequestError(f"line {row.line}: {error}") from None
        else:
            yield row.content


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], system: str | None = None) -> list[int]:
    """Token ids of a conversation, ready for the assistant's answer.

    Raises:
        RequestError: no chat template, or it refuses these messages.
    """
    if tokenizer.chat_template is None:
        raise RequestError("this model has no chat template; give plain prompts, with template=false and chat=false")
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    try:
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except Exception as error:  # templates are programs and raise what they like
        raise RequestError(f"the model's chat template refuses these messages: {error}") from None
    return list(encoded["input_ids"])
