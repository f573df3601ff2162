"""report.html: what a run came to, in one file that needs no network."""

import base64
import json
from collections.abc import Sequence
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined
from transformers import PreTrainedTokenizerBase

from hispec.card import measured
from hispec.decode.request import Completion
from hispec.decode.text import REPLACEMENT
from hispec.errors import FileError
from hispec.model import HiSpecModel
from hispec.train.metrics import read

# Texts that are shown, and the tokens of each.
EXAMPLES, LONGEST = 6, 400


class Level(NamedTuple):
    """How tokens of a level look: a colour of their own and, for who sees no colours, a line below."""

    name: str
    colour: str
    line: str
    tokens: int
    share: float


class Token(NamedTuple):
    """One token of an example: the text that it adds, the level that it comes from, and what a hover says."""

    text: str
    level: int
    hover: str


class Example(NamedTuple):
    """A prompt, and what was decoded."""

    prompt: str
    tokens: list[Token]
    is_cut: bool


class Picture(NamedTuple):
    """A picture, its title, and its SVG for an img element."""

    title: str
    source: str


def write_report(folder: Path, model: HiSpecModel, decoded: Sequence[Completion]) -> Path:
    """Write `folder`/report.html from the run's own records and the last evaluation's texts; returns its path.

    Raises:
        FileError: it cannot be written.
    """
    names = [*(f"exit {exit_}" for exit_ in model.exits), "the full model"]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("hispec.train").joinpath("report.html").read_text())
    page = template.render(
        name=folder.name,
        base=model.base,
        names=names,
        tables=measured(model.metrics),
        pictures=_pictures(read(folder / "metrics.jsonl"), model.metrics),
        levels=_levels(names, decoded),
        examples=[_example(model.tokenizer, completion, names) for completion in decoded[:EXAMPLES]],
        n_decoded=len(decoded),
        training=model.training,
        config=(folder / "config.yaml").read_text(),
        environment=json.loads((folder / "environment.json").read_text()),
    )
    path = folder / "report.html"
    try:
        new = path.with_suffix(".new")
        new.write_text(page, encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror}; free space and run the same command again") from None
    return path


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[str]:
    """The text that each token adds; a character that several tokens make together is the last one's."""
    texts = [""]
    for n in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[:n], skip_special_tokens=False, clean_up_tokenization_spaces=False))
        texts.append(texts[-1] if text.endswith(REPLACEMENT) and n < len(ids) else text)
    return [after[len(before) :] for before, after in pairwise(texts)]


def _example(tokenizer: PreTrainedTokenizerBase, completion: Completion, names: Sequence[str]) -> Example:
    ids, levels = completion.ids[:LONGEST], completion.chosen_by[:LONGEST]
    tokens = []
    for at, (text, token, level) in enumerate(zip(pieces(tokenizer, ids), ids, levels, strict=True), 1):
        tokens.append(Token(text, level, f"token {at}, id {token}: {_decided(level, names)}"))
    prompt = str(tokenizer.decode(completion.prompt_ids, skip_special_tokens=False))
    return Example(prompt, tokens, len(completion.ids) > LONGEST)


def _decided(level: int, names: Sequence[str]) -> str:
    if level == len(names) - 1:
        return f"chosen by {names[level]}"
    how = "drafted at" if level == 0 else "chosen by"
    return f"{how} {names[level]}, {'accepted by ' + ' and '.join(names[level + 1 :])}"


def _levels(names: Sequence[str], decoded: Sequence[Completion]) -> list[Level]:
    from hispec.train.pictures import colour

    chosen = [level for completion in decoded for level in completion.chosen_by]
    lines = ("solid", "dotted", "dashed", "double")
    return [
        Level(
            _decided(level, names),
            colour(level, len(names) - 1),
            lines[level % len(lines)],
            chosen.count(level),
            chosen.count(level) / max(1, len(chosen)),
        )
        for level in range(len(names))
    ]


def _pictures(lines: Sequence[dict[str, Any]], metrics: dict[str, Any]) -> list[Picture]:
    from hispec.train import pictures  # draws with matplotlib, which takes a second to import

    with pictures.styled():
        drawn = {
            "Loss": pictures.training(lines, "loss", "loss per token"),
            "Same token as the full model": pictures.training(lines, "top1", "same top-1 token"),
            "Chance that a sampled draft stands": pictures.training(lines, "acceptance", "sum min(p, q)"),
            "Drafted tokens that stood, by position": pictures.positions(metrics["judges"]),
            "Decoding held-out prompts": pictures.decoding(lines),
        }
    found = {title: svg for title, svg in drawn.items() if svg is not None}
    return [
        Picture(title, "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode())
        for title, svg in found.items()
    ]
