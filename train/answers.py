"""The trunk answers the training prompts itself, through the decoder: what decoding will see is what heads learn.

answers/RANK.jsonl: the first line says which model wrote it and how, then one line per answer as soon as it is
finished. Each rank writes its share, into a file of its own, and a run that is interrupted goes on with what is
missing, whatever the number of ranks was.
"""

import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hispec.decode.decoder import Decoder
from hispec.decode.request import SamplingParams
from hispec.errors import DataError, FileError
from hispec.model import HiSpecModel
from hispec.train import ranks
from hispec.train.config import DataConfig
from hispec.train.data import Document
from hispec.train.masks import supervised

log = logging.getLogger("hispec")
# Which prompt, and which of its samples.
Key = tuple[int, int]


class Answers:
    """The answers to some prompts, kept in a folder."""

    def __init__(
        self, model: HiSpecModel, prompts: Sequence[list[int]], config: DataConfig, seed: int, folder: Path
    ) -> None:
        """`prompts`: token ids; those that leave no room for an answer are left out.

        Raises:
            DataError: no prompt can be answered.
        """
        room = model.trunk.max_positions - config.max_new_tokens
        self.prompts = [ids for ids in prompts if len(ids) < room]
        if len(self.prompts) < len(prompts):
            left_out = len(prompts) - len(self.prompts)
            log.warning("%d prompts skipped: they leave no room for data.max_new_tokens in the model", left_out)
        if not self.prompts:
            raise DataError(
                f"data.answers=trunk: none of {len(prompts)} prompts fits; lower data.max_new_tokens (now"
                f" {config.max_new_tokens}) or give shorter ones"
            )
        self.model, self.config, self.seed, self.folder = model, config, seed, folder
        self.provenance = _provenance(model, self.prompts, config, seed)

    def write(self, rank: int = 0, world: int = 1) -> None:
        """Write this rank's share of what is missing.

        Raises:
            DataError: the folder holds answers of other settings. FileError: it cannot be written.
        """
        path = self.folder / f"{rank:05d}.jsonl"
        _repair(path)
        done = self._done()
        keys = [(index, sample) for index in range(len(self.prompts)) for sample in range(self.config.samples)]
        if self.model.trunk.in_step:
            # All ranks run a sharded trunk together, so all write the same; the first one's is kept.
            ranks.meet()
            rank, world, path = 0, 1, path if rank == 0 else Path(os.devnull)
        missing = [key for key in keys[rank::world] if key not in done]
        if not missing:
            return
        params = [_params(self.config, self.seed, key) for key in missing]
        decoder = Decoder(self.model, exits=(), max_batch=self.config.answer_batch)
        completions = decoder.generate_as_completed([self.prompts[index] for index, _ in missing], params)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            bar = tqdm(total=len(missing), desc="answers", unit="answer", disable=True if rank else None)
            with path.open("a") as file, bar:
                if not file.tell():
                    file.write(json.dumps({"provenance": self.provenance}) + "\n")
                for completion in completions:
                    index, sample = missing[completion.index]
                    line = {"prompt": index, "sample": sample, "ids": completion.ids, "text": completion.text}
                    file.write(json.dumps(line | {"finish_reason": completion.finish_reason}) + "\n")
                    file.flush()
                    bar.update()
                    bar.set_postfix_str(f"{decoder.stats.tokens_per_second:.0f} tokens/s", refresh=False)
        except OSError as error:
            raise FileError(f"cannot write answers to {path}: {error.strerror or error}") from None
        finally:
            decoder.close()

    def documents(self) -> list[Document]:
        """One document per answer, made of the very ids that were generated; call it when all ranks have written.

        Raises:
            DataError: none is left.
        """
        documents = []
        max_len = self.config.max_len
        for (index, _), ids in sorted(self._done().items()):
            prompt = self.prompts[index]
            answer = [False] * len(prompt) + [True] * len(ids)
            marks = supervised(answer[:max_len])
            if any(marks):
                documents.append(Document([*prompt, *ids][:max_len], marks))
        if not documents:
            raise DataError(f"no prompt fits data.max_len={max_len} with an answer; raise it")
        return documents

    def _done(self) -> dict[Key, list[int]]:
        """The answers that are there, of any rank; what another rank is just writing is not."""
        done: dict[Key, list[int]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            lines = path.read_text().split("\n")[:-1]  # what follows the last line feed is not finished
            if lines:
                _check(path, json.loads(lines[0]).get("provenance", {}), self.provenance)
            items = [json.loads(line) for line in lines[1:]]
            done |= {(item["prompt"], item["sample"]): item["ids"] for item in items}
        return done


def _provenance(model: HiSpecModel, prompts: list[list[int]], config: DataConfig, seed: int) -> dict[str, Any]:
    return {
        "model": model.base,
        "revision": model.revision,
        "dtype": str(model.trunk.dtype).removeprefix("torch."),
        "temperature": config.temperature,
        "samples": config.samples,
        "max_new_tokens": config.max_new_tokens,
        "seed": seed,
        "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
    }


def _check(path: Path, written: dict[str, Any], provenance: dict[str, Any]) -> None:
    for name, value in provenance.items():
        if written.get(name) != value:
            raise DataError(
                f"{path} was written with {name}={written.get(name)!r}, this run has {value!r};"
                " remove the file, or give another run_dir"
            )


def _repair(path: Path) -> None:
    """Cut off a half-written last line."""
    if path.is_file():
        whole, feed, _ = path.read_text().rpartition("\n")
        path.write_text(whole + feed)


def _params(config: DataConfig, seed: int, key: Key) -> SamplingParams:
    # A seed of its own for every answer: an interrupted run writes the same ones.
    own = seed * 1_000_003 + key[0] * config.samples + key[1]
    return SamplingParams(temperature=config.temperature, max_new_tokens=config.max_new_tokens, seed=own)
