"""Rows to token ids, once, and kept on disk: before the trunk is loaded, by all ranks together.

run_dir/tokens/KEY/    KEY: hash of everything that the ids depend on, so that no change of template, tokenizer, length
                       or source meets old ones
    part-RANK-of-WORLD-N.safetensors    some documents: ids, supervised, lengths, and the number of each one's row
    state-RANK-of-WORLD.json            what this rank skipped; written last

Rank r of w encodes the rows r, r + w, r + 2w, ...; sorted by row number, the parts are the same whatever w was.
"""

import hashlib
import itertools
import json
import logging
import platform
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hispec.errors import FileError, first_line
from hispec.train import sources
from hispec.train.data import Document, Skipped, encode
from hispec.train.data_config import DataConfig
from hispec.train.masks import Message, encode_prompt, encode_text
from hispec.train.rows import Row

log = logging.getLogger("hispec")
FORMAT = 1
# Documents held in memory until they are written.
PART = 20_000


@dataclass
class Tokens:
    """What was read: documents with supervised tokens, and prompts that the trunk is to answer."""

    documents: list[Document] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)


class TokenCache:
    """The encoded rows of one run folder."""

    def __init__(
        self,
        folder: Path,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        texts: Sequence[str] = (),
    ) -> None:
        """`texts`: what the rows say, where `config` does not tell."""
        self.config, self.tokenizer, self.seed = config, tokenizer, seed
        self.folder = folder / key(config, tokenizer, seed, texts)

    def write(self, rows: Iterator[Row], rank: int, world: int) -> None:
        """Encode this rank's share of `rows`, unless a cache of these settings is there already.

        Raises:
            DataError: a row cannot be used and data.strict is set. FileError: the cache cannot be written.
        """
        if self._world():
            return
        skipped = Skipped(self.config.strict)
        name = f"{rank:05d}-of-{world:05d}"
        mine = itertools.islice(enumerate(rows), rank, None, world)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tqdm(mine, desc="tokens", unit="row", disable=True if rank else None) as bar:
                for number, part in enumerate(_parts(self._encoded(bar, skipped))):
                    save_file(part, self.folder / f"part-{name}-{number:05d}.safetensors")
            new = self.folder / f"state-{name}.new"
            new.write_text(json.dumps({"counts": skipped.counts, "first": skipped.first}) + "\n")
            new.replace(new.with_suffix(".json"))
        except (OSError, SafetensorError) as error:
            why = first_line(error)
            raise FileError(
                f"cannot write tokens to {self.folder}: {why}; free space or give another run_dir"
            ) from None

    def read(self) -> Tokens:
        """What all ranks have written; call it when all are done.

        Raises:
            FileError: parts are missing. DataError: no row can be used.
        """
        world = self._world()
        if not world:
            raise FileError(f"{self.folder} lacks parts: run_dir must lie on a disk that all nodes share")
        skipped = Skipped()
        for path in sorted(self.folder.glob(f"state-*-of-{world:05d}.json")):
            state = json.loads(path.read_text())
            skipped.counts.update(state["counts"])
            skipped.first = state["first"] | skipped.first
        numbered: list[tuple[int, Document]] = []
        for path in sorted(self.folder.glob(f"part-*-of-{world:05d}-*.safetensors")):
            part = load_file(path)
            ends = np.cumsum(part["lengths"])
            for row, start, end in zip(part["rows"], ends - part["lengths"], ends, strict=True):
                numbered.append((int(row), Document(part["ids"][start:end], part["supervised"][start:end])))
        numbered.sort(key=lambda pair: pair[0])  # stable: the parts of a long text keep their order
        skipped.tell(len(numbered), self.config.max_len)
        tokens = Tokens()
        for _, document in numbered:
            if any(document.supervised):
                tokens.documents.append(document)
            else:
                tokens.prompts.append([int(token) for token in document.ids])
        return tokens

    def _world(self) -> int:
        """Of the ranks that have written all parts; 0 if there are no such."""
        names = [path.stem.split("-") for path in self.folder.glob("state-*.json")]
        worlds = Counter(int(world) for _, _, _, world in names)
        return next((world for world, n_ranks in sorted(worlds.items()) if n_ranks == world), 0)

    def _encoded(self, rows: Any, skipped: Skipped) -> Iterator[tuple[int, Document]]:
        answered_later = self.config.answers == "trunk"
        for number, row in rows:
            if answered_later and row.asks:
                new = self._prompt(row, skipped)
            else:
                new = encode(row, self.tokenizer, self.config.max_len, skipped)
            yield from ((number, document) for document in new)

    def _prompt(self, row: Row, skipped: Skipped) -> list[Document]:
        ids = prompt_ids(self.tokenizer, row)
        if 0 < len(ids) < self.config.max_len:
            return [Document(ids, [False] * len(ids))]
        skipped.add(row, f"no prompt of fewer than {self.config.max_len} tokens before the first answer")
        return []


def key(config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int, texts: Sequence[str] = ()) -> str:
    """Name of everything that the encoded rows depend on."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    parts = [
        FORMAT,
        type(tokenizer).__name__,
        vocabulary,
        tokenizer.special_tokens_map,
        tokenizer.chat_template,
        [sources.stamp(source) for source in config.source],
        [config.prompts, config.max_prompts, config.answers, config.max_len, config.strict, seed],
        [config.stdlib_prompts, platform.python_version() if config.stdlib_prompts else None],
        list(texts),
    ]
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def prompt_of(row: Row) -> list[Message]:
    """The turns before the first answer."""
    answers = [number for number, message in enumerate(row.messages) if message["role"] == "assistant"]
    return list(row.messages[: answers[0]] if answers else row.messages)


def prompt_ids(tokenizer: PreTrainedTokenizerBase, row: Row) -> list[int]:
    """Token ids of what the trunk answers or goes on with; none where nothing comes before the first answer."""
    if row.unfinished and tokenizer.chat_template is None:
        return encode_text(tokenizer, row.text)
    turns = [{"role": "user", "content": row.text}] if row.unfinished else prompt_of(row)
    return encode_prompt(tokenizer, turns) if turns else []


def _parts(documents: Iterator[tuple[int, Document]]) -> Iterator[dict[str, Any]]:
    while chunk := list(itertools.islice(documents, PART)):
        yield {
            "rows": np.array([row for row, _ in chunk], np.int64),
            "lengths": np.array([len(document.ids) for _, document in chunk], np.int64),
            "ids": np.concatenate([np.asarray(document.ids, np.int32) for _, document in chunk]),
            "supervised": np.concatenate([np.asarray(document.supervised, np.bool_) for _, document in chunk]),
        }
