"""Everything a run needs before its first step, cheapest checks first: wrong exits are told before weights load."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hispec.base import base_config, load_base, locate
from hispec.config import HeadConfig, check_exits
from hispec.errors import ConfigError, DataError, FileError, first_line
from hispec.heads import make_heads
from hispec.linear import quicken
from hispec.model import HiSpecModel
from hispec.push import check_login
from hispec.train import packaged, ranks, sources, tiny
from hispec.train.answers import Answers
from hispec.train.batch import solve
from hispec.train.calibrate import choose_exits
from hispec.train.choice import Choice
from hispec.train.config import TrainConfig
from hispec.train.data import Document, MicroBatch, frequent_tokens, pack, text_documents
from hispec.train.masks import encode_prompt, everywhere
from hispec.train.own_prompts import OwnPrompts, opening_of
from hispec.train.rows import Row, read_file
from hispec.train.shard import load_sharded
from hispec.train.tokens import TokenCache, Tokens, prompt_of
from hispec.trunk import Trunk

log = logging.getLogger("hispec")


@dataclass(frozen=True)
class Prepared:
    """A trunk, the data, and heads that start as the logit lens.

    Attributes:
        model: the trunk, with heads in its own precision for evaluation and export.
        heads: the same heads in float32, to be trained.
        batches: the packed data. held_out: prompts for evaluation, token ids.
        choice: of the exits, where they were chosen by calibration.
    """

    model: HiSpecModel
    heads: nn.ModuleList
    batches: list[MicroBatch]
    held_out: list[list[int]]
    choice: Choice | None

    @property
    def trunk(self) -> Trunk:
        return self.model.trunk


def prepare(config: TrainConfig, choice: Choice | None = None) -> Prepared:
    """Check the settings, encode the rows, load the trunk, write the answers, pack the data, make the heads.

    `choice`: what exits=auto has come to in the run that goes on; else it is made once the data are there.

    Raises:
        ConfigError, FileError, DataError, UnsupportedModelError: the user's own mistakes, before the first step.
    """
    if config.export.push is not None and ranks.rank() == 0:
        check_login(config.export.push)
    base = base_of(config)
    n_layers = int(base_config(base, config.revision).get_text_config().num_hidden_layers)
    exits = config.exits_for(n_layers)
    micro_batch = micro_batch_of(config)
    kinds = (config.heads or [config.head]) if exits is None else config.heads_for(len(exits))
    held_out = read_held_out(config)
    tokenizer = load_tokenizer(config, base)
    if config.data.own_prompts:
        opening_of(tokenizer)  # refuses what cannot write any
    tokens = read_tokens(config, tokenizer)
    trunk = load_trunk(config, base)
    if trunk.final_norm is None and any(head.kind == "norm" for head in kinds):
        raise ConfigError("head.kind: 'norm' has nothing to train, this model has no final norm; use mlp or block")
    plain = HiSpecModel(trunk, tokenizer, nn.ModuleList(), base, config.revision)
    documents = documents_for(plain, tokens, config)
    batches = pack(documents, micro_batch, config.train.seed)
    vocab_ids = _vocabularies(documents, kinds, trunk)
    if exits is None:
        choice = choice or choose_exits(trunk, batches, config, vocab_ids[kinds[0]])
        exits = check_exits(choice.exits, n_layers)
        log.info("exits=auto: %s: %s", list(exits), choice.reason)
    head_configs = config.heads_for(len(exits))
    ids = [vocab_ids[head] for head in head_configs]
    torch.manual_seed(config.train.seed)
    heads = make_heads(trunk, exits, head_configs, ids).float()
    if trunk.dtype == torch.float32 and config.train.zero < 3:  # stage 3 has a product of its own
        quicken(heads)
    model = HiSpecModel(trunk, tokenizer, make_heads(trunk, exits, head_configs, ids), base, config.revision)
    return Prepared(model, heads, batches, _held_out(plain, held_out, config), choice)


def load_trunk(config: TrainConfig, base: str) -> Trunk:
    """The trunk on this rank, or this rank's part of it. Raises as `load_base` and `Trunk`."""
    dtype = getattr(torch, dtype_of(config))
    if config.trunk.shard == "zero3":
        return load_sharded(base, config.revision, dtype)[0]
    return Trunk(load_base(base, config.revision, dtype, ranks.device())[0])


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


