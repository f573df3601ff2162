"""Text that every machine has: the running Python's own library, and the packaged prompts."""

import ast
import importlib
import importlib.util
import itertools
import random
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from hispec.config import unknown_key
from hispec.errors import ConfigError
from hispec.train.rows import Row

# Characters of the longest beginning of a function: a docstring that is longer is a manual.
LONGEST = 900


def stdlib_rows(seed: int) -> Iterator[Row]:
    """Documentation topics and module sources of the running Python, alternating, in an order that `seed` decides."""
    rng = random.Random(seed)
    # The documentation of the language, as `help()` prints it; typing stubs do not know the module.
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    names = sorted(topics)
    rng.shuffle(names)
    modules = _modules()
    rng.shuffle(modules)
    docs = (Row(f"stdlib topic {name!r}", text=topics[name]) for name in names)
    sources = (row for name in modules if (row := _source(name)) is not None)
    for pair in itertools.zip_longest(docs, sources):
        yield from (row for row in pair if row is not None)


def stdlib_prompts(limit: int, seed: int) -> list[Row]:
    """Functions of the running Python up to the end of their docstrings, in an order that `seed` decides: `limit` of
    them, or all there are."""
    rows = _functions()
    return random.Random(seed).sample(rows, min(limit, len(rows)))


@cache
def _functions() -> tuple[Row, ...]:
    rows: dict[str, Row] = {}  # by text: some modules share functions
    for module in _modules():
        source = _source(module)
        for name, text in _beginnings("" if source is None else source.text):
            rows.setdefault(text, Row(f"stdlib function {module}.{name}", text=text, unfinished=True))
    return tuple(rows.values())


def _beginnings(source: str) -> Iterator[tuple[str, str]]:
    """Name and beginning of every function of a module that has a docstring and goes on after it."""
    lines = source.split("\n")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            text = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n"
            if len(text) <= LONGEST:
                yield node.name, text


def _modules() -> list[str]:
    return sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))


def _source(module: str) -> Row | None:
    spec = importlib.util.find_spec(module)
    path = None if spec is None or spec.origin is None else Path(spec.origin)
    if path is None or path.suffix != ".py" or not path.is_file():
        return None
    return Row(f"stdlib module {module!r}", text=path.read_text(encoding="utf-8", errors="replace"))


def training_prompts(name: str, limit: int | None, seed: int) -> list[Row]:
    """Every task of a packaged list crossed with every topic, shuffled, the first `limit`."""
    lists = _packaged(name)["training"]
    prompts = [
        text.format(topic=topic)
        for group in lists
        for text, topic in itertools.product(group["tasks"], group["topics"])
    ]
    random.Random(seed).shuffle(prompts)
    return [prompt_row(f"prompts {name}, number {number}", text) for number, text in enumerate(prompts[:limit], 1)]


def held_out_prompts(name: str) -> list[Row]:
    """The prompts of a packaged list that are never trained on, for evaluation and benchmarks."""
    return [prompt_row(f"held-out {name}, number {n}", text) for n, text in enumerate(_packaged(name)["held_out"], 1)]


def packaged_names() -> list[str]:
    """Names of the packaged prompt lists."""
    folder = files("hispec.recipes") / "prompts"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def _packaged(name: str) -> dict[str, list[Any]]:
    if name not in packaged_names():
        raise ConfigError(f"prompts: {unknown_key(name, packaged_names()).replace('unknown key', 'unknown list')}")
    data: dict[str, list[Any]] = yaml.safe_load((files("hispec.recipes") / "prompts" / f"{name}.yaml").read_text())
    return data


def prompt_row(where: str, text: str) -> Row:
    """What a user says first."""
    return Row(where, ({"role": "user", "content": text},))
