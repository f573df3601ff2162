"""`plan=true`: what a recipe would do, told without loading a weight."""

import itertools
import math
import sys
from importlib.resources import files
from typing import NamedTuple

import torch
import yaml
from huggingface_hub import HfApi, get_session, is_offline_mode
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from hispec.base import base_config
from hispec.config import HeadConfig
from hispec.errors import FileError, first_line
from hispec.train import budget, launch, ranks, setup, sources
from hispec.train.batch import BatchTriple, solve
from hispec.train.budget import GB, Shape
from hispec.train.config import LaunchConfig, TrainConfig
from hispec.train.data import Document, Skipped, encode
from hispec.train.loop import n_steps
from hispec.train.own_prompts import opening_of
from hispec.train.preview import show
from hispec.train.tokens import prompt_ids

# Rows that are encoded to know how long they are; the others are taken to be alike.
SAMPLE = 1000
SHOWN = 3


class Epoch(NamedTuple):
    """Tokens of one pass over the data, what is not known about them, and some documents to look at."""

    tokens: int
    note: str
    shown: list[str]


def describe(config: TrainConfig) -> list[str]:
    """Lines for a person.

    Raises:
        HiSpecError: as `setup.prepare`, for what can be known without weights.
    """
    base = setup.base_of(config)
    known = _known().get(config.model)
    settings = base_config(base, config.revision) if known is None else _from_shape(known)
    shape = Shape.of(settings)
    exits = config.exits_for(shape.n_layers)
    heads = (config.heads or [config.head] * 2) if exits is None else config.heads_for(len(exits))
    setup.read_held_out(config)
    epoch = _epoch(config, base)
    world, where = _ranks(config)
    train, triple = config.train, solve(config.train, world)
    steps = n_steps(train, max(1, math.ceil(epoch.tokens / triple.micro)), triple.accumulation * world)
    dtype = setup.dtype_of(config) if config.needs is None else config.dtype or "bfloat16"
    size = torch.finfo(getattr(torch, dtype)).bits // 8
    cache = epoch.tokens * shape.hidden * size * (len(heads) + 1) if config.data.cache else 0
    return [
        f"model      {config.model}, {shape.n_parameters / 1e6:,.1f} M parameters, {shape.n_layers} layers, {dtype}",
        f"device     {where}, trunk.shard={config.trunk.shard}, ZeRO stage {train.zero}",
        *(
            f"exit {exit_:<5} {_head(head)}, {budget.trained(head, shape) / 1e6:,.2f} M trainable"
            for exit_, head in zip(exits or ["auto"] * len(heads), heads, strict=True)
        ),
        *_choice(config, shape),
        f"data       about {epoch.tokens:,} tokens an epoch{epoch.note}",
        f"batch      {triple} tokens a step",
        f"steps      about {steps:,}, learning rate {train.lr:g}, a checkpoint every {train.save_every}",
        *_memory(config, shape, heads, triple, size),
        _time(config, shape, heads, triple, steps, epoch.tokens),
        f"disk       about {cache / GB:.2f} GB of cached features",
        f"run folder {config.run_dir} (settings, metrics, report.html, tokens/, answers/, features/, checkpoints/)",
        f"export     {config.heads_folder}" + (f", then the Hub: {config.export.push}" if config.export.push else ""),
        *epoch.shown,
    ]


def _choice(config: TrainConfig, shape: Shape) -> list[str]:
    if config.exits != "auto":
        return []
    candidates = ", ".join(map(str, config.candidates_for(shape.n_layers)))
    return [
        f"exits      chosen when the run starts, by a short calibration, which a plan does not run, among {candidates}"
    ]


def _ranks(config: TrainConfig) -> tuple[int, str]:
    """How many, and on what."""
    here = torch.cuda.device_count()
    if here == 0 and config.needs is not None and config.launch == LaunchConfig():
        n = config.needs.ranks
        return n, f"{n} x GPU of {config.needs.memory:g} GB (the recipe's; none is here)"
    world = launch.planned(config.launch)
    return world, f"{ranks.device().partition(':')[0]}, {world} rank{'s' if world > 1 else ''}"


def _memory(config: TrainConfig, shape: Shape, heads: list[HeadConfig], triple: BatchTriple, size: int) -> list[str]:
    parts = budget.memory(config, shape, heads, triple, size)
    total = sum(parts.values()) / GB
    limit = "" if config.needs is None else f" of {config.needs.memory:g}"
    fits = config.needs is None or total <= config.needs.memory
    line = f"memory     about {total:.2f}{limit} GB on each rank{'' if fits else ': TOO MUCH'}"
    return [line, *(f"           {value / GB:9.2f} GB  {name}" for name, value in parts.items())]


def _time(
    config: TrainConfig, shape: Shape, heads: list[HeadConfig], triple: BatchTriple, steps: int, tokens: int
) -> str:
    trunk, own = budget.work(shape, heads)
    seen = steps * triple.total
    through_trunk = min(seen, tokens) if config.data.cache else seen
    flops = seen * own + through_trunk * trunk
    measured = torch.cuda.is_available() or config.needs is None
    rate = budget.flops(ranks.device()) if measured else budget.ASSUMED_FLOPS
    source = "as measured on a product of matrices" if measured else "assumed, not measured"
    hours = flops / (rate * triple.world) / 3600
    text = f"{hours * 60:.1f} minutes" if hours < 2 else f"{hours:.1f} hours"
    if config.data.answers == "trunk":
        source += "; without what the trunk writes"
    return f"time       about {text} of arithmetic at {rate / 1e12:.3g} TFLOP/s a rank ({source})"