def load_tokenizer(config: TrainConfig, base: str) -> PreTrainedTokenizerBase:
    """The trunk's tokenizer, with the chat template that heads are trained with. Raises FileError."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(locate(base), revision=config.revision)
    except (OSError, ValueError) as error:
        raise FileError(f"the tokenizer of {base!r} cannot be loaded: {first_line(error)}") from None
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    found: PreTrainedTokenizerBase = tokenizer
    return found


def rows_of(config: TrainConfig) -> Iterator[Row]:
    """All rows of the recipe but those that the trunk is to write, read as they are needed.

    Raises:
        FileError, DataError, ConfigError: missing, empty or malformed files, an unknown list of prompts.
    """
    data, seed = config.data, config.train.seed
    yield from sources.rows_of(data.source, seed)
    if data.prompts is not None:
        yield from packaged.training_prompts(data.prompts, data.max_prompts, seed)
    if data.stdlib_prompts:
        yield from packaged.stdlib_prompts(data.stdlib_prompts, seed)


def read_held_out(config: TrainConfig) -> list[Row]:
    """The prompts for evaluation. Raises as `rows_of`."""
    name = config.eval.prompts
    if name in packaged.packaged_names():
        return packaged.held_out_prompts(name)
    if Path(name).is_file():
        return list(read_file(Path(name)))
    names = ", ".join(packaged.packaged_names())
    raise FileError(f"eval.prompts: {name!r} is neither a packaged list ({names}) nor a file")


def read_tokens(config: TrainConfig, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    """All rows as token ids; nothing at all when all text is made or written later.

    Raises:
        As `rows_of`; DataError also when no row can be used.
    """
    data = config.data
    sources.check(data.source)
    if not (data.source or data.prompts or data.stdlib_prompts):
        return Tokens()
    return _encoded(rows_of(config), config, tokenizer)


def own_prompts(plain: HiSpecModel, config: TrainConfig) -> Tokens:
    """The prompts that the trunk writes, as token ids.

    Raises:
        As `OwnPrompts` and `Writing`; DataError also when no prompt can be used.
    """
    own = OwnPrompts(plain, config.data, config.train.seed, Path(config.run_dir) / "own_prompts")
    own.write(ranks.rank(), ranks.world())
    ranks.meet()
    rows = own.rows()
    texts = [row.text or row.messages[0]["content"] for row in rows]
    return _encoded(iter(rows), config, plain.tokenizer, texts)


def _encoded(
    rows: Iterator[Row], config: TrainConfig, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str] = ()
) -> Tokens:
    cache = TokenCache(Path(config.run_dir) / "tokens", config.data, tokenizer, config.train.seed, texts)
    cache.write(rows, ranks.rank(), ranks.world())
    ranks.meet()
    return cache.read()


def documents_for(plain: HiSpecModel, tokens: Tokens, config: TrainConfig) -> list[Document]:
    """The training documents; prompts and answers are written first where the trunk is to write them.

    Raises:
        DataError: nothing to train on.
    """
    data, seed = config.data, config.train.seed
    documents = list(tokens.documents)
    prompts = list(tokens.prompts)
    if data.own_prompts:
        prompts += own_prompts(plain, config).prompts
    if prompts:
        answers = Answers(plain, prompts, data, seed, Path(config.run_dir) / "answers")
        answers.write(ranks.rank(), ranks.world())
        ranks.meet()
        documents += answers.documents()
    if data.stdlib_tokens:
        documents += text_documents(packaged.stdlib_rows(seed), plain.tokenizer, data.max_len, data.stdlib_tokens, seed)
    if data.learn_from == "all":
        documents = [Document(document.ids, everywhere(len(document.ids))) for document in documents]
    n_tokens = sum(len(document.ids) for document in documents)
    n_trained = sum(int(np.sum(document.supervised)) for document in documents)
    log.info("%d documents, %d tokens, %d of them supervised", len(documents), n_tokens, n_trained)
    return documents


def _vocabularies(
    documents: Sequence[Document], kinds: Sequence[HeadConfig], trunk: Trunk
) -> dict[HeadConfig, Tensor | None]:
    sizes = {kind.vocab_size for kind in kinds if kind.vocab_size is not None}
    made = {size: frequent_tokens(documents, size, trunk.vocab_size).to(trunk.device) for size in sizes}
    return {kind: None if kind.vocab_size is None else made[kind.vocab_size] for kind in kinds}


def _held_out(plain: HiSpecModel, rows: Sequence[Row], config: TrainConfig) -> list[list[int]]:
    if any(not row.messages for row in rows):
        raise DataError(f"eval.prompts: {config.eval.prompts!r} must hold rows with prompt or messages")
    encoded = [encode_prompt(plain.tokenizer, prompt_of(row)) for row in rows]
    room = plain.trunk.max_positions - config.eval.max_new_tokens
    fitting = [ids for ids in encoded if 0 < len(ids) <= room]
    if not fitting:
        raise DataError(
            f"eval.prompts: no prompt has 1 to {room} tokens; lower eval.max_new_tokens or give shorter ones"
        )
    return fitting[: config.eval.max_prompts]
