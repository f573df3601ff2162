"""Everything a run needs before its first step, cheapest checks first: wrong exits are told before weights load."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hispec.base import base_config, load_base
from hispec.config import HeadConfig
from hispec.errors import ConfigError, DataError, FileError
from hispec.heads import make_heads
from hispec.model import HiSpecModel
from hispec.train import ranks, sources, tiny
from hispec.train.answers import answered, prompt_of
from hispec.train.batch import solve
from hispec.train.config import TrainConfig
from hispec.train.data import Document, MicroBatch, documents_of, frequent_tokens, pack, text_documents
from hispec.train.masks import encode_prompt
from hispec.train.rows import Row, read_files
from hispec.train.shard import load_sharded
from hispec.trunk import Trunk

log = logging.getLogger("hispec")


@dataclass(frozen=True)
class Rows:
    """What was read before the trunk was loaded. `chats` may hold prompts without answers."""

    chats: list[Row]
    texts: list[Row]
    held_out: list[Row]


@dataclass(frozen=True)
class Prepared:
    """A trunk, the data, and heads that start as the logit lens.

    Attributes:
        model: the trunk, with heads in its own precision for evaluation and export.
        heads: the same heads in float32, to be trained.
        batches: the packed data. held_out: prompts for evaluation, token ids.
    """

    model: HiSpecModel
    heads: nn.ModuleList
    batches: list[MicroBatch]
    held_out: list[list[int]]

    @property
    def trunk(self) -> Trunk:
        return self.model.trunk


def prepare(config: TrainConfig) -> Prepared:
    """Check the settings, read the rows, load the trunk, write the answers, pack the data, make the heads.

    Raises:
        ConfigError, FileError, DataError, UnsupportedModelError: the user's own mistakes, before the first step.
    """
    base = base_of(config)
    n_layers = int(base_config(base, config.revision).get_text_config().num_hidden_layers)
    exits = config.exits_for(n_layers)
    micro_batch = micro_batch_of(config)
    head_configs = config.heads_for(len(exits))
    rows = read_rows(config)
    trunk, tokenizer = load_trunk(config, base)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    if trunk.final_norm is None and any(head.kind == "norm" for head in head_configs):
        raise ConfigError("head.kind: 'norm' has nothing to train, this model has no final norm; use mlp or block")
    plain = HiSpecModel(trunk, tokenizer, nn.ModuleList(), base, config.revision)
    documents = documents_for(plain, rows, config)
    batches = pack(documents, micro_batch, config.train.seed)
    ids = _vocabularies(documents, head_configs, trunk)
    torch.manual_seed(config.train.seed)
    heads = make_heads(trunk, exits, head_configs, ids).float()
    model = HiSpecModel(trunk, tokenizer, make_heads(trunk, exits, head_configs, ids), base, config.revision)
    return Prepared(model, heads, batches, _held_out(plain, rows.held_out, config))


def load_trunk(config: TrainConfig, base: str) -> tuple[Trunk, PreTrainedTokenizerBase]:
    """The trunk on this rank, or this rank's part of it, and its tokenizer. Raises as `load_base` and `Trunk`."""
    dtype = getattr(torch, dtype_of(config))
    if config.trunk.shard == "zero3":
        return load_sharded(base, config.revision, dtype)
    network, tokenizer = load_base(base, config.revision, dtype, ranks.device())
    return Trunk(network), tokenizer


def base_of(config: TrainConfig) -> str:
    """The trunk's name; `tiny` is made in the run folder first."""
    if config.model != tiny.NAME:
        return config.model
    folder = Path(config.run_dir) / tiny.NAME
    if ranks.rank() == 0:
        tiny.write_tiny(folder)
    ranks.meet()
    return str(folder)