def _epoch(config: TrainConfig, base: str) -> Epoch:
    """Rows that lie here are read; a data set of the Hub is reckoned by its rows, and shown if the Hub answers."""
    data = config.data
    sources.check(data.source)
    hub = [source for source in data.source if sources.is_hub(source.path)]
    longest = data.max_new_tokens * data.samples if data.answers == "trunk" else 0
    tokens, notes = data.stdlib_tokens, []
    for source in hub:
        if source.rows is None:
            notes.append(f"{source.path} is counted when it is read")
        else:
            tokens += round(source.rows * source.weight) * (data.max_len + longest)
            notes.append(f"{source.path} is reckoned at {data.max_len} tokens a row")
    try:
        if hub:
            _reach_hub()
        tokenizer = setup.load_tokenizer(config, base)
        here = _sampled(config, tokenizer) + _own(config, tokenizer, notes)
        shown = _first(config, tokenizer)
    except FileError as error:
        if not hub:
            raise
        return Epoch(tokens, _noted(notes), [f"rows       not shown: {error}"])
    if longest and here:
        notes.append(f"answers of up to {data.max_new_tokens} tokens are still to be written")
    legend = "green is learned" if sys.stdout.isatty() else "[[this]] is learned"
    lines = [f"rows       the first ones, as the model sees them; {legend}", *(f"  {text}" for text in shown)]
    return Epoch(tokens + here, _noted(notes), lines if shown else [])


def _reach_hub() -> None:
    """Ask the Hub once, for a moment: its client asks for the better part of a minute. Raises FileError."""
    if is_offline_mode():
        return  # then the client knows at once, and may have what is needed on disk
    try:
        get_session().head(HfApi().endpoint, timeout=3)
    except Exception as error:  # whatever the client's client raises
        raise FileError(f"the Hub cannot be reached ({first_line(error)})") from None


def _noted(notes: list[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""


def _sampled(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens of the rows that lie on this machine."""
    data = config.data
    here = [source for source in data.source if not sources.is_hub(source.path)]
    local = config.model_copy(update={"data": data.model_copy(update={"source": here})})
    skipped, n_rows, n_read, tokens = Skipped(data.strict), 0, 0, 0
    n_documents = 0
    for row in setup.rows_of(local):
        n_rows += 1
        if n_rows > SAMPLE:
            continue
        n_read += 1
        if data.answers == "trunk" and row.asks:
            tokens += (len(prompt_ids(tokenizer, row)) + data.max_new_tokens) * data.samples
            n_documents += 1
        else:
            documents = encode(row, tokenizer, data.max_len, skipped)
            tokens += sum(len(document.ids) for document in documents)
            n_documents += len(documents)
    if n_rows:
        skipped.tell(n_documents, data.max_len)
    return round(tokens * n_rows / max(1, n_read))


def _own(config: TrainConfig, tokenizer: PreTrainedTokenizerBase, notes: list[str]) -> int:
    """Tokens of the prompts that the trunk is to write, and of their answers, were all of them as long as they may be.

    Raises:
        DataError: it cannot write any.
    """
    data = config.data
    if not data.own_prompts:
        return 0
    opening = opening_of(tokenizer)
    notes.append(f"{data.own_prompts} own prompts are reckoned at {opening.longest} tokens each")
    return data.own_prompts * data.samples * (len(opening.ids) + opening.longest + data.max_new_tokens)


def _first(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The first documents, decoded; a data set of the Hub is streamed for it."""
    data = config.data
    streamed = [source.model_copy(update={"streaming": True}) for source in data.source]
    config = config.model_copy(update={"data": data.model_copy(update={"source": streamed})})
    skipped = Skipped()
    documents: list[Document] = []
    for row in itertools.islice(setup.rows_of(config), 10 * SHOWN):
        if data.answers == "trunk" and row.asks:
            ids = prompt_ids(tokenizer, row)
            documents.append(Document(ids, [False] * len(ids)))
        else:
            documents += encode(row, tokenizer, data.max_len, skipped)
        if len(documents) >= SHOWN:
            break
    return [show(document, tokenizer, sys.stdout.isatty()) for document in documents[:SHOWN]]


def _known() -> dict[str, dict[str, object]]:
    """Shapes of the recipes' trunks."""
    path = files("hispec.recipes") / "shapes" / "known.yaml"
    shapes: dict[str, dict[str, object]] = yaml.safe_load(path.read_text())
    return shapes


def _from_shape(shape: dict[str, object]) -> PretrainedConfig:
    rest = {name: value for name, value in shape.items() if name != "model_type"}
    found: PretrainedConfig = AutoConfig.for_model(str(shape["model_type"]), **rest)
    return found


def _head(head: HeadConfig) -> str:
    vocabulary = "whole vocabulary" if head.vocab_size is None else f"{head.vocab_size} tokens"
    return f"{head.kind} head, {vocabulary}" + (", copied" if head.unembedding == "copied" else "")