def micro_batch_of(config: TrainConfig) -> int:
    """Tokens of a micro batch.

    Raises:
        ConfigError: the batch's numbers contradict each other, or a document may not fit.
    """
    micro_batch = solve(config.train, ranks.world()).micro
    if micro_batch < config.data.max_len:
        raise ConfigError(
            f"data.max_len={config.data.max_len} does not fit a micro batch of {micro_batch} tokens;"
            " lower it, or raise train.micro_batch_tokens"
        )
    return micro_batch


def dtype_of(config: TrainConfig) -> str:
    """The trunk's precision."""
    return config.dtype or ("bfloat16" if torch.cuda.is_available() else "float32")


def read_template(path: str) -> str:
    """The text of a chat template's file. Raises FileError."""
    try:
        return Path(path).read_text()
    except OSError as error:
        raise FileError(f"chat_template {path!r} cannot be read: {error.strerror}") from None


def read_rows(config: TrainConfig) -> Rows:
    """All rows that need no model to be read.

    Raises:
        FileError, DataError, ConfigError: missing, empty or malformed files, an unknown list of prompts.
    """
    data = config.data
    rows = read_files(data.files)
    if data.prompts is not None:
        rows += sources.training_prompts(data.prompts, data.max_prompts, config.train.seed)
    if config.eval.prompts in sources.packaged_names():
        held_out = sources.held_out_prompts(config.eval.prompts)
    elif Path(config.eval.prompts).exists():
        held_out = read_files([config.eval.prompts])
    else:
        names = ", ".join(sources.packaged_names())
        raise FileError(f"eval.prompts: {config.eval.prompts!r} is neither a packaged list ({names}) nor a file")
    return Rows([row for row in rows if row.messages], [row for row in rows if not row.messages], held_out)


def documents_for(plain: HiSpecModel, rows: Rows, config: TrainConfig) -> list[Document]:
    """The training documents; answers are written first where the trunk is to write them.

    Raises:
        DataError: nothing to train on.
    """
    data, seed = config.data, config.train.seed
    documents: list[Document] = []
    given = list(rows.texts)
    if data.answers == "trunk" and rows.chats:
        path = Path(config.run_dir) / "answers.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        if ranks.rank() == 0:
            documents += answered(plain, rows.chats, data, seed, path)
        ranks.meet()
        if ranks.rank() > 0:
            documents += answered(plain, rows.chats, data, seed, path)
    else:
        given = [*rows.chats, *rows.texts]
    if given:
        documents += documents_of(given, plain.tokenizer, data.max_len, data.strict)[0]
    if data.stdlib_tokens:
        documents += text_documents(sources.stdlib_rows(seed), plain.tokenizer, data.max_len, data.stdlib_tokens, seed)
    n_tokens = sum(len(document.ids) for document in documents)
    n_trained = sum(sum(document.supervised) for document in documents)
    log.info("%d documents, %d tokens, %d of them supervised", len(documents), n_tokens, n_trained)
    return documents


def _vocabularies(documents: Sequence[Document], configs: Sequence[HeadConfig], trunk: Trunk) -> list[Tensor | None]:
    sizes = [config.vocab_size for config in configs]
    made = {
        size: frequent_tokens(documents, size, trunk.vocab_size).to(trunk.device)
        for size in set(sizes)
        if size is not None
    }
    return [None if size is None else made[size] for size in sizes]


def _held_out(plain: HiSpecModel, rows: Sequence[Row], config: TrainConfig) -> list[list[int]]:
    texts = [row.text for row in rows if row.text]
    if texts:
        raise DataError(f"eval.prompts: {config.eval.prompts!r} holds text; rows with prompt or messages are needed")
    encoded = [encode_prompt(plain.tokenizer, prompt_of(row)) for row in rows]
    room = plain.trunk.max_positions - config.eval.max_new_tokens
    fitting = [ids for ids in encoded if 0 < len(ids) <= room]
    if not fitting:
        raise DataError(
            f"eval.prompts: no prompt has 1 to {room} tokens; lower eval.max_new_tokens or give shorter ones"
        )
    return fitting[: config.eval.max_prompts]
